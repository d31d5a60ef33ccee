"""The handoff agent of one worker: a thread that owns links, transports and sessions.

    engine's thread ── commands ──► agent's thread ── events ──► engine's thread (`poll`)
                                      │  │
                       links to peers ┘  └ transports

The thread sleeps in one `select` over all of them, and looks for a moment before that while answers
come quickly (`baton.transfer.waiting`). The engine's calls only queue a command and write one byte
to a pipe.
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

from baton.authority.ticket import WorkerRef
from baton.errors import BatonError, ConfigError, TransferError
from baton.handoff.borrowing import BorrowingDesk
from baton.handoff.desk import Desk
from baton.handoff.footprint import ServedFace
from baton.handoff.landing import Landing
from baton.handoff.lending import LendingDesk
from baton.handoff.link_options import LinkOptions
from baton.handoff.messages import (
    PROTOCOL_VERSION,
    Available,
    Avoid,
    Declined,
    FaceOffer,
    Failed,
    Finished,
    Grant,
    Hello,
    Lent,
    Missing,
    ProbeAsked,
    Probed,
    ProbeOver,
    ProbeReady,
    Recalled,
    Renew,
    Renewed,
    Rerouted,
    Returned,
    Reversed,
    Settled,
    Taken,
    Underway,
    Unlent,
)
from baton.handoff.one_piece import OnePiece
from baton.handoff.peers import Heard, Peer, PeerGone, PeerTable, PeerUp
from baton.handoff.pooling.absent import NoPool
from baton.handoff.pooling.desk import PoolDesk
from baton.handoff.pulse import EnginePulse
from baton.handoff.receiving import ReceivingDesk
from baton.handoff.routes import RouteFound, RouteLost, RouteTable
from baton.handoff.sending import SendingDesk
from baton.handoff.session.borrow import BorrowBook
from baton.handoff.surroundings import MACHINE
from baton.handoff.survey import Surveyor
from baton.handoff.verification import VerificationPolicy
from baton.handoff.vouching import Vouching
from baton.transfer.interface import (
    Arrived,
    Attached,
    ReadCompleted,
    ReadFailed,
    RemoteLost,
    WindowQuiescent,
    WriteCompleted,
    WriteFailed,
)
from baton.transfer.links.outcome import SilentObserver
from baton.transfer.links.scratch import Scratch
from baton.transfer.waiting import LONGEST_AWAKE_S, Waiting

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from baton.authority.key import ClusterKey
    from baton.authority.ticket import HandoffMode, Ticket
    from baton.clock import Clock, Instant
    from baton.handoff.faces import Face
    from baton.handoff.interface import (
        HandoffEvent,
        ReceiveOrder,
        SampledToken,
        SendOrder,
    )
    from baton.handoff.messages import Mover
    from baton.handoff.peers import PeerEvent
    from baton.handoff.pooling.pool import Pool
    from baton.handoff.surroundings import Surroundings
    from baton.ids import Epoch, TicketId, WorkerId
    from baton.transfer.interface import TransferEvent, Transport
    from baton.transfer.links.outcome import LinkObserver

logger = logging.getLogger(__name__)

TICK_S: Final = 0.05
STOP_TIMEOUT_S: Final = 5.0
THREAD_NAME: Final = b"baton-handoff"
_PR_SET_NAME: Final = 15

_TO_RECEIVERS: Final = Available | Rerouted | Lent | Unlent | Finished | Failed
_TO_SENDERS: Final = Grant | Declined | Taken | Missing | Avoid | Reversed | Failed | Renew


@dataclass(frozen=True, slots=True)
class AgentOptions:
    """Who this agent is and what it works with; `faces` and `transports` in order of preference.

    `mover` is who moves the bytes where this worker receives, if the transport can do both.
    `traits` are readable properties that explain why two workers cannot exchange KV (engine,
    version, dtype …): at most 32, names of 64 characters and values of 256. `lease_s` is how long
    a computed prompt is held for a decode worker that does not renew it. Prompts of at most
    `one_piece_tokens` are sent when they are computed, not layer by layer. Without a `pool`
    handoffs through a store fail here.
    """

    worker: WorkerId
    epoch: Epoch
    fingerprint: str
    faces: tuple[Face, ...]
    transports: tuple[Transport, ...]
    key: ClusterKey
    clock: Clock
    host: str = "127.0.0.1"
    port: int = 0
    timeout_s: float = 60.0
    liveness_timeout_s: float = 3.0
    lease_s: float = 10.0
    one_piece_tokens: int = 0
    mover: Mover = "prefill"
    traits: Mapping[str, str] = field(default_factory=dict)
    links: LinkOptions = field(default_factory=LinkOptions)
    surroundings: Surroundings = MACHINE
    verification: VerificationPolicy = field(default_factory=VerificationPolicy)
    pool: Pool | None = None
    awake_s: float = LONGEST_AWAKE_S

    @property
    def modes(self) -> tuple[HandoffMode, ...]:
        """The ways of handing over that this worker takes part in, on either side."""
        modes: list[HandoffMode] = ["push", "pull"]
        if self.pool is not None:
            modes.append("pool")
        is_open = any(face.annexes is not None for face in self.faces)
        if is_open and any(each.capabilities.lends for each in self.transports):
            modes.append("reference")
        return tuple(modes)

    def __post_init__(self) -> None:
        """Refuse faces that no engine has.

        Raises:
            ConfigError: there is none, or they are not of one model.
        """
        if len({face.layout.num_layers for face in self.faces}) != 1:
            raise ConfigError("the faces of a worker show the same layers, and there is one face")


class HandoffAgent:  # noqa: PLR0904 - the engine's contract, and the process's
    """Implements `HandoffPort` (thread-safe); all else belongs to the agent's own thread."""

    def __init__(self, options: AgentOptions) -> None:
        self.options = options
        self._commands: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._events: deque[HandoffEvent] = deque()
        self._wake_engine: Callable[[], None] = _nothing
        self._observer: LinkObserver = SilentObserver()
        self._selector = options.surroundings.make_selector()
        self._one_piece = OnePiece(options.one_piece_tokens)
        self._pulse = EnginePulse(options.clock)
        self._pool = _make_pool(options, self._pulse)
        self._waiting = Waiting(options.clock, options.awake_s)
        self._stopping = False
        self._thread: threading.Thread | None = None
        self._next_tick = 0.0
        self._address = ""

    @property
    def address(self) -> str:
        """Where peers reach this agent: `host:port`, known after `start`."""
        return self._address

    def start(self, wake_engine: Callable[[], None]) -> None:
        """Listen, expose each face on every transport, start the thread. Once.

        Raises:
            ConfigError: the handoff port is taken.
            TransferError: a transport cannot expose the region of a face.
        """
        self.open(wake_engine)
        self._pool.start()
        self._thread = threading.Thread(target=self._run, name="handoff-agent", daemon=True)
        self._thread.start()

    def open(self, wake_engine: Callable[[], None]) -> None:
        """`start` without the thread: the simulator calls `step` instead."""
        self._wake_engine = wake_engine
        options = self.options
        self._bell = options.surroundings.make_bell()
        self._pool.open(self._emit)
        scratch = _allocate_scratch(options.links)
        self._landing = Landing(scratch, options.transports, options.clock)
        hello = Hello(
            version=PROTOCOL_VERSION,
            worker=options.worker,
            epoch=options.epoch,
            clock_domain=options.surroundings.clock_domain(),
            fingerprint=options.fingerprint,
            faces=tuple(_offer(face, options.transports) for face in options.faces),
            traits=dict(options.traits),
            mover=options.mover,
            scratch=self._landing.expose(),
            lease_s=options.lease_s,
        )
        self._peers = PeerTable(
            hello,
            key=options.key,
            clock=options.clock,
            selector=self._selector,
            liveness_timeout_s=options.liveness_timeout_s,
            surroundings=options.surroundings,
        )
        self._address = self._peers.listen(options.host, options.port)
        self._routes = RouteTable(
            options.transports,
            clock=options.clock,
            rule=options.links.rule,
            mover=options.mover,
            observer=self._observer,
        )
        desk = Desk(
            me=WorkerRef(options.worker, options.epoch, self._address),
            key=options.key,
            clock=options.clock,
            faces=tuple(ServedFace.open(face) for face in options.faces),
            mover=options.mover,
            peers=self._peers,
            routes=self._routes,
            transports=options.transports,
            timeout_s=options.timeout_s,
            lease_s=options.lease_s,
            verification=options.verification,
            emit=self._emit,
        )
        self._landing.answer_by(self._peers)
        self._surveyor = Surveyor(self._routes, self._peers, self._landing, options.links.bounds)
        self._faces = desk.faces
        self._borrowing, self._lending = BorrowingDesk(desk, BorrowBook()), LendingDesk(desk)
        self._receiving = ReceivingDesk(desk, self._borrowing)
        self._sending = SendingDesk(desk, self._lending)
        self._vouching = Vouching(desk, self._pulse)
        self._selector.register(self._bell, selectors.EVENT_READ, self._bell)
        for transport in options.transports:
            if transport.readiness_fd is not None:
                self._selector.register(transport.readiness_fd, selectors.EVENT_READ, transport)

    def stop(self) -> None:
        """End every handoff, close every socket and mapping, end the thread. Idempotent."""
        if self._thread is None:
            return
        self._pool.stop()
        self._command(self._begin_stop)
        self._thread.join(STOP_TIMEOUT_S)
        if self._thread.is_alive():
            logger.error("the handoff agent did not stop within %s s", STOP_TIMEOUT_S)
        self._thread = None

    def observe_links(self, observer: LinkObserver) -> None:
        """Tell an observer of choices, transfers and failures. Before `start`."""
        self._observer = observer

    @property
    def num_lapsed_leases(self) -> int:
        """Prompts that were held here until their lease ran out."""
        return 0 if self._thread is None else self._sending.num_lapsed_leases

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread is not None and self._thread.is_alive()

    def keep(self, ticket: Ticket) -> None:
        """See `HandoffPort`."""
        if ticket.mode != "pool":  # nobody holds anything: it is in the store
            self._command(partial(self._receiving.keep, ticket))

    def expect(self, order: ReceiveOrder) -> None:
        """See `HandoffPort`."""
        if order.ticket.mode == "pool":
            self._pool.expect(order)
        else:
            self._command(partial(self._receiving.expect, order))

    def offer(self, order: SendOrder) -> None:
        """See `HandoffPort`."""
        if order.ticket.mode == "pool":
            self._pool.offer(order)
            return
        self._one_piece.add(order)
        self._command(partial(self._sending.offer, order))

    def computing(self, prompts: Sequence[Ticket]) -> None:
        """See `HandoffPort`."""
        self._pulse.computing(prompts)
        self._pool.computing(prompts)

    def layer_ready(self, tickets: Sequence[tuple[TicketId, int]], layer: int) -> None:
        """See `HandoffPort`."""
        self._pulse.beat()
        self._pool.layer_ready(tuple(tickets), layer)
        told = self._one_piece.leave_out(tickets)
        if told:
            self._command(partial(self._sending.layer_ready, told, layer))

    def finish(self, ticket: TicketId, first_token: SampledToken | None) -> None:
        """See `HandoffPort`."""
        self._pool.finish(ticket, first_token)
        stop = self._one_piece.take(ticket)
        if stop is not None:
            self._command(partial(self._sending.all_ready, ticket, stop))
        self._command(partial(self._sending.finish, ticket, first_token))

    def decline(self, ticket: Ticket, reason: str) -> None:
        """See `HandoffPort`."""
        if ticket.mode != "pool":  # there the prefill worker's work is of use to others, too
            self._command(partial(self._receiving.decline, ticket, reason))

    def abort(self, ticket: TicketId, reason: str) -> None:
        """See `HandoffPort`."""
        self._pool.abort(ticket, reason)
        self._command(partial(self._abort, ticket, reason))

    def withdraw_oldest(self, tickets: Sequence[TicketId], reason: str) -> None:
        """See `HandoffPort`."""
        self._command(partial(self._sending.withdraw_oldest, tuple(tickets), reason))

    def give_up(self, ticket: TicketId, reason: str) -> None:
        """The gateway says that this ticket's other half failed: recompute (or stop) now."""
        self._pool.give_up(ticket, reason)
        self._command(partial(self._give_up, ticket, reason))

    def give_back(self, ticket: TicketId) -> None:
        """See `LoanPort`."""
        self._command(partial(self._borrowing.give_back, ticket))

    def recall(self) -> None:
        """See `LoanPort`."""
        self._command(self._lending.recall)

    def poll(self) -> list[HandoffEvent]:
        """See `HandoffPort`."""
        events: list[HandoffEvent] = []
        while self._events:
            event = self._events.popleft()
            self._one_piece.take(event.ticket)  # of a prompt that failed before it was computed
            events.append(event)
        return events

    def _command(self, command: Callable[[], object]) -> None:
        self._commands.put(command)
        self._bell.ring()

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
            if key.data is self._bell:
                self._bell.quiet()
            elif isinstance(key.data, Peer | PeerTable):
                self._dispatch_all(self._peers.serve(key.data, mask))
        self._run_commands()
        for transport in self.options.transports:
            for event in transport.poll():
                self._moved(transport, event)
        now = self.options.clock.now()
        if now >= self._next_tick:
            self._tick(now)
        self._serve_staging()
        self._survey()

    def _survey(self) -> None:
        """Handoffs first: probes are made while none waits, or between their transfers."""
        receiving, sending = self._receiving, self._sending
        found = self._surveyor.step(
            num_handoffs=receiving.num_sessions + sending.num_sessions,
            is_moving=receiving.is_moving or sending.is_moving,
        )
        if found is not None:
            self._route_found(found)

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
        for lost in self._routes.tick():
            self._route_lost(lost)
        self._landing.tick()
        roll = self._vouching.tick()
        if roll is not None:
            self._sending.working(roll)
        self._receiving.tick()
        self._sending.tick()
        self._borrowing.tick()
        self._lending.tick()

    def _serve_staging(self) -> None:
        """Let those begin whose turn it is; one that ends at once may serve the next."""
        while served := [holder for face in self._faces for holder in face.take_served()]:
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
                    for lost in self._routes.meet(peer):
                        self._route_lost(lost)
                    self._borrowing.peer_up(peer)
                    self._receiving.peer_up(peer)
                case PeerGone(peer, error):
                    self._surveyor.forget(peer)
                    self._landing.forget(peer)
                    self._routes.forget(peer)
                    self._receiving.peer_gone(peer, error)
                    self._sending.peer_gone(peer, error)
                    self._borrowing.peer_gone(peer)
                    self._lending.peer_gone(peer)
                case Heard():
                    self._heard(event)
                case _:
                    assert_never(event)

    def _heard(self, heard: Heard) -> None:
        peer, message = heard.peer, heard.message
        try:
            if isinstance(message, Failed):
                self._receiving.lost(peer, message)
            if isinstance(message, Renewed | Underway):
                self._receiving.assured(peer, message)
            if isinstance(message, _TO_RECEIVERS):
                self._receiving.heard(peer, message)
            if isinstance(message, _TO_SENDERS):
                self._sending.heard(peer, message)
            if isinstance(message, Returned | Settled | Recalled):
                self._heard_of_loans(peer, message)
            if isinstance(message, ProbeAsked | ProbeOver):
                self._landing.heard(peer, message)
            if isinstance(message, ProbeReady | Probed):
                self._surveyor.heard(message)
        except BatonError as exc:
            logger.warning("handoff: refused what %s said: %s", peer.name, exc)

    def _heard_of_loans(self, peer: Peer, message: Returned | Settled | Recalled) -> None:
        match message:
            case Returned():
                self._sending.returned(peer, message)
            case Settled(tickets):
                self._borrowing.settled(peer, tickets)
            case Recalled(tickets):
                self._borrowing.recalled(peer, tickets)
            case _:
                assert_never(message)

    def _moved(self, transport: Transport, event: TransferEvent) -> None:
        if self._surveyor.moved(transport, event) or self._landing.moved(transport, event):
            return
        match event:
            case Arrived() | ReadCompleted() | ReadFailed() | WindowQuiescent():
                self._receiving.moved(transport, event)
            case WriteCompleted(transfer):
                self._sending.write_completed(transport, transfer)
            case WriteFailed(transfer, error):
                self._sending.write_failed(transport, transfer, error)
            case Attached() | RemoteLost():
                self._route_changed(transport, event)
            case _:
                assert_never(event)

    def _route_changed(self, transport: Transport, event: Attached | RemoteLost) -> None:
        if isinstance(event, Attached):
            lender = self._borrowing.attached(transport, event.remote)
            if lender is not None:
                self._receiving.lender_changed(lender)
                return
            found = self._routes.attached(transport, event.remote)
            if found is not None:
                self._route_found(found)
            return
        lender = self._borrowing.lost(transport, event.remote, event.error)
        if lender is not None:
            self._receiving.lender_changed(lender)
            return
        lost = self._routes.lost(transport, event.remote, event.error)
        if lost is not None:
            self._route_lost(lost)

    def _route_found(self, found: RouteFound) -> None:
        self._receiving.route_found(found)
        self._sending.route_found(found)
        self._surveyor.ask(found.peer)

    def _route_lost(self, lost: RouteLost) -> None:
        self._receiving.route_lost(lost)
        self._sending.route_lost(lost)

    def _abort(self, ticket: TicketId, reason: str) -> None:
        if not self._receiving.abort(ticket, reason):
            self._sending.abort(ticket, reason)

    def _give_up(self, ticket: TicketId, reason: str) -> None:
        if not self._sending.abort(ticket, reason):
            self._receiving.give_up(ticket, reason)

    def _begin_stop(self) -> None:
        self._receiving.stop("the worker is stopping")
        self._sending.stop("the worker is stopping")
        self._stopping = True

    def _close(self) -> None:
        self._peers.close()
        for transport in self.options.transports:
            transport.close()
        self._lending.close()
        self._landing.release()
        self._selector.close()
        self._bell.close()


def _offer(face: Face, transports: tuple[Transport, ...]) -> FaceOffer:
    return FaceOffer(face.layout, tuple(t.expose(face.region) for t in transports))


def _make_pool(options: AgentOptions, pulse: EnginePulse) -> PoolDesk | NoPool:
    if options.pool is None:
        return NoPool()
    return PoolDesk(
        options.pool,
        fingerprint=options.fingerprint,
        clock=options.clock,
        timeout_s=options.timeout_s,
        pulse=pulse,
    )


def _allocate_scratch(links: LinkOptions) -> Scratch | None:
    """Memory for probes, if links are to be measured; one that cannot be had costs only that."""
    if links.rule == "listed":
        return None
    try:
        return Scratch.allocate()
    except TransferError as exc:
        logger.warning("handoff: links are not measured: %s", exc)
        return None


def _name_this_thread(name: bytes) -> None:
    """For `top -H` and /proc: Python names threads for itself alone. At most 15 bytes."""
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name, 0, 0, 0)


def _nothing() -> None:
    """Before `start`, nobody waits for events."""
