"""Ticket → which part this worker plays in a request."""

from __future__ import annotations

from typing import TYPE_CHECKING

from baton.authority.seen import SeenTickets, TicketUse
from baton.authority.ticket import unseal
from baton.engines.interface import Colocated, DecodeLeg, PrefillLeg
from baton.errors import OverloadedError, TicketError
from baton.worker.problems import StaleTicketError

if TYPE_CHECKING:
    from baton.authority.key import ClusterKey
    from baton.authority.ticket import Ticket, WorkerRef
    from baton.clock import Clock, UnixTime
    from baton.engines.interface import Leg
    from baton.ids import Epoch, WorkerId


class LegReader:
    """Reads tickets that name this life of this worker. Owned by the event loop's thread."""

    def __init__(
        self, worker: WorkerId, epoch: Epoch, key: ClusterKey | None, clock: Clock
    ) -> None:
        self._me = (worker, epoch)
        self._key, self._clock = key, clock
        self._seen = SeenTickets()

    def read(self, text: str | None) -> Leg:
        """The leg that a ticket authorises; without a ticket, all of the request.

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
        leg = self._mine(ticket)
        self._use(ticket, now)
        return leg

    def _use(self, ticket: Ticket, now: UnixTime) -> None:
        match self._seen.use(ticket, now):
            case TicketUse.FIRST:
                return
            case TicketUse.AGAIN:
                raise StaleTicketError("this ticket was used before; ask for a new one")
            case TicketUse.NO_ROOM:
                raise OverloadedError("too many tickets are in use", retry_after_s=5.0)

    def _mine(self, ticket: Ticket) -> PrefillLeg | DecodeLeg:
        if self._is_me(ticket.prefill):
            return PrefillLeg(ticket)
        if self._is_me(ticket.decode):
            return DecodeLeg(ticket)
        worker, epoch = self._me
        raise StaleTicketError(
            f"the ticket is for {_name(ticket.prefill)} and {_name(ticket.decode)}, this is "
            f"{worker}@{epoch[:8]}; read /baton/v1/info again"
        )

    def _is_me(self, ref: WorkerRef) -> bool:
        return (ref.worker, ref.epoch) == self._me


def _name(ref: WorkerRef) -> str:
    return f"{ref.worker}@{ref.epoch[:8]}"
