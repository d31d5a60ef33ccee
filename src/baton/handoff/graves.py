"""Tickets that ended before this side had heard of them: remembered for a while, bounded."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from baton.ids import TicketId

MAX_GRAVES: Final = 4096


class Graves:
    """Why a ticket is dead. The oldest are forgotten first: a deadline still ends those."""

    def __init__(self) -> None:
        self._reasons: OrderedDict[TicketId, str] = OrderedDict()

    def bury(self, ticket: TicketId, reason: str) -> None:
        """Remember that a ticket is dead."""
        self._reasons[ticket] = reason
        while len(self._reasons) > MAX_GRAVES:
            self._reasons.popitem(last=False)

    def take(self, ticket: TicketId) -> str | None:
        """The reason, if this ticket is dead; it is forgotten then."""
        return self._reasons.pop(ticket, None)
