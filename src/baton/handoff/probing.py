"""Measures the links to peers: probes into scratch memory, while no handoff waits.

The side that moves the bytes probes: one link at a time, small probes first, and each is verified
before the next is made, so that a transport which brings wrong bytes is found here.

    push:  attach ── ProbeRequest ─► ProbeReady ── write ─► completed, ProbeResult … ProbeEnd
    pull:  attach ── own landing pages are free ── read ──► completed, looked at ── read …

Where handoffs leave too little room between their transfers, or a peer answers too late, what was
measured until then counts. Where that is nothing, the link keeps its prior and is measured later.
"""

from __future__ import annotations

import hashlib
import logging
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, assert_never

from baton.clock import Clock, Instant
from baton.errors import BatonError, ProtocolError
from baton.handoff.messages import (
    ProbeEnd,
    ProbeNotification,
    ProbeReady,
    ProbeRequest,
    ProbeResult,
    decode_probe_notification,
    encode,
)
from baton.handoff.peer_transports import PeerTransportState
from baton.ids import Epoch, TicketId, WorkerId, new_ticket_id
from baton.transfer.interface import (
    Arrived,
    GrantQuiescent,
    PagedRegion,
    PageRead,
    PageWrite,
    ReadCompleted,
    ReadFailed,
    RegionDescriptor,
    RemoteAttached,
    RemoteId,
    RemoteLost,
    TransferEvent,
    TransferId,
    Transport,
    WriteCompleted,
    WriteFailed,
    WriteGrant,
    as_reader,
)
from baton.transfer.links.probes import (
    PLAN,
    RECOVERY,
    TARGET_PAGES,
    ProbeBuffer,
    ProbeSeries,
    compute_probe_digest,
    make_probe_copies,
)
from baton.transfer.region import release_region

if TYPE_CHECKING:
    from baton.handoff.peer_transports import PeerTransport, PeerTransportTable, PeerTransportUp
    from baton.handoff.peers import Peer, PeerTable
    from baton.transfer.links.probes import Probe, ProbeBounds

logger = logging.getLogger(__name__)

STEP_TIMEOUT_S: Final = 1.0
PROBE_AGAIN_S: Final = 30.0
"""A link whose probe failed, or was not answered, is measured again after this time."""
MAX_WAIT_FOR_IDLE_S: Final = 2.0
"""A worker that is never idle probes after this time, between the transfers of its handoffs."""


@dataclass(slots=True, eq=False)
class _ProbeRun:
    """One link that is being measured."""

    peer: Peer
    peer_transport: PeerTransport
    series: ProbeSeries
    remote: RemoteId
    deadline: Instant
    grant: TicketId
    is_attached: bool = False
    is_ready: bool = False
    transfer: TransferId | None = None
    posted_at: Instant | None = None
    took_s: float | None = None
    was_intact: bool | None = None

    @property
    def is_push(self) -> bool:
        return self.peer_transport.direction == "push"

    @property
    def is_half_open(self) -> bool:
        """Whether the link failed before, and is used again only if the probes are right."""
        return self.peer_transport.state is PeerTransportState.HALF_OPEN

    @property
    def is_in_flight(self) -> bool:
        return self.posted_at is not None


@dataclass(frozen=True, slots=True)
class _Waiting:
    """`since`: from when on its turn may come."""

    peer: Peer
    peer_transport: PeerTransport
    since: Instant


class LinkProber:
    """The link probes of one agent. Owner: the agent's thread.

    `active` is the link that is being measured, `waiting` are those whose turn will come.
    """

    def __init__(
        self,
        peer_transports: PeerTransportTable,
        peers: PeerTable,
        target: ProbeTarget,
        bounds: ProbeBounds,
    ) -> None:
        self._peer_transports, self._peers, self._probe_target = peer_transports, peers, target
        self._bounds = bounds
        self.waiting: dict[tuple[int, str], _Waiting] = {}
        self._done: set[tuple[int, str]] = set()
        self.active: _ProbeRun | None = None

    def ask(self, peer: Peer) -> None:
        """Probe the links to a peer that were not probed yet, and those that are half-open."""
        if not self._probe_target.has_memory:
            return
        for peer_transport in self._peer_transports.of(peer):
            key = id(peer), peer_transport.kind
            is_new = peer_transport.state is PeerTransportState.UP and key not in self._done
            if (
                is_new or peer_transport.state is PeerTransportState.HALF_OPEN
            ) and key not in self.waiting:
                self.waiting[key] = _Waiting(peer, peer_transport, self._peer_transports.now())

    def forget(self, peer: Peer) -> None:
        """The link to a peer ended."""
        if self.active is not None and self.active.peer is peer:
            self._end(self.active)
        for key in [key for key in (*self.waiting, *self._done) if key[0] == id(peer)]:
            self.waiting.pop(key, None)
            self._done.discard(key)

    def step(self, *, num_handoffs: int, is_moving: bool) -> PeerTransportUp | None:
        """Make the next probe, unless a handoff waits; what was found out, at the end of one.

        A half-open link is probed though data is moving: handoffs may wait for it.
        """
        run = self.active
        if run is not None and self._peer_transports.now() > run.deadline:
            return self._time_out(run)
        if is_moving and run is not None and not run.is_half_open:
            return None
        if run is None:
            run = self._begin_next(num_handoffs, is_moving=is_moving)
        if run is None or run.is_in_flight or not self._is_ready(run):
            return None
        probe = run.series.next()
        if probe is None:
            return self._conclude(run)
        self._post(run, probe)
        return None

    def handle_message(self, message: ProbeReady | ProbeResult) -> None:
        """The peer answers."""
        run = self.active
        if run is None or run.grant != message.id:
            return
        if isinstance(message, ProbeResult):
            run.was_intact = message.is_intact
            self._take(run)
        else:
            run.is_ready = True

    def handle_transfer_event(self, transport: Transport, event: TransferEvent) -> bool:
        """Handle a transport's event: whether it belongs to a probe."""
        run = self.active
        if run is None or run.peer_transport.transport is not transport:
            return False
        match event:
            case RemoteAttached(remote) if remote == run.remote:
                run.is_attached = True
                run.deadline = self._deadline()
                if run.is_push:
                    self._peers.send(run.peer, ProbeRequest(run.grant, run.peer_transport.kind))
            case RemoteLost(remote, error) if remote == run.remote:
                self._abandon(run, str(error))
            case WriteCompleted(transfer) | ReadCompleted(transfer) if transfer == run.transfer:
                run.took_s = self._peer_transports.now() - (run.posted_at or 0.0)
                self._look(run)
            case WriteFailed(transfer, error) | ReadFailed(transfer, error) if (
                transfer == run.transfer
            ):
                self._abandon(run, str(error))
            case _:
                return False
        return True

    def _begin_next(self, num_handoffs: int, *, is_moving: bool) -> _ProbeRun | None:
        now = self._peer_transports.now()
        for key, waiting in tuple(self.waiting.items()):
            peer_transport = waiting.peer_transport
            half_open = peer_transport.state is PeerTransportState.HALF_OPEN
            waited_s = now - waiting.since
            least_s = MAX_WAIT_FOR_IDLE_S if num_handoffs else 0.0
            if (is_moving or waited_s < least_s) and not half_open:
                continue
            del self.waiting[key]
            run = self._begin(waiting.peer, peer_transport, half_open=half_open)
            if run is not None:
                if not half_open:  # two probes show that it works, not what it costs
                    self._done.add(key)
                return run
        return None

    def _begin(
        self, peer: Peer, peer_transport: PeerTransport, *, half_open: bool
    ) -> _ProbeRun | None:
        offered = () if peer.hello is None else peer.hello.probe_buffers
        descriptor = next((each for each in offered if each.transport == peer_transport.kind), None)
        is_usable = peer_transport.state in {PeerTransportState.UP, PeerTransportState.HALF_OPEN}
        if descriptor is None or not is_usable or not self._probe_target.has_memory:
            return None
        bounds = self._bounds.share(max(1, len(list(self._peer_transports.of(peer)))))
        series = ProbeSeries(bounds, peer_transport.model, RECOVERY if half_open else PLAN)
        try:
            remote = peer_transport.transport.attach(descriptor)
        except BatonError as exc:
            logger.info(
                "handoff: %s is not measured over %s: %s", peer.name, peer_transport.kind, exc
            )
            if half_open:
                self._peer_transports.penalize(peer, peer_transport.kind, str(exc))
            return None
        self.active = _ProbeRun(
            peer, peer_transport, series, remote, self._deadline(), new_ticket_id()
        )
        return self.active

    def _is_ready(self, run: _ProbeRun) -> bool:
        if not run.is_attached:
            return False
        if not run.is_push and not run.is_ready:
            run.is_ready = self._probe_target.try_take(run.grant)
        return run.is_ready

    def _post(self, run: _ProbeRun, probe: Probe) -> None:
        copies, region = make_probe_copies(probe), self._probe_target.region
        run.took_s = run.was_intact = None
        run.deadline = self._deadline()
        digest = compute_probe_digest(probe)
        run.posted_at = self._peer_transports.now()
        transport = run.peer_transport.transport
        try:
            if run.is_push:
                notification = encode(ProbeNotification(probe.num_pages, digest))
                run.transfer = transport.submit(
                    PageWrite(
                        run.remote,
                        compute_probe_grant(self._peers.epoch, run.grant),
                        region.handle,
                        copies,
                        notification,
                    )
                )
            else:
                run.transfer = as_reader(transport).read(
                    PageRead(run.remote, region.handle, copies)
                )
        except BatonError as exc:
            self._abandon(run, str(exc))

    def _look(self, run: _ProbeRun) -> None:
        """A read is here: see what it brought. A write's bytes are the peer's to look at."""
        probe = run.series.next()
        if not run.is_push and probe is not None:
            run.was_intact = self._probe_target.is_intact(
                probe.num_pages, compute_probe_digest(probe)
            )
        self._take(run)

    def _take(self, run: _ProbeRun) -> None:
        if run.took_s is None or run.was_intact is None:
            return
        if not run.was_intact:
            self._abandon(run, "a probe brought other bytes than were sent", is_wrong=True)
            return
        run.series.made(run.took_s)
        run.posted_at = run.transfer = None

    def _conclude(self, run: _ProbeRun) -> PeerTransportUp | None:
        self._end(run)
        model, kind = run.series.model, run.peer_transport.kind
        logger.info(
            "handoff: %s over %s (%s): %.1f us, %.3f us a descriptor, %.2f GB/s",
            run.peer.name,
            kind,
            run.peer_transport.direction,
            model.latency_s * 1e6,
            model.descriptor_s * 1e6,
            model.bandwidth / 1e9,
        )
        return self._peer_transports.probed(run.peer, kind, model)

    def _time_out(self, run: _ProbeRun) -> PeerTransportUp | None:
        """The peer does not answer, or handoffs leave no room between their transfers."""
        if len(run.series.samples) > 1 and not run.is_half_open:
            return self._conclude(run)
        if not run.is_attached:
            self._abandon(run, "it takes too long to attach")
        elif run.is_in_flight:
            self._abandon(run, "no answer to a probe")
        else:
            self._end(run)
            self._wait_again(run, 0.0)
        return None

    def _abandon(self, run: _ProbeRun, reason: str, *, is_wrong: bool = False) -> None:
        """The link is not measured now; one that is wrong, or half-open, is left alone."""
        self._end(run)
        kind = run.peer_transport.kind
        logger.info("handoff: %s is not measured over %s: %s", run.peer.name, kind, reason)
        if is_wrong or run.is_half_open:
            self._peer_transports.penalize(run.peer, kind, reason)
        else:
            self._wait_again(run, PROBE_AGAIN_S)

    def _wait_again(self, run: _ProbeRun, delay_s: float) -> None:
        peer, since = run.peer, Instant(self._peer_transports.now() + delay_s)
        self.waiting[id(peer), run.peer_transport.kind] = _Waiting(peer, run.peer_transport, since)

    def _end(self, run: _ProbeRun) -> None:
        self.active = None
        run.peer_transport.transport.detach(run.remote)
        if run.is_push and run.is_attached:
            self._peers.send(run.peer, ProbeEnd(run.grant))
        if not run.is_push and run.is_ready:
            self._probe_target.release_window(run.grant)

    def _deadline(self) -> Instant:
        return Instant(self._peer_transports.now() + STEP_TIMEOUT_S)


MAX_WAITING: Final = 256
MAX_BACKOFF_S: Final = 2.0
"""For how long one probe may use the pages: others wait."""


@dataclass(frozen=True, slots=True)
class _ProbeGrant:
    peer: Peer
    transport: Transport
    probe: TicketId


def compute_probe_grant(prober: Epoch, probe: TicketId) -> TicketId:
    """The write grant of a probe: no peer can name it like a ticket's, or like another peer's."""
    digest = hashlib.sha256(b"baton/probe/1" + prober.encode() + probe).digest()
    return TicketId(digest[: len(probe)])


@dataclass(slots=True)
class _Held:
    """Which probe holds the probe buffer. `asked` is None for this side's own."""

    grant: TicketId
    until: Instant
    asked: _ProbeGrant | None = None
    is_closing: bool = False


class ProbeTarget:
    """Owner: the agent's thread. Without a probe buffer no probe is admitted.

    `held` is the probe that has the probe buffer now, `exposed` are the transports that reach it.
    """

    def __init__(
        self, probe_buffer: ProbeBuffer | None, transports: tuple[Transport, ...], clock: Clock
    ) -> None:
        self._probe_buffer, self._clock = probe_buffer, clock
        self._transports = {transport.kind: transport for transport in transports}
        self._peers: PeerTable | None = None
        self._waiting: OrderedDict[TicketId, _ProbeGrant] = OrderedDict()
        self.held: _Held | None = None
        self.exposed: set[str] = set()

    @property
    def has_memory(self) -> bool:
        """Whether links are measured from here: not where the operator listed their order."""
        return self._probe_buffer is not None

    @property
    def region(self) -> PagedRegion:
        """The scratch memory."""
        if self._probe_buffer is None:
            raise AssertionError("there is no scratch memory")
        return self._probe_buffer.region

    def expose(self) -> tuple[RegionDescriptor, ...]:
        """Its descriptors for peers; a transport that cannot expose such memory is not measured."""
        found: list[RegionDescriptor] = []
        for transport in self._transports.values() if self._probe_buffer else ():
            try:
                found.append(transport.expose(self.region))
            except BatonError as exc:
                logger.info("handoff: %s will not be measured: %s", transport.kind, exc)
        self.exposed = {each.transport for each in found}
        return tuple(found)

    def connect(self, peers: PeerTable) -> None:
        """Where answers are sent. Call before the first message."""
        self._peers = peers

    def try_take(self, grant: TicketId) -> bool:
        """For this side's own probe; whether the pages were free."""
        if self.held is not None:
            return self.held.grant == grant
        self.held = _Held(grant, self._latest())
        return True

    def release_window(self, grant: TicketId) -> None:
        """This side's own probe is over."""
        if self.held is not None and self.held.grant == grant:
            self.held = None
            self._serve()

    def is_intact(self, num_pages: int, digest: bytes) -> bool:
        """Whether so many pages have landed with this digest; they are wiped."""
        return self._probe_buffer is not None and self._probe_buffer.try_take(num_pages, digest)

    def handle_message(self, peer: Peer, message: ProbeRequest | ProbeEnd) -> None:
        """A peer wants to land probes, or is done.

        Raises:
            ProtocolError: over a transport that is not here, with an id that is in use, or where
                no probe is admitted.
        """
        match message:
            case ProbeRequest(probe, kind):
                transport, grant = self._transports.get(kind), _grant_of(peer, probe)
                in_use = grant in self._waiting or (self.held and self.held.grant == grant)
                can_take = self.has_memory and len(self._waiting) < MAX_WAITING
                if transport is None or in_use or not can_take:
                    raise ProtocolError(f"a probe over {kind}, which cannot be made here")
                self._waiting[grant] = _ProbeGrant(peer, transport, probe)
                self._serve()
            case ProbeEnd(probe):
                grant, held = _grant_of(peer, probe), self.held
                self._waiting.pop(grant, None)
                if held and held.grant == grant and held.asked and held.asked.peer is peer:
                    self._close(held)
                    if not held.asked.transport.capabilities.late_writes:
                        self.held = None  # its writer has no write in flight
                        self._serve()
            case _:
                assert_never(message)

    def handle_transfer_event(self, transport: Transport, event: TransferEvent) -> bool:
        """Handle a transport's event: whether it belongs to a probe."""
        held = self.held
        match event:
            case Arrived(grant, notification) if held and held.asked and held.grant == grant:
                self._answer(held.asked, notification)
            case GrantQuiescent(grant) if held and held.grant == grant and held.asked:
                if held.asked.transport is transport:
                    self.held = None
                    self._serve()
            case _:
                return False
        return True

    def forget(self, peer: Peer) -> None:
        """The link to a peer ended: its grant is closed, and waited for."""
        for grant, asked in tuple(self._waiting.items()):
            if asked.peer is peer:
                del self._waiting[grant]
        if self.held and self.held.asked and self.held.asked.peer is peer:
            self._close(self.held)

    def release(self) -> None:
        """Give the memory back, once every transport is closed."""
        if self._probe_buffer is not None:
            release_region(self._probe_buffer.region)

    def tick(self) -> None:
        """Close the grant of a peer that takes too long."""
        held = self.held
        if held is not None and held.asked is not None and self._clock.now() > held.until:
            self._close(held)

    def _answer(self, asked: _ProbeGrant, raw: bytes) -> None:
        try:
            notification = decode_probe_notification(raw)
        except ProtocolError:
            is_intact = False
        else:
            is_intact = self.is_intact(notification.num_pages, notification.digest)
        if self._peers is not None:
            self._peers.send(asked.peer, ProbeResult(asked.probe, is_intact))

    def _serve(self) -> None:
        while self.held is None and self._waiting:
            grant, asked = self._waiting.popitem(last=False)
            hello = asked.peer.hello
            if self._peers is None or hello is None:
                continue
            try:
                asked.transport.open_grant(
                    WriteGrant(
                        grant, self.region.handle, hello.epoch, TARGET_PAGES, WorkerId(hello.worker)
                    )
                )
            except BatonError as exc:
                logger.info("handoff: %s cannot be probed: %s", asked.transport.kind, exc)
                continue
            self.held = _Held(grant, self._latest(), asked)
            self._peers.send(asked.peer, ProbeReady(asked.probe))

    def _close(self, held: _Held) -> None:
        if held.asked is not None and not held.is_closing:
            held.is_closing = True
            held.asked.transport.close_grant(held.grant)

    def _latest(self) -> Instant:
        return Instant(self._clock.now() + MAX_BACKOFF_S)


def _grant_of(peer: Peer, probe: TicketId) -> TicketId:
    if peer.hello is None:
        raise ProtocolError("a probe before Hello")
    return compute_probe_grant(peer.hello.epoch, probe)
