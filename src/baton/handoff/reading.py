"""Reads of a peer's pages: from "available" to bytes in this worker's pages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from baton.errors import PeerLostError
from baton.handoff.messages import Notice
from baton.handoff.session.posted import Posted
from baton.kv.copies import PagedSequence
from baton.transfer.interface import PageRead
from baton.transfer.links.shape import measure_shape

if TYPE_CHECKING:
    from baton.handoff.incoming import Incoming
    from baton.handoff.messages import Available
    from baton.handoff.route import Route
    from baton.handoff.routes import RouteTable


@dataclass(frozen=True, slots=True)
class PendingRead:
    """A read that was posted: what it will have brought, and over what.

    `tried` are the transports by which it failed, or brought something else, before.
    """

    available: Available
    route: Route
    tried: frozenset[str]

    @property
    def notice(self) -> Notice:
        """What is in the pages, if it went well."""
        said = self.available
        return Notice(said.layer, said.start, said.stop, said.digests)

    @property
    def tried_now(self) -> frozenset[str]:
        """`tried`, and this one."""
        return self.tried | {self.route.kind}


class Reader:
    """The reads of one receiving desk that are under way. Owner: the agent's thread."""

    def __init__(self, routes: RouteTable) -> None:
        self._routes = routes
        self._pending: dict[Posted, PendingRead] = {}

    @property
    def is_moving(self) -> bool:
        """Whether a read is under way."""
        return bool(self._pending)

    def post(
        self, incoming: Incoming, available: Available, tried: frozenset[str] = frozenset()
    ) -> Posted:
        """Read what is available into the handoff's pages, by a transport that was not tried.

        Raises:
            TransferError: there is no way to the peer any more, or it named pages that it lacks.
            ProtocolError: the pages that it named do not hold what it says.
        """
        peer, footprint = incoming.peer, incoming.footprint
        if peer is None or footprint is None:
            raise PeerLostError("its pages cannot be read any more")
        copies = incoming.planner.plan(
            PagedSequence(peer.met.theirs.layout, incoming.named.find(available)),
            footprint.sequence,
            available.layer,
            start=available.start,
            stop=available.stop,
        )
        region = footprint.face.region
        shape = measure_shape(copies, peer.met.theirs.regions[0].arrays, region.arrays)
        way = self._routes.choose(peer, shape, tried)
        if way is None:
            raise self._routes.explain(peer)
        began_at = self._routes.now()
        transfer = way.route.transport.read(PageRead(way.route.attached, region.handle, copies))
        self._routes.posted(way, began_at)
        incoming.note_read(way.choice, copies)
        posted = Posted(way.route.kind, transfer)
        self._pending[posted] = PendingRead(available, way.route, tried)
        return posted

    def take(self, posted: Posted) -> PendingRead | None:
        """The read that ended; None if it is none of ours."""
        return self._pending.pop(posted, None)
