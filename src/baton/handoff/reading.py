"""Reads of a peer's pages: from "available" to bytes in this worker's pages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from baton.errors import PeerLostError
from baton.handoff.messages import Notice, unpack_blocks
from baton.kv.copies import BlockTable, PagedSequence, compute_page_copies
from baton.transfer.interface import PageRead

if TYPE_CHECKING:
    from baton.handoff.incoming import Incoming
    from baton.handoff.messages import Available
    from baton.handoff.routes import RouteTable
    from baton.ids import TicketId
    from baton.transfer.interface import TransferId, Transport


@dataclass(frozen=True, slots=True)
class PendingRead:
    """A read that was posted: for which handoff, and what it will have brought."""

    ticket: TicketId
    notice: Notice


class Reader:
    """The reads of one receiving desk that are under way. Owner: the agent's thread."""

    def __init__(self, routes: RouteTable) -> None:
        self._routes = routes
        self._pending: dict[tuple[str, TransferId], PendingRead] = {}

    def post(self, incoming: Incoming, available: Available) -> TransferId:
        """Read what is available into the handoff's pages.

        Raises:
            TransferError: there is no way to the peer any more, or it named pages that it lacks.
            ProtocolError: the pages that it named do not hold what it says.
        """
        peer, footprint = incoming.peer, incoming.footprint
        route = None if peer is None else self._routes.find(peer)
        if peer is None or footprint is None or route is None:
            raise PeerLostError("its pages cannot be read any more")
        theirs = BlockTable(available.first_block, unpack_blocks(available.blocks))
        copies = compute_page_copies(
            PagedSequence(peer.met.theirs.layout, theirs),
            footprint.sequence,
            available.layer,
            start=available.start,
            stop=available.stop,
        )
        read = PageRead(route.remote, footprint.face.region.handle, copies)
        transfer = route.transport.read(read)
        trace = incoming.session.order.trace
        trace.transport, trace.expected_transport = route.used, route.expected
        trace.num_bytes += copies.num_bytes
        trace.num_pages += copies.num_pages
        notice = Notice(available.layer, available.start, available.stop, available.digests)
        self._pending[route.used, transfer] = PendingRead(available.ticket, notice)
        return transfer

    def take(self, transport: Transport, transfer: TransferId) -> PendingRead | None:
        """The read that ended; None if it is none of ours."""
        return self._pending.pop((transport.kind, transfer), None)
