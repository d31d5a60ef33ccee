"""The handoff port of a worker that hands nothing over (it has no agent)."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from baton.errors import HandoffError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from baton.auth.ticket import Ticket
    from baton.handoff.interface import HandoffEvent, ReceiveOrder, SampledToken, SendOrder
    from baton.ids import TicketId


class DisabledHandoffs:
    """Implements `HandoffPort`. `TicketReader` refuses tickets, so no handoff ever begins here."""

    def renew_lease(self, ticket: Ticket) -> None:
        """See `HandoffPort`."""
        _refuse(ticket)

    def start_receive(self, order: ReceiveOrder) -> None:
        """See `HandoffPort`."""
        _refuse(order.ticket)

    def start_send(self, order: SendOrder) -> None:
        """See `HandoffPort`."""
        _refuse(order.ticket)

    def report_progress(self, prompts: Sequence[Ticket]) -> None:
        """See `HandoffPort`."""

    def layer_ready(self, tickets: Sequence[tuple[TicketId, int]], layer: int) -> None:
        """See `HandoffPort`."""

    def prefill_done(self, ticket: TicketId, first_token: SampledToken | None) -> None:
        """See `HandoffPort`."""

    def decline(self, ticket: Ticket, reason: str) -> None:
        """See `HandoffPort`."""

    def abort(self, ticket: TicketId, reason: str) -> None:
        """See `HandoffPort`."""

    def release_imported(self, ticket: TicketId) -> None:
        """See `SharedBlockPort`."""

    def revoke_exported(self) -> None:
        """See `SharedBlockPort`."""

    def cancel_oldest_ungranted(self, tickets: Sequence[TicketId], reason: str) -> None:
        """See `HandoffPort`."""

    def poll(self) -> list[HandoffEvent]:
        """See `HandoffPort`."""
        return []


def _refuse(ticket: Ticket) -> NoReturn:
    raise HandoffError(f"no handoffs here, but {ticket.id.hex()} asks for one", stage="start")
