"""No ticket is used twice, at any rate of tickets, in bounded memory and by no wall clock.

The anti-replay window of IPsec (RFC 4303, section 3.4.3): an issuer numbers its tickets, and a
worker keeps the highest number that it was shown and one bit for each of the `WINDOW` numbers
below.
What is older than that, or was issued longer before the newest ticket than it may live, is refused
without a look. Nothing is refused because the memory is full.
"""

from __future__ import annotations

from collections import OrderedDict
from enum import StrEnum
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from baton.auth.ticket import TicketIssue
    from baton.ids import Epoch

BITS: Final = 8
WINDOW: Final = 1 << 22
"""Numbers: 35 minutes of a gateway that hands over 2,000 requests/s. 512 KiB for each issuer."""
MAX_ISSUERS: Final = 64
"""Lives of gateways. The one whose last ticket is the oldest is forgotten; its tickets would
be new again: 64 gateways must have started since."""


class TicketUse(StrEnum):
    """Whether a ticket may be used: only its first use is good."""

    FIRST = "first"
    REPEATED = "again"
    EXPIRED = "expired"


class UsedTickets:
    """Tickets that were used. `window` is a multiple of 8."""

    def __init__(self, window: int = WINDOW, max_issuers: int = MAX_ISSUERS) -> None:
        self._window, self._max_issuers = window, max_issuers
        self._issuers: OrderedDict[Epoch, _IssuerWindow] = OrderedDict()

    def use(self, ticket: TicketIssue) -> TicketUse:
        """Mark a ticket as used, by its `issue`."""
        issuer = self._issuers.get(ticket.issuer)
        if issuer is None:
            self._issuers[ticket.issuer] = issuer = _IssuerWindow(self._window, ticket)
            while len(self._issuers) > self._max_issuers:
                self._issuers.popitem(last=False)
        self._issuers.move_to_end(ticket.issuer)
        return issuer.use(ticket)


class _IssuerWindow:
    """Bits of the numbers in `(highest - window, highest]`, each at its number modulo `window`."""

    __slots__ = ("_bits", "_highest", "_newest", "_window")

    def __init__(self, window: int, first: TicketIssue) -> None:
        self._window, self._highest, self._newest = window, first.number, first.at
        self._bits = bytearray(window // BITS)

    def use(self, ticket: TicketIssue) -> TicketUse:
        number = ticket.number
        if number > self._highest:
            self._advance(number)
        elif number <= self._highest - self._window:
            return TicketUse.EXPIRED
        if ticket.at + ticket.lifetime_s < self._newest:
            return TicketUse.EXPIRED
        self._newest = max(self._newest, ticket.at)
        place, bit = divmod(number % self._window, BITS)
        if self._bits[place] >> bit & 1:
            return TicketUse.REPEATED
        self._bits[place] |= 1 << bit
        return TicketUse.FIRST

    def _advance(self, number: int) -> None:
        """Clear the bits of the numbers that come in, up to this one."""
        at, self._highest = self._highest + 1, number
        if number - at >= self._window:
            self._bits = bytearray(self._window // BITS)
            return
        while at <= number:
            place, bit = divmod(at % self._window, BITS)
            if bit or number - at < BITS:
                self._bits[place] &= ~(1 << bit)
                at += 1
            else:
                num_bytes = min((number - at) // BITS, len(self._bits) - place)
                self._bits[place : place + num_bytes] = bytes(num_bytes)
                at += BITS * num_bytes
