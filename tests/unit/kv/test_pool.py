"""The pool's promises one by one; tests/property/kv drives it at random."""

from __future__ import annotations

import numpy as np
import pytest

from baton.errors import BlockStateError, ConfigError
from baton.kv.identity import BlockHash, HashDomain, compute_block_hashes
from baton.kv.pool import BlockPool

HASHES = compute_block_hashes(HashDomain("m", "", 1), np.arange(8, dtype=np.int32))


def cached(pool: BlockPool, hashes: list[BlockHash]) -> list[int]:
    """Blocks that hold `hashes` and that nobody references."""
    blocks = pool.try_allocate(len(hashes))
    assert blocks is not None
    for block, block_hash in zip(blocks, hashes, strict=True):
        pool.publish(block, block_hash)
    pool.release(blocks)
    return blocks


def test_a_fresh_pool_hands_out_adjacent_blocks() -> None:
    pool = BlockPool(8)
    assert pool.try_allocate(3) == [0, 1, 2]
    assert pool.try_allocate(2) == [3, 4]


def test_no_room_is_a_value_and_takes_nothing() -> None:
    pool = BlockPool(4)
    assert pool.try_allocate(5) is None
    assert pool.try_reserve(5) is None
    assert pool.num_free == 4


def test_find_and_acquire_stop_at_the_first_miss() -> None:
    pool = BlockPool(8)
    blocks = cached(pool, [HASHES[0], HASHES[1], HASHES[3]])
    assert pool.find_cached(HASHES) == 2
    assert pool.find_cached(HASHES[2:]) == 0
    assert pool.acquire_cached(HASHES) == blocks[:2]
    pool.check_invariants()
    assert pool.num_free == 6


def test_the_tail_of_a_prefix_is_evicted_before_its_head() -> None:
    pool = BlockPool(4)
    cached(pool, HASHES[:4])
    assert pool.try_allocate(1) is not None
    assert pool.find_cached(HASHES) == 3
    assert pool.try_allocate(2) is not None
    assert pool.find_cached(HASHES) == 1


def test_the_least_recently_used_is_evicted_first() -> None:
    pool = BlockPool(2)
    cached(pool, HASHES[:1])
    cached(pool, HASHES[1:2])
    pool.release(pool.acquire_cached(HASHES[:1]))
    assert pool.try_allocate(1) is not None
    assert [pool.find_cached([h]) for h in HASHES[:2]] == [1, 0]


def test_free_blocks_go_before_cached_ones() -> None:
    pool = BlockPool(4)
    cached(pool, HASHES[:2])
    assert pool.try_allocate(2) is not None
    assert pool.num_cached == 2


def test_a_referenced_block_is_never_evicted() -> None:
    pool = BlockPool(2)
    blocks = cached(pool, HASHES[:1])
    assert pool.acquire_cached(HASHES) == blocks
    assert pool.try_allocate(2) is None
    assert pool.find_cached(HASHES) == 1


@pytest.mark.parametrize("take", ["try_allocate", "try_reserve"])
def test_an_evicted_block_is_forgotten_before_it_is_handed_out(take: str) -> None:
    pool = BlockPool(1)
    cached(pool, HASHES[:1])
    assert getattr(pool, take)(1) is not None
    assert pool.find_cached(HASHES) == 0
    assert pool.num_cached == 0


def test_a_block_is_shared_until_its_last_reference_is_dropped() -> None:
    pool = BlockPool(1)
    cached(pool, HASHES[:1])
    first, second = pool.acquire_cached(HASHES), pool.acquire_cached(HASHES)
    pool.release(first)
    assert pool.num_free == 0
    pool.release(second)
    assert pool.num_free == 1
    with pytest.raises(BlockStateError, match="no reference"):
        pool.release(first)


def test_a_duplicate_hash_keeps_the_first_block() -> None:
    pool = BlockPool(4)
    first = cached(pool, HASHES[:1])
    second = cached(pool, HASHES[:1])
    assert first != second
    assert pool.acquire_cached(HASHES) == first
    assert pool.num_cached == 1
    pool.check_invariants()


def test_publishing_is_for_ready_blocks_with_one_name() -> None:
    pool = BlockPool(2)
    blocks = pool.try_allocate(1)
    assert blocks is not None
    pool.publish(blocks[0], HASHES[0])
    pool.publish(blocks[0], HASHES[0])
    with pytest.raises(BlockStateError, match="another hash"):
        pool.publish(blocks[0], HASHES[1])
    with pytest.raises(BlockStateError, match="not ready"):
        pool.publish(1, HASHES[1])


def test_a_handoff_that_ends_well() -> None:
    pool = BlockPool(4)
    reserved = pool.try_reserve(3)
    assert reserved is not None
    with reserved:
        assert (pool.num_free, pool.num_reserved) == (1, 3)
        flying = reserved.grant()
    assert (pool.num_reserved, pool.num_in_flight) == (0, 3)
    blocks = flying.settle().accept()
    assert blocks == [0, 1, 2]
    assert (pool.num_free, pool.num_in_flight) == (1, 0)
    pool.publish(blocks[0], HASHES[0])
    pool.release(blocks)
    assert pool.num_free == 4


def test_a_reservation_that_is_not_granted_comes_back() -> None:
    pool = BlockPool(4)
    reserved = pool.try_reserve(3)
    assert reserved is not None
    with pytest.raises(KeyError), reserved:
        raise KeyError
    assert (pool.num_free, pool.num_reserved) == (4, 0)


def test_blocks_of_an_aborted_handoff_are_not_reused_before_they_are_still() -> None:
    pool = BlockPool(2)
    reserved = pool.try_reserve(2)
    assert reserved is not None
    quarantined = reserved.grant().quarantine()
    assert (pool.num_free, pool.num_quarantined) == (0, 2)
    assert pool.try_allocate(1) is None
    quarantined.release()
    assert (pool.num_free, pool.num_quarantined) == (2, 0)


def test_a_used_up_guard_refuses_a_second_use() -> None:
    pool = BlockPool(2)
    reserved = pool.try_reserve(1)
    assert reserved is not None
    flying = reserved.grant()
    with pytest.raises(BlockStateError, match="these reserved blocks were already handed on"):
        reserved.grant()
    still = flying.settle()
    with pytest.raises(BlockStateError, match="these in_flight blocks were already handed on"):
        flying.quarantine()
    still.accept()
    with pytest.raises(BlockStateError, match="these quiescent blocks were already handed on"):
        _ = still.blocks


def test_a_pool_has_blocks() -> None:
    with pytest.raises(ConfigError):
        BlockPool(0)
