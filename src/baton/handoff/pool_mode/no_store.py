"""A worker without a store: mode pool costs it time only."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from baton.errors import HandoffError
from baton.handoff.interface import BlocksQuiescent, KVFailed, SendFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from baton.auth.ticket import Ticket
    from baton.handoff.interface import (
        HandoffEvent,
        ReceiveOrder,
        SampledToken,
        SendOrder,
    )
    from baton.ids import TicketId

REASON: Final = "this worker has no store ([store] tiers)"


class NoStoreHandoff:
    """In place of a `StoreHandoff`: every handoff has failed at once."""

    def open(self, emit: Callable[[HandoffEvent], None]) -> None:
        """See `StoreHandoff`."""
        self._emit = emit

    def start(self) -> None:
        """See `StoreHandoff`."""

    def stop(self) -> None:
        """See `StoreHandoff`."""

    def start_receive(self, order: ReceiveOrder) -> None:
        """See `HandoffPort.start_receive`."""
        ticket = order.ticket
        error = HandoffError(REASON, stage="store", peer=ticket.prefill.worker)
        self._emit(KVFailed(ticket.id, error))
        self._emit(BlocksQuiescent(ticket.id))

    def start_send(self, order: SendOrder) -> None:
        """See `HandoffPort.start_send`."""
        ticket = order.ticket
        error = HandoffError(REASON, stage="store", peer=ticket.decode.worker)
        self._emit(SendFailed(ticket.id, error))

    def report_progress(self, prompts: Sequence[Ticket]) -> None:
        """See `StoreHandoff`: nothing is under way."""

    def layer_ready(self, tickets: Sequence[tuple[TicketId, int]], layer: int) -> None:
        """See `StoreHandoff`: nothing is under way."""

    def prefill_done(self, ticket: TicketId, first_token: SampledToken | None) -> None:
        """See `StoreHandoff`: nothing is under way."""

    def abort(self, ticket: TicketId, reason: str) -> None:
        """See `StoreHandoff`: nothing is under way."""

    def abort_from_peer(self, ticket: TicketId, reason: str) -> None:
        """See `StoreHandoff`: nothing is under way."""
