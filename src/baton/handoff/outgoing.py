"""One handoff out of this worker, as its desk keeps it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from baton.handoff.carriage import Carriage
from baton.kv.planning import CopyPlanner

if TYPE_CHECKING:
    from baton.handoff.footprint import Footprint
    from baton.handoff.grants import Granted
    from baton.handoff.peers import Peer
    from baton.handoff.session.send import SendSession


@dataclass(slots=True, eq=False)
class Outgoing:
    """A session, what was granted, and what carries it.

    `footprint` is known from `SendSession.begin` on. `planner` keeps what its layers have in
    common. `waits`: something could not be submitted before a route is attached.
    """

    session: SendSession
    granted: Granted | None = None
    footprint: Footprint | None = None
    carriage: Carriage = field(default_factory=Carriage)
    planner: CopyPlanner = field(default_factory=CopyPlanner)
    waits: bool = False

    @property
    def is_held(self) -> bool:
        """Whether its KV waits here until the decode worker asks for it."""
        return self.granted is None and self.session.order.ticket.mode == "pull"

    def reaches(self, peer: Peer) -> bool:
        """Whether this peer granted it."""
        return self.granted is not None and self.granted.peer is peer

    def write_trace(self) -> None:
        """Say in the trace what carried it."""
        self.carriage.write_into(self.session.order.trace)
