"""The decode worker's handoffs: carries out what `ReceiveSession` asks for."""

from __future__ import annotations

import logging
from collections import deque
from typing import TYPE_CHECKING, assert_never

from baton.auth.ticket import seal
from baton.clock import Instant
from baton.encodings.interface import RAW
from baton.errors import BatonError, HandoffError, ProtocolError
from baton.handoff.grants import LeaseRenewer, Tombstone, Tombstones
from baton.handoff.incoming import IncomingHandoff, explain_mismatch, verify_written
from baton.handoff.interface import BlocksQuiescent, KVFailed, KVLanded, LayersLanding
from baton.handoff.kv_views import STAGING_STAGE, Holder
from baton.handoff.messages import (
    Available,
    BlocksExported,
    Declined,
    EncodingCosts,
    EncodingRefused,
    ExportRefused,
    Failed,
    Finished,
    Grant,
    Keepalive,
    LeaseRenewed,
    TransferAck,
    TransportFailed,
    decode_notification,
)
from baton.handoff.page_reads import PageReads
from baton.handoff.peer_transports import REFERENCE, Reachability
from baton.handoff.session.actions import (
    CloseWriteGrant,
    Emit,
    Fence,
    ImportBlocks,
    OpenWriteGrant,
    ReadPages,
    ReceiveAction,
    SendMessage,
    SendTransferAck,
    TransferHandle,
    TransferPlan,
)
from baton.handoff.session.receive import ReceivePhase, ReceiveSession
from baton.telemetry.trace import Stamp
from baton.transfer.interface import Arrived, GrantQuiescent, ReadCompleted, ReadFailed

if TYPE_CHECKING:
    from collections.abc import Iterable

    from baton.auth.ticket import Ticket
    from baton.handoff.interface import ReceiveOrder, StreamPosition
    from baton.handoff.kv_views import AgentContext
    from baton.handoff.link_encodings import LinkEncodings
    from baton.handoff.messages import GrantOp, Notification, ToReceiver
    from baton.handoff.peer_transports import PeerTransportLost, PeerTransportUp
    from baton.handoff.peers import Peer
    from baton.handoff.reference.imports import SharedBlockImporter
    from baton.handoff.session.actions import PeerMessage
    from baton.ids import TicketId
    from baton.transfer.interface import Transport

logger = logging.getLogger(__name__)


class DecodeReceiver:  # noqa: PLR0904 -- a method for each event (ADR 0005)
    """All handoffs into this worker. Owner: the agent's thread."""

    def __init__(
        self, context: AgentContext, importer: SharedBlockImporter, encodings: LinkEncodings
    ) -> None:
        self._context, self._importer, self._encodings = context, importer, encodings
        self._reads = PageReads(context, perform=self._perform, accept=self._accept)
        self.pending_reads = self._reads.pending
        self._copies: deque[tuple[StreamPosition, IncomingHandoff]] = deque()
        self._blocks_in_use: deque[tuple[StreamPosition, IncomingHandoff]] = deque()
        self._incoming: dict[TicketId, IncomingHandoff] = {}
        self._aborted = Tombstones()
        self._lease_renewer = LeaseRenewer(context)

    @property
    def is_copying(self) -> bool:
        """Whether pages are on their way to the engine's, or in use by its GPU: `poll_copies`."""
        return bool(self._copies or self._blocks_in_use)

    @property
    def num_sessions(self) -> int:
        """Handoffs that are not over."""
        return len(self._incoming)

    def renew_lease(self, ticket: Ticket) -> None:
        """See `HandoffPort.renew_lease`."""
        self._lease_renewer.add(ticket)

    def start_receive(self, order: ReceiveOrder) -> None:
        """See `HandoffPort.start_receive`."""
        context = self._context
        self._lease_renewer.drop(order.ticket.id)
        session = ReceiveSession(
            order,
            sealed_ticket=seal(order.ticket, context.credentials),
            num_layers=context.num_layers,
            deadline=Instant(min(order.deadline, context.clock.now() + context.timeout_s)),
        )
        incoming = self._incoming[session.ticket] = IncomingHandoff(session)
        tombstone = self._aborted.take(session.ticket)
        if tombstone is not None:
            self._perform(incoming, session.fail(tombstone.reason, stage=tombstone.stage))
            return
        incoming.peer = context.peers.dial(order.ticket.prefill)
        if incoming.peer is None:
            self._perform(incoming, session.fail("cannot reach the prefill worker", stage="link"))
        else:
            if order.after is not None and not all(view.is_staged for view in context.views):
                incoming.waits_for_blocks = True
                self._blocks_in_use.append((order.after, incoming))
            self._try_begin(incoming)

    def start_failed(self, order: ReceiveOrder, reason: str) -> None:
        """`start_receive` did not come to its end: the order ends."""
        ticket, incoming = order.ticket, self._incoming.get(order.ticket.id)
        if incoming is not None:
            self._perform(incoming, incoming.session.fail(reason, stage="agent"))
            return
        error = HandoffError(reason, stage="agent", peer=ticket.prefill.worker)
        self._context.emit(KVFailed(ticket.id, error))
        self._context.emit(BlocksQuiescent(ticket.id))

    def decline(self, ticket: Ticket, reason: str) -> None:
        """See `HandoffPort.decline`."""
        self._lease_renewer.drop(ticket.id)
        peer = self._context.peers.dial(ticket.prefill)
        if peer is not None:
            self._context.peers.send(
                peer, Declined(seal(ticket, self._context.credentials), reason[:2000])
            )

    def abort(self, ticket: TicketId, reason: str) -> bool:
        """See `HandoffPort.abort`; whether the ticket is known here."""
        incoming = self._incoming.get(ticket)
        if incoming is None:
            return False
        self._perform(incoming, incoming.session.abort(reason))
        return True

    def abort_from_peer(self, ticket: TicketId, reason: str) -> None:
        """The gateway knows that no KV will come: fail now, or as soon as it is expected."""
        incoming = self._incoming.get(ticket)
        if incoming is None:
            self._aborted.add(ticket, Tombstone(reason, "prefill"))
        else:
            self._perform(incoming, incoming.session.fail(reason, stage="prefill"))

    def peer_up(self, peer: Peer) -> None:
        """Grant what waited for this link."""
        self._lease_renewer.peer_connected(peer)
        for incoming in self._of(peer):
            self._try_begin(incoming)

    def peer_gone(self, peer: Peer, error: BatonError) -> None:
        """Fail what depended on this link."""
        for incoming in self._of(peer):
            session = incoming.session
            self._perform(incoming, session.fail(str(error), stage=str(session.phase)))

    def transport_up(self, event: PeerTransportUp) -> None:
        """A peer's pages can be read."""
        for incoming in self._of(event.peer):
            self._try_begin(incoming)

    def transport_down(self, event: PeerTransportLost) -> None:
        """A route to a peer's pages is gone: what has not begun may be written by the peer."""
        for incoming in self._of(event.peer):
            if incoming.session.plan is None:
                self._try_begin(incoming)
            elif not self._context.peer_transports.can_read(event.peer):
                self._reads.stop(incoming, event.transport)

    def exporter_changed(self, peer: Peer) -> None:
        """A peer's blocks can be imported from now on, or cannot."""
        for incoming in self._of(peer):
            self._try_begin(incoming)

    def staged(self, ticket: TicketId) -> None:
        """The turn of a handoff that waited for staging pages has come."""
        incoming = self._incoming.get(ticket)
        if incoming is not None:
            self._try_begin(incoming)

    def handle_message(self, peer: Peer, message: ToReceiver) -> None:
        """Handle a message of a prefill worker, about one handoff or several."""
        match message:
            case LeaseRenewed(at, tickets):
                # One from the future answers a message that was never sent.
                if at <= self._context.clock.now():
                    for incoming in self._among(tickets, peer):
                        incoming.session.lease_holder.confirmed(Instant(at))
            case Keepalive(idle_s, tickets):
                until = Instant(self._context.clock.now() - idle_s + self._context.timeout_s)
                for incoming in self._among(tickets, peer):
                    incoming.session.wait_until(until)
            case EncodingCosts():
                self._encodings.handle_message(peer, message)
            case EncodingRefused(ticket):
                for incoming in self._among((ticket,), peer):
                    self._encoding_refused(incoming, message)
            case Failed(ticket, reason) if self._lease_renewer.is_queued_from(ticket, peer):
                # What a queued request waits for is gone: it fails as soon as it is expected.
                self._lease_renewer.drop(ticket)
                self._aborted.add(ticket, Tombstone(f"prefill worker: {reason}", "lease"))
            case _:
                for incoming in self._among((message.ticket,), peer):
                    self._perform(incoming, self._advance(incoming, message))

    def _encoding_refused(self, incoming: IncomingHandoff, message: EncodingRefused) -> None:
        """KV in another encoding, or raw, would be there sooner: grant such pages."""
        session = incoming.session
        try:
            actions = session.encoding_refused(message.encoding)
        except ProtocolError as exc:
            self._perform(incoming, session.fail(str(exc), stage="grant"))
            return
        incoming.refused = message
        self._perform(incoming, actions)
        self._try_begin_again(incoming)

    def _try_begin_again(self, incoming: IncomingHandoff) -> None:
        """After a refused encoding, once nothing can land in its pages."""
        session, peer, refused = incoming.session, incoming.peer, incoming.refused
        if refused is None or peer is None or session.phase is not ReceivePhase.WAITING:
            return
        incoming.refused = None
        view = self._context.view_to(peer, incoming.encoding)
        view.release(Holder("receive", session.ticket))
        incoming.take_other_terms(refused)
        self._try_begin(incoming)

    def _advance(
        self,
        incoming: IncomingHandoff,
        message: Available | TransportFailed | BlocksExported | ExportRefused | Finished | Failed,
    ) -> list[ReceiveAction]:
        session = incoming.session
        try:
            match message:
                case Available():
                    return session.available(message)
                case TransportFailed():
                    return session.transport_failed(message)
                case BlocksExported():
                    return session.exported(message)
                case ExportRefused(_, reason):
                    return session.export_refused(reason)
                case Finished():
                    if session.phase is ReceivePhase.GRANTED:
                        incoming.record_sender(message)
                    return session.finished(message)
                case Failed(_, reason):
                    return session.fail(f"prefill worker: {reason}", stage="prefill")
                case _:
                    assert_never(message)
        except ProtocolError as exc:
            return session.fail(str(exc), stage="landing")

    def handle_transfer_event(
        self, transport: Transport, event: Arrived | ReadCompleted | ReadFailed | GrantQuiescent
    ) -> None:
        """Handle a transport's event about pages of this worker."""
        match event:
            case Arrived(ticket, notification):
                self._write_arrived(transport, ticket, notification)
            case ReadCompleted(transfer):
                self._reads.completed(TransferHandle(transport.kind, transfer))
            case ReadFailed(transfer, error):
                self._reads.failed(TransferHandle(transport.kind, transfer), error)
            case GrantQuiescent(ticket):
                self._grant_quiescent(transport, ticket)
            case _:
                assert_never(event)

    def poll_copies(self) -> bool:
        """Go on with what has been copied to the engine's blocks; whether there was any.

        And begin to receive into blocks that the engine's GPU has left.
        """
        has_news = self._poll_blocks_in_use()
        while self._copies:
            done, incoming = self._copies[0]
            try:
                if not done.is_done():
                    break
            except BatonError as exc:
                self._perform(incoming, incoming.session.fail(str(exc), stage=STAGING_STAGE))
            self._copies.popleft()
            has_news = True
            self._perform(incoming, incoming.session.scattered())
        return has_news

    def _poll_blocks_in_use(self) -> bool:
        has_news = False
        while self._blocks_in_use:
            after, incoming = self._blocks_in_use[0]
            try:
                if not after.is_done():
                    break
            except BatonError as exc:
                self._perform(incoming, incoming.session.fail(str(exc), stage=STAGING_STAGE))
            self._blocks_in_use.popleft()
            has_news = True
            incoming.waits_for_blocks = False
            self._try_begin(incoming)
        return has_news

    def tick(self) -> None:
        """Fail what is past its deadline; renew leases."""
        self._lease_renewer.tick(each.session.order.ticket for each in self._incoming.values())
        now = self._context.clock.now()
        for incoming in tuple(self._incoming.values()):
            self._perform(incoming, incoming.session.expire(now))

    def stop(self, reason: str) -> None:
        """Fail everything."""
        for incoming in tuple(self._incoming.values()):
            self._perform(incoming, incoming.session.fail(reason, stage="stop"))

    def _write_arrived(self, transport: Transport, ticket: TicketId, raw_notice: bytes) -> None:
        """A peer's write is in place: check it against what is expected and its digests."""
        incoming = self._incoming.get(ticket)
        if incoming is None or not incoming.admits(transport):
            return
        session = incoming.session
        try:
            notification = decode_notification(raw_notice)
            if not session.expects(notification):
                return
        except ProtocolError as exc:
            self._perform(incoming, session.fail(str(exc), stage="landing"))
            return
        began = self._context.clock.now()
        wrong = verify_written(self._context.verification, incoming, notification, transport)
        incoming.session.order.trace.verify_s += self._context.clock.now() - began
        if not wrong:
            incoming.record_arrival(transport, notification)
            self._accept(incoming, notification)
        elif len(wrong) == notification.num_layers:
            self._refuse(transport, incoming, notification)
        else:
            for part in notification.split():
                self._part_arrived(transport, incoming, part, is_intact=part.layer not in wrong)

    def _part_arrived(
        self,
        transport: Transport,
        incoming: IncomingHandoff,
        part: Notification,
        *,
        is_intact: bool,
    ) -> None:
        """One layer of a write that was wrong in another one, or in this."""
        if incoming.session.phase is not ReceivePhase.GRANTED:
            return  # the pages are not this handoff's any more
        if is_intact:
            incoming.record_arrival(transport, part)
            self._accept(incoming, part)
        else:
            self._refuse(transport, incoming, part)

    def _refuse(
        self, transport: Transport, incoming: IncomingHandoff, notification: Notification
    ) -> None:
        """What was written is not what its sender had: it comes by another way, or not at all."""
        session, reason = incoming.session, explain_mismatch(notification)
        if incoming.has_other(transport):
            self._perform(incoming, session.exclude(transport.kind, reason))
        else:
            self._perform(incoming, session.fail(reason, stage="verify"))

    def _grant_quiescent(self, transport: Transport, ticket: TicketId) -> None:
        """One transport reports that nothing can land in a closed write grant."""
        incoming = self._incoming.get(ticket)
        if incoming is None:
            return
        if incoming.is_fenced(transport):
            self._perform(incoming, incoming.session.fenced(transport.kind))
        if incoming.is_quiescent(transport):
            self._perform(incoming, incoming.session.grant_quiescent())
            self._try_begin_again(incoming)

    def _try_begin(self, incoming: IncomingHandoff) -> None:
        """Settle the terms, if the peer is up, reachable, and the KV has pages to go to."""
        session, peer = incoming.session, incoming.peer
        if session.phase is not ReceivePhase.WAITING or incoming.waits_for_blocks:
            return
        if peer is None or peer.hello is None:
            return
        op = self._choose_op(incoming, peer)
        if op is None:
            return
        order = session.order
        if incoming.theirs is None:
            incoming.encoding, incoming.costs = self._encodings.choose(peer, op, order)
            incoming.theirs = peer.views_for(incoming.encoding).theirs
        view = self._context.view_to(peer, incoming.encoding)
        if order.start % view.page_tokens:
            reason = f"token {order.start} is not the first of a page of {view.page_tokens}"
            self._perform(incoming, session.fail(reason, stage=STAGING_STAGE))
            return
        try:
            incoming.mapped_pages = view.try_map_pages(
                Holder("receive", session.ticket), order.blocks
            )
        except BatonError as exc:
            self._perform(incoming, session.fail(str(exc), stage=STAGING_STAGE))
            return
        if incoming.mapped_pages is not None:
            context = self._context
            distance = order.ticket.distance
            context.peer_transports.record_handoff(peer, incoming.encoding, distance)
            plan = TransferPlan(
                op,
                incoming.mapped_pages.pages,
                view.is_staged,
                context.no_digest_transports,
                plain_digests=context.is_on_this_host(peer),
                encoding=incoming.encoding,
                costs=None if incoming.encoding == RAW else incoming.costs,
            )
            self._perform(incoming, session.begin(plan))

    def _choose_op(self, incoming: IncomingHandoff, peer: Peer) -> GrantOp | None:
        """The operation; None while a way to read, or to import, is looked for.

        What is pulled is complete: reading it is no work for a core that computes another prompt.
        """
        order, peer_transports = incoming.session.order, self._context.peer_transports
        if order.ticket.mode == "reference" and not incoming.reference_failed:
            reach = self._importer.reach(peer)
            if reach is not Reachability.NONE:
                return "NONE" if reach is Reachability.READY else None
            incoming.reference_failed = True
            order.trace.reroutes.append(f"{REFERENCE}: {self._importer.explain(peer)}"[:500])
        if self._context.preferred_op == "WRITE" and order.ticket.mode != "pull":
            return "WRITE"
        peer_transports.attach_all(peer)
        match peer_transports.reach(peer):
            case Reachability.READY:
                return "READ"
            case Reachability.WAITING if peer_transports.is_attaching(peer):
                return None
            case _:  # probes of a half-open route may take longer than writes
                return "WRITE"

    def _import_blocks(self, incoming: IncomingHandoff, exported: BlocksExported) -> None:
        session = incoming.session
        if incoming.peer is None:
            raise AssertionError("blocks are exported by a peer that was not dialed")
        try:
            blocks = self._importer.import_blocks(incoming.peer, session.order, exported)
        except BatonError as exc:
            self._perform(incoming, session.fail(str(exc), stage="import"))
            return
        trace = session.order.trace
        trace.transport = trace.expected_transport = REFERENCE
        actions = session.imported(blocks)
        incoming.stamp_progress(self._context.clock.now())
        self._perform(incoming, actions)

    def _accept(self, incoming: IncomingHandoff, notification: Notification) -> None:
        """Count what is in the pages, and is what the sender had."""
        session, finished = incoming.session, notification.finished
        try:
            done = incoming.scatter(notification)
        except BatonError as exc:
            self._perform(incoming, session.fail(str(exc), stage=STAGING_STAGE))
            return
        if done is not None:
            session.scattering()
            self._copies.append((done, incoming))
        actions = session.landed(notification)
        if finished is not None and session.phase is ReceivePhase.GRANTED:
            incoming.record_sender(finished)
            actions += session.finished(finished)
        incoming.stamp_progress(self._context.clock.now(), notification)
        self._count_layers(incoming, is_in_place=done is None)
        self._perform(incoming, actions)

    def _count_layers(self, incoming: IncomingHandoff, *, is_in_place: bool) -> None:
        """For an engine that reads layers before all have landed."""
        session, layers = incoming.session, incoming.session.order.layers
        if layers is None:
            return
        if not is_in_place:
            layers.end()
        is_first = not layers.num
        layers.advance(session.coverage.num_leading_layers)
        if is_first and layers.num and not session.coverage.complete:
            self._context.emit(LayersLanding(session.ticket, layers))

    def _perform(self, incoming: IncomingHandoff, actions: list[ReceiveAction]) -> None:
        for action in actions:
            self._carry_out(incoming, action)
        session = incoming.session
        if (
            session.phase is ReceivePhase.ENDED
            and self._incoming.pop(session.ticket, None) is not None
        ):
            holder = Holder("receive", session.ticket)
            for view in self._context.views:
                view.release(holder)
            if session.may_hold_export:
                self._importer.queue_release(session.ticket, session.order.ticket.prefill.epoch)

    def _carry_out(self, incoming: IncomingHandoff, action: ReceiveAction) -> None:
        session = incoming.session
        match action:
            case OpenWriteGrant():
                try:
                    incoming.open_write_grants(self._context.transports)
                except BatonError as exc:
                    self._perform(incoming, session.fail(str(exc), stage="grant"))
            case CloseWriteGrant(writer_is_done):
                if not incoming.close_write_grants(writer_is_done=writer_is_done):
                    self._perform(incoming, session.grant_quiescent())
            case Fence(kind):
                if incoming.fence(kind):
                    self._perform(incoming, session.fenced(kind))
            case ReadPages(available):
                self._reads.read(incoming, available)
            case ImportBlocks(exported):
                self._import_blocks(incoming, exported)
            case SendMessage(message):
                self._send_message(incoming, message)
            case SendTransferAck(closes_grant):
                self._send_transfer_ack(incoming, closes_grant=closes_grant)
            case Emit(event):
                incoming.end_order(has_landed=isinstance(event, KVLanded))
                self._context.emit(event)
            case _:
                assert_never(action)

    def _send_transfer_ack(self, incoming: IncomingHandoff, *, closes_grant: bool) -> None:
        trace = incoming.session.order.trace
        message = TransferAck(
            incoming.session.ticket,
            trace.transport or "",
            trace.expected_transport or "",
            closes_grant,
        )
        if incoming.peer is not None:
            self._context.peers.send(incoming.peer, message)

    def _send_message(self, incoming: IncomingHandoff, message: PeerMessage) -> None:
        if isinstance(message, Grant):
            if incoming.session.phase is not ReceivePhase.GRANTED:
                return  # no write grant could be opened
            now = self._context.clock.now()
            incoming.session.order.trace.stamp(Stamp.GRANTED, now)
            if incoming.peer is not None and incoming.peer.hello is not None:
                incoming.session.lease_holder.begin(now, incoming.peer.hello.lease_s)
        if incoming.peer is not None:
            self._context.peers.send(incoming.peer, message)

    def _among(self, tickets: Iterable[TicketId], peer: Peer) -> list[IncomingHandoff]:
        """Those of these tickets that come from this peer."""
        found = filter(None, map(self._incoming.get, tickets))
        return [incoming for incoming in found if incoming.peer is peer]

    def _of(self, peer: Peer) -> list[IncomingHandoff]:
        return [incoming for incoming in self._incoming.values() if incoming.peer is peer]
