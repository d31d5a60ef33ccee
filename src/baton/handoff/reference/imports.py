"""Peers' blocks that this worker's engine attends over: mapped beside its own, and given back.

    attach (a transport with views) ──► its pages, mapped ──► blocks imported from it
                                                                              │ given back
    the link is gone and nothing is held: unmapped, detached ◄────────────────┘

A mapping needs neither link nor transport nor the exporter's process: a request that runs on
imported blocks ends well whatever becomes of the exporter.

`ImportTable` has what was imported, and pending releases:

    add ──► HELD ── release ──► PENDING ── take_pending ──► UNACKED ── acked ──► (none)
                                 ▲  ▲                         │
             queue_release ──────┘  └──────── link_lost ──────┘

    queue_release  a handoff that asked for an export failed: the peer may have exported

An exporter waits for the release of each export, so releases are sent until the exporter has
acknowledged them: over another link if one broke. `HELD` blocks stay in use even if the link or the
exporter is lost: their memory stays mapped.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Final, assert_never

from baton.clock import Instant
from baton.errors import BatonError, ProtocolError
from baton.handoff.interface import ImportRevoked, ReceiveOrder
from baton.handoff.messages import MAX_BATCH, Release, ReleaseAck, Revoke, unpack_blocks
from baton.handoff.peer_transports import Reachability
from baton.transfer.interface import RegionDescriptor, RemoteId, Transport, as_viewer
from baton.transfer.region import view_pages

if TYPE_CHECKING:
    from collections.abc import Iterable

    from baton.auth.ticket import WorkerRef
    from baton.handoff.kv_views import AgentContext, KVView
    from baton.handoff.messages import BlocksExported, ToImporter
    from baton.handoff.peers import Peer
    from baton.ids import Epoch, TicketId
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
    """An incarnation of a worker: its pages, attached by `remote`, mapped as `mapping`; or why not.

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
        exporter = self._of_peer(peer)
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
        exporter = self._of_peer(peer)
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

    def handle_message(self, peer: Peer, message: ToImporter) -> None:
        """The exporter acknowledges releases, or wants blocks back; other peers are ignored."""
        exporter = self._of_peer(peer)
        if exporter is None:
            return
        match message:
            case ReleaseAck(tickets):
                self.table.acked(exporter.ref.epoch, tickets)
            case Revoke(tickets):
                for ticket in self.table.revoked(exporter.ref.epoch, tickets):
                    self._context.emit(ImportRevoked(ticket))
            case _:
                assert_never(message)

    def peer_up(self, peer: Peer) -> None:
        """A link is up: send the releases that the exporter has not acknowledged."""
        exporter = self._of_peer(peer)
        if exporter is not None:
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
        else:  # another link is up already: what this one may have lost goes over that
            self._send_releases(epoch)

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
        known = self._of_peer(peer)
        if known is None:
            if self._why_not(peer):
                return None
            view = self._context.view_to(peer).view
            transport = self._exporting_transports(peer)[0][0]
            if view.peer_mappings is None:
                return None
            known = _Exporter(peer.dialed, view, view.peer_mappings, transport, peer)
            self._exporters[peer.dialed.epoch] = known
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
        if peer.dialed is not None and peer.dialed.epoch in self._exporters:
            return f"another worker has the epoch of {peer.name}"
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

    def _of_peer(self, peer: Peer) -> _Exporter | None:
        """The record of a peer that was dialed here: its name and epoch were checked then."""
        ref = peer.dialed
        exporter = None if ref is None else self._exporters.get(ref.epoch)
        if ref is None or exporter is None or exporter.ref.worker != ref.worker:
            return None
        return exporter

    def _of_remote(self, transport: Transport, remote: RemoteId) -> _Exporter | None:
        for exporter in self._exporters.values():
            if exporter.transport is transport and exporter.remote == remote:
                return exporter
        return None


@dataclass(slots=True)
class _PerExporter:
    """With one exporter. `held`, `pending`, `unacked` are disjoint; `revoked` are held ones."""

    held: set[TicketId] = field(default_factory=set)
    pending: set[TicketId] = field(default_factory=set)
    unacked: set[TicketId] = field(default_factory=set)
    revoked: set[TicketId] = field(default_factory=set)

    @property
    def is_even(self) -> bool:
        return not (self.held or self.pending or self.unacked)


class ImportTable:
    """Imports by exporter and ticket. Owner: the agent's thread."""

    def __init__(self) -> None:
        self._accounts: dict[Epoch, _PerExporter] = {}
        self._exporter_of: dict[TicketId, Epoch] = {}

    @property
    def exporters(self) -> list[Epoch]:
        """Exporters with held blocks or pending releases."""
        return list(self._accounts)

    def holds(self, exporter: Epoch) -> bool:
        """Whether blocks of this exporter are in use."""
        return bool(self._account(exporter).held)

    def has_pending(self, exporter: Epoch) -> bool:
        """Whether a release to this exporter is not sent, or not acknowledged."""
        account = self._account(exporter)
        return bool(account.pending or account.unacked)

    def add(self, ticket: TicketId, exporter: Epoch) -> None:
        """From here the engine reads the exporter's blocks."""
        self._accounts.setdefault(exporter, _PerExporter()).held.add(ticket)
        self._exporter_of[ticket] = exporter

    def release(self, ticket: TicketId) -> Epoch | None:
        """The engine no longer reads them; the exporter, None if the ticket is unknown."""
        exporter = self._exporter_of.pop(ticket, None)
        if exporter is not None:
            account = self._accounts[exporter]
            account.held.discard(ticket)
            account.revoked.discard(ticket)
            account.pending.add(ticket)
        return exporter

    def queue_release(self, ticket: TicketId, exporter: Epoch) -> None:
        """Blocks that were or may have been exported will not be read: release them."""
        if self.release(ticket) is None:
            self._accounts.setdefault(exporter, _PerExporter()).pending.add(ticket)

    def take_pending(self, exporter: Epoch, num_tickets: int) -> list[TicketId]:
        """Releases to send now, at most that many."""
        account = self._account(exporter)
        taken = list(islice(account.pending, num_tickets))
        account.pending.difference_update(taken)
        account.unacked.update(taken)
        return taken

    def acked(self, exporter: Epoch, tickets: Iterable[TicketId]) -> None:
        """The exporter has acknowledged these."""
        self._account(exporter).unacked.difference_update(tickets)
        self._tidy(exporter)

    def link_lost(self, exporter: Epoch) -> None:
        """Unacknowledged releases may not have been received: send them again."""
        account = self._account(exporter)
        account.pending |= account.unacked
        account.unacked.clear()

    def drop_pending(self, exporter: Epoch) -> None:
        """The exporter is unreachable or has ended: drop its releases, keep held blocks."""
        account = self._account(exporter)
        account.pending.clear()
        account.unacked.clear()
        self._tidy(exporter)

    def revoked(self, exporter: Epoch, tickets: Iterable[TicketId]) -> list[TicketId]:
        """The exporter revokes blocks: those of them that are held, each once."""
        account = self._account(exporter)
        fresh = [each for each in tickets if each in account.held - account.revoked]
        account.revoked.update(fresh)
        return fresh

    def check_invariants(self) -> None:
        """Raise AssertionError where the tables disagree."""
        held = {ticket: name for name, each in self._accounts.items() for ticket in each.held}
        if held != self._exporter_of:
            raise AssertionError("an import is held from another exporter than recorded")
        for account in self._accounts.values():
            if account.is_even:
                raise AssertionError("an empty account is kept")
            if not account.revoked <= account.held:
                raise AssertionError("a released import is being revoked")
            if account.held & account.pending or account.pending & account.unacked:
                raise AssertionError("an import is in two states")

    def _account(self, exporter: Epoch) -> _PerExporter:
        return self._accounts.get(exporter) or _PerExporter()

    def _tidy(self, exporter: Epoch) -> None:
        if self._account(exporter).is_even:
            self._accounts.pop(exporter, None)
