"""Blocks that a peer may write: one class for each state, so that the next step is a method.

    ReservedBlocks ─grant─► InFlightBlocks ─settle─► QuiescentBlocks ─accept─► list of ready blocks
         │ (leaving)             └─quarantine─► QuarantinedBlocks          └─discard─► free
         └─► free                                    └─release─► free

Each guard can be used up once; it then holds nothing and refuses a second use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Self, TypeAlias

from baton.errors import BlockStateError
from baton.kv.blocks import BlockState

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from baton.kv.blocks import BlockLedger

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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
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
            BlockStateError: already accepted or discarded.
        """
        blocks = self._transition(BlockState.READY)
        self._adopt(blocks)
        return blocks

    def discard(self) -> None:
        """They are not what was asked for: free them.

        Raises:
            BlockStateError: already accepted or discarded.
        """
        self._transition(BlockState.FREE)


class QuarantinedBlocks(_Guard):
    """Of an aborted handoff: not to be reused until the transport reports that nothing can land."""

    state = BlockState.QUARANTINED

    def release(self) -> None:
        """The transport reported that nothing can land: free them.

        Raises:
            BlockStateError: already released.
        """
        self._transition(BlockState.FREE)
