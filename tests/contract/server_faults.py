"""What a tier on a server must do when the server fails. Inherit the suite in a test module."""

from __future__ import annotations

import random
import socketserver
import time
from abc import abstractmethod
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from baton.errors import StoreError, StoreFullError
from baton.store.entry_format import HEADER_BYTES, make_header
from baton.store.interface import TIERS, PutResult, TierContext
from baton.store.remote.circuit_breaker import MIN_BACKOFF_S
from baton.store.remote.refused_reads import READ_AGAIN_S
from baton.store.tiered import TieredStore, open_store
from baton.testing.clocks import ManualClock
from baton.testing.store_contract import (
    BODY_BYTES,
    CONTRACT_KEY,
    SharedTierContract,
    body_of,
    name_of,
    put,
    read,
    read_lease,
    scan,
)
from tests.store_servers import S3_CREDENTIALS

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from baton.store.interface import PeerAccess, Tier
    from baton.store.remote.tier import RemoteTier

TIMEOUT_S = 0.5
"""Where a server fails on purpose; elsewhere the machine may be as busy as it likes."""
ANSWERS_WITHIN_S = 5.0
"""Where a server fails at once, and is to answer later, beside other tests."""
PATIENT_S = 30.0
SLACK_S = 4.0
DAY_S = 86_400.0
QUICK_S = 4 * TIMEOUT_S
"""Of tens of requests that are not sent: each would wait for `TIMEOUT_S`."""


class QuickServer(socketserver.ThreadingTCPServer):
    """Its end waits for no connection."""

    daemon_threads = True
    block_on_close = False


class SetClock(ManualClock):
    """A clock that an operator, or NTP, sets."""

    def set_by(self, seconds: float) -> None:
        self._unix_s += seconds


class ServerFaultContract(SharedTierContract):
    """A subclass starts the server, and reads and writes values beside the tier."""

    kind: str
    server: Any

    @abstractmethod
    def options(self) -> dict[str, object]:
        """Of the tier."""

    @abstractmethod
    def raw_get(self, path: str) -> bytes | None:
        """A value as the server has it. `path`: cluster and content."""

    @abstractmethod
    def raw_put(self, path: str, value: bytes) -> None:
        """Replace a value on the server."""

    def peers(self) -> PeerAccess | None:
        """How the tier reaches its server, where that is another process of the cluster."""
        return None

    @pytest.fixture(autouse=True)
    def _use_environment(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name, value in S3_CREDENTIALS.items():
            monkeypatch.setenv(name, value)

    def open_tier(self, place: Path, capacity_bytes: int) -> Tier:
        del capacity_bytes  # the server's own
        return self.open_remote(place)

    def open_remote(self, place: Path, clock: ManualClock | None = None, **changed) -> RemoteTier:
        options = self.options() | {"timeout_s": PATIENT_S} | changed
        clock = clock or ManualClock()
        context = TierContext(place.name, CONTRACT_KEY, clock, peers=self.peers())
        return TIERS.build(self.kind, options)(context)  # type: ignore[return-value]

    def path(self, place: Path, content: str) -> str:
        return f"{place.name}/{name_of(content).hex()}"

    def test_what_is_kept_outlives_its_users(self, tmp_path: Path) -> None:
        with self.opened(tmp_path) as tier:
            put(tier, "a")
        with self.opened(tmp_path) as tier:
            assert read(tier, "a") == body_of("a")

    @pytest.mark.parametrize("jump_s", [-DAY_S, DAY_S])
    def test_a_clock_that_jumps_changes_no_entry(self, tmp_path: Path, jump_s: float) -> None:
        clock = SetClock()
        with closing(self.open_remote(tmp_path, clock)) as tier, self.opened(tmp_path) as other:
            put(tier, "a")
            lease = tier.try_lease(name_of("a"))
            assert lease is not None
            with lease:
                clock.set_by(jump_s)
                assert read_lease(lease) == body_of("a")
            assert put(tier, "b") is PutResult.STORED
            for content in "ab":
                assert put(tier, content) is PutResult.EXISTS
                assert read(tier, content) == read(other, content) == body_of(content)
            assert {entry.name for entry in tier.entries()} == {name_of("a"), name_of("b")}
            for content in "ab":
                tier.discard(name_of(content))
                assert read(other, content) is None
            health = tier.usage().server
            assert health is not None
            assert (health.is_available, health.num_failures) == (True, 0)

    def test_a_flipped_bit_anywhere_is_a_miss(self, tmp_path: Path) -> None:
        chance = random.Random(5)
        places = [*range(0, HEADER_BYTES, 5), *chance.sample(range(HEADER_BYTES, BODY_BYTES), 5)]
        with self.opened(tmp_path) as tier:
            put(tier, "a")
            path = self.path(tmp_path, "a")
            right = self.raw_get(path)
            assert right is not None
            for at in places:
                value = bytearray(right)
                value[at] ^= 1 << chance.randrange(8)
                self.raw_put(path, bytes(value))
                assert read(tier, "a") is None
                assert self.raw_get(path) is None, "a damaged entry is removed"
            assert scan(tier).num_damaged == len(places)
            assert put(tier, "a") is PutResult.STORED
            assert read(tier, "a") == body_of("a")

    def test_a_value_cut_short_or_grown_is_a_miss(self, tmp_path: Path) -> None:
        with self.opened(tmp_path) as tier:
            put(tier, "a")
            path = self.path(tmp_path, "a")
            right = self.raw_get(path)
            assert right is not None
            for wrong in (right[:0], right[:10], right[:HEADER_BYTES], right[:-1], right + b"x"):
                self.raw_put(path, wrong)
                assert read(tier, "a") is None
                assert not tier.is_whole(name_of("a"))
            assert scan(tier).num_damaged == 5

    def test_a_value_larger_than_any_entry_is_not_fetched_whole(self, tmp_path: Path) -> None:
        with closing(self.open_remote(tmp_path, max_entry_bytes=BODY_BYTES)) as tier:
            with pytest.raises(StoreFullError, match="max_entry_bytes"):
                tier.put(name_of("large"), body_of("large", BODY_BYTES + 1))
            self.raw_put(self.path(tmp_path, "a"), bytes(4 << 20))
            read_value = tier._client.read(name_of("a").hex(), 1000)
            assert read_value is not None
            assert len(read_value) <= 1000
            assert read(tier, "a") is None
            assert scan(tier).num_damaged == 1

    def test_an_entry_that_is_too_large_for_this_reader_is_anothers(self, tmp_path: Path) -> None:
        """As while workers are restarted with another `max_entry_bytes`."""
        with self.opened(tmp_path) as tier:
            put(tier, "a")
            clock = ManualClock()
            with closing(
                self.open_remote(tmp_path, clock, max_entry_bytes=BODY_BYTES - 1)
            ) as small:
                asked = count_calls(small._client, "use")
                assert small.find([name_of("a")]) == 1, "it is found until it is read"
                for _ in range(3):  # as who waits for it looks, each few milliseconds
                    assert read(small, "a") is None
                    assert small.find([name_of("a")]) == 0
                    assert small.put(name_of("a"), b"") is PutResult.EXISTS
                assert len(asked) == 1
                clock.advance(READ_AGAIN_S)
                assert small.find([name_of("a")]) == 1
                assert read(small, "a") is None
                assert len(asked) == 2
                with pytest.raises(StoreError, match="max_entry_bytes"):
                    small.is_whole(name_of("a"))
                assert scan(small).num_damaged == 0
            assert read(tier, "a") == body_of("a")

    def test_bytes_of_another_are_a_miss(self, tmp_path: Path) -> None:
        """Another entry of this cluster, and one made without the key."""
        with self.opened(tmp_path) as tier:
            put(tier, "a")
            put(tier, "b")
            other = self.raw_get(self.path(tmp_path, "b"))
            assert other is not None
            self.raw_put(self.path(tmp_path, "a"), other)
            assert read(tier, "a") is None
            forged = body_of("c")
            header = make_header(bytes(32), name_of("a"), forged)
            self.raw_put(self.path(tmp_path, "a"), header + forged)
            assert read(tier, "a") is None
            assert scan(tier).num_damaged == 2
            assert read(tier, "b") == body_of("b")

    def test_two_clusters_on_one_server_do_not_meet(self, tmp_path: Path) -> None:
        other_place = tmp_path / "other-cluster"
        with self.opened(tmp_path) as one, self.opened(other_place) as other:
            put(one, "a")
            assert read(other, "a") is None
            assert other.entries() == []
            assert scan(other).num_damaged == 0

    def test_a_server_that_is_killed_costs_one_wait(self, tmp_path: Path) -> None:
        clock = ManualClock()
        with closing(self.open_remote(tmp_path, clock, timeout_s=ANSWERS_WITHIN_S)) as tier:
            put(tier, "a")
            assert read(tier, "a") == body_of("a")
            self.server.kill()
            try:
                with taking_at_most(ANSWERS_WITHIN_S + SLACK_S):
                    assert read(tier, "a") is None
                assert tier.usage().server.num_failures == 1
                with taking_at_most(QUICK_S):
                    use_while_down(tier)
            finally:
                self.server.start()
            wait_available(tier, clock)
            put(tier, "b")
            assert read(tier, "b") == body_of("b")

    def test_a_server_that_hangs_costs_one_wait(self, tmp_path: Path) -> None:
        clock = ManualClock()
        with closing(self.open_remote(tmp_path, clock, timeout_s=TIMEOUT_S)) as tier:
            put(tier, "a")
            with self.server.stopped():
                began = time.monotonic()
                with taking_at_most(TIMEOUT_S + SLACK_S):
                    assert tier.find([name_of("a")]) == 0
                assert time.monotonic() - began > 0.9 * TIMEOUT_S, "it did not hang"
                with taking_at_most(QUICK_S):
                    use_while_down(tier)
                for _ in range(3):  # trials of a server that hangs are waited for by no caller
                    clock.advance(100.0)
                    with taking_at_most(QUICK_S):
                        use_while_down(tier)
            wait_available(tier, clock)
            assert read(tier, "a") == body_of("a")

    def test_a_server_that_is_down_at_the_start_is_used_later(self, tmp_path: Path) -> None:
        clock = ManualClock()
        self.server.kill()
        try:
            tier = self.open_remote(tmp_path, clock)
            assert read(tier, "a") is None
            with pytest.raises(StoreError):
                tier.entries()
        finally:
            self.server.start()
        with closing(tier):
            wait_available(tier, clock)
            assert put(tier, "a") is PutResult.STORED

    def test_a_late_write_of_more_than_the_buffer_costs_no_reads(self, tmp_path: Path) -> None:
        """`timeout_s` may be too short for it; what fits is to be written within it."""
        clock = ManualClock()
        changed = {"timeout_s": TIMEOUT_S, "buffer_bytes": BODY_BYTES - 1}
        with closing(self.open_remote(tmp_path, clock, **changed)) as tier:
            put(tier, "a")
            with self.server.stopped():
                tier.put_behind(name_of("b"), body_of("b"))
                assert tier._behind.wait_empty(PATIENT_S)
                assert tier.is_available()
                with pytest.raises(StoreError):
                    tier.put_behind(name_of("c"), b"")
            assert tier.usage().num_dropped == 1, "it was not late"
            assert tier.usage().server.num_failures == 0
            clock.advance(MIN_BACKOFF_S)
            tier.put_behind(name_of("c"), b"")

    def test_a_lower_tier_that_hangs_delays_no_put(self, tmp_path: Path) -> None:
        """Entries that `shared` demotes, and that `host` writes through, do not wait for it."""
        for kind, options in (("shared", {"directory": str(tmp_path)}), ("host", {})):
            upper = options | {"capacity_bytes": 60_000}
            with (
                closing(self.open_store(tmp_path, kind, upper, TIMEOUT_S)) as s,
                self.server.stopped(),
                taking_at_most(20 * TIMEOUT_S),  # of 60 puts, each of which would wait so long
            ):
                for i in range(60):
                    put(s, f"{kind} {i}")
                    assert read(s, f"{kind} {i}") == body_of(f"{kind} {i}")
                    s.find([name_of(f"{kind} {n}") for n in range(60)])

    def test_entries_go_down_and_come_up_again(self, tmp_path: Path) -> None:
        for kind, options in (("shared", {"directory": str(tmp_path)}), ("host", {})):
            upper = options | {"capacity_bytes": 60_000}
            with closing(self.open_store(tmp_path, kind, upper)) as s:
                for i in range(12):
                    put(s, f"{kind} {i}")
                wait_until(lambda s=s: s.tiers[1].inner._behind.wait_empty(1.0))
                first, lower = s.tiers
                assert first.find([name_of(f"{kind} 0")]) == 0
                assert lower.find([name_of(f"{kind} 0")]) == 1
                names = [name_of(f"{kind} {i}") for i in range(12)]
                assert s.find(names) == 12
                assert [read(s, f"{kind} {i}") for i in range(12)] == [
                    body_of(f"{kind} {i}") for i in range(12)
                ]
                assert first.find([name_of(f"{kind} 11")]) == 1
                assert first.usage().num_damaged == lower.usage().num_damaged == 0

    def open_store(
        self, place: Path, kind: str, upper: dict[str, object], timeout_s: float = PATIENT_S
    ) -> TieredStore:
        lower = self.options() | {"timeout_s": timeout_s}
        options = {kind: upper, self.kind: lower}
        clock = ManualClock()
        return open_store(
            (kind, self.kind),
            options,
            cluster=place.name,
            key=CONTRACT_KEY,
            clock=clock,
            peers=self.peers(),
        )

    def test_names_in_two_tiers_are_found_with_one_question(self, tmp_path: Path) -> None:
        with closing(self.open_store(tmp_path, "host", {})) as store:
            upper, lower = store.tiers
            names = [name_of(f"entry {i}") for i in range(100)]
            for i, name in enumerate(names[:90]):
                if i % 3:
                    upper.inner._table.add(name)  # found, not read
                else:
                    put(lower, f"entry {i}")
            if self.kind == "object":  # it stops some time after its first miss
                for i, _ in enumerate(names[:90]):
                    put(lower, f"entry {i}")
            asked = count_calls(lower.inner._client, "exists")
            assert store.find(names) == 90
            assert asked == [100]
            upper.inner._clear()

    def test_a_prefix_is_fetched_ahead(self, tmp_path: Path) -> None:
        with closing(self.open_remote(tmp_path)) as tier:
            contents = [f"entry {i}" for i in range(8)]
            for content in contents:
                put(tier, content)
            assert tier.find([name_of(content) for content in contents]) == 8
            asked = count_calls(tier._client, "use")
            assert [read(tier, content) for content in contents[:4]] == [
                body_of(content) for content in contents[:4]
            ]
            wait_until(lambda: len(asked) > 4)
            tier.discard(name_of(contents[5]))
            assert read(tier, contents[5]) is None
            assert read(tier, contents[6]) == body_of(contents[6])


def use_while_down(tier: RemoteTier) -> None:
    """Everything that may be asked of a tier whose server is down: nothing waits or is wrong."""
    for _ in range(5):
        assert read(tier, "a") is None
        assert tier.find([name_of("a")]) == 0
        with pytest.raises(StoreError):
            tier.is_whole(name_of("a"))
        tier.discard(name_of("z"))
        tier.usage()
        with pytest.raises(StoreError):
            put(tier, "b")
        with pytest.raises(StoreError):
            tier.put_behind(name_of("b"), body_of("b"))
    assert not tier.usage().server.is_available


def wait_available(tier: RemoteTier, clock: ManualClock) -> None:
    """Let the back-off pass; a trial that runs beside the caller ends it."""
    assert not tier.usage().server.is_available

    def is_available() -> bool:
        clock.advance(MIN_BACKOFF_S)
        tier.find([name_of("nothing")])
        return tier.usage().server.is_available

    wait_until(is_available)


def wait_until(is_true: Any, timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@contextmanager
def taking_at_most(seconds: float) -> Iterator[None]:
    began = time.monotonic()
    yield
    assert time.monotonic() - began < seconds


def count_calls(client: Any, method: str) -> list[int]:
    """Sizes of the first arguments of calls from now on."""
    inner, sizes = getattr(client, method), []

    def counted(first: Any, *rest: Any) -> Any:
        sizes.append(len(first))
        return inner(first, *rest)

    setattr(client, method, counted)
    return sizes
