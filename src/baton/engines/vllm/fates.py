"""What the gateway says of a ticket reaches the tickets that were derived from it."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from baton.handoff.graves import Grave, Graves

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from baton.ids import TicketId


class Fates:
    """Tickets whose other half failed, before or after this rank heard of them. Thread-safe."""

    def __init__(self, give_up: Callable[[TicketId, str], None]) -> None:
        self._give_up = give_up
        self._lock = threading.Lock()
        self._derived: dict[TicketId, Sequence[TicketId]] = {}
        self._early = Graves()

    def known(self, ticket: TicketId, derived: Sequence[TicketId]) -> None:
        """This rank works on a ticket, under those derived from it."""
        with self._lock:
            self._derived[ticket] = derived
            grave = self._early.take(ticket)
        if grave is not None:
            self._tell(derived, grave.reason)

    def forget(self, ticket: TicketId) -> None:
        """This rank is done with a ticket."""
        with self._lock:
            self._derived.pop(ticket, None)

    def give_up(self, ticket: TicketId, reason: str) -> None:
        """The other half of a ticket has failed."""
        with self._lock:
            derived = self._derived.get(ticket)
            if derived is None:
                self._early.bury(ticket, Grave(reason, "gateway"))
                return
        self._tell(derived, reason)

    def _tell(self, derived: Sequence[TicketId], reason: str) -> None:
        for ticket in derived:
            self._give_up(ticket, reason)
