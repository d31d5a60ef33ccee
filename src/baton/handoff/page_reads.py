"""Reads of peers' pages into this worker's: posted, verified, made again over another transport.

ReadPages ── read ──► under way ── completed, as announced ──► accepted
             ▲                  └─ failed, or something else
             └── another transport is up ◄──┤
                 the peer can write ◄───────┤  `fall_back_to_write`, once no read is under way
                 neither ◄──────────────────┘  the handoff fails
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from baton.errors import BatonError, PeerLostError
from baton.handoff.incoming import BlockTableCache, IncomingHandoff, explain_mismatch, verify_read
from baton.handoff.messages import Available, Notification
from baton.handoff.session.actions import ReceiveAction, TransferHandle
from baton.handoff.session.receive import ReceivePhase
from baton.kv.copies import (
    MAX_JOINED_BYTES,
    MAX_JOINED_DEVICE_BYTES,
    CopyPlanner,
    PageCopies,
    PagedSequence,
)
from baton.record import Record
from baton.transfer.interface import PageRead, as_reader
from baton.transfer.links.cost_model import TransferShape, measure_shape

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from baton.handoff.kv_views import AgentContext
    from baton.handoff.peer_transports import PeerTransport, TransportChoice
    from baton.handoff.peers import Peer
    from baton.ids import RegionHandle
    from baton.kv.digest import PieceDigests


@dataclass(frozen=True, slots=True)
class _ReadFailure:
    """Why a read was of no use."""

    stage: str
    reason: str


class _PendingRead(Record, frozen=True):
    """A read that was posted: into which handoff, what it will have brought, and over what.

    `tried` are the transports by which it failed, or brought something else, before. `begun` has
    the digests of what was copied already.
    """

    incoming: IncomingHandoff
    available: Available
    peer_transport: PeerTransport
    tried: frozenset[str]
    begun: PieceDigests | None

    @property
    def notification(self) -> Notification:
        """What is in the pages, if it went well."""
        available = self.available
        return Notification(
            available.layer,
            available.start,
            available.stop,
            available.digests,
            available.num_layers,
        )

    @property
    def tried_now(self) -> frozenset[str]:
        """`tried`, and this one."""
        return self.tried | {self.peer_transport.kind}


class PageReads:
    """The reads of all handoffs into this worker. Owner: the agent's thread.

    `perform` carries out what a session asks for, `accept` counts what is in the pages.
    """

    def __init__(
        self,
        context: AgentContext,
        *,
        perform: Callable[[IncomingHandoff, list[ReceiveAction]], None],
        accept: Callable[[IncomingHandoff, Notification], None],
    ) -> None:
        self._context, self._perform, self._accept = context, perform, accept
        self.pending: dict[TransferHandle, _PendingRead] = {}
        """Reads that are under way."""

    def read(
        self, incoming: IncomingHandoff, available: Available, tried: frozenset[str] = frozenset()
    ) -> None:
        """Read what a peer announced, by a transport that was not tried; a failure ends it."""
        session = incoming.session
        if incoming.unreadable:
            return  # the peer will be asked to write it
        try:
            for handle in self._post(incoming, available, tried):
                session.reading(handle)
        except BatonError as exc:
            self._perform(incoming, session.fail(str(exc), stage="read"))

    def completed(self, handle: TransferHandle) -> None:
        """Pages that a peer reported available are in this worker's pages: check their digests."""
        pending = self.pending.pop(handle, None)
        if pending is None:
            return
        self._context.peer_transports.completed(pending.peer_transport)
        incoming, notification = pending.incoming, pending.notification
        session = incoming.session
        if session.phase is not ReceivePhase.GRANTED:
            self._perform(incoming, session.read_ended(handle))
        elif prefill_failed := session.check_lease(self._context.clock.now()):
            self._perform(incoming, prefill_failed)
            self._perform(incoming, session.read_ended(handle))
        elif self._is_intact(pending, notification):
            if pending.tried:
                self._penalize_others(pending)
            self._perform(incoming, session.read_ended(handle))
            self._accept(incoming, notification)
            if incoming.unreadable:
                self.stop(incoming, handle.transport)
        else:
            trouble = _ReadFailure("verify", explain_mismatch(notification))
            self._read_again(handle, pending, trouble)

    def _is_intact(self, pending: _PendingRead, notification: Notification) -> bool:
        began = self._context.clock.now()
        transport = pending.peer_transport.transport
        found = verify_read(pending.incoming, notification, transport, pending.begun)
        pending.incoming.session.order.trace.verify_s += self._context.clock.now() - began
        return found

    def failed(self, handle: TransferHandle, error: BatonError) -> None:
        """A read did not complete."""
        pending = self.pending.pop(handle, None)
        if pending is None:
            return
        pending.peer_transport.failed()
        trouble = _ReadFailure("read", f"{handle.transport}: {error}")
        self._read_again(handle, pending, trouble)

    def _read_again(
        self, handle: TransferHandle, pending: _PendingRead, trouble: _ReadFailure
    ) -> None:
        """Read the same by another transport; without one, have it written, or fail."""
        incoming = pending.incoming
        session, peer = incoming.session, incoming.peer
        kind, peer_transports = handle.transport, self._context.peer_transports
        if peer is not None and session.phase is ReceivePhase.GRANTED:
            if peer_transports.is_up(peer, pending.tried_now):
                self._record_reroute(incoming, kind, trouble.reason)
                self.read(incoming, pending.available, pending.tried_now)
            elif trouble.stage == "verify" or not peer_transports.can_be_written(
                peer, pending.tried_now
            ):
                self._perform(incoming, session.fail(trouble.reason, stage=trouble.stage))
            else:
                incoming.unreadable |= pending.tried_now
        self._perform(incoming, session.read_ended(handle))
        if incoming.unreadable:
            self.stop(incoming, kind)

    def stop(self, incoming: IncomingHandoff, kind: str) -> None:
        """Have the rest written by the peer, once no read is under way; or fail."""
        session, peer = incoming.session, incoming.peer
        if peer is None or session.plan is None or session.plan.op != "READ":
            return
        incoming.unreadable.add(kind)
        peer_transports = self._context.peer_transports
        if not peer_transports.can_be_written(peer, incoming.unreadable):
            self._perform(incoming, session.fail(str(peer_transports.explain(peer)), stage="read"))
            return
        actions = session.fall_back_to_write(incoming.unreadable)
        if actions:
            self._record_reroute(incoming, kind, str(peer_transports.explain(peer)))
            incoming.record_fallback(kind)
            self._perform(incoming, actions)

    def _penalize_others(self, pending: _PendingRead) -> None:
        """What another transport could not bring was there all the time."""
        peer = pending.incoming.peer
        if peer is None:
            return
        for kind in pending.tried:
            self._context.peer_transports.penalize(peer, kind, "it read something else, or failed")

    def _record_reroute(self, incoming: IncomingHandoff, kind: str, reason: str) -> None:
        incoming.session.order.trace.reroutes.append(f"{kind}: {reason}"[:500])
        self._context.peer_transports.observer.failed("pull", kind)

    def _post(
        self, incoming: IncomingHandoff, available: Available, tried: frozenset[str]
    ) -> Iterator[TransferHandle]:
        """Read what is available into the handoff's pages, by transports that were not tried.

        Layers whose pages are alike go together, where a transport reads them so.

        Raises:
            TransferError: there is no way to the peer any more, or it named pages that it lacks.
            ProtocolError: the pages that it named do not hold what it announced.
        """
        peer, theirs, mapped_pages = incoming.peer, incoming.theirs, incoming.mapped_pages
        if peer is None or theirs is None or mapped_pages is None:
            raise PeerLostError("its pages cannot be read any more")
        ours = mapped_pages.sequence
        planner, tables = incoming.planner, incoming.block_tables
        if planner is None or tables is None:  # neither layout changes while there is the link
            is_on_device = mapped_pages.view.region.device is not None
            joined = MAX_JOINED_DEVICE_BYTES if is_on_device else MAX_JOINED_BYTES
            planner = incoming.planner = CopyPlanner(theirs.layout, ours.layout, joined)
            tables = incoming.block_tables = BlockTableCache()
        source = PagedSequence(theirs.layout, tables.find(available))
        source_arrays, region = theirs.regions[0].arrays, mapped_pages.view.region
        layers, start, stop = available.layers, available.start, available.stop
        while layers:
            copies = planner.plan(source, ours, layers.start, start=start, stop=stop)
            copies = planner.join(copies, layers)
            chosen = self._choose(peer, measure_shape(copies, source_arrays, region.arrays), tried)
            if copies.num_layers > 1 and not chosen.peer_transport.takes_several_arrays:
                copies = PageCopies(copies.layer, copies.groups)
                shape = measure_shape(copies, source_arrays, region.arrays)
                chosen = self._choose(peer, shape, tried)
            part = available.part(copies.layers)
            yield self._submit(
                incoming, part, copies, region=region.handle, chosen=chosen, tried=tried
            )
            layers = layers[copies.num_layers :]

    def _choose(self, peer: Peer, shape: TransferShape, tried: frozenset[str]) -> TransportChoice:
        chosen = self._context.peer_transports.choose(peer, shape, tried)
        if chosen is None:
            raise self._context.peer_transports.explain(peer)
        return chosen

    def _submit(
        self,
        incoming: IncomingHandoff,
        available: Available,
        copies: PageCopies,
        *,
        region: RegionHandle,
        chosen: TransportChoice,
        tried: frozenset[str],
    ) -> TransferHandle:
        began_at = self._context.peer_transports.now()
        begun = incoming.verifier.begin(
            available.layers, available.start, available.stop, is_keyed=True
        )
        read = PageRead(
            chosen.peer_transport.remote_for(incoming.encoding),
            region,
            copies,
            incoming.session.ticket,
            None if begun is None else begun.add_pages,
        )
        transfer = as_reader(chosen.peer_transport.transport).read(read)
        self._context.peer_transports.submitted(chosen, began_at)
        incoming.record_read(chosen.choice, copies)
        handle = TransferHandle(chosen.peer_transport.kind, transfer)
        self.pending[handle] = _PendingRead(
            incoming, available, chosen.peer_transport, tried, begun
        )
        return handle
