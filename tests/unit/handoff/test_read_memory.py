"""Memory of batches that were read: nobody else has it before it is given back."""

from __future__ import annotations

import numpy as np

from baton.handoff.pool_mode.block_copier import BATCH_BYTES, EntryBodies
from baton.handoff.pool_mode.store_reader import ReadMemory
from baton.kv.layout import KVLayout

LAYOUT = KVLayout.gqa(1, 1, 8, block_size=1, dtype="float32")


def test_memory_is_used_again_once_it_was_given_back() -> None:
    memory = ReadMemory(1)
    first, second = memory.take(100), memory.take(100)
    assert not np.shares_memory(first, second)
    memory.give_back([EntryBodies(LAYOUT, first.reshape(10, 10)).part(2, 5)])
    third, fourth = memory.take(BATCH_BYTES), memory.take(100)
    assert np.shares_memory(third, first)
    assert not np.shares_memory(fourth, third)
    assert not np.shares_memory(fourth, second)


def test_a_batch_for_each_part_is_kept_and_no_more() -> None:
    memory = ReadMemory(2)
    taken = [memory.take(8) for _ in range(3)]
    memory.give_back([EntryBodies(LAYOUT, each.reshape(1, 8)) for each in taken])
    again = [memory.take(8) for _ in range(3)]
    used = [any(np.shares_memory(one, each) for each in taken) for one in again]
    assert used == [True, True, False]


def test_an_entry_larger_than_a_batch_is_not_kept() -> None:
    memory = ReadMemory(1)
    large = memory.take(BATCH_BYTES + 1)
    memory.give_back([EntryBodies(LAYOUT, large.reshape(1, -1))])
    assert not np.shares_memory(memory.take(8), large)
