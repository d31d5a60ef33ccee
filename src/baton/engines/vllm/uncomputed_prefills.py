"""Worker side: prompts of prefill requests that are not computed yet, queued in vLLM or begun."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from baton.auth.ticket import Ticket
    from baton.ids import TicketId


class UncomputedPrefills:
    """By the gateway's ticket. Owned by vLLM's worker thread."""

    def __init__(self) -> None:
        self._derived: dict[TicketId, tuple[Ticket, ...]] = {}
        self._tickets: tuple[Ticket, ...] | None = ()

    @property
    def tickets(self) -> tuple[Ticket, ...]:
        """Those under which this rank will send them, or does."""
        if self._tickets is None:
            self._tickets = tuple(chain.from_iterable(self._derived.values()))
        return self._tickets

    def add(self, ticket: TicketId, derived: tuple[Ticket, ...]) -> None:
        """It is to be computed; again changes nothing."""
        self._derived[ticket] = derived
        self._tickets = None

    def drop(self, ticket: TicketId) -> None:
        """It is computed, or will never be; again changes nothing."""
        self._derived.pop(ticket, None)
        self._tickets = None
