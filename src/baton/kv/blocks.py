"""Which state each block is in: the ledger under the pool.

    free ──► reserved ──► in_flight ──► quiescent ──► ready ──► evictable
                              └──► quarantined          (cached, unreferenced)

Every block is in exactly one state, and leaves it only by a move that names that state.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

from baton.errors import BlockStateError

if TYPE_CHECKING:
    from collections.abc import Sequence


class BlockState(Enum):
    """What may be done with a block."""

    FREE = "free"
    RESERVED = "reserved"
    IN_FLIGHT = "in_flight"
    QUIESCENT = "quiescent"
    READY = "ready"
    EVICTABLE = "evictable"
    QUARANTINED = "quarantined"


class BlockLedger:
    """The state of every block. One owner thread; moves are all or nothing."""

    def __init__(self, num_blocks: int) -> None:
        self._states = [BlockState.FREE] * num_blocks
        self._counts = dict.fromkeys(BlockState, 0)
        self._counts[BlockState.FREE] = num_blocks
        # A stack with the lowest id on top: a fresh pool hands out adjacent blocks, which
        # transports can copy as one run.
        self._free = list(range(num_blocks - 1, -1, -1))

    @property
    def num_blocks(self) -> int:
        """Blocks in all states."""
        return len(self._states)

    def state(self, block: int) -> BlockState:
        """The state of one block."""
        return self._states[block]

    def count(self, state: BlockState) -> int:
        """How many blocks are in `state`."""
        return self._counts[state]

    def take_free(self, num_blocks: int, target: BlockState) -> list[int]:
        """Move that many free blocks, at most as many as there are, to `target`."""
        stop = len(self._free) - num_blocks
        blocks = self._free[stop:][::-1]
        del self._free[stop:]
        self._set(blocks, BlockState.FREE, target)
        return blocks

    def move(self, blocks: Sequence[int], source: BlockState, target: BlockState) -> None:
        """Move all of `blocks`, each named once, from `source` to `target`.

        Raises:
            BlockStateError: one of them is in another state; then none has moved.
        """
        for block in blocks:
            if not 0 <= block < len(self._states):
                raise BlockStateError(f"block {block} of {len(self._states)}")
            if self._states[block] is not source:
                raise BlockStateError(
                    f"block {block} is {self._states[block].value}, not {source.value}"
                )
        self._set(blocks, source, target)
        if target is BlockState.FREE:
            self._free.extend(reversed(blocks))

    def _set(self, blocks: Sequence[int], source: BlockState, target: BlockState) -> None:
        for block in blocks:
            self._states[block] = target
        self._counts[source] -= len(blocks)
        self._counts[target] += len(blocks)

    def check_invariants(self) -> None:
        """Raise AssertionError where states, counts and the free stack disagree."""
        for state, count in self._counts.items():
            if self._states.count(state) != count:
                raise AssertionError(f"{count} blocks counted as {state.value}")
        free = {block for block, state in enumerate(self._states) if state is BlockState.FREE}
        if len(self._free) != len(free) or set(self._free) != free:
            raise AssertionError("the free stack disagrees with the states")
