"""Tickets that need no check here, by their text: it was done, or a gateway sent them."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from baton.auth.ticket import Ticket

MAX_VERIFIED_TICKETS: Final = 1024
"""Of some 3 KiB. A worker is shown a ticket's text twice within the time of one handoff."""


class VerifiedTickets:
    """A text that was verified once is not verified again. The oldest are forgotten first.

    Thread-safe: each of its operations is one call of a built-in type.
    """

    def __init__(self) -> None:
        self._tickets: OrderedDict[str, Ticket] = OrderedDict()

    def add(self, text: str, ticket: Ticket) -> None:
        """Remember a ticket that is trusted, from whatever source."""
        self._tickets[text] = ticket
        if len(self._tickets) > MAX_VERIFIED_TICKETS:
            self._tickets.popitem(last=False)

    def find(self, text: str) -> Ticket | None:
        """The ticket of a text that is trusted; None where it has to be verified."""
        return self._tickets.get(text)
