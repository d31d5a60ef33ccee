"""Ticket → which part this worker plays in a request."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, Final

from baton.authority.ticket import CLOCK_SKEW_S, unseal
from baton.engines.interface import Colocated, DecodeLeg, PrefillLeg
from baton.errors import OverloadedError, TicketError
from baton.worker.problems import StaleTicketError

if TYPE_CHECKING:
    from baton.authority.key import ClusterKey
    from baton.authority.ticket import Ticket, WorkerRef
    from baton.clock import Clock, UnixTime
    from baton.engines.interface import Leg
    from baton.ids import Epoch, TicketId, WorkerId

MAX_REMEMBERED: Final = 65_536


class SeenTickets:
    """Tickets that were used, each remembered until it has expired. Bounded; reads no clock."""

    def __init__(self, capacity: int = MAX_REMEMBERED) -> None:
        self._capacity = capacity
        self._seen: set[TicketId] = set()
        self._expiries: list[tuple[float, TicketId]] = []

    def use(self, ticket: Ticket, now: UnixTime) -> None:
        """Mark a ticket as used.

        Raises:
            StaleTicketError: it was used before.
            OverloadedError: too many unexpired tickets are remembered to accept another.
        """
        while self._expiries and self._expiries[0][0] < now:
            self._seen.discard(heapq.heappop(self._expiries)[1])
        if ticket.id in self._seen:
            raise StaleTicketError("this ticket was used before; ask for a new one")
        if len(self._seen) >= self._capacity:
            raise OverloadedError("too many tickets are in use", retry_after_s=5.0)
        self._seen.add(ticket.id)
        heapq.heappush(self._expiries, (ticket.expires_at + CLOCK_SKEW_S, ticket.id))

    def __len__(self) -> int:
        return len(self._seen)

    def check_invariants(self) -> None:
        """Raise AssertionError where set and expiries disagree."""
        ids = [ticket for _, ticket in self._expiries]
        if len(ids) != len(set(ids)) or set(ids) != self._seen:
            raise AssertionError("remembered tickets and their expiries differ")
        if len(self._seen) > self._capacity:
            raise AssertionError("more tickets are remembered than there is room for")


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
        """
        if text is None:
            return Colocated()
        if self._key is None:
            raise TicketError("this worker was started without handoffs and reads no tickets")
        now = self._clock.unix_now()
        ticket = unseal(text, self._key, now)
        leg = self._mine(ticket)
        self._seen.use(ticket, now)
        return leg

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
