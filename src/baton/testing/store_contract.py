"""What every tier must do. Inherit the suite in a test module to run it.

Enters: how a tier is opened (`open_tier`). Leaves: a verdict, test by test. What only files can
suffer (flipped bits, killed writers) is in `store_faults`.
"""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import pytest

from baton.errors import StoreFullError
from baton.store.interface import NO_TENANT, EntryName, NamedBody, PutResult, PutsMany
from baton.store.puts import put_each

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence
    from pathlib import Path

    from baton.store.interface import EntryLease, PutOutcome, TenantLabel, Tier

BODY_BYTES = 10_000
MUCH_ROOM = 100 * BODY_BYTES


CONTRACT_KEY: Final = bytes(range(32))


@dataclass(frozen=True, slots=True)
class TierScan:
    """A tier at one moment, in bytes that it takes up; `num_damaged` since it was opened."""

    num_entries: int
    used_bytes: int
    capacity_bytes: int
    num_damaged: int


def scan(tier: Tier) -> TierScan:
    """What a tier holds, entry by entry."""
    entries, usage = tier.entries(), tier.usage()
    used_bytes = sum(entry.num_bytes for entry in entries)
    return TierScan(len(entries), used_bytes, usage.capacity_bytes, usage.num_damaged)


def name_of(content: str) -> EntryName:
    """A name as a digest gives it."""
    return EntryName(hashlib.sha256(content.encode()).digest())


def body_of(content: str, num_bytes: int = BODY_BYTES) -> bytes:
    """A body that no other content has."""
    return hashlib.shake_128(content.encode()).digest(num_bytes)


def put(tier: Tier, content: str) -> PutResult:
    """Put an entry whose name and body follow from one word."""
    return tier.put(name_of(content), body_of(content))


def read(tier: Tier, content: str) -> bytes | None:
    """An entry's body, or None for a miss: also one that is found while reading."""
    lease = tier.try_lease(name_of(content))
    if lease is None:
        return None
    with lease:
        return read_lease(lease)


def read_lease(lease: EntryLease) -> bytes | None:
    """What a lease gives."""
    into = bytearray(lease.num_bytes)
    return bytes(into) if lease.try_read(memoryview(into)) else None


class TierContract:
    """What every tier does. A subclass defines how it is opened."""

    @abstractmethod
    def open_tier(self, place: Path, capacity_bytes: int) -> Tier:
        """A tier that keeps its entries somewhere in `place`; twice the same for the same place."""

    @contextmanager
    def opened(self, place: Path, capacity_bytes: int = MUCH_ROOM) -> Generator[Tier]:
        """A tier for the length of a block."""
        tier = self.open_tier(place, capacity_bytes)
        try:
            yield tier
        finally:
            tier.close()

    def test_what_is_put_is_read_again(self, tmp_path: Path) -> None:
        with self.opened(tmp_path) as tier:
            assert read(tier, "a") is None
            assert put(tier, "a") is PutResult.STORED
            assert read(tier, "a") == body_of("a")
            assert read(tier, "b") is None

    @pytest.mark.parametrize("num_bytes", [0, 1, 4095, 4096, 70_001])
    def test_bodies_of_any_size(self, tmp_path: Path, num_bytes: int) -> None:
        with self.opened(tmp_path) as tier:
            tier.put(name_of("a"), body_of("a", num_bytes))
            assert read(tier, "a") == body_of("a", num_bytes)

    def test_a_second_put_of_a_name_changes_nothing(self, tmp_path: Path) -> None:
        with self.opened(tmp_path) as tier:
            put(tier, "a")
            assert tier.put(name_of("a"), body_of("something else")) is PutResult.EXISTS
            assert read(tier, "a") == body_of("a")
            assert scan(tier).num_entries == 1

    def test_entries_are_listed_and_checked_and_stay(self, tmp_path: Path) -> None:
        with self.opened(tmp_path) as tier:
            assert tier.entries() == []
            for content in "abc":
                put(tier, content)
            assert {entry.name for entry in tier.entries()} == {name_of(c) for c in "abc"}
            assert all(entry.num_bytes > 0 for entry in tier.entries())
            assert tier.is_whole(name_of("a"))
            assert not tier.is_whole(name_of("d"))
            assert scan(tier).num_entries == 3

    def test_find_stops_at_the_first_miss(self, tmp_path: Path) -> None:
        with self.opened(tmp_path) as tier:
            for content in "abd":
                put(tier, content)
            names = [name_of(content) for content in "abcd"]
            assert tier.find(names) == 2
            assert tier.find(names[2:]) == 0
            assert tier.find([]) == 0

    def test_a_lease_outlives_the_entry(self, tmp_path: Path) -> None:
        with self.opened(tmp_path) as tier:
            put(tier, "a")
            lease = tier.try_lease(name_of("a"))
            assert lease is not None
            with lease:
                tier.discard(name_of("a"))
                assert tier.find([name_of("a")]) == 0
                assert read_lease(lease) == body_of("a")
            lease.release()
            tier.discard(name_of("a"))

    def test_closing_twice_is_nothing(self, tmp_path: Path) -> None:
        tier = self.open_tier(tmp_path, MUCH_ROOM)
        tier.close()
        tier.close()


class SharedTierContract(TierContract):
    """Several processes may have the tier open."""

    def test_another_user_of_the_place_finds_it(self, tmp_path: Path) -> None:
        with self.opened(tmp_path) as one, self.opened(tmp_path) as other:
            put(one, "a")
            assert read(other, "a") == body_of("a")
            assert put(other, "a") is PutResult.EXISTS
            other.discard(name_of("a"))
            assert read(one, "a") is None


class BoundedTierContract(TierContract):
    """The tier itself makes room, for exactly the capacity that it was given."""

    def test_it_is_never_fuller_than_it_may_be(self, tmp_path: Path) -> None:
        capacity = 10 * BODY_BYTES
        with self.opened(tmp_path, capacity) as tier:
            for i in range(40):
                assert put(tier, f"entry {i}") is PutResult.STORED
                found = scan(tier)
                assert found.used_bytes <= found.capacity_bytes
            assert read(tier, "entry 39") == body_of("entry 39")

    def test_the_least_recently_used_goes_first(self, tmp_path: Path) -> None:
        with self.opened(tmp_path, 8 * BODY_BYTES) as tier:
            put(tier, "kept")
            for i in range(40):
                put(tier, f"entry {i}")
                assert read(tier, "kept") == body_of("kept")
            assert scan(tier).num_entries < 40  # so some had to go

    def test_what_makes_room_stays_readable_for_who_reads_it(self, tmp_path: Path) -> None:
        with self.opened(tmp_path, 8 * BODY_BYTES) as tier:
            put(tier, "a")
            lease = tier.try_lease(name_of("a"))
            assert lease is not None
            with lease:
                for i in range(60):
                    put(tier, f"entry {i}")
                assert read_lease(lease) == body_of("a")

    def test_a_body_that_can_never_fit_is_refused(self, tmp_path: Path) -> None:
        with self.opened(tmp_path, BODY_BYTES) as tier:
            with pytest.raises(StoreFullError):
                tier.put(name_of("a"), body_of("a", 40 * BODY_BYTES))
            assert read(tier, "a") is None
            assert scan(tier).num_entries == 0


class StoreContract(SharedTierContract, BoundedTierContract):
    """A tier that is both: a folder, or tiers of them."""

    def test_its_level_is_what_its_entries_take_up(self, tmp_path: Path) -> None:
        capacity = 10 * BODY_BYTES
        with self.opened(tmp_path, capacity) as tier, self.opened(tmp_path, capacity) as other:
            put(tier, "a")
            put(tier, "b")
            tier.discard(name_of("a"))
            found = scan(tier)
            for each in (tier, other):
                usage = each.usage()
                assert usage.used_bytes == found.used_bytes > 0
                assert usage.capacity_bytes == found.capacity_bytes
                assert usage.num_dropped == usage.num_demoted == usage.num_damaged == 0
            for i in range(40):
                put(tier, f"entry {i}")
            kept = scan(tier)
            usage = tier.usage()
            assert usage.used_bytes == kept.used_bytes
            assert usage.num_dropped == 41 - kept.num_entries
            assert other.usage().num_dropped == 0

    def test_several_puts_at_once_are_as_one_after_the_other(self, tmp_path: Path) -> None:
        with self.opened(tmp_path) as tier:
            put(tier, "b")
            entries = [NamedBody(name_of(content), body_of(content)) for content in "abca"]
            outcomes = [PutResult.STORED, PutResult.EXISTS, PutResult.STORED, PutResult.EXISTS]
            assert list(put_many(tier, entries)) == outcomes
            assert [read(tier, content) for content in "abc"] == [body_of(c) for c in "abc"]
            assert scan(tier).num_entries == 3
            assert tier.usage().used_bytes == scan(tier).used_bytes
            assert list(put_many(tier, [])) == []

    def test_one_of_several_that_can_never_fit_costs_no_other(self, tmp_path: Path) -> None:
        with self.opened(tmp_path, 10 * BODY_BYTES) as tier:
            large = NamedBody(name_of("large"), body_of("large", 40 * BODY_BYTES))
            entries = [NamedBody(name_of(content), body_of(content)) for content in "abc"]
            outcomes = put_many(tier, [entries[0], large, *entries[1:]])
            assert isinstance(outcomes[1], StoreFullError)
            assert [*outcomes[:1], *outcomes[2:]] == [PutResult.STORED] * 3
            assert [read(tier, content) for content in "abc"] == [body_of(c) for c in "abc"]
            assert tier.usage().used_bytes == scan(tier).used_bytes

    def test_more_at_once_than_fit_leave_the_last_ones(self, tmp_path: Path) -> None:
        with self.opened(tmp_path, 10 * BODY_BYTES) as tier:
            contents = [f"entry {i}" for i in range(40)]
            outcomes = put_many(tier, [NamedBody(name_of(c), body_of(c)) for c in contents])
            assert list(outcomes) == [PutResult.STORED] * 40
            found = scan(tier)
            assert found.used_bytes <= found.capacity_bytes
            assert tier.usage().used_bytes == found.used_bytes
            assert read(tier, contents[-1]) == body_of(contents[-1])
            assert read(tier, contents[0]) is None


def put_many(
    tier: Tier, entries: Sequence[NamedBody], tenant: TenantLabel = NO_TENANT
) -> Sequence[PutOutcome]:
    """Put several entries; one after the other where the tier has no way of its own."""
    if isinstance(tier, PutsMany):
        return tier.put_many(entries, tenant)
    return put_each(tier.put, entries, tenant)
