from __future__ import annotations

import pytest

from baton.events.blocks import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventDomain,
    Lost,
    Restarted,
    WorkerBlockIndex,
)

DOMAIN = EventDomain("vllm/sha256")


def stored(*hashes, medium="GPU", group=0, domain=DOMAIN):
    return BlockStored(domain, hashes, None, b"", 0, medium, group)


def removed(*hashes, medium="GPU", group=0, domain=DOMAIN):
    return BlockRemoved(domain, hashes, medium, group)


@pytest.fixture
def block_index():
    block_index = WorkerBlockIndex(DOMAIN)
    for event in (stored(1, 2, b"3"), stored(1, 9, medium="CPU"), stored(1, group=1)):
        block_index.apply(event)
    return block_index


def test_media_and_groups_are_apart(block_index):
    assert block_index.num_blocks == {("GPU", 0): 3, ("CPU", 0): 2, ("GPU", 1): 1}
    block_index.apply(removed(1))
    assert block_index.num_blocks == {("GPU", 0): 2, ("CPU", 0): 2, ("GPU", 1): 1}


def test_removing_what_is_not_held_changes_nothing(block_index):
    before = block_index.num_blocks
    block_index.apply(removed(77))
    assert block_index.num_blocks == before


def test_one_copy_gone_is_a_block_gone(block_index):
    before = block_index.num_blocks
    block_index.apply(stored(1))
    assert block_index.num_blocks == before
    block_index.apply(removed(1))
    assert block_index.num_blocks["GPU", 0] == before["GPU", 0] - 1


@pytest.mark.parametrize("event", [AllBlocksCleared(), Restarted(), Lost(3)])
def test_some_events_leave_nothing(block_index, event):
    block_index.apply(event)
    assert set(block_index.num_blocks.values()) == {0}
    block_index.check_invariants()


def test_hashes_of_another_domain_are_not_ours(block_index):
    before, other = block_index.num_blocks, EventDomain("other/xxh")
    block_index.apply(stored(50, domain=other))
    assert block_index.num_blocks == before
    block_index.apply(removed(1, domain=other))
    assert block_index.num_blocks == before


def test_what_is_no_hash_breaks_an_invariant(block_index):
    block_index.check_invariants()
    block_index.apply(stored("text"))
    with pytest.raises(AssertionError):
        block_index.check_invariants()
