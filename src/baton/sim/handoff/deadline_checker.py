"""I4: when a handoff must have ended, on each side."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

    from baton.auth.ticket import Ticket
    from baton.ids import Epoch, TicketId
    from baton.sim.handoff.process import SimProcess

HANDOFF_TIMEOUT_S: Final = 3.0
REQUEST_TIMEOUT_S: Final = 10.0
SLACK_S: Final = 0.7
"""Deadlines are looked at now and then, by clocks that are 2 % wrong."""


@dataclass(slots=True)
class DeadlineChecker:
    """From when each handoff's `HANDOFF_TIMEOUT_S` counts, by the life of its worker."""

    _since_s: dict[tuple[Epoch, TicketId], float] = field(default_factory=dict)

    def start(self, process: SimProcess, ticket: TicketId, *, is_held: bool) -> None:
        """What is held to be pulled waits for as long as its request may, and its lease lasts."""
        extra_s = REQUEST_TIMEOUT_S - HANDOFF_TIMEOUT_S if is_held else 0.0
        self._since_s[process.epoch, ticket] = process.world.timeline.now_s + extra_s

    def end(self, process: SimProcess, ticket: TicketId) -> None:
        """No process waits for it there any more."""
        self._since_s.pop((process.epoch, ticket), None)

    def engine_alive(self, process: SimProcess, prompts: Iterable[Ticket]) -> None:
        """An engine computes: prompts that it has yet to compute may take longer, on both sides."""
        for ticket in prompts:
            for key in ((process.epoch, ticket.id), (ticket.decode.epoch, ticket.id)):
                if key in self._since_s:
                    self._since_s[key] = max(self._since_s[key], process.world.timeline.now_s)

    def find_overdue(self, process: SimProcess) -> TicketId | None:
        """A handoff of this life that should have ended long ago."""
        latest_s = process.world.timeline.now_s - HANDOFF_TIMEOUT_S - SLACK_S
        if latest_s < process.running_since_s:
            return None  # what was asked before it stood still may have begun after it
        for (epoch, ticket), since_s in self._since_s.items():
            if epoch == process.epoch and since_s < latest_s:
                return ticket
        return None
