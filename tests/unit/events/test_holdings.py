from __future__ import annotations

import pytest

from baton.events.blocks import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventDomain,
    Lost,
    Restarted,
)
from baton.events.holdings import BlockHoldings

DOMAIN = EventDomain("vllm/sha256")


def stored(*hashes, medium="GPU", group=0, domain=DOMAIN):
    return BlockStored(domain, hashes, None, (), 0, medium, group)


def removed(*hashes, medium="GPU", group=0, domain=DOMAIN):
    return BlockRemoved(domain, hashes, medium, group)


@pytest.fixture
def holdings():
    holdings = BlockHoldings(DOMAIN)
    for event in (stored(1, 2, b"3"), stored(1, 9, medium="CPU"), stored(1, group=1)):
        holdings.apply(event)
    return holdings


def test_matches_stop_at_the_first_miss(holdings):
    assert holdings.find_matches([1, 2, b"3"]) == 3
    assert holdings.find_matches([1, 7, 2, b"3"]) == 1
    assert holdings.find_matches([7, 1]) == holdings.find_matches([]) == 0


def test_matches_do_not_read_on_after_a_miss(holdings):
    assert holdings.find_matches([1, 7, []]) == 1  # [] has no hash: asking for it would raise
    with pytest.raises(TypeError):
        holdings.find_matches([1, []])


def test_media_and_groups_are_apart(holdings):
    assert holdings.find_matches([1, 2], medium="CPU") == 1
    assert holdings.find_matches([1, 2], group=1) == 1
    assert holdings.find_matches([1], medium="STORAGE") == 0
    holdings.apply(removed(1))
    assert holdings.find_matches([1]) == 0
    assert holdings.find_matches([1], medium="CPU") == 1
    assert holdings.num_blocks == {("GPU", 0): 2, ("CPU", 0): 2, ("GPU", 1): 1}


def test_removing_what_is_not_held_changes_nothing(holdings):
    before = holdings.num_blocks
    holdings.apply(removed(77))
    assert holdings.num_blocks == before


def test_one_copy_gone_is_a_block_gone(holdings):
    holdings.apply(stored(1))
    holdings.apply(removed(1))
    assert holdings.find_matches([1]) == 0


@pytest.mark.parametrize("event", [AllBlocksCleared(), Restarted(), Lost(3)])
def test_some_events_leave_nothing(holdings, event):
    holdings.apply(event)
    assert set(holdings.num_blocks.values()) == {0}
    holdings.check_invariants()


def test_hashes_of_another_domain_are_not_ours(holdings):
    other = EventDomain("other/xxh")
    holdings.apply(stored(50, domain=other))
    holdings.apply(removed(1, domain=other))
    assert holdings.find_matches([50]) == 0
    assert holdings.find_matches([1]) == 1


def test_what_is_no_hash_breaks_an_invariant(holdings):
    holdings.check_invariants()
    holdings.apply(stored("text"))
    with pytest.raises(AssertionError):
        holdings.check_invariants()
