"""What the handoff agent's thread owns: links, transports and sessions, and the loop over them.

The thread sleeps in one `select` over all of them, and looks for a moment before that while answers
come quickly (`baton.transfer.adaptive_wait`).
"""

from __future__ import annotations

import logging
import queue
import selectors
from typing import TYPE_CHECKING, Final, TypeVarTuple, assert_never

from baton.auth.ticket import WorkerRef
from baton.errors import BatonError, PeerLostError, TransferError
from baton.handoff.decode_receiver import DecodeReceiver
from baton.handoff.heartbeat import EngineHeartbeat, HeartbeatPublisher
from baton.handoff.interface import ReceiveOrder, SendOrder
from baton.handoff.kv_views import AgentContext, KVView, RegisteredView
from baton.handoff.link_encodings import LinkEncodings
from baton.handoff.messages import (
    MAX_TRAIT_CHARS,
    PROTOCOL_VERSION,
    Failed,
    Hello,
    ImporterMessage,
    KVViewDescriptor,
    ProberMessage,
    ProbeTargetMessage,
    ReceiverMessage,
    SenderMessage,
)
from baton.handoff.peer_transports import PeerTransportLost, PeerTransportTable, PeerTransportUp
from baton.handoff.peers import MessageReceived, Peer, PeerEvent, PeerGone, PeerTable, PeerUp
from baton.handoff.prefill_sender import PrefillSender
from baton.handoff.probing import LinkProber, ProbeTarget
from baton.handoff.reference.exports import SharedBlockExporter
from baton.handoff.reference.imports import ImportTable, SharedBlockImporter
from baton.handoff.segment_reports import SegmentReporter
from baton.ids import TicketId
from baton.telemetry.log_limit import WARNINGS
from baton.transfer.adaptive_wait import AdaptiveWaiter
from baton.transfer.interface import (
    Arrived,
    GrantQuiescent,
    ReadCompleted,
    ReadFailed,
    RemoteAttached,
    RemoteLost,
    WriteCompleted,
    WriteFailed,
)
from baton.transfer.links.probes import ProbeBuffer

if TYPE_CHECKING:
    from collections.abc import Callable

    from baton.clock import Instant
    from baton.handoff.interface import HandoffEvent
    from baton.handoff.options import AgentOptions
    from baton.handoff.peer_transports import LinkReport
    from baton.transfer.interface import RemoteId, TransferEvent, Transport
    from baton.transfer.links.choice import LinkObserver

logger = logging.getLogger(__name__)

Ts = TypeVarTuple("Ts")

TICK_S: Final = 0.05
MIN_COPY_PAUSE_S: Final = 0.00005
MAX_COPY_PAUSE_S: Final = 0.0005
"""Between two looks at what a GPU does: it wakes no thread at the end of a copy, or of a layer."""


class AgentLoop:
    """Owner: the agent's thread; `call` and `note` alone are for every thread."""

    num_failed_steps = 0
    """Since the last `_tick` that came to its end."""

    def __init__(
        self,
        options: AgentOptions,
        *,
        heartbeat: EngineHeartbeat,
        observer: LinkObserver,
        emit: Callable[[HandoffEvent], None],
    ) -> None:
        """Listen, and expose each KV view on every transport.

        Raises:
            ConfigError: the handoff port is taken.
            TransferError: a transport cannot expose the region of a view.
        """
        self.options = options
        self.is_stopping = False
        self.reraises = False
        """Unexpected errors: a simulation looks for those that this thread survives."""
        self._commands: queue.SimpleQueue[tuple[Callable[..., object], tuple[object, ...]]] = (
            queue.SimpleQueue()
        )
        self._selector = options.io_backend.make_selector()
        self._waker = options.io_backend.make_waker()
        self._is_woken = False
        self._waiting = AdaptiveWaiter(options.clock, options.spin_s)
        self._next_tick = 0.0
        probe_buffer = _allocate_probe_buffer(options)
        self._probe_target = ProbeTarget(probe_buffer, options.transports, options.clock)
        self._peers = PeerTable(
            _make_hello(options, self._probe_target),
            credentials=options.credentials,
            clock=options.clock,
            selector=self._selector,
            liveness_timeout_s=options.liveness_timeout_s,
            io_backend=options.io_backend,
        )
        self.address = self._peers.listen(options.host, options.port)
        self._peer_transports = PeerTransportTable(
            options.transports,
            clock=options.clock,
            rule=options.links.rule,
            preferred_op=options.preferred_op,
            probed_transports=self._probe_target.exposed,
            observer=observer,
        )
        context = AgentContext(
            me=WorkerRef(options.worker, options.epoch, self.address),
            credentials=options.credentials,
            clock=options.clock,
            views=tuple(RegisteredView.open(view) for view in options.views),
            preferred_op=options.preferred_op,
            peers=self._peers,
            peer_transports=self._peer_transports,
            transports=options.transports,
            timeout_s=options.timeout_s,
            lease_s=options.lease_s,
            verification=options.verification,
            emit=emit,
            write_lease=options.write_lease,
        )
        self._probe_target.connect(self._peers)
        self._prober = LinkProber(
            self._peer_transports, self._peers, self._probe_target, options.links.bounds
        )
        self._views, self._segments = (
            context.views,
            SegmentReporter(options.transports, self._peers, observer),
        )
        self._polls_copies = any(view.is_gathered for view in context.views)
        self._looks_often, self._copy_pause_s = False, MIN_COPY_PAUSE_S
        self.importer, self.exporter = (
            SharedBlockImporter(context, ImportTable()),
            SharedBlockExporter(context),
        )
        self._encodings = LinkEncodings(context)
        self.receiving = DecodeReceiver(context, self.importer, self._encodings)
        self.sending = PrefillSender(context, self.exporter, self._encodings)
        self._heartbeat_publisher = HeartbeatPublisher(context, heartbeat)
        self._selector.register(self._waker, selectors.EVENT_READ, self._waker)
        for transport in options.transports:
            if transport.readiness_fd is not None:
                self._selector.register(transport.readiness_fd, selectors.EVENT_READ, transport)

    def describe_links(self) -> list[LinkReport]:
        """See `PeerTransportTable.describe`; on this thread."""
        return self._peer_transports.describe(self._encodings.find_kv_byte_s)

    def call(self, command: Callable[[*Ts], object], *arguments: *Ts) -> None:
        """Have the thread do something now: queues it, and wakes the thread. Thread-safe.

        A thread that was woken, and has not run its commands yet, is not woken again; nor is one
        that looks at copies all the time.
        """
        self._commands.put((command, arguments))
        if not (self._is_woken or self._looks_often):
            self._is_woken = True
            self._waker.wake()

    def note(self, command: Callable[[*Ts], object], *arguments: *Ts) -> None:
        """Have the thread do something before whatever it does next, in `TICK_S`. Thread-safe."""
        self._commands.put((command, arguments))

    def step(self) -> None:
        """Sleep until something is to be done, `TICK_S` at most, and do it."""
        if self._polls_copies:
            ready = self._wait()
        else:
            ready = self._waiting.wait(self._selector.select, TICK_S)
        sources: list[object] = []
        for key, _ in ready:
            sources.append(key.data)
            if key.data is self._waker:
                self._waker.clear()
        self._run_commands()
        for key, mask in ready:
            if isinstance(key.data, Peer | PeerTable):
                self._dispatch_all(self._peers.serve(key.data, mask))
        if self._peers.unflushed:
            self._peers.flush()
        now = self.options.clock.now()
        self._poll_transports(sources, also_idle=now >= self._next_tick)
        if now >= self._next_tick:
            self._tick(now)
        if self._polls_copies:
            if self.sending.is_copying or self.receiving.is_copying:
                self._poll_copies()
            self._serve_staging()
        if self._prober.active is not None or self._prober.waiting:
            self._probe()
        if self._peers.unflushed:
            self._peers.flush()

    def _wait(self) -> list[tuple[selectors.SelectorKey, int]]:
        """What is ready; while pages are copied, what is ready after a short pause."""
        if not (self.sending.is_copying or self.receiving.is_copying):
            # First this, then the look at the queue: who queues does it the other way round.
            self._looks_often = False
            if not self._commands.empty():
                return self._selector.select(0)
            return self._waiting.wait(self._selector.select, TICK_S)
        if not self._looks_often:
            self._looks_often, self._copy_pause_s = True, MIN_COPY_PAUSE_S
        ready = self._selector.select(0)
        if ready or not self._commands.empty():
            return ready
        self.options.io_backend.sleep(self._copy_pause_s)
        self._copy_pause_s = min(2 * self._copy_pause_s, MAX_COPY_PAUSE_S)
        return self._selector.select(0)

    def _poll_copies(self) -> None:
        has_sent, has_received = self.sending.poll_copies(), self.receiving.poll_copies()
        if has_sent or has_received:  # the pause finds the copies' own pace
            self._copy_pause_s = max(MIN_COPY_PAUSE_S, self._copy_pause_s / 2)

    def _poll_transports(self, ready: list[object], *, also_idle: bool) -> None:
        """Handle the events of those that are ready, or may have some of what was just posted."""
        also_idle = also_idle or bool(self.sending.writes or self.receiving.pending_reads)
        for transport in self.options.transports:
            if also_idle or transport.readiness_fd is None or transport in ready:
                for event in transport.poll():
                    self._guard_transfer_event(transport, event)

    def _probe(self) -> None:
        """Handoffs first: probes are made while none waits, or between their transfers."""
        receiving, sending = self.receiving, self.sending
        found = self._prober.step(
            num_handoffs=receiving.num_sessions + sending.num_sessions,
            is_moving=bool(receiving.pending_reads or sending.writes),
        )
        if found is not None:
            self._transport_up(found)

    def _run_commands(self) -> None:
        """Carry out what was queued before this call, and no more, so that sockets get a turn."""
        self._is_woken = False  # first: what is queued from now on wakes the thread again
        for _ in range(self._commands.qsize()):
            command, arguments = self._commands.get_nowait()
            try:
                command(*arguments)
            except Exception as exc:
                if self.reraises and not isinstance(exc, BatonError):
                    raise
                self._command_failed(arguments, exc)

    def _command_failed(self, arguments: tuple[object, ...], error: Exception) -> None:
        """End the handoffs that a command of the engine was about: how far it came is unknown."""
        if isinstance(error, BatonError):
            logger.warning("handoff: %s", error)
        else:
            log_unexpected("handoff: a command of the engine could not be carried out")
        reason = f"the handoff agent could not carry out a command: {error}"
        match arguments:
            case (ReceiveOrder() as order, *_):
                self.receiving.start_failed(order, reason)
            case (SendOrder() as order, *_):
                self.sending.start_failed(order, reason)
            case (bytes() as ticket, *_):
                self.abort_from_peer(TicketId(ticket), reason)
            case (tuple() as several, *_):  # of `PrefillSender.layers_ready`
                for each in several:
                    if isinstance(each, tuple):
                        self.sending.abort(each[0], reason)
            case _:
                pass

    def _tick(self, now: Instant) -> None:
        self._next_tick = now + TICK_S
        self._dispatch_all(self._peers.tick())
        for lost in self._peer_transports.tick():
            self._transport_down(lost)
        self._probe_target.tick()
        pending = self._heartbeat_publisher.tick()
        if pending is not None:
            self.sending.engine_progressed(pending)
        self.receiving.tick()
        self.sending.tick()
        self.importer.tick()
        self.exporter.tick()
        self._encodings.tick()
        self._segments.tick(now)
        self.num_failed_steps = 0

    def _serve_staging(self) -> None:
        """Let those begin whose turn it is; one that ends at once may serve the next."""
        while served := [holder for view in self._views for holder in view.take_granted()]:
            for holder in served:
                match holder.side:
                    case "receive":
                        self.receiving.staged(holder.ticket)
                    case "send":
                        self.sending.staged(holder.ticket)
                    case _:
                        assert_never(holder.side)

    def _dispatch_all(self, events: list[PeerEvent]) -> None:
        for event in events:
            try:
                self._dispatch(event)
            except Exception:
                if self.reraises:
                    raise
                # What its peer's handoffs have missed is unknown: they end, others go on.
                log_unexpected("handoff: an event of %s could not be handled", event.peer.name)
                self._peers.end(event.peer, PeerLostError("an event of it could not be handled"))

    def _dispatch(self, event: PeerEvent) -> None:
        match event:
            case PeerUp(peer):
                for lost in self._peer_transports.attach_preferred(peer):
                    self._transport_down(lost)
                self.importer.peer_up(peer)
                self.receiving.peer_up(peer)
            case PeerGone(peer, error):
                self._segments.remember(peer)
                self._prober.forget(peer)
                self._probe_target.forget(peer)
                self._peer_transports.forget(peer)
                self._encodings.forget(peer)
                self.receiving.peer_gone(peer, error)
                self.sending.peer_gone(peer, error)
                self.importer.peer_gone(peer)
                self.exporter.peer_gone(peer)
            case MessageReceived():
                self._dispatch_message(event)
            case _:
                assert_never(event)

    def _dispatch_message(self, event: MessageReceived) -> None:
        peer, message = event.peer, event.message
        try:
            match message:
                case ReceiverMessage():
                    self.receiving.handle_message(peer, message)
                case SenderMessage():
                    self.sending.handle_message(peer, message)
                case Failed() if peer.dialed is None:  # it receives from this worker
                    self.sending.handle_message(peer, message)
                case Failed():
                    self.receiving.handle_message(peer, message)
                case ImporterMessage():
                    self.importer.handle_message(peer, message)
                case ProberMessage():
                    self._prober.handle_message(message)
                case ProbeTargetMessage():
                    self._probe_target.handle_message(peer, message)
                case _:
                    assert_never(message)
        except BatonError as exc:
            logger.warning("handoff: refused a message of %s: %s", peer.name, exc)

    def _guard_transfer_event(self, transport: Transport, event: TransferEvent) -> None:
        try:
            self._dispatch_transfer_event(transport, event)
        except Exception:
            if self.reraises:
                raise
            log_unexpected("handoff: %r could not be handled", event)

    def _dispatch_transfer_event(self, transport: Transport, event: TransferEvent) -> None:
        prober, target = self._prober, self._probe_target
        if prober.active is not None and prober.handle_transfer_event(transport, event):
            return
        if target.held is not None and target.handle_transfer_event(transport, event):
            return
        match event:
            case Arrived() | ReadCompleted() | ReadFailed() | GrantQuiescent():
                self.receiving.handle_transfer_event(transport, event)
            case WriteCompleted(transfer):
                self.sending.write_completed(transport, transfer)
            case WriteFailed(transfer, error):
                self.sending.write_failed(transport, transfer, error)
            case RemoteAttached(remote):
                self._remote_attached(transport, remote)
            case RemoteLost(remote, error):
                self._remote_lost(transport, remote, error)
            case _:
                assert_never(event)

    def _remote_attached(self, transport: Transport, remote: RemoteId) -> None:
        exporter = self.importer.attached(transport, remote)
        if exporter is not None:
            self.receiving.exporter_changed(exporter)
            return
        found = self._peer_transports.attached(transport, remote)
        if found is not None:
            self._transport_up(found)

    def _remote_lost(self, transport: Transport, remote: RemoteId, error: BatonError) -> None:
        exporter = self.importer.lost(transport, remote, error)
        if exporter is not None:
            self.receiving.exporter_changed(exporter)
            return
        lost = self._peer_transports.lost(transport, remote, error)
        if lost is not None:
            self._transport_down(lost)

    def _transport_up(self, found: PeerTransportUp) -> None:
        self.receiving.transport_up(found)
        self.sending.transport_up(found)
        self._prober.ask(found.peer)

    def _transport_down(self, lost: PeerTransportLost) -> None:
        self.receiving.transport_down(lost)
        self.sending.transport_down(lost)

    def abort(self, ticket: TicketId, reason: str) -> None:
        """See `HandoffPort.abort`."""
        if not self.receiving.abort(ticket, reason):
            self.sending.abort(ticket, reason)

    def cut_writes(self, ticket: TicketId) -> None:
        """See `HandoffAgent.cut_writes`."""
        error = PeerLostError("it did not take what was written, and the pages are needed")
        for used in self.sending.transports_of(ticket):
            remote = next(iter(used.remotes.values()), None)
            if remote is not None and not used.transport.capabilities.late_writes:
                self._remote_lost(used.transport, remote, error)

    def abort_from_peer(self, ticket: TicketId, reason: str) -> None:
        """See `HandoffAgent.abort_from_peer`."""
        if not self.sending.abort(ticket, reason):
            self.receiving.abort_from_peer(ticket, reason)

    def abort_all(self, reason: str) -> None:
        """Fail every handoff: close what was granted, write nothing more, hold nothing."""
        self.receiving.stop(reason)
        self.sending.stop(reason)
        self.exporter.revoke_exported()

    def begin_stop(self) -> None:
        """Fail every handoff; `close` follows."""
        self.is_stopping = True
        self.receiving.stop("the worker is stopping")
        self.sending.stop("the worker is stopping")

    def close(self) -> None:
        """Close every socket and mapping."""
        self._peers.close()
        for transport in self.options.transports:
            transport.close()
        self.exporter.close()
        for view in self._views:
            view.close()
        self._probe_target.release()
        self._selector.close()
        self._waker.close()


def log_unexpected(text: str, *arguments: object) -> None:
    """Log the exception that is being handled, and count it in `WARNINGS`."""
    WARNINGS.labels("handoff.agent_loop", "unexpected").inc()
    logger.error(text, *arguments, exc_info=True)  # noqa: LOG014 - see above


def _make_hello(options: AgentOptions, probe_target: ProbeTarget) -> Hello:
    return Hello(
        version=PROTOCOL_VERSION,
        worker=options.worker,
        epoch=options.epoch,
        clock_domain=options.io_backend.clock_domain(),
        fingerprint=options.fingerprint,
        views=tuple(_offer(view, options.transports) for view in options.views),
        traits={name: value[:MAX_TRAIT_CHARS] for name, value in options.traits.items()},
        preferred_op=options.preferred_op,
        probe_buffers=probe_target.expose(),
        lease_s=options.lease_s,
    )


def _offer(view: KVView, transports: tuple[Transport, ...]) -> KVViewDescriptor:
    regions = tuple(transport.expose(view.region) for transport in transports)
    return KVViewDescriptor(view.layout, regions, view.digest)


def _allocate_probe_buffer(options: AgentOptions) -> ProbeBuffer | None:
    """Memory for probes, if links are to be measured; one that cannot be had costs only that.

    It is of the kind that the first view's is: transports move one kind to the same kind.
    """
    if options.links.rule == "listed":
        return None
    try:
        return ProbeBuffer.allocate(options.views[0].device_access)
    except TransferError as exc:
        logger.warning("handoff: links are not measured: %s", exc)
        return None
