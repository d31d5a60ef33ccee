"""A worker without a store: mode pool costs it time only."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from baton.errors import HandoffError
from baton.handoff.interface import BlocksQuiescent, KVFailed, SendFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from baton.authority.ticket import Ticket
    from baton.handoff.interface import (
        HandoffEvent,
        ReceiveOrder,
        SampledToken,
        SendOrder,
    )
    from baton.ids import TicketId

REASON: Final = "this worker has no store ([store] tiers)"


class NoPool:
    """In place of a `PoolDesk`: every handoff has failed at once."""

    def open(self, emit: Callable[[HandoffEvent], None]) -> None:
        """See `PoolDesk`."""
        self._emit = emit

    def start(self) -> None:
        """See `PoolDesk`."""

    def stop(self) -> None:
        """See `PoolDesk`."""

    def expect(self, order: ReceiveOrder) -> None:
        """See `HandoffPort.expect`."""
        ticket = order.ticket
        error = HandoffError(REASON, stage="store", peer=ticket.prefill.worker)
        self._emit(KVFailed(ticket.id, error))
        self._emit(BlocksQuiescent(ticket.id))

    def offer(self, order: SendOrder) -> None:
        """See `HandoffPort.offer`."""
        ticket = order.ticket
        error = HandoffError(REASON, stage="store", peer=ticket.decode.worker)
        self._emit(SendFailed(ticket.id, error))

    def computing(self, prompts: Sequence[Ticket]) -> None:
        """See `PoolDesk`: nothing is under way."""

    def layer_ready(self, tickets: Sequence[tuple[TicketId, int]], layer: int) -> None:
        """See `PoolDesk`: nothing is under way."""

    def finish(self, ticket: TicketId, first_token: SampledToken | None) -> None:
        """See `PoolDesk`: nothing is under way."""

    def abort(self, ticket: TicketId, reason: str) -> None:
        """See `PoolDesk`: nothing is under way."""

    def give_up(self, ticket: TicketId, reason: str) -> None:
        """See `PoolDesk`: nothing is under way."""
