"""Tickets that ended before this side had heard of them: remembered for a while, bounded."""

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

    `by` is the life of the peer that said so, or that is to be told; None where it is not known:
    what a life says of a ticket that does not name it changes nothing.
    """

    def __init__(self) -> None:
        self._tombstones: OrderedDict[tuple[TicketId, Epoch | None], Tombstone] = OrderedDict()

    def add(self, ticket: TicketId, tombstone: Tombstone, by: Epoch | None = None) -> None:
        """Remember that a ticket is dead."""
        self._tombstones[ticket, by] = tombstone
        while len(self._tombstones) > MAX_TOMBSTONES:
            self._tombstones.popitem(last=False)

    def take(self, ticket: TicketId, peer: Epoch | None = None) -> Tombstone | None:
        """The grave, if this ticket, whose other half is `peer`, is dead; it is forgotten then."""
        own, peers = (
            self._tombstones.pop((ticket, None), None),
            self._tombstones.pop((ticket, peer), None),
        )
        return own or peers
