"""Ticket → which part this worker plays in a request."""

from __future__ import annotations

from typing import TYPE_CHECKING

from baton.auth.ticket import TicketUse, UsedTickets, unseal
from baton.engines.interface import Colocated, DecodeRequest, PrefillRequest
from baton.errors import OverloadedError, TicketError
from baton.protocol.worker_http import INFO_PATH
from baton.worker.http_exchange import StaleTicketError

if TYPE_CHECKING:
    from baton.auth.key import ClusterKey
    from baton.auth.ticket import Ticket, WorkerRef
    from baton.clock import Clock, UnixTime
    from baton.engines.interface import RequestKind
    from baton.ids import Epoch, WorkerId


class TicketReader:
    """Reads tickets that name this life of this worker. Owned by the event loop's thread."""

    def __init__(
        self, worker: WorkerId, epoch: Epoch, key: ClusterKey | None, clock: Clock
    ) -> None:
        self._self_id = (worker, epoch)
        self._key, self._clock = key, clock
        self._used = UsedTickets()

    def read(self, text: str | None) -> RequestKind:
        """The kind of request that a ticket authorises; without one, colocated.

        Raises:
            TicketError: malformed, forged or expired, or this worker hands nothing over.
            StaleTicketError: for another life or another worker, or used before.
            OverloadedError: too many unexpired tickets are remembered to accept another.
        """
        if text is None:
            return Colocated()
        if self._key is None:
            raise TicketError("this worker was started without handoffs and reads no tickets")
        now = self._clock.unix_now()
        ticket = unseal(text, self._key, now)
        kind = self._own_ref(ticket)
        self._use(ticket, now)
        return kind

    def _use(self, ticket: Ticket, now: UnixTime) -> None:
        match self._used.use(ticket, now):
            case TicketUse.FIRST:
                return
            case TicketUse.REPEATED:
                raise StaleTicketError("this ticket was used before; ask for a new one")
            case TicketUse.FULL:
                raise OverloadedError("too many tickets are in use", retry_after_s=5.0)

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
