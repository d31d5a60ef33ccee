"""Ticket → which part this worker plays in a request."""

from __future__ import annotations

from typing import TYPE_CHECKING

from baton.auth.replay import TicketUse, UsedTickets
from baton.auth.ticket import Ticket, WorkerRef, unseal
from baton.engines.interface import Colocated, DecodeRequest, PrefillRequest, RequestKind
from baton.errors import TicketError
from baton.protocol.worker_http import INFO_PATH
from baton.worker.errors import StaleTicketError

if TYPE_CHECKING:
    from baton.auth.credentials import Credentials
    from baton.ids import Epoch, WorkerId


class TicketReader:
    """Reads tickets that name this incarnation of this worker. Owned by the event loop's thread."""

    def __init__(self, worker: WorkerId, epoch: Epoch, credentials: Credentials | None) -> None:
        self._self_id, self._credentials = (worker, epoch), credentials
        self._used = UsedTickets()

    def read(self, text: str | None, *, is_from_gateway: bool = False) -> RequestKind:
        """The kind of request that a ticket authorises; without one, colocated.

        `is_from_gateway` as in `unseal`.

        Raises:
            TicketError: malformed or forged, or this worker hands nothing over.
            StaleTicketError: for another incarnation or another worker, used before, or expired.
        """
        if text is None:
            return Colocated()
        if self._credentials is None:
            raise TicketError("this worker was started without handoffs and reads no tickets")
        ticket = unseal(text, self._credentials, is_from_gateway=is_from_gateway)
        kind = self._own_ref(ticket)
        match self._used.use(ticket.issue):
            case TicketUse.FIRST:
                return kind
            case TicketUse.REPEATED:
                raise StaleTicketError("this ticket was used before; ask for a new one")
            case TicketUse.EXPIRED:
                raise StaleTicketError("this ticket has expired; ask for a new one")

    def _own_ref(self, ticket: Ticket) -> PrefillRequest | DecodeRequest:
        if self._is_me(ticket.prefill):
            return PrefillRequest(ticket)
        if self._is_me(ticket.decode):
            return DecodeRequest(ticket)
        worker, epoch = self._self_id
        raise StaleTicketError(
            f"the ticket is for {_name(ticket.prefill)} and {_name(ticket.decode)}, this is "
            f"{worker}@{epoch[:8]}; read {INFO_PATH} again"
        )

    def _is_me(self, ref: WorkerRef) -> bool:
        return (ref.worker, ref.epoch) == self._self_id


def _name(ref: WorkerRef) -> str:
    return f"{ref.worker}@{ref.epoch[:8]}"
