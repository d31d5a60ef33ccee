"""Peers' blocks that this worker's engine attends over: mapped beside its own, and given back.

    attach (a transport with views) ──► its pages, mapped ──► blocks imported from it
                                                                              │ given back
    the link is gone and nothing is held: unmapped, detached ◄────────────────┘

A mapping needs neither link nor transport nor the exporter's process: a request that runs on
imported blocks ends well whatever becomes of the exporter.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from baton.clock import Instant
from baton.errors import BatonError, ProtocolError
from baton.handoff.interface import ImportRevoked
from baton.handoff.messages import MAX_BATCH, Release, unpack_blocks
from baton.handoff.peer_transport_table import Reachability
from baton.transfer.interface import as_viewer
from baton.transfer.region import view_pages

if TYPE_CHECKING:
    from baton.auth.ticket import WorkerRef
    from baton.handoff.context import AgentContext
    from baton.handoff.interface import ReceiveOrder
    from baton.handoff.kv_views import KVView
    from baton.handoff.messages import BlocksExported
    from baton.handoff.peers import Peer
    from baton.handoff.session.import_table import ImportTable
    from baton.ids import Epoch, TicketId
    from baton.transfer.interface import RegionDescriptor, RemoteId, Transport
    from baton.transfer.peer_mappings import PeerMapping, PeerMappings

logger = logging.getLogger(__name__)

REDIAL_S: Final = 2.0
REATTACH_S: Final = 1.0
LONGEST_PAUSE_S: Final = 60.0
"""Pages that were lost while the link lasts are attached again after a pause, doubled each time."""
RELEASE_TIMEOUT_S: Final = 60.0
"""For how long an unreachable exporter is dialed; later it gets its releases over the next link."""
MAX_UNREACHABLE_EXPORTERS: Final = 64
"""Of those: beyond, the oldest are forgotten, which have died by all appearance."""


@dataclass(slots=True, eq=False)
class _Exporter:
    """One life of a worker: its pages, attached by `remote`, mapped as `mapping`; or why not.

    `reason` holds until `retry_at`.
    """

    ref: WorkerRef
    view: KVView
    peer_mappings: PeerMappings
    transport: Transport
    peer: Peer | None
    remote: RemoteId | None = None
    mapping: PeerMapping | None = None
    reason: str = ""
    retry_at: float = 0.0
    num_failures: int = 0
    release_before: Instant | None = None
    redial_at: float = 0.0


class SharedBlockImporter:
    """The blocks that this worker imports. Owner: the agent's thread."""

    def __init__(self, context: AgentContext, table: ImportTable) -> None:
        self._context, self.table = context, table
        self._exporters: dict[Epoch, _Exporter] = {}

    def reach(self, peer: Peer) -> Reachability:
        """Whether a peer's blocks can be attended over; while it waits, `is_attached` follows."""
        exporter = self._find(peer)
        if exporter is None or exporter.reason:
            return Reachability.NONE
        is_mapped = exporter.mapping is not None and exporter.remote is not None
        return Reachability.READY if is_mapped else Reachability.WAITING

    def explain(self, peer: Peer) -> str:
        """Why they cannot."""
        exporter = None if peer.hello is None else self._exporters.get(peer.hello.epoch)
        return exporter.reason if exporter is not None else self._why_not(peer)

    def attached(self, transport: Transport, remote: RemoteId) -> Peer | None:
        """A remote can be viewed: its peer, if that is an exporter."""
        exporter = self._of_remote(transport, remote)
        if exporter is None:
            return None
        try:
            if exporter.mapping is None:
                viewer = as_viewer(transport)
                exporter.mapping = exporter.peer_mappings.attach([
                    viewer.view(remote, n) for n in range(len(exporter.view.region.arrays))
                ])
        except BatonError as exc:
            self._fail(exporter, str(exc))
        else:
            exporter.num_failures = 0
        return exporter.peer

    def lost(self, transport: Transport, remote: RemoteId, error: BatonError) -> Peer | None:
        """A remote is out of reach: its peer, if that is an exporter."""
        exporter = self._of_remote(transport, remote)
        if exporter is None:
            return None
        self._fail(exporter, str(error))
        return exporter.peer

    def import_blocks(
        self, peer: Peer, order: ReceiveOrder, exported: BlocksExported
    ) -> tuple[int, ...]:
        """Check what a peer exports, copy the block with the last token, and import the others.

        Raises:
            ProtocolError: it exports other blocks than requested, or some that it does not have.
        """
        exporter = None if peer.hello is None else self._exporters.get(peer.hello.epoch)
        if exporter is None or exporter.mapping is None:
            raise ProtocolError("blocks are exported by a worker whose pages are not mapped here")
        blocks = unpack_blocks(exported.blocks)
        if exported.first_block != order.blocks.first or len(blocks) != len(order.blocks.blocks):
            raise ProtocolError("other blocks are exported than were requested")
        if int(blocks.max()) >= exporter.mapping.num_pages:
            raise ProtocolError("a block is exported that the peer does not have")
        self._copy(exporter, int(blocks[-1]), int(order.blocks.blocks[-1]))
        imported = tuple(int(block) for block in exporter.mapping.first + blocks[:-1])
        if imported:
            self.table.add(order.ticket.id, order.ticket.prefill.epoch)
        else:
            self.queue_release(order.ticket.id, order.ticket.prefill.epoch)
        return imported

    def queue_release(self, ticket: TicketId, exporter: Epoch) -> None:
        """Nothing that may have been exported for this ticket will be read."""
        self.table.queue_release(ticket, exporter)
        self._send_releases(exporter)

    def release_imported(self, ticket: TicketId) -> None:
        """See `SharedBlockPort.release_imported`."""
        epoch = self.table.release(ticket)
        if epoch is not None:
            self._send_releases(epoch)
            self._tidy(epoch)

    def acked(self, peer: Peer, tickets: tuple[TicketId, ...]) -> None:
        """The exporter acknowledges releases."""
        if peer.hello is not None:
            self.table.acked(peer.hello.epoch, tickets)

    def revoked(self, peer: Peer, tickets: tuple[TicketId, ...]) -> None:
        """The exporter wants blocks back."""
        if peer.hello is not None:
            for ticket in self.table.revoked(peer.hello.epoch, tickets):
                self._context.emit(ImportRevoked(ticket))

    def peer_up(self, peer: Peer) -> None:
        """A link is up: send the releases that the exporter has not acknowledged."""
        exporter = None if peer.hello is None else self._exporters.get(peer.hello.epoch)
        if exporter is not None and peer.dialed is not None:
            exporter.peer, exporter.release_before = peer, None
            if exporter.reason:
                self._drop(exporter)  # it may be attached once more
            self._send_releases(exporter.ref.epoch)

    def peer_gone(self, peer: Peer) -> None:
        """A link ended. What is held stays in use."""
        if peer.dialed is None:
            return
        epoch = peer.dialed.epoch
        self.table.link_lost(epoch)
        exporter = self._exporters.get(epoch)
        if exporter is not None and exporter.peer is peer:
            exporter.peer = None
            self._tidy(epoch)

    def tick(self) -> None:
        """Dial exporters with pending releases that are not linked."""
        for served in self._context.views:
            if served.view.peer_mappings is not None:
                served.view.peer_mappings.prefault()
        now = self._context.clock.now()
        silent: list[Epoch] = []
        for epoch in self.table.exporters:
            exporter = self._exporters.get(epoch)
            if exporter is None or exporter.peer is not None or not self.table.has_pending(epoch):
                continue
            if exporter.release_before is None:
                exporter.release_before = Instant(now + RELEASE_TIMEOUT_S)
            if now >= exporter.release_before:
                silent.append(epoch)
            elif now >= exporter.redial_at:
                exporter.redial_at = now + REDIAL_S
                self._context.peers.dial(exporter.ref)
        for epoch in silent[:-MAX_UNREACHABLE_EXPORTERS]:
            logger.info("handoff: releases for %s could not be delivered", epoch)
            self.table.drop_pending(epoch)
            self._tidy(epoch)

    def _find(self, peer: Peer) -> _Exporter | None:
        """The record of a peer, made now if its pages can be looked at here."""
        if peer.hello is None or peer.dialed is None:
            return None
        known = self._exporters.get(peer.hello.epoch)
        if known is None:
            if self._why_not(peer):
                return None
            view = self._context.view_to(peer).view
            transport = self._exporting_transports(peer)[0][0]
            if view.peer_mappings is None:
                return None
            known = _Exporter(peer.dialed, view, view.peer_mappings, transport, peer)
            self._exporters[peer.hello.epoch] = known
        known.peer = peer
        if self._context.clock.now() >= known.retry_at:
            known.reason = ""
        if known.remote is None and not known.reason:
            try:
                known.remote = known.transport.attach(self._exporting_transports(peer)[0][1])
            except BatonError as exc:
                self._fail(known, str(exc))
        return known

    def _why_not(self, peer: Peer) -> str:
        view = self._context.view_to(peer).view
        if view.peer_mappings is None:
            return f"{self._context.me.worker} cannot import blocks: its engine or memory cannot"
        if peer.negotiated.theirs.layout != view.layout:
            return "the pages of the two workers differ (block size, dtype or arrangement)"
        if not self._exporting_transports(peer):
            return f"no transport in common with {peer.name} has views"
        return ""

    def _exporting_transports(self, peer: Peer) -> list[tuple[Transport, RegionDescriptor]]:
        """Transports by which a peer's pages can be looked at, in this worker's order."""
        regions = {region.transport: region for region in peer.negotiated.theirs.regions}
        return [
            (transport, regions[transport.kind])
            for transport in self._context.transports
            if transport.capabilities.views and transport.kind in regions
        ]

    def _copy(self, exporter: _Exporter, source: int, target: int) -> None:
        """One block of the exporter's into one of the engine's own, all layers."""
        if exporter.mapping is None:
            raise AssertionError("blocks are imported only once they are mapped")
        region = exporter.view.region
        for layer, array in enumerate(region.arrays):
            theirs = exporter.peer_mappings.view(layer)[exporter.mapping.first + source]
            view_pages(region.memory, array)[target] = theirs

    def _send_releases(self, epoch: Epoch) -> None:
        exporter = self._exporters.get(epoch)
        if exporter is None or exporter.peer is None or exporter.peer.hello is None:
            return
        while tickets := self.table.take_pending(epoch, MAX_BATCH):
            self._context.peers.send(exporter.peer, Release(tuple(tickets)))

    def _fail(self, exporter: _Exporter, reason: str) -> None:
        """Nothing can be imported from it for a while. Mapped blocks in use stay in use."""
        pause_s = min(LONGEST_PAUSE_S, REATTACH_S * 2**exporter.num_failures)
        exporter.reason, exporter.retry_at = reason, self._context.clock.now() + pause_s
        exporter.num_failures = min(exporter.num_failures + 1, 16)
        if exporter.remote is not None:
            exporter.transport.detach(exporter.remote)
            exporter.remote = None

    def _tidy(self, epoch: Epoch) -> None:
        """Unmap an exporter that is not linked and of which no block is held."""
        exporter = self._exporters.get(epoch)
        if exporter is not None and exporter.peer is None and not self.table.holds(epoch):
            self._drop(exporter)
            if not self.table.has_pending(epoch):
                del self._exporters[epoch]

    def _drop(self, exporter: _Exporter) -> None:
        """Unmap and detach, if nothing is held."""
        exporter.reason = ""
        if exporter.remote is not None:
            exporter.transport.detach(exporter.remote)
            exporter.remote = None
        if exporter.mapping is not None and not self.table.holds(exporter.ref.epoch):
            exporter.peer_mappings.detach(exporter.mapping)
            exporter.mapping = None

    def _of_remote(self, transport: Transport, remote: RemoteId) -> _Exporter | None:
        for exporter in self._exporters.values():
            if exporter.transport is transport and exporter.remote == remote:
                return exporter
        return None
