"""What the gateway says of a ticket reaches the tickets that were derived from it."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from baton.handoff.tombstones import Tombstone, Tombstones

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from baton.ids import TicketId


class AbortFanout:
    """Tickets whose other half failed, before or after this rank heard of them. Thread-safe."""

    def __init__(self, abort_from_peer: Callable[[TicketId, str], None]) -> None:
        self._abort_from_peer = abort_from_peer
        self._lock = threading.Lock()
        self._derived: dict[TicketId, Sequence[TicketId]] = {}
        self._early = Tombstones()

    def known(self, ticket: TicketId, derived: Sequence[TicketId]) -> None:
        """This rank works on a ticket, under those derived from it."""
        with self._lock:
            self._derived[ticket] = derived
            tombstone = self._early.take(ticket)
        if tombstone is not None:
            self._abort_all(derived, tombstone.reason)

    def forget(self, ticket: TicketId) -> None:
        """This rank is done with a ticket."""
        with self._lock:
            self._derived.pop(ticket, None)

    def abort_from_peer(self, ticket: TicketId, reason: str) -> None:
        """The other half of a ticket has failed."""
        with self._lock:
            derived = self._derived.get(ticket)
            if derived is None:
                self._early.add(ticket, Tombstone(reason, "gateway"))
                return
        self._abort_all(derived, reason)

    def _abort_all(self, derived: Sequence[TicketId], reason: str) -> None:
        for ticket in derived:
            self._abort_from_peer(ticket, reason)
