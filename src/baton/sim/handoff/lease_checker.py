"""What a prefill worker holds under a lease, as an onlooker sees it: I1, I3 of what is held."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from baton.handoff.interface import KVExported, KVSent, SendFailed
from baton.handoff.session.lease import LEASE_STAGE
from baton.sim.handoff import internals

if TYPE_CHECKING:
    from collections.abc import Iterable

    from baton.auth.ticket import Ticket
    from baton.handoff.interface import HandoffEvent
    from baton.ids import Epoch, TicketId
    from baton.sim.handoff.process import SimProcess

DRIFT: Final = 0.05
"""Of a lease: two clocks are 2 % wrong each, in opposite directions, and decode's is not ours."""
SLACK_S: Final = 0.7
"""An agent looks at its leases now and then."""


@dataclass(slots=True)
class LeaseChecker:
    """All leases of a run, in true time. `seen` counts what happened to them."""

    tickets: dict[TicketId, Ticket]
    seen: Counter[str] = field(default_factory=Counter)
    _renewed_s: dict[tuple[Epoch, TicketId], float] = field(default_factory=dict)
    _lapsed_s: dict[TicketId, float] = field(default_factory=dict)
    _read_late: set[TicketId] = field(default_factory=set)

    def start(self, process: SimProcess, ticket: TicketId) -> None:
        """All is computed: the prefill worker holds it."""
        self._renewed_s[process.epoch, ticket] = process.world.timeline.now_s

    def on_renewed(self, process: SimProcess, by: Epoch, tickets: Iterable[TicketId]) -> None:
        """A prefill worker receives tickets: those of that decode worker are held longer."""
        now_s = process.world.timeline.now_s
        for ticket in tickets:
            known = self.tickets.get(ticket)
            if known is not None and known.decode.epoch == by:
                key = process.epoch, ticket
                if key in self._renewed_s:
                    self.seen["lease renewed"] += 1
                    self._renewed_s[key] = now_s

    def on_event(self, process: SimProcess, event: HandoffEvent) -> None:
        """A prefill worker holds it no more; its blocks may hold another prompt from here on."""
        if isinstance(event, KVSent | KVExported | SendFailed):
            self._renewed_s.pop((process.epoch, event.ticket), None)
        if isinstance(event, SendFailed) and event.error.stage == LEASE_STAGE:
            self.seen["lease lapsed"] += 1
            self._lapsed_s[event.ticket] = process.world.timeline.now_s

    def on_read(self, process: SimProcess, ticket: TicketId | None) -> None:
        """A decode worker copies source pages of this ticket."""
        if ticket is None or ticket not in self._lapsed_s:
            return
        world = process.world
        late_s = world.timeline.now_s - self._lapsed_s[ticket]
        if late_s > DRIFT * world.schedule.lease_s:
            self.seen["read after its lease"] += 1
            self._read_late.add(ticket)

    def is_read_late(self, ticket: TicketId) -> bool:
        """Whether what lies in its pages was read when no handoff held it any more."""
        return ticket in self._read_late

    def find_overdue(self, process: SimProcess) -> TicketId | None:
        """One that is held although no worker has renewed it in time."""
        world = process.world
        latest_s = world.timeline.now_s - (1 + DRIFT) * world.schedule.lease_s - SLACK_S
        for (epoch, ticket), renewed_s in self._renewed_s.items():
            # It may have begun when the process went on.
            if epoch == process.epoch and max(renewed_s, process.running_since_s) < latest_s:
                is_ending = internals.is_ending(process.agent, ticket)
                if not is_ending and internals.outgoing_blocks(
                    process.scheduler.pinned_blocks, ticket
                ):
                    return ticket
        return None
