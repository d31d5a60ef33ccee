"""Tickets that ended before this side had heard of them: remembered for a while, bounded."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from baton.ids import Epoch, TicketId

MAX_GRAVES: Final = 4096


@dataclass(frozen=True, slots=True)
class Grave:
    """Why a ticket is dead, and at which stage it died."""

    reason: str
    stage: str


class Graves:
    """Tickets that are dead. The oldest are forgotten first: a deadline still ends those.

    `by` is the life of the peer that said so, or that is to be told; None where it is not known:
    what a life says of a ticket that does not name it changes nothing.
    """

    def __init__(self) -> None:
        self._graves: OrderedDict[tuple[TicketId, Epoch | None], Grave] = OrderedDict()

    def bury(self, ticket: TicketId, grave: Grave, by: Epoch | None = None) -> None:
        """Remember that a ticket is dead."""
        self._graves[ticket, by] = grave
        while len(self._graves) > MAX_GRAVES:
            self._graves.popitem(last=False)

    def take(self, ticket: TicketId, peer: Epoch | None = None) -> Grave | None:
        """The grave, if this ticket, whose other half is `peer`, is dead; it is forgotten then."""
        own, peers = self._graves.pop((ticket, None), None), self._graves.pop((ticket, peer), None)
        return own or peers
