"""The handoff agent of one worker: a thread that owns links, transports and sessions.

    engine's thread ── commands ──► agent's thread ── events ──► engine's thread (`poll`)
                                      │  │
                       links to peers ┘  └ transports

The thread sleeps in one `select` over all of them, and looks for a moment before that while answers
come quickly (`baton.transfer.adaptive_wait`). The engine's calls only queue a command and write one
byte to a pipe.
"""

from __future__ import annotations

import ctypes
import logging
import queue
import selectors
import threading
from collections import deque
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Final, assert_never

from baton.auth.ticket import WorkerRef
from baton.errors import BatonError, ConfigError, TransferError
from baton.handoff.decode_receiver import DecodeReceiver
from baton.handoff.heartbeat import EngineHeartbeat, HeartbeatPublisher
from baton.handoff.io_backend import OS_BACKEND
from baton.handoff.kv_views import AgentContext, RegisteredView
from baton.handoff.messages import (
    PROTOCOL_VERSION,
    Hello,
    KVViewDescriptor,
    ToImporter,
    ToProber,
    ToProbeTarget,
    ToReceiver,
    ToSender,
)
from baton.handoff.peer_transports import (
    LinkOptions,
    PeerTransportLost,
    PeerTransportTable,
    PeerTransportUp,
)
from baton.handoff.peers import MessageReceived, Peer, PeerGone, PeerTable, PeerUp
from baton.handoff.prefill_sender import PrefillSender
from baton.handoff.probing import LinkProber, ProbeTarget
from baton.handoff.reference.exports import SharedBlockExporter
from baton.handoff.reference.imports import ImportTable, SharedBlockImporter
from baton.handoff.short_prompts import ShortPromptBatcher
from baton.handoff.verify import VerificationPolicy
from baton.transfer.adaptive_wait import MAX_SPIN_S, AdaptiveWaiter
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
from baton.transfer.links.choice import NullObserver
from baton.transfer.links.probes import ProbeBuffer

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from baton.auth.key import ClusterKey
    from baton.auth.ticket import HandoffMode, Ticket
    from baton.clock import Clock, Instant
    from baton.handoff.interface import (
        HandoffEvent,
        ReceiveOrder,
        SampledToken,
        SendOrder,
    )
    from baton.handoff.io_backend import IoBackend
    from baton.handoff.kv_views import KVView
    from baton.handoff.messages import TransferOp
    from baton.handoff.peers import PeerEvent
    from baton.ids import Epoch, TicketId, WorkerId
    from baton.transfer.interface import TransferEvent, Transport
    from baton.transfer.links.choice import LinkObserver

logger = logging.getLogger(__name__)

TICK_S: Final = 0.05
STOP_TIMEOUT_S: Final = 5.0
THREAD_NAME: Final = b"baton-handoff"
_PR_SET_NAME: Final = 15


@dataclass(frozen=True, slots=True)
class AgentOptions:
    """Who this agent is and what it works with; `views` and `transports` in order of preference.

    `preferred_op` is who moves the bytes where this worker receives, if the transport can do both.
    `traits` are readable properties that explain why two workers cannot exchange KV (engine,
    version, dtype …): at most 32, names of 64 characters and values of 256. `lease_s` is how long
    a computed prompt is held for a decode worker that does not renew it. Prompts of at most
    `single_send_max_tokens` are sent when they are computed, not layer by layer.
    """

    worker: WorkerId
    epoch: Epoch
    fingerprint: str
    views: tuple[KVView, ...]
    transports: tuple[Transport, ...]
    key: ClusterKey
    clock: Clock
    host: str = "127.0.0.1"
    port: int = 0
    timeout_s: float = 60.0
    liveness_timeout_s: float = 3.0
    lease_s: float = 10.0
    single_send_max_tokens: int = 0
    preferred_op: TransferOp = "WRITE"
    traits: Mapping[str, str] = field(default_factory=dict)
    links: LinkOptions = field(default_factory=LinkOptions)
    io_backend: IoBackend = OS_BACKEND
    verification: VerificationPolicy = field(default_factory=VerificationPolicy)
    spin_s: float = MAX_SPIN_S

    @property
    def modes(self) -> tuple[HandoffMode, ...]:
        """The ways of handing over that this agent takes part in, on either side."""
        is_open = any(view.peer_mappings is not None for view in self.views)
        if is_open and any(each.capabilities.views for each in self.transports):
            return "push", "pull", "reference"
        return "push", "pull"

    def __post_init__(self) -> None:
        """Check the KV views.

        Raises:
            ConfigError: there is none, or they are not of one model.
        """
        if len({view.layout.num_layers for view in self.views}) != 1:
            raise ConfigError("a worker needs a KV view, and all its views have the same layers")


class HandoffAgent:  # noqa: PLR0904 - the engine's contract, and the process's
    """Implements `HandoffPort` (thread-safe); all else belongs to the agent's own thread.

    For orders of every mode but pool: `HandoffDispatcher` stands between it and an engine.
    """

    def __init__(self, options: AgentOptions) -> None:
        self.options = options
        self._commands: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._events: deque[HandoffEvent] = deque()
        self._wake_engine: Callable[[], None] = _nothing
        self._observer: LinkObserver = NullObserver()
        self._selector = options.io_backend.make_selector()
        self._short_prompts = ShortPromptBatcher(options.single_send_max_tokens)
        self._heartbeat = EngineHeartbeat(options.clock)
        self._waiting = AdaptiveWaiter(options.clock, options.spin_s)
        self._stopping = False
        self._thread: threading.Thread | None = None
        self._next_tick = 0.0
        self._address = ""

    @property
    def address(self) -> str:
        """Where peers reach this agent: `host:port`, known after `start`."""
        return self._address

    def start(self, wake_engine: Callable[[], None]) -> None:
        """Listen, expose each KV view on every transport, start the thread. Call once.

        Raises:
            ConfigError: the handoff port is taken.
            TransferError: a transport cannot expose the region of a view.
        """
        self.open(wake_engine)
        self._thread = threading.Thread(target=self._run, name="handoff-agent", daemon=True)
        self._thread.start()

    def open(self, wake_engine: Callable[[], None]) -> None:
        """`start` without the thread: the simulator calls `step` instead."""
        self._wake_engine = wake_engine
        options = self.options
        self._waker = options.io_backend.make_waker()
        probe_buffer = _allocate_probe_buffer(options.links)
        self._probe_target = ProbeTarget(probe_buffer, options.transports, options.clock)
        hello = Hello(
            version=PROTOCOL_VERSION,
            worker=options.worker,
            epoch=options.epoch,
            clock_domain=options.io_backend.clock_domain(),
            fingerprint=options.fingerprint,
            views=tuple(_offer(view, options.transports) for view in options.views),
            traits=dict(options.traits),
            preferred_op=options.preferred_op,
            probe_buffers=self._probe_target.expose(),
            lease_s=options.lease_s,
        )
        self._peers = PeerTable(
            hello,
            key=options.key,
            clock=options.clock,
            selector=self._selector,
            liveness_timeout_s=options.liveness_timeout_s,
            io_backend=options.io_backend,
        )
        self._address = self._peers.listen(options.host, options.port)
        self._peer_transports = PeerTransportTable(
            options.transports,
            clock=options.clock,
            rule=options.links.rule,
            preferred_op=options.preferred_op,
            observer=self._observer,
        )
        context = AgentContext(
            me=WorkerRef(options.worker, options.epoch, self._address),
            key=options.key,
            clock=options.clock,
            views=tuple(RegisteredView.open(view) for view in options.views),
            preferred_op=options.preferred_op,
            peers=self._peers,
            peer_transports=self._peer_transports,
            transports=options.transports,
            timeout_s=options.timeout_s,
            lease_s=options.lease_s,
            verification=options.verification,
            emit=self._emit,
        )
        self._probe_target.connect(self._peers)
        self._prober = LinkProber(
            self._peer_transports, self._peers, self._probe_target, options.links.bounds
        )
        self._views = context.views
        self._has_staging = any(view.is_staged for view in context.views)
        self._importer, self._exporter = (
            SharedBlockImporter(context, ImportTable()),
            SharedBlockExporter(context),
        )
        self._receiving = DecodeReceiver(context, self._importer)
        self._sending = PrefillSender(context, self._exporter)
        self._heartbeat_publisher = HeartbeatPublisher(context, self._heartbeat)
        self._selector.register(self._waker, selectors.EVENT_READ, self._waker)
        for transport in options.transports:
            if transport.readiness_fd is not None:
                self._selector.register(transport.readiness_fd, selectors.EVENT_READ, transport)

    def stop(self) -> None:
        """End every handoff, close every socket and mapping, end the thread. Idempotent."""
        if self._thread is None:
            return
        self._command(self._begin_stop)
        self._thread.join(STOP_TIMEOUT_S)
        if self._thread.is_alive():
            logger.error("the handoff agent did not stop within %s s", STOP_TIMEOUT_S)
        self._thread = None

    def observe_links(self, observer: LinkObserver) -> None:
        """Report choices, transfers and failures to an observer. Call before `start`."""
        self._observer = observer

    @property
    def num_lapsed_leases(self) -> int:
        """Prompts that were held here until their lease ran out."""
        return 0 if self._thread is None else self._sending.num_lapsed_leases

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread is not None and self._thread.is_alive()

    def renew_lease(self, ticket: Ticket) -> None:
        """See `HandoffPort`."""
        self._command(partial(self._receiving.renew_lease, ticket))

    def start_receive(self, order: ReceiveOrder) -> None:
        """See `HandoffPort`."""
        self._command(partial(self._receiving.start_receive, order))

    def start_send(self, order: SendOrder) -> None:
        """See `HandoffPort`."""
        self._short_prompts.add(order)
        self._command(partial(self._sending.start_send, order))

    def report_progress(self, prompts: Sequence[Ticket]) -> None:
        """See `HandoffPort`."""
        self._heartbeat.report_progress(prompts)

    def layer_ready(self, tickets: Sequence[tuple[TicketId, int]], layer: int) -> None:
        """See `HandoffPort`."""
        self._heartbeat.tick()
        layerwise = self._short_prompts.exclude(tickets)
        if layerwise:
            self._command(partial(self._sending.layer_ready, layerwise, layer))

    def prefill_done(self, ticket: TicketId, first_token: SampledToken | None) -> None:
        """See `HandoffPort`."""
        stop = self._short_prompts.take(ticket)
        if stop is not None:
            self._command(partial(self._sending.all_layers_ready, ticket, stop))
        self._command(partial(self._sending.prefill_done, ticket, first_token))

    def decline(self, ticket: Ticket, reason: str) -> None:
        """See `HandoffPort`."""
        self._command(partial(self._receiving.decline, ticket, reason))

    def abort(self, ticket: TicketId, reason: str) -> None:
        """See `HandoffPort`."""
        self._command(partial(self._abort, ticket, reason))

    def cancel_oldest_ungranted(self, tickets: Sequence[TicketId], reason: str) -> None:
        """See `HandoffPort`."""
        self._command(partial(self._sending.cancel_oldest_ungranted, tuple(tickets), reason))

    def abort_from_peer(self, ticket: TicketId, reason: str) -> None:
        """The gateway reports that this ticket's other half failed: recompute (or stop) now."""
        self._command(partial(self._abort_from_peer, ticket, reason))

    def release_imported(self, ticket: TicketId) -> None:
        """See `SharedBlockPort`."""
        self._command(partial(self._importer.release_imported, ticket))

    def revoke_exported(self) -> None:
        """See `SharedBlockPort`."""
        self._command(self._exporter.revoke_exported)

    def poll(self) -> list[HandoffEvent]:
        """See `HandoffPort`."""
        events: list[HandoffEvent] = []
        while self._events:
            event = self._events.popleft()
            self._short_prompts.take(event.ticket)  # of a prompt that failed before it was computed
            events.append(event)
        return events

    def _command(self, command: Callable[[], object]) -> None:
        self._commands.put(command)
        self._waker.wake()

    def _emit(self, event: HandoffEvent) -> None:
        self._events.append(event)
        self._wake_engine()

    def _run(self) -> None:
        _name_this_thread(THREAD_NAME)
        while not self._stopping:
            try:
                self.step()
            except Exception:
                # One broken handoff must not end all others.
                logger.exception("the handoff agent met an unexpected error")
        self._close()

    def step(self) -> None:
        """Sleep until something is to be done, `TICK_S` at most, and do it. The owner's thread."""
        ready = self._waiting.wait(self._selector.select, TICK_S)
        for key, mask in ready:
            if key.data is self._waker:
                self._waker.clear()
            elif isinstance(key.data, Peer | PeerTable):
                self._dispatch_all(self._peers.serve(key.data, mask))
        self._run_commands()
        for transport in self.options.transports:
            for event in transport.poll():
                self._dispatch_transfer_event(transport, event)
        now = self.options.clock.now()
        if now >= self._next_tick:
            self._tick(now)
        if self._has_staging:
            self._serve_staging()
        if self._prober.has_work:
            self._probe()

    def _probe(self) -> None:
        """Handoffs first: probes are made while none waits, or between their transfers."""
        receiving, sending = self._receiving, self._sending
        found = self._prober.step(
            num_handoffs=receiving.num_sessions + sending.num_sessions,
            is_moving=receiving.is_moving or sending.is_moving,
        )
        if found is not None:
            self._transport_up(found)

    def _run_commands(self) -> None:
        """Carry out what was queued before this call, and no more, so that sockets get a turn."""
        for _ in range(self._commands.qsize()):
            try:
                self._commands.get_nowait()()
            except BatonError as exc:
                logger.warning("handoff: %s", exc)

    def _tick(self, now: Instant) -> None:
        self._next_tick = now + TICK_S
        self._dispatch_all(self._peers.tick())
        for lost in self._peer_transports.tick():
            self._transport_down(lost)
        self._probe_target.tick()
        pending = self._heartbeat_publisher.tick()
        if pending is not None:
            self._sending.engine_progressed(pending)
        self._receiving.tick()
        self._sending.tick()
        self._importer.tick()
        self._exporter.tick()

    def _serve_staging(self) -> None:
        """Let those begin whose turn it is; one that ends at once may serve the next."""
        while served := [holder for view in self._views for holder in view.take_granted()]:
            for holder in served:
                match holder.side:
                    case "receive":
                        self._receiving.staged(holder.ticket)
                    case "send":
                        self._sending.staged(holder.ticket)
                    case _:
                        assert_never(holder.side)

    def _dispatch_all(self, events: list[PeerEvent]) -> None:
        for event in events:
            match event:
                case PeerUp(peer):
                    for lost in self._peer_transports.attach_preferred(peer):
                        self._transport_down(lost)
                    self._importer.peer_up(peer)
                    self._receiving.peer_up(peer)
                case PeerGone(peer, error):
                    self._prober.forget(peer)
                    self._probe_target.forget(peer)
                    self._peer_transports.forget(peer)
                    self._receiving.peer_gone(peer, error)
                    self._sending.peer_gone(peer, error)
                    self._importer.peer_gone(peer)
                    self._exporter.peer_gone(peer)
                case MessageReceived():
                    self._dispatch_message(event)
                case _:
                    assert_never(event)

    def _dispatch_message(self, event: MessageReceived) -> None:
        peer, message = event.peer, event.message
        try:
            if isinstance(message, ToReceiver):
                self._receiving.handle_message(peer, message)
            if isinstance(message, ToSender):
                self._sending.handle_message(peer, message)
            if isinstance(message, ToImporter):
                self._importer.handle_message(peer, message)
            if isinstance(message, ToProbeTarget):
                self._probe_target.handle_message(peer, message)
            if isinstance(message, ToProber):
                self._prober.handle_message(message)
        except BatonError as exc:
            logger.warning("handoff: refused a message of %s: %s", peer.name, exc)

    def _dispatch_transfer_event(self, transport: Transport, event: TransferEvent) -> None:
        if self._prober.handle_transfer_event(
            transport, event
        ) or self._probe_target.handle_transfer_event(transport, event):
            return
        match event:
            case Arrived() | ReadCompleted() | ReadFailed() | GrantQuiescent():
                self._receiving.handle_transfer_event(transport, event)
            case WriteCompleted(transfer):
                self._sending.write_completed(transport, transfer)
            case WriteFailed(transfer, error):
                self._sending.write_failed(transport, transfer, error)
            case RemoteAttached() | RemoteLost():
                self._transport_changed(transport, event)
            case _:
                assert_never(event)

    def _transport_changed(self, transport: Transport, event: RemoteAttached | RemoteLost) -> None:
        if isinstance(event, RemoteAttached):
            exporter = self._importer.attached(transport, event.remote)
            if exporter is not None:
                self._receiving.exporter_changed(exporter)
                return
            found = self._peer_transports.attached(transport, event.remote)
            if found is not None:
                self._transport_up(found)
            return
        exporter = self._importer.lost(transport, event.remote, event.error)
        if exporter is not None:
            self._receiving.exporter_changed(exporter)
            return
        lost = self._peer_transports.lost(transport, event.remote, event.error)
        if lost is not None:
            self._transport_down(lost)

    def _transport_up(self, found: PeerTransportUp) -> None:
        self._receiving.transport_up(found)
        self._sending.transport_up(found)
        self._prober.ask(found.peer)

    def _transport_down(self, lost: PeerTransportLost) -> None:
        self._receiving.transport_down(lost)
        self._sending.transport_down(lost)

    def _abort(self, ticket: TicketId, reason: str) -> None:
        if not self._receiving.abort(ticket, reason):
            self._sending.abort(ticket, reason)

    def _abort_from_peer(self, ticket: TicketId, reason: str) -> None:
        if not self._sending.abort(ticket, reason):
            self._receiving.abort_from_peer(ticket, reason)

    def _begin_stop(self) -> None:
        self._receiving.stop("the worker is stopping")
        self._sending.stop("the worker is stopping")
        self._stopping = True

    def _close(self) -> None:
        self._peers.close()
        for transport in self.options.transports:
            transport.close()
        self._exporter.close()
        for view in self._views:
            view.close()
        self._probe_target.release()
        self._selector.close()
        self._waker.close()


def _offer(view: KVView, transports: tuple[Transport, ...]) -> KVViewDescriptor:
    return KVViewDescriptor(view.layout, tuple(t.expose(view.region) for t in transports))


def _allocate_probe_buffer(links: LinkOptions) -> ProbeBuffer | None:
    """Memory for probes, if links are to be measured; one that cannot be had costs only that."""
    if links.rule == "listed":
        return None
    try:
        return ProbeBuffer.allocate()
    except TransferError as exc:
        logger.warning("handoff: links are not measured: %s", exc)
        return None


def _name_this_thread(name: bytes) -> None:
    """For `top -H` and /proc: Python names threads for itself alone. At most 15 bytes."""
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name, 0, 0, 0)


def _nothing() -> None:
    """Before `start`, no thread waits for events."""
