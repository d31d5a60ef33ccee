"""Reads of a peer's pages: from "available" to bytes in this worker's pages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from baton.errors import PeerLostError
from baton.handoff.messages import Notification
from baton.handoff.session.transfer_handle import TransferHandle
from baton.kv.copies import PagedSequence
from baton.transfer.interface import PageRead
from baton.transfer.links.cost_model import measure_shape

if TYPE_CHECKING:
    from baton.handoff.incoming import IncomingHandoff
    from baton.handoff.messages import Available
    from baton.handoff.peer_transport import PeerTransport
    from baton.handoff.peer_transport_table import PeerTransportTable


@dataclass(frozen=True, slots=True)
class PendingRead:
    """A read that was posted: what it will have brought, and over what.

    `tried` are the transports by which it failed, or brought something else, before.
    """

    available: Available
    peer_transport: PeerTransport
    tried: frozenset[str]

    @property
    def notification(self) -> Notification:
        """What is in the pages, if it went well."""
        message = self.available
        return Notification(message.layer, message.start, message.stop, message.digests)

    @property
    def tried_now(self) -> frozenset[str]:
        """`tried`, and this one."""
        return self.tried | {self.peer_transport.kind}


class Reader:
    """The reads of one receiving context that are under way. Owner: the agent's thread."""

    def __init__(self, peer_transports: PeerTransportTable) -> None:
        self._peer_transports = peer_transports
        self._pending: dict[TransferHandle, PendingRead] = {}

    @property
    def is_moving(self) -> bool:
        """Whether a read is under way."""
        return bool(self._pending)

    def post(
        self, incoming: IncomingHandoff, available: Available, tried: frozenset[str] = frozenset()
    ) -> TransferHandle:
        """Read what is available into the handoff's pages, by a transport that was not tried.

        Raises:
            TransferError: there is no way to the peer any more, or it named pages that it lacks.
            ProtocolError: the pages that it named do not hold what it announced.
        """
        peer, mapped_pages = incoming.peer, incoming.mapped_pages
        if peer is None or mapped_pages is None:
            raise PeerLostError("its pages cannot be read any more")
        copies = incoming.planner.plan(
            PagedSequence(peer.negotiated.theirs.layout, incoming.block_tables.find(available)),
            mapped_pages.sequence,
            available.layer,
            start=available.start,
            stop=available.stop,
        )
        region = mapped_pages.view.region
        shape = measure_shape(copies, peer.negotiated.theirs.regions[0].arrays, region.arrays)
        chosen = self._peer_transports.choose(peer, shape, tried)
        if chosen is None:
            raise self._peer_transports.explain(peer)
        began_at = self._peer_transports.now()
        transfer = chosen.peer_transport.transport.read(
            PageRead(chosen.peer_transport.attached, region.handle, copies)
        )
        self._peer_transports.submitted(chosen, began_at)
        incoming.record_read(chosen.choice, copies)
        handle = TransferHandle(chosen.peer_transport.kind, transfer)
        self._pending[handle] = PendingRead(available, chosen.peer_transport, tried)
        return handle

    def take(self, handle: TransferHandle) -> PendingRead | None:
        """The read that ended; None if it is none of ours."""
        return self._pending.pop(handle, None)
