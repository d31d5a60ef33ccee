"""What one tenant may hold of a tier: the others keep what they have."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from baton.auth.key import ClusterKey
from baton.auth.ticket import hash_tenant
from baton.errors import StoreFullError
from baton.handoff.pool_mode.store_access import label_tenant
from baton.store.evictions.lru import LeastRecentlyUsed
from baton.store.interface import NO_TENANT, TIERS, Tier, TierContext
from baton.testing.store_contract import CONTRACT_KEY, body_of, name_of
from baton.testing.store_syscalls import failing
from tests.contract.test_store_policies import ENTRY_BYTES, Place, WallClock, place_fixture

if TYPE_CHECKING:
    from pathlib import Path

KEY = ClusterKey(bytes(range(32)))
LOUD, QUIET = (label_tenant(KEY, hash_tenant(salt)) for salt in ("loud", "quiet"))
NUM_ENTRIES = 40

__all__ = ["place_fixture"]


def put(tier: Tier, tenant: bytes, content: str) -> None:
    tier.put(name_of(content), body_of(content), tenant)


def held(tier: Tier, tenant: bytes) -> int:
    """How many entries a tenant has."""
    return sum(entry.tenant == tenant for entry in tier.entries())


def test_labels_are_keyed() -> None:
    """Golden: docs/wire/store.md."""
    assert label_tenant(KEY, "") != NO_TENANT
    assert KEY.sign("store", b"tenant/1" + hash_tenant("loud").encode())[:8] == LOUD
    assert LOUD.hex() == "34c007d6c928aee2"
    other = ClusterKey(bytes(range(1, 33)))
    assert label_tenant(other, hash_tenant("loud")) != LOUD


@pytest.mark.parametrize("eviction", ["lru", "s3fifo"])
def test_a_tenant_that_writes_ten_times_the_tier_evicts_its_own_entries(
    place: Place, eviction: str
) -> None:
    options = {"tenant_share": 0.5, "eviction": eviction}
    with place.opened(NUM_ENTRIES, **options) as tier, place.opened(NUM_ENTRIES, **options) as two:
        for i in range(NUM_ENTRIES // 2):
            put(tier, QUIET, f"quiet {i}")
        for i in range(10 * NUM_ENTRIES):
            put((tier, two)[i % 2], LOUD, f"loud {i}")
            if i % 7 == 0:
                assert held(tier, LOUD) <= NUM_ENTRIES // 2
        assert held(tier, QUIET) == NUM_ENTRIES // 2
        assert held(tier, LOUD) > NUM_ENTRIES // 4
        assert tier.usage().num_dropped + two.usage().num_dropped > 9 * NUM_ENTRIES
        assert tier.find([name_of(f"loud {10 * NUM_ENTRIES - 1}")]) == 1, "the newest stay"


def test_without_a_share_it_would_have_pushed_them_out(place: Place) -> None:
    with place.opened(NUM_ENTRIES) as tier:
        for i in range(NUM_ENTRIES // 2):
            put(tier, QUIET, f"quiet {i}")
        for i in range(2 * NUM_ENTRIES):
            put(tier, LOUD, f"loud {i}")
        assert held(tier, QUIET) == 0


def test_where_a_tenant_may_hold_all_each_list_serves_many_evictions(place: Place) -> None:
    """Most stores have one tenant: the label of requests without a salt is one, too."""
    lists: list[None] = []
    with place.opened(NUM_ENTRIES) as tier:
        for i in range(NUM_ENTRIES):
            put(tier, QUIET, f"first {i}")
        with failing(None, lambda: lists.append(None), ("scandir",)):
            for i in range(4 * NUM_ENTRIES):
                put(tier, QUIET, f"later {i}")
    assert len(lists) <= 4 * NUM_ENTRIES / (NUM_ENTRIES * LeastRecentlyUsed.lookahead_share) + 1


def test_what_is_no_tenants_has_no_share(place: Place) -> None:
    with place.opened(NUM_ENTRIES, tenant_share=0.1) as tier:
        for i in range(NUM_ENTRIES):
            put(tier, NO_TENANT, f"marker {i}")
        assert held(tier, NO_TENANT) == NUM_ENTRIES
        with pytest.raises(StoreFullError, match="tenant_share"):
            tier.put(name_of("large"), bytes(ENTRY_BYTES * 5), LOUD)


def test_tenants_survive_a_restart(place: Place) -> None:
    with place.opened(NUM_ENTRIES) as other:  # so that a shared tier stays
        put(other, QUIET, "a")
        with place.opened(NUM_ENTRIES) as tier:
            lease = tier.try_lease(name_of("a"))
            assert lease is not None
            with lease:
                assert lease.tenant == QUIET
            assert [entry.tenant for entry in tier.entries()] == [QUIET]


def test_another_place_in_the_queue_is_no_other_tenant(place: Place) -> None:
    """A list that takes long may show the label that a place had before."""
    with place.opened(NUM_ENTRIES) as tier:
        put(tier, QUIET, "a")
        (entry,) = tier.entries()
        tier._files.mark(replace(entry, queued_at=entry.queued_at + 5, tenant=LOUD))
        (marked,) = tier.entries()
        assert marked.queued_at == pytest.approx(entry.queued_at + 5)
        assert marked.tenant == QUIET
        tier.discard(entry.name)
        assert tier._capacity.peek_held(QUIET) == 0


def test_a_table_that_was_lost_is_counted_again(tmp_path: Path) -> None:
    place = Place("file", tmp_path, WallClock())
    with place.opened(NUM_ENTRIES, tenant_share=0.5) as tier:
        for i in range(10):
            put(tier, QUIET, f"quiet {i}")
        table = place.folder / "tenants"
        right = table.read_bytes()
        wrong = right.replace((10 * ENTRY_BYTES).to_bytes(8, "little"), bytes(8))
        assert wrong != right
        table.write_bytes(wrong)
    with place.opened(NUM_ENTRIES, tenant_share=0.5):
        assert table.read_bytes() == right


def test_entries_survive_the_loss_of_the_table(tmp_path: Path) -> None:
    place = Place("file", tmp_path, WallClock())
    with place.opened(NUM_ENTRIES) as tier:
        put(tier, QUIET, "a")
    (place.folder / "tenants").unlink()
    with place.opened(NUM_ENTRIES) as tier:
        assert tier.find([name_of("a")]) == 1
        assert tier.usage().used_bytes == ENTRY_BYTES
        assert held(tier, NO_TENANT) == 1, "whose it is was in the table"
        put(tier, LOUD, "b")
        assert held(tier, LOUD) == 1


def test_more_tenants_than_places_nearby_are_not_bounded_and_not_lost(place: Place) -> None:
    """Labels that all name the same place in the table."""
    labels = [(1 + i * 4080).to_bytes(8, "little") for i in range(20)]
    with place.opened(NUM_ENTRIES) as tier:
        for label in labels:
            put(tier, label, label.hex())
        found = [held(tier, label) for label in labels]
        assert found == [1] * 16 + [0] * 4
        assert held(tier, NO_TENANT) == 4
        lease = tier.try_lease(name_of(labels[-1].hex()))
        assert lease is not None
        with lease:
            assert lease.tenant == labels[-1], "the header has it"
        tier.discard(name_of(labels[0].hex()))
        put(tier, labels[-2], "second")
        assert held(tier, labels[-2]) == 1, "a place that counts nothing is another's"


def test_host_keeps_shares_too() -> None:
    factory = TIERS.build("host", {"capacity_bytes": NUM_ENTRIES * 10_000, "tenant_share": 0.5})
    tier = factory(TierContext("contract", CONTRACT_KEY, WallClock()))
    for i in range(NUM_ENTRIES // 2):
        put(tier, QUIET, f"quiet {i}")
    for i in range(10 * NUM_ENTRIES):
        put(tier, LOUD, f"loud {i}")
        assert held(tier, LOUD) <= NUM_ENTRIES // 2
    assert held(tier, QUIET) == NUM_ENTRIES // 2
    with pytest.raises(StoreFullError, match="tenant_share"):
        tier.put(name_of("large"), bytes(NUM_ENTRIES * 6_000), LOUD)
    assert tier.put(name_of("large"), bytes(NUM_ENTRIES * 6_000)).value == "stored"


def test_in_host_no_more_than_is_needed_makes_room_where_a_tenant_may_hold_all() -> None:
    num_bytes = len(body_of("first 10"))
    factory = TIERS.build("host", {"capacity_bytes": NUM_ENTRIES * num_bytes})
    tier = factory(TierContext("contract", CONTRACT_KEY, WallClock()))
    for i in range(3 * NUM_ENTRIES):
        put(tier, QUIET, f"entry {i}")
        assert held(tier, QUIET) == min(i + 1, NUM_ENTRIES)


def test_a_tenant_may_pin_half_of_what_it_may_hold(place: Place) -> None:
    """Else none of its next entries would find room, however many others went."""
    with place.opened(NUM_ENTRIES, tenant_share=0.1) as tier:
        for i in range(4):
            put(tier, LOUD, f"loud {i}")
        for i in range(2):
            assert tier.pin(name_of(f"loud {i}"))
        with pytest.raises(StoreFullError, match="of one tenant"):
            tier.pin(name_of("loud 2"))
        put(tier, QUIET, "quiet")
        assert tier.pin(name_of("quiet")), "another tenant's"
        for i in range(4, 20):
            put(tier, LOUD, f"loud {i}")
        assert held(tier, LOUD) <= 4
        assert tier.find([name_of("loud 0"), name_of("loud 1"), name_of("loud 19")]) == 3
