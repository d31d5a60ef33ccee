"""Decode's half of one handoff."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Final

from baton.errors import HandoffError
from baton.handoff.coverage import Coverage
from baton.handoff.interface import BlocksQuiescent, KVFailed, KVLanded, SampledToken
from baton.handoff.messages import Failed, Finished, Grant, Notice, pack_blocks
from baton.handoff.session.actions import CloseWindow, Emit, OpenWindow, ReceiveAction, Say

if TYPE_CHECKING:
    from baton.clock import Instant
    from baton.handoff.interface import ReceiveOrder
    from baton.ids import TicketId


class ReceivePhase(StrEnum):
    """Where a handoff stands on the decode worker."""

    WAITING = "waiting"
    GRANTED = "granted"
    LANDED = "landed"
    ENDING = "ending"
    ENDED = "ended"


_CLOSED: Final = frozenset({ReceivePhase.LANDED, ReceivePhase.ENDING, ReceivePhase.ENDED})


class ReceiveSession:
    """Decode's half of one handoff."""

    def __init__(
        self, order: ReceiveOrder, *, sealed_ticket: str, num_layers: int, deadline: Instant
    ) -> None:
        self.order = order
        self.deadline = deadline
        self.phase = ReceivePhase.WAITING
        self.coverage = Coverage(num_layers=num_layers, start=order.start, stop=order.num_tokens)
        self._sealed_ticket = sealed_ticket
        self._first_token: SampledToken | None = None

    @property
    def ticket(self) -> TicketId:
        """The ticket's id."""
        return self.order.ticket.id

    @property
    def over(self) -> bool:
        """Whether nothing can happen any more."""
        return self.phase is ReceivePhase.ENDED

    def link_up(self) -> list[ReceiveAction]:
        """The peer can be talked to: grant it the pages that this worker lacks."""
        if self.phase is not ReceivePhase.WAITING:
            return []
        self.phase = ReceivePhase.GRANTED
        order = self.order
        grant = Grant(
            id=self.ticket,
            ticket=self._sealed_ticket,
            prompt_hash=order.prompt_hash,
            start=order.start,
            num_tokens=order.num_tokens,
            first_block=order.blocks.first,
            blocks=pack_blocks(order.blocks.blocks),
        )
        return [OpenWindow(), Say(grant)]

    def expects(self, notice: Notice) -> bool:
        """Whether a notice is for a handoff that still waits for it.

        Raises:
            ProtocolError: it claims tokens that are not expected, or landed already.
        """
        if self.phase is not ReceivePhase.GRANTED:
            return False
        self.coverage.check(notice.layer, notice.start, notice.stop)
        return True

    def landed(self, notice: Notice) -> list[ReceiveAction]:
        """Tokens are in place and their digests are right: count them."""
        if self.phase is not ReceivePhase.GRANTED:
            return []
        self.coverage.add(notice.layer, notice.start, notice.stop)
        return self._complete()

    def finished(self, message: Finished) -> list[ReceiveAction]:
        """The peer said that nothing will follow."""
        if self.phase is not ReceivePhase.GRANTED or self._first_token is not None:
            return []
        self._first_token = message.first_token
        return self._complete()

    def window_quiescent(self) -> list[ReceiveAction]:
        """Nothing can land in the closed window any more."""
        if self.phase is ReceivePhase.LANDED:
            self.phase = ReceivePhase.ENDED
            return []
        if self.phase is ReceivePhase.ENDING:
            self.phase = ReceivePhase.ENDED
            return [Emit(BlocksQuiescent(self.ticket))]
        return []

    def fail(self, reason: str, *, stage: str) -> list[ReceiveAction]:
        """End without KV: the engine will recompute."""
        error = HandoffError(reason, stage=stage, peer=self.order.ticket.prefill.worker)
        return self._end(reason, [Emit(KVFailed(self.ticket, error))])

    def abort(self, reason: str) -> list[ReceiveAction]:
        """End because the engine lost interest."""
        return self._end(reason, [])

    def expire(self, now: Instant) -> list[ReceiveAction]:
        """Fail if the deadline has passed."""
        if now < self.deadline or self.phase in _CLOSED:
            return []
        missing = self.coverage.num_missing
        return self.fail(
            f"the deadline passed with {missing} layer-tokens still missing",
            stage=str(self.phase),
        )

    def _complete(self) -> list[ReceiveAction]:
        if self._first_token is None or not self.coverage.complete:
            return []
        self.phase = ReceivePhase.LANDED
        return [Emit(KVLanded(self.ticket, self._first_token)), CloseWindow()]

    def _end(self, reason: str, telling: list[ReceiveAction]) -> list[ReceiveAction]:
        match self.phase:
            case ReceivePhase.WAITING:
                self.phase = ReceivePhase.ENDED
                return [*telling, Emit(BlocksQuiescent(self.ticket))]
            case ReceivePhase.GRANTED:
                self.phase = ReceivePhase.ENDING
                return [Say(Failed(self.ticket, reason)), *telling, CloseWindow()]
            case _:
                return []
