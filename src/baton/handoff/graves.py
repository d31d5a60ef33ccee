"""Tickets that ended before this side had heard of them: remembered for a while, bounded."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from baton.ids import TicketId

MAX_GRAVES: Final = 4096


@dataclass(frozen=True, slots=True)
class Grave:
    """Why a ticket is dead, and at which stage it died."""

    reason: str
    stage: str


class Graves:
    """Tickets that are dead. The oldest are forgotten first: a deadline still ends those."""

    def __init__(self) -> None:
        self._graves: OrderedDict[TicketId, Grave] = OrderedDict()

    def bury(self, ticket: TicketId, grave: Grave) -> None:
        """Remember that a ticket is dead."""
        self._graves[ticket] = grave
        while len(self._graves) > MAX_GRAVES:
            self._graves.popitem(last=False)

    def take(self, ticket: TicketId) -> Grave | None:
        """The grave, if this ticket is dead; it is forgotten then."""
        return self._graves.pop(ticket, None)
