"""Tickets that ended before this side received a message about them: kept for a while, bounded."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from baton.ids import Epoch, TicketId

MAX_TOMBSTONES: Final = 4096


@dataclass(frozen=True, slots=True)
class Tombstone:
    """Why a ticket is dead, and at which stage it died."""

    reason: str
    stage: str


class Tombstones:
    """Tickets that are dead. The oldest are forgotten first: a deadline still ends those.

    `by` is the epoch of the peer that ended it, or that must be notified; None where unknown:
    a message of an epoch that the ticket does not name changes nothing.
    """

    def __init__(self) -> None:
        self._tombstones: OrderedDict[tuple[TicketId, Epoch | None], Tombstone] = OrderedDict()

    def add(self, ticket: TicketId, tombstone: Tombstone, by: Epoch | None = None) -> None:
        """Remember that a ticket is dead."""
        self._tombstones[ticket, by] = tombstone
        while len(self._tombstones) > MAX_TOMBSTONES:
            self._tombstones.popitem(last=False)

    def take(self, ticket: TicketId, peer: Epoch | None = None) -> Tombstone | None:
        """The tombstone, if this ticket, whose other half is `peer`, ended; it is removed then."""
        own, peers = (
            self._tombstones.pop((ticket, None), None),
            self._tombstones.pop((ticket, peer), None),
        )
        return own or peers
