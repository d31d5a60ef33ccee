"""Tickets that were used, so that none is used twice. Bounded; reads no clock."""

from __future__ import annotations

import heapq
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from baton.auth.ticket import CLOCK_SKEW_S

if TYPE_CHECKING:
    from baton.auth.ticket import Ticket
    from baton.clock import UnixTime
    from baton.ids import TicketId

MAX_REMEMBERED: Final = 65_536


class TicketUse(StrEnum):
    """Whether a ticket may be used: only its first use is remembered, and good."""

    FIRST = "first"
    REPEATED = "again"
    FULL = "no room"


class UsedTickets:
    """Tickets that were used, each remembered until it has expired."""

    def __init__(self, capacity: int = MAX_REMEMBERED) -> None:
        self._capacity = capacity
        self._used: set[TicketId] = set()
        self._expiries: list[tuple[float, TicketId]] = []

    def use(self, ticket: Ticket, now: UnixTime) -> TicketUse:
        """Mark a ticket as used, if there is room to remember that it was."""
        while self._expiries and self._expiries[0][0] < now:
            self._used.discard(heapq.heappop(self._expiries)[1])
        if ticket.id in self._used:
            return TicketUse.REPEATED
        if len(self._used) >= self._capacity:
            return TicketUse.FULL
        self._used.add(ticket.id)
        heapq.heappush(self._expiries, (ticket.expires_at + CLOCK_SKEW_S, ticket.id))
        return TicketUse.FIRST

    def __len__(self) -> int:
        return len(self._used)

    def check_invariants(self) -> None:
        """Raise AssertionError where set and expiries disagree."""
        ids = [ticket for _, ticket in self._expiries]
        if len(ids) != len(set(ids)) or set(ids) != self._used:
            raise AssertionError("remembered tickets and their expiries differ")
        if len(self._used) > self._capacity:
            raise AssertionError("more tickets are remembered than there is room for")
