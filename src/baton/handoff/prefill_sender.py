"""The prefill worker's handoffs: carries out what `SendSession` asks for."""

from __future__ import annotations

import logging
from collections import deque
from typing import TYPE_CHECKING, Final, NamedTuple, assert_never

from baton.clock import Instant
from baton.errors import BatonError, HandoffError
from baton.handoff.awaited_stamps import AwaitedStamps
from baton.handoff.encoded_view import note_encoding
from baton.handoff.grants import (
    EarlyGrants,
    Granted,
    Tombstone,
    Tombstones,
    check_fallback,
    check_grant,
    check_ticket,
    incarnation_of,
    incarnation_of_peer,
    is_confirmed,
)
from baton.handoff.interface import DECLINED_STAGE, KVExported, SendFailed
from baton.handoff.kv_views import STAGING_STAGE, AgentContext, Holder
from baton.handoff.messages import (
    BlocksExported,
    Declined,
    ExcludeTransport,
    ExportRefused,
    Failed,
    FallbackToWrite,
    Grant,
    LeaseRenewed,
    Release,
    RenewLease,
    RetransmitRequest,
    TransferAck,
    pack_blocks,
)
from baton.handoff.peer_transports import REFERENCE, Reachability
from baton.handoff.session.actions import (
    AnnounceReadable,
    Emit,
    ExportBlocks,
    GatherPages,
    SendAction,
    SendFinished,
    SendMessage,
    TransferHandle,
    WriteLayers,
)
from baton.handoff.session.lease import LEASE_STAGE
from baton.handoff.session.send import SendPhase, SendSession
from baton.handoff.write_batches import (
    OutgoingHandoff,
    announce,
    map_granted_pages,
    split_gather,
    write_batches,
)
from baton.telemetry.trace import Stamp
from baton.transfer.interface import TransferId, Transport, find_read_scopes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from baton.handoff.agent import ReadyLayers
    from baton.handoff.heartbeat import PendingPrefills
    from baton.handoff.interface import SampledToken, SendOrder, StreamPosition
    from baton.handoff.link_encodings import LinkEncodings
    from baton.handoff.messages import ToSender
    from baton.handoff.peer_transports import PeerTransport, PeerTransportLost, PeerTransportUp
    from baton.handoff.peers import Peer
    from baton.handoff.reference.exports import SharedBlockExporter
    from baton.handoff.session.actions import PeerMessage
    from baton.ids import TicketId

logger = logging.getLogger(__name__)

LEASE_OVER: Final = "this worker did not renew its membership lease, and may not write"
_WRITING: Final = frozenset({SendPhase.SENDING, SendPhase.DRAINING})


class _PendingGather(NamedTuple):
    """Tokens of these layers, up to `stop`, are in the pages of a view once `done` is reached."""

    done: StreamPosition
    outgoing: OutgoingHandoff
    layers: range
    stop: int


class PrefillSender:  # noqa: PLR0904 -- a method for each event (ADR 0005)
    """All handoffs out of this worker. Owner: the agent's thread."""

    def __init__(
        self, context: AgentContext, exporter: SharedBlockExporter, encodings: LinkEncodings
    ) -> None:
        self._context, self._exporter, self._encodings = context, exporter, encodings
        self._read_scopes = find_read_scopes(context.transports)
        self._outgoing: dict[TicketId, OutgoingHandoff] = {}
        self._early = EarlyGrants(self._admit_unused)
        self._copies: deque[_PendingGather] = deque()
        self._awaited_stamps = AwaitedStamps(context.clock)
        self._is_gathered = any(view.is_gathered for view in context.views)
        self.writes: dict[TransferHandle, tuple[PeerTransport, TicketId]] = {}
        """Those that are under way."""
        self._tombstones = Tombstones()
        self.num_lapsed_leases = 0

    @property
    def is_copying(self) -> bool:
        """Whether a GPU computes what is to be sent, or copies it: `poll_copies`."""
        return bool(self._copies) or not self._awaited_stamps.is_empty

    @property
    def num_sessions(self) -> int:
        """Handoffs that are not over, but for prompts that wait to be pulled."""
        return sum(not outgoing.is_held for outgoing in self._outgoing.values())

    def start_send(self, order: SendOrder) -> None:
        """See `HandoffPort.start_send`."""
        context = self._context
        now = context.clock.now()
        session = SendSession(
            order,
            num_layers=context.num_layers,
            deadline=_deadline_of(order, context, now),
            lease_s=context.lease_s,
        )
        outgoing = self._outgoing[session.ticket] = OutgoingHandoff(session, now)
        tombstone = self._tombstones.take(session.ticket, order.ticket.decode)
        if tombstone is not None:
            self._perform(outgoing, session.peer_failed(tombstone.reason, stage=tombstone.stage))
            return
        granted = self._early.take(order.ticket)
        if granted is None:
            return
        if is_confirmed(granted, order.ticket):
            self._take_grant(outgoing, granted)
        else:
            self._refuse(granted.peer, session.ticket, "it was under another ticket")

    def start_failed(self, order: SendOrder, reason: str) -> None:
        """`start_send` did not come to its end: the order ends."""
        ticket = order.ticket
        if not self.abort(ticket.id, reason):
            error = HandoffError(reason, stage="agent", peer=ticket.decode.worker)
            self._context.emit(SendFailed(ticket.id, error))

    def layers_ready(self, ready: Sequence[ReadyLayers], after: StreamPosition | None) -> None:
        """See `HandoffPort.layer_ready`."""
        for ticket, layers, stop in ready:
            outgoing = self._outgoing.get(ticket)
            if outgoing is not None:
                if after is not None:
                    self._reported(outgoing, after)
                self._perform(outgoing, outgoing.session.layers_ready(layers, stop))

    def _reported(self, outgoing: OutgoingHandoff, after: StreamPosition) -> None:
        """All that was reported of it is computed at this position."""
        if outgoing.after is None:
            self._await_stamp(outgoing, after, Stamp.FIRST_LAYER_READY)
        outgoing.after = after

    def _await_stamp(
        self, outgoing: OutgoingHandoff, position: StreamPosition, stamp: Stamp
    ) -> None:
        # Where pages are in place as they are reported, the engine stamps by itself.
        if self._is_gathered:
            self._awaited_stamps.add(position, outgoing.session.order.trace, stamp)

    def prefill_done(
        self,
        ticket: TicketId,
        first_token: SampledToken | None,
        rest: ReadyLayers | None,
        after: StreamPosition | None,
    ) -> None:
        """See `HandoffPort.prefill_done`; `rest` are layers that were not reported before."""
        outgoing = self._outgoing.get(ticket)
        if outgoing is not None:
            if after is not None:
                self._reported(outgoing, after)
                self._await_stamp(outgoing, after, Stamp.PREFILL_DONE)
            now = self._context.clock.now()
            if self._encodings.are_used:
                self._encodings.prefill_done(outgoing, now)
            outgoing.session.lease.hold(now)
            outgoing.session.wait_until(Instant(now + self._context.timeout_s))
            # First the end: it may ride on the write.
            self._perform(outgoing, outgoing.session.finish(first_token))
            if rest is not None:
                self._perform(outgoing, outgoing.session.layers_ready(rest.layers, rest.stop))

    def poll_copies(self) -> bool:
        """Send what is in the views' pages by now; whether there was any."""
        has_news = self._awaited_stamps.poll()
        while self._copies:
            done, outgoing, layers, stop = self._copies[0]
            try:
                if not done.is_done():
                    break
            except BatonError as exc:
                self._perform(outgoing, outgoing.session.fail(str(exc), stage=STAGING_STAGE))
            self._copies.popleft()
            has_news = True
            self._awaited_stamps.poll()  # before the peer is sent the trace
            if outgoing.after is not None:  # else the engine's thread has noted it
                ready_at = outgoing.session.order.trace.layers_ready
                ready_at[layers.start : layers.stop] = [self._context.clock.now()] * len(layers)
            self._perform(outgoing, outgoing.session.gathered(layers, stop))
        return has_news

    def engine_progressed(self, pending: PendingPrefills) -> None:
        """This worker's engine lives, and has yet to compute these: their deadlines can wait."""
        until = Instant(pending.last_progress_at + self._context.timeout_s)
        for ticket in pending.prompts:
            outgoing = self._outgoing.get(ticket.id)
            if outgoing is not None:
                outgoing.session.wait_until(until)

    def abort(self, ticket: TicketId, reason: str) -> bool:
        """See `HandoffPort.abort`; whether the ticket is known here."""
        outgoing = self._outgoing.get(ticket)
        if outgoing is None:
            return False
        self._perform(outgoing, outgoing.session.fail(reason, stage="abort"))
        return True

    def cancel_oldest_ungranted(self, tickets: Sequence[TicketId], reason: str) -> None:
        """See `HandoffPort.cancel_oldest_ungranted`."""
        for outgoing in filter(None, map(self._outgoing.get, tickets)):
            if outgoing.granted is None:
                self._perform(outgoing, outgoing.session.fail(reason, stage="offered"))
                return

    def handle_message(self, peer: Peer, message: ToSender) -> None:
        """Handle a message of a decode worker, about one handoff or several.

        Raises:
            TicketError: this peer declined a ticket that is not its own.
            ProtocolError: its ranges or pages are none.
        """
        match message:
            case Grant():
                self._handle_grant(peer, message)
            case Declined(sealed, reason):
                ticket = check_ticket(self._context, peer, sealed)
                self._end(peer, ticket.id, reason, DECLINED_STAGE)
            case Failed(ticket_id, reason):
                self._end(peer, ticket_id, reason, "decode")
            case RenewLease():
                answer_renewal(
                    self._context,
                    peer,
                    message,
                    outgoing=self._outgoing,
                    dead=self._tombstones,
                    early=self._early,
                )
            case Release():
                self._handle_release(peer, message)
            case TransferAck():
                self._handle_transfer_ack(peer, message)
            case RetransmitRequest():
                self._handle_retransmit_request(peer, message)
            case ExcludeTransport(ticket_id, transport, reason):
                outgoing = self._find_granted(peer, ticket_id)
                if outgoing is not None and not self._fail_over(outgoing, peer, transport):
                    self._perform(outgoing, outgoing.session.fail(reason, stage="transfer"))
            case FallbackToWrite():
                self._handle_fallback(peer, message)
            case _:
                assert_never(message)

    def peer_gone(self, peer: Peer, error: BatonError) -> None:
        """Fail what depended on this link."""
        self._early.forget_peer(peer)
        for outgoing in self._of(peer):
            session = outgoing.session
            self._perform(outgoing, session.peer_failed(str(error), stage=str(session.phase)))

    def transport_up(self, event: PeerTransportUp) -> None:
        """A peer's pages can be written, over one more route."""
        for outgoing in self._of(event.peer):
            self._try_begin(outgoing)
            self._resume(outgoing)

    def transport_down(self, event: PeerTransportLost) -> None:
        """A transport does not reach this peer (any more): go on over another, if there is one."""
        for outgoing in self._of(event.peer):
            session = outgoing.session
            if session.phase is SendPhase.OFFERED:
                self._try_begin(outgoing)
                continue
            reach = self._context.peer_transports.reach(event.peer, session.excluded)
            if not event.was_up and reach is not Reachability.NONE:
                self._resume(outgoing)  # it has sent nothing over that one
                continue
            if session.is_written and not self._fail_over(outgoing, event.peer, event.transport):
                error = self._context.peer_transports.explain(event.peer)
                self._perform(outgoing, session.fail(str(error), stage="attach"))
            self._resume(outgoing)

    def staged(self, ticket: TicketId) -> None:
        """The turn of a handoff that waited for staging pages has come."""
        outgoing = self._outgoing.get(ticket)
        if outgoing is not None:
            self._try_begin(outgoing)

    def write_completed(self, transport: Transport, transfer: TransferId) -> None:
        """A write is done."""
        handle = TransferHandle(transport.kind, transfer)
        peer_transport, outgoing = self._take_write(handle)
        try:
            if peer_transport is not None:
                self._context.peer_transports.completed(peer_transport)
        finally:  # else its pages would be held without end
            if outgoing is not None:
                self._perform(outgoing, outgoing.session.ended(handle))

    def write_failed(self, transport: Transport, transfer: TransferId, error: BatonError) -> None:
        """A write failed: another transport takes over, if there is one."""
        handle = TransferHandle(transport.kind, transfer)
        peer_transport, outgoing = self._take_write(handle)
        if peer_transport is not None:
            peer_transport.failed()
        if outgoing is None or outgoing.granted is None:
            return
        session = outgoing.session
        if not self._fail_over(outgoing, outgoing.granted.peer, transport.kind):
            reason = f"{transport.kind}: {error}"
            self._perform(outgoing, session.fail(reason, stage="transfer"))
        self._perform(outgoing, session.ended(handle))

    def transports_of(self, ticket: TicketId) -> list[PeerTransport]:
        """Those over which writes of a ticket are under way."""
        return [used for used, of in self.writes.values() if of == ticket]

    def tick(self) -> None:
        """Fail what is past its deadline; forget grants for requests that never came."""
        now = self._context.clock.now()
        for outgoing in tuple(self._outgoing.values()):
            self._perform(outgoing, outgoing.session.expire(now))
        self._early.forget_expired(now)

    def stop(self, reason: str) -> None:
        """Fail everything."""
        for outgoing in tuple(self._outgoing.values()):
            self._perform(outgoing, outgoing.session.fail(reason, stage="stop"))

    def _handle_grant(self, peer: Peer, grant: Grant) -> None:
        """Take a good grant; answer a bad one, so that the decode worker need not wait."""
        outgoing = self._outgoing.get(grant.id)
        known = None if outgoing is None else outgoing.session.order.ticket
        try:
            granted = check_grant(self._context, peer, grant, known)
        except BatonError as exc:
            self._refuse(peer, grant.id, str(exc))
            return
        if outgoing is not None:
            self._take_grant(outgoing, granted)
            return
        tombstone = self._tombstones.take(granted.ticket.id, granted.ticket.decode)
        reason = None if tombstone is None else tombstone.reason
        if reason is None and granted.ticket.mode == "pull":  # it was held before decode was asked
            reason = "it is held no more"
        if reason is not None:
            self._admit_unused(granted)
            self._context.peers.send(peer, Failed(granted.ticket.id, reason))
            return
        self._early.add(granted)

    def _refuse(self, peer: Peer, ticket: TicketId, why: str) -> None:
        logger.warning("handoff: refused a grant of %s: %s", peer.name, why)
        self._context.peers.send(peer, Failed(ticket, why[:2000]))

    def _take_grant(self, outgoing: OutgoingHandoff, granted: Granted) -> None:
        if outgoing.granted is not None:
            return
        may_refuse = granted.grant.costs is not None and outgoing.refused is None
        if may_refuse and self._refuses(outgoing, granted):
            return
        outgoing.take_grant(granted)
        outgoing.session.renew(self._context.clock.now())
        self._perform(outgoing, outgoing.session.granted(granted.grant))
        if outgoing.session.is_written and not outgoing.session.over:
            self._admit(granted)
        if outgoing.session.is_exported and not outgoing.session.over:
            reason = self._exporter.reserve(granted)
            if reason is not None:
                outgoing.session.order.trace.reroutes.append(f"reference: {reason}"[:500])
                self._context.peers.send(granted.peer, ExportRefused(granted.ticket.id, reason))
                return  # the peer will send a grant to write
        self._try_begin(outgoing)

    def _refuses(self, outgoing: OutgoingHandoff, granted: Granted) -> bool:
        """Whether this side asks for raw pages, in place of the encoded ones that were granted."""
        refusal = self._encodings.try_refuse(outgoing, granted)
        if refusal is None:
            return False
        outgoing.refused = granted
        outgoing.session.renew(self._context.clock.now())
        self._admit_unused(granted)
        self._context.peers.send(granted.peer, refusal)
        return True

    def _admit(self, granted: Granted) -> None:
        """The peer closes a write grant, used or not, and may ask whether this side is done.

        A close of one that no transport knows is kept, and of these a connection keeps few.
        """
        ticket, pages = granted.ticket.id, granted.target.blocks
        self._context.peer_transports.admit_writes(
            granted.peer, ticket, pages, granted.grant.encoding
        )

    def _admit_unused(self, granted: Granted) -> None:
        if granted.grant.op == "WRITE":
            self._admit(granted)

    def _try_begin(self, outgoing: OutgoingHandoff) -> None:
        """Begin to send, if the peer can be reached and the KV has pages to lie in."""
        session, granted = outgoing.session, outgoing.granted
        if session.phase is not SendPhase.OFFERED or granted is None:
            return
        if session.is_exported and not self._exporter.is_reserved(session.ticket):
            return  # an export was refused: the peer has yet to send a grant to write
        view = self._context.view_to(granted.peer, granted.grant.encoding)
        stage = "attach"
        try:
            if session.is_written and not self._is_reachable(granted.peer):
                return
            stage = STAGING_STAGE
            outgoing.mapped_pages = map_granted_pages(view, session.order, granted.grant)
        except BatonError as exc:
            self._perform(outgoing, session.fail(str(exc), stage=stage))
            return
        if outgoing.mapped_pages is not None:
            note_encoding(session.order.trace, view.view.layout)
            encoding, distance = granted.grant.encoding, granted.ticket.distance
            self._context.peer_transports.record_handoff(granted.peer, encoding, distance)
            self._perform(outgoing, session.begin(view.page_tokens, is_gathered=view.is_gathered))

    def _is_reachable(self, peer: Peer) -> bool:
        """Whether there is a route; if not, `route_found` or `route_lost` follows.

        Raises:
            TransferError: there is none, and none is being looked for.
        """
        peer_transports = self._context.peer_transports
        peer_transports.attach_all(peer)
        match peer_transports.reach(peer):
            case Reachability.READY:
                return True
            case Reachability.WAITING:
                return False
            case Reachability.NONE:
                raise peer_transports.explain(peer)

    def _fail_over(self, outgoing: OutgoingHandoff, peer: Peer, kind: str) -> bool:
        """Have a session go on without a transport; whether there is another for it."""
        session, peer_transports = outgoing.session, self._context.peer_transports
        if peer_transports.reach(peer, {*session.excluded, kind}) is Reachability.NONE:
            return False
        if kind in session.excluded or not session.is_written:
            return True
        outgoing.session.order.trace.reroutes.append(
            f"{kind}: {peer_transports.explain(peer)}"[:500]
        )
        peer_transports.observer.failed("push", kind)
        self._perform(outgoing, session.fail_over(kind))
        return True

    def _resume(self, outgoing: OutgoingHandoff) -> None:
        if outgoing.waits:
            outgoing.waits = False
            self._perform(outgoing, outgoing.session.resume())

    def _handle_release(self, peer: Peer, message: Release) -> None:
        """An importer wants these no more, exported already or not."""
        for ticket in message.tickets:
            # What was exported is over here: a tombstone would take another ticket's place.
            if ticket in self._outgoing or not self._exporter.is_reserved(ticket):
                self._end(peer, ticket, "the decode worker gave up", "decode")
        self._exporter.released(peer, message)

    def _handle_transfer_ack(self, peer: Peer, message: TransferAck) -> None:
        if message.closes_grant:
            self._context.peer_transports.forget_grant(peer, message.ticket)
        outgoing = self._find_granted(peer, message.ticket)
        if outgoing is not None:
            trace = outgoing.session.order.trace
            trace.transport = message.transport
            trace.expected_transport = message.expected_transport
            if outgoing.estimated_at is not None:
                self._encodings.acked(outgoing)
            self._perform(outgoing, outgoing.session.acked())

    def _handle_retransmit_request(self, peer: Peer, message: RetransmitRequest) -> None:
        outgoing = self._find_granted(peer, message.ticket)
        if outgoing is None:
            return
        if message.transport in outgoing.session.excluded:
            # It was no refusal by a handoff that had ended over there.
            self._context.peer_transports.penalize(peer, message.transport, "writes did not arrive")
        self._perform(outgoing, outgoing.session.retransmit(message))

    def _handle_fallback(self, peer: Peer, message: FallbackToWrite) -> None:
        outgoing = self._find_granted(peer, message.ticket)
        if outgoing is None or outgoing.granted is None:
            return
        granted = check_fallback(outgoing.granted, message)
        outgoing.take_grant(granted)
        self._context.peer_transports.attach_all(peer)
        self._perform(outgoing, outgoing.session.fall_back_to_write(message))
        if outgoing.session.is_written and not outgoing.session.over:
            self._admit(granted)
        self._try_begin(outgoing)

    def _find_granted(self, peer: Peer, ticket: TicketId) -> OutgoingHandoff | None:
        """The handoff that this peer granted."""
        outgoing = self._outgoing.get(ticket)
        return outgoing if outgoing is not None and outgoing.was_granted_by(peer) else None

    def _end(self, peer: Peer, ticket: TicketId, reason: str, stage: str) -> None:
        """The decode worker wants no more of this ticket."""
        outgoing = self._outgoing.get(ticket)
        if outgoing is None:
            self._early.forget(ticket, peer)
            self._tombstones.add(ticket, Tombstone(reason, stage), by=peer.hello)
        elif incarnation_of(outgoing.session.order.ticket.decode) == incarnation_of_peer(peer):
            self._perform(outgoing, outgoing.session.peer_failed(reason, stage=stage))

    def _perform(self, outgoing: OutgoingHandoff, actions: list[SendAction]) -> None:
        for action in actions:
            self._carry_out(outgoing, action)
        session = outgoing.session
        if (
            session.phase is SendPhase.ENDED
            and self._outgoing.pop(session.ticket, None) is not None
        ):
            holder = Holder("send", session.ticket)
            for view in self._context.views:
                view.release(holder)
            for transport in self._read_scopes:
                transport.close_read_grant(session.ticket)
            self._exporter.forget(session.ticket)

    def _carry_out(self, outgoing: OutgoingHandoff, action: SendAction) -> None:
        match action:
            case GatherPages():
                self._gather(outgoing, action)
            case WriteLayers():
                self._submit(outgoing, action)
            case AnnounceReadable():
                self._announce(outgoing, action)
            case SendFinished(first_token):
                self._send_finished(outgoing, first_token)
            case ExportBlocks():
                self._export(outgoing, action)
            case SendMessage(message):
                self._send_message(outgoing, message)
            case Emit(event):
                if isinstance(event, SendFailed) and event.error.stage == LEASE_STAGE:
                    self.num_lapsed_leases += 1
                outgoing.write_trace()
                self._context.emit(event)
            case _:
                assert_never(action)

    def _gather(self, outgoing: OutgoingHandoff, gather: GatherPages) -> None:
        """Copy a range of one layer or more to the view's pages; a failure ends the session."""
        session, pages = outgoing.session, outgoing.pages_to_send
        for layers in split_gather(gather, pages.view):
            if session.phase is not SendPhase.SENDING:
                return  # what was gathered first could not be sent
            try:
                done = pages.gather(layers, gather.start, gather.stop, outgoing.after)
            except BatonError as exc:
                self._perform(outgoing, session.fail(str(exc), stage=STAGING_STAGE))
                return
            session.gathering()
            if done is None:
                self._perform(outgoing, session.gathered(layers, gather.stop))
            else:
                self._copies.append(_PendingGather(done, outgoing, layers, gather.stop))

    def _submit(self, outgoing: OutgoingHandoff, submit: WriteLayers) -> None:
        """Write a range of one layer or more, in batches; a failure ends the session."""
        session, granted = outgoing.session, outgoing.granted
        if session.phase not in _WRITING or granted is None:
            return  # an earlier write of the same batch failed
        lease = self._context.write_lease
        if lease is not None and self._context.clock.now() >= lease.until:
            self._perform(outgoing, session.fail(LEASE_OVER, stage="submit"))
            return
        peer_transports = self._context.peer_transports
        peer, avoided = granted.peer, session.excluded
        if (
            not peer_transports.is_up(peer, avoided)
            and peer_transports.reach(peer, avoided) is Reachability.WAITING
        ):
            outgoing.waits = True  # `resume` will ask for it again
            return
        try:
            for write in write_batches(submit, peer_transports, outgoing):
                self.writes[write.handle] = write.chosen.peer_transport, session.ticket
                submitted = session.submitted(write.handle, write.written, is_last=write.is_last)
                self._perform(outgoing, submitted)
                if session.phase not in _WRITING:
                    return
                self._context.peers.keep_alive()  # digests of a long prompt take seconds
        except BatonError as exc:
            self._perform(outgoing, session.fail(str(exc), stage="submit"))

    def _announce(self, outgoing: OutgoingHandoff, action: AnnounceReadable) -> None:
        """Announce where a range of one layer or more lies, in batches; a failure ends it."""
        session, granted = outgoing.session, outgoing.granted
        if session.phase is not SendPhase.SENDING or granted is None:
            return
        try:
            for message in announce(action, outgoing, self._read_scopes):
                self._context.peers.send(granted.peer, message)
                self._perform(outgoing, session.announced(message.layers, message.stop))
                self._context.peers.keep_alive()  # digests of a long prompt take seconds
        except BatonError as exc:
            self._perform(outgoing, session.fail(str(exc), stage="announce"))

    def _export(self, outgoing: OutgoingHandoff, action: ExportBlocks) -> None:
        """Export what was promised. Only the importer's release, or its end, ends it."""
        granted, order = outgoing.granted, outgoing.session.order
        if granted is None:
            raise AssertionError("blocks are exported only after a grant")
        size = self._context.view_to(granted.peer).view.layout.block_size
        exported = order.blocks.slice_tokens(action.start, order.num_tokens, size)
        blocks = exported.blocks
        self._exporter.export(order.ticket.id, order.deadline)
        order.trace.transport = order.trace.expected_transport = REFERENCE
        self._context.emit(KVExported(order.ticket.id, tuple(int(block) for block in blocks)))
        self._context.peers.send(
            granted.peer, BlocksExported(order.ticket.id, exported.first, pack_blocks(blocks))
        )
        self._send_finished(outgoing, action.first_token)

    def _send_finished(self, outgoing: OutgoingHandoff, first_token: SampledToken | None) -> None:
        if outgoing.granted is None:
            return
        self._context.peers.send(outgoing.granted.peer, outgoing.make_finished(first_token))

    def _send_message(self, outgoing: OutgoingHandoff, message: PeerMessage) -> None:
        if outgoing.granted is not None:
            self._context.peers.send(outgoing.granted.peer, message)
        elif isinstance(message, Failed):
            ticket = outgoing.session.order.ticket
            self._tombstones.add(ticket.id, Tombstone(message.reason, "prefill"), by=ticket.decode)

    def _take_write(
        self, handle: TransferHandle
    ) -> tuple[PeerTransport | None, OutgoingHandoff | None]:
        found = self.writes.pop(handle, None)
        return (None, None) if found is None else (found[0], self._outgoing.get(found[1]))

    def _of(self, peer: Peer) -> list[OutgoingHandoff]:
        return [
            outgoing
            for outgoing in self._outgoing.values()
            if outgoing.was_granted_by(peer) or outgoing.was_refused_to(peer)
        ]


def _deadline_of(order: SendOrder, context: AgentContext, now: Instant) -> Instant:
    """A pull waits for decode to have room: for as long as the request may, and its lease lasts."""
    if order.ticket.mode == "pull":
        return order.deadline
    return Instant(min(order.deadline, now + context.timeout_s))


def answer_renewal(
    context: AgentContext,
    peer: Peer,
    message: RenewLease,
    *,
    outgoing: Mapping[TicketId, OutgoingHandoff],
    dead: Tombstones,
    early: EarlyGrants,
) -> None:
    """Prefill's side: extend the leases that are held here, and report those that are gone.

    A ticket that is neither may be one whose prompt has not come yet: if it was granted, its
    lease has yet to begin, so a renewal counts for that one, too.
    """
    now = context.clock.now()
    held: list[TicketId] = []
    for ticket in message.tickets:
        known = outgoing.get(ticket)
        if known is not None:
            decode = known.session.order.ticket.decode
            is_its_own = incarnation_of(decode) == incarnation_of_peer(peer)
            if is_its_own and known.session.renew(now):
                held.append(ticket)
            continue
        if peer.hello is not None and early.find(ticket, peer.hello) is not None:
            held.append(ticket)
            continue
        tombstone = dead.take(ticket, peer.hello)
        if tombstone is not None:
            context.peers.send(peer, Failed(ticket, tombstone.reason))
    context.peers.send(peer, LeaseRenewed(message.at, tuple(held)))
