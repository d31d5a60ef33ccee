"""One handoff out of this worker, as its context keeps it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from baton.handoff.transport_usage import TransportUsage
from baton.kv.planning import CopyPlanner

if TYPE_CHECKING:
    from baton.handoff.grants import Granted
    from baton.handoff.mapped_pages import MappedPages
    from baton.handoff.peers import Peer
    from baton.handoff.session.send import SendSession


@dataclass(slots=True, eq=False)
class OutgoingHandoff:
    """A session, what was granted, and what carries it.

    `mapped_pages` is known from `SendSession.begin` on. `planner` keeps what its layers have in
    common. `waits`: something could not be submitted before a route is attached.
    """

    session: SendSession
    granted: Granted | None = None
    mapped_pages: MappedPages | None = None
    usage: TransportUsage = field(default_factory=TransportUsage)
    planner: CopyPlanner = field(default_factory=CopyPlanner)
    waits: bool = False

    @property
    def is_held(self) -> bool:
        """Whether its KV waits here until the decode worker asks for it."""
        return self.granted is None and self.session.order.ticket.mode == "pull"

    def was_granted_by(self, peer: Peer) -> bool:
        """Whether this peer granted it."""
        return self.granted is not None and self.granted.peer is peer

    def write_trace(self) -> None:
        """Write into the trace which transports carried it."""
        self.usage.write_into(self.session.order.trace)
