"""Which state each block is in: the ledger under the pool.

    free ──► reserved ──► in_flight ──► quiescent ──► ready ──► evictable
                              └──► quarantined          (cached, unreferenced)

Every block is in exactly one state, and leaves it only by a move that names that state.

Blocks that a peer may write have one class for each state, so that the next step is a method:

    ReservedBlocks ─grant─► InFlightBlocks ─settle─► QuiescentBlocks ─accept─► list of ready blocks
         │ (leaving)             └─quarantine─► QuarantinedBlocks
         └─► free                                    └─release─► free

Each guard can be used up once; it then holds nothing and refuses a second use.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, ClassVar, Self, TypeAlias

from baton.errors import BlockStateError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


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


Adopt: TypeAlias = "Callable[[list[int]], None]"
"""Make blocks, quiescent until now, ready with one reference each."""


class _Guard:
    """Blocks in one state, of which this object alone decides what comes next."""

    state: ClassVar[BlockState]

    def __init__(self, blocks: list[int], ledger: BlockLedger, adopt: Adopt) -> None:
        self._blocks: list[int] | None = blocks
        self._ledger, self._adopt = ledger, adopt

    @property
    def blocks(self) -> tuple[int, ...]:
        """The blocks, in the order of their tokens.

        Raises:
            BlockStateError: this guard was used up.
        """
        return tuple(self._held())

    def _held(self) -> list[int]:
        if self._blocks is None:
            raise BlockStateError(f"these {self.state.value} blocks were already handed on")
        return self._blocks

    def _transition(self, target: BlockState) -> list[int]:
        blocks = self._held()
        self._ledger.move(blocks, self.state, target)
        self._blocks = None
        return blocks


class ReservedBlocks(_Guard):
    """Set aside for a handoff; nothing may write them yet. Leaving the `with` gives them back."""

    state = BlockState.RESERVED

    def grant(self) -> InFlightBlocks:
        """From here a remote write may land in them.

        Raises:
            BlockStateError: already granted or given back.
        """
        return InFlightBlocks(self._transition(BlockState.IN_FLIGHT), self._ledger, self._adopt)

    def release(self) -> None:
        """Free them.

        Raises:
            BlockStateError: already granted or given back.
        """
        self._transition(BlockState.FREE)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._blocks is not None:
            self.release()


class InFlightBlocks(_Guard):
    """A peer may be writing them."""

    state = BlockState.IN_FLIGHT

    def settle(self) -> QuiescentBlocks:
        """Everything expected has landed, and nothing more can.

        Raises:
            BlockStateError: already settled or quarantined.
        """
        return QuiescentBlocks(self._transition(BlockState.QUIESCENT), self._ledger, self._adopt)

    def quarantine(self) -> QuarantinedBlocks:
        """The handoff is over, but a posted write may still land.

        Raises:
            BlockStateError: already settled or quarantined.
        """
        return QuarantinedBlocks(
            self._transition(BlockState.QUARANTINED), self._ledger, self._adopt
        )


class QuiescentBlocks(_Guard):
    """Complete and still; not yet believed."""

    state = BlockState.QUIESCENT

    def accept(self) -> list[int]:
        """They are verified: ready, and the caller holds one reference on each.

        Raises:
            BlockStateError: already accepted.
        """
        blocks = self._transition(BlockState.READY)
        self._adopt(blocks)
        return blocks


class QuarantinedBlocks(_Guard):
    """Of an aborted handoff: not to be reused until the transport reports that nothing can land."""

    state = BlockState.QUARANTINED

    def release(self) -> None:
        """The transport reported that nothing can land: free them.

        Raises:
            BlockStateError: already released.
        """
        self._transition(BlockState.FREE)
