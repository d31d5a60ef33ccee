"""The handoff port of a worker that hands nothing over (it has no agent)."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from baton.errors import HandoffError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from baton.authority.ticket import Ticket
    from baton.handoff.interface import HandoffEvent, ReceiveOrder, SampledToken, SendOrder
    from baton.ids import TicketId


class NoHandoffs:
    """Implements `HandoffPort`. `LegReader` refuses tickets, so no handoff ever begins here."""

    def keep(self, ticket: Ticket) -> None:
        """See `HandoffPort`."""
        _refuse(ticket)

    def expect(self, order: ReceiveOrder) -> None:
        """See `HandoffPort`."""
        _refuse(order.ticket)

    def offer(self, order: SendOrder) -> None:
        """See `HandoffPort`."""
        _refuse(order.ticket)

    def computing(self, prompts: Sequence[Ticket]) -> None:
        """See `HandoffPort`."""

    def layer_ready(self, tickets: Sequence[tuple[TicketId, int]], layer: int) -> None:
        """See `HandoffPort`."""

    def finish(self, ticket: TicketId, first_token: SampledToken | None) -> None:
        """See `HandoffPort`."""

    def decline(self, ticket: Ticket, reason: str) -> None:
        """See `HandoffPort`."""

    def abort(self, ticket: TicketId, reason: str) -> None:
        """See `HandoffPort`."""

    def give_back(self, ticket: TicketId) -> None:
        """See `LoanPort`."""

    def recall(self) -> None:
        """See `LoanPort`."""

    def withdraw_oldest(self, tickets: Sequence[TicketId], reason: str) -> None:
        """See `HandoffPort`."""

    def poll(self) -> list[HandoffEvent]:
        """See `HandoffPort`."""
        return []


def _refuse(ticket: Ticket) -> NoReturn:
    raise HandoffError(f"no handoffs here, but {ticket.id.hex()} asks for one", stage="start")
