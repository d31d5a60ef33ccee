"""The transports that reach a peer: all of them attached, and for each transfer the best chosen.

A peer is reached in one direction: this worker writes to the peers that dialed it ("push"), and
reads from those that it dialed ("pull"). What is *expected* to carry a transfer is the best of all
transports that both have; what is *used*, the best of those that work. They differ only where one
failed, and then the reason is kept: no slow path is silent.

    DOWN ── attach ──► ATTACHING ──► UP ── lost ──► DOWN ── its backoff is over ──► ATTACHING …
                           └► HALF_OPEN, if it had failed ── probes are right ──► UP
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Final

import msgspec

from baton.encodings.interface import RAW
from baton.errors import BatonError, PeerUnreachableError
from baton.record import MutableRecord, Record
from baton.telemetry.transfers import Direction, Outcome, TransferTime
from baton.transfer.interface import RegionDescriptor, RemoteId, Transport, as_admitter
from baton.transfer.links.choice import Backoff, Choice, ChoiceRule, Chooser, LinkObserver
from baton.transfer.links.cost_model import MIN_BYTE_S, LinkModel, TransferShape, default_link_model
from baton.transfer.links.probes import ProbeBounds

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    import numpy as np
    from numpy.typing import NDArray

    from baton.clock import Clock, Instant
    from baton.handoff.messages import TransferOp
    from baton.handoff.peers import Peer
    from baton.ids import TicketId
    from baton.telemetry.trace import RequestSpan


class PeerTransportState(StrEnum):
    """Whether a route can be gone."""

    ATTACHING = "attaching"
    UP = "up"
    HALF_OPEN = "half-open"  # attached; it failed before, and a probe decides whether it works
    DOWN = "down"  # until its backoff is over


MIN_BULK_BYTES: Final = 1 << 20
"""From that size on the time of a transfer shows a link's bandwidth."""
NUM_BULK_TRANSFERS: Final = 3


class _Period(MutableRecord):
    """From the first transfer over an idle route; `filled_at` is when the last was submitted."""

    began_at: Instant
    filled_at: Instant
    largest: TransferShape
    num_transfers: int = 0
    num_bytes: int = 0
    num_descriptors: int = 0
    predicted_s: float = 0.0


class _InFlight(Record, frozen=True):
    """A transfer that was submitted, and the bytes under way with it, if they are known."""

    began_at: Instant
    num_bytes: int
    bytes_in_flight: int | None


@dataclass(slots=True, eq=False)
class PeerTransport:
    """A way to write into a peer's pages, or to read them. Owner: the agent's thread.

    `descriptors` and `remotes` are the peer's region for raw KV and those for encoded KV, by
    encoding. They are attached and dropped together.
    """

    peer: str
    transport: Transport
    descriptors: Mapping[str, RegionDescriptor]
    direction: Direction
    model: LinkModel
    distance: str = ""
    state: PeerTransportState = PeerTransportState.DOWN
    remotes: dict[str, RemoteId] = field(default_factory=dict)
    reason: str = ""
    backoff: Backoff = field(default_factory=Backoff)
    _bulk_byte_s: deque[float] = field(default_factory=lambda: deque(maxlen=NUM_BULK_TRANSFERS))
    _attaching: set[RemoteId] = field(default_factory=set)
    _num_under_way: int = 0
    _num_untimed: int = 0  # of these, those that were under way when another one failed
    _in_flight: deque[_InFlight] = field(default_factory=deque)
    _bytes_in_flight: int = 0
    _period: _Period | None = None

    @property
    def kind(self) -> str:
        """The transport's name."""
        return self.transport.kind

    @property
    def takes_several_arrays(self) -> bool:
        """Whether one transfer may be of several layers."""
        return self.transport.capabilities.multi_array

    def remote_for(self, encoding: str) -> RemoteId:
        """The peer's region for KV in an encoding, of a route that is up.

        Raises:
            PeerUnreachableError: the peer has not exposed that region over this transport.
        """
        if encoding not in self.remotes:
            raise PeerUnreachableError(f"{self.kind} does not reach the peer's {encoding} pages")
        return self.remotes[encoding]

    @property
    def bulk_byte_s(self) -> float | None:
        """Seconds for a byte of large transfers; None before a probe or some such transfers.

        As the quickest of the latest took: a machine that does something else makes a transfer
        slower, never quicker.
        """
        is_known = self.model.num_probes or len(self._bulk_byte_s) == NUM_BULK_TRANSFERS
        return min(self._bulk_byte_s) if is_known else None

    def probed(self, model: LinkModel) -> None:
        """Probes were right, and cost so much."""
        self.model = model
        self._bulk_byte_s.append(model.byte_s)

    def attach(self) -> None:
        """Begin to attach every region.

        Raises:
            TransferError: one cannot be attached; `drop` the rest.
        """
        for encoding, descriptor in self.descriptors.items():
            remote = self.remotes[encoding] = self.transport.attach(descriptor)
            self._attaching.add(remote)

    def remote_attached(self, remote: RemoteId) -> bool:
        """One of its regions is attached: whether all are."""
        self._attaching.discard(remote)
        return not self._attaching

    @property
    def is_new(self) -> bool:
        """Whether it is being attached and never failed: worth waiting for."""
        return self.state is PeerTransportState.ATTACHING and not self.backoff.num_failures

    def drop(self) -> None:
        """Forget the remotes, whose transfers fail."""
        remotes, self.remotes = self.remotes, {}
        self._attaching.clear()
        self._forget_in_flight()
        self.state = PeerTransportState.DOWN
        for remote in remotes.values():
            self.transport.detach(remote)

    def submitted(self, choice: Choice, before: Instant, after: Instant) -> None:
        """A transfer was submitted, which took from `before` to `after`."""
        num_bytes = choice.shape.num_bytes
        if not self._num_under_way:
            self._period = _Period(before, after, choice.shape)
        period = self._period
        if period is not None:
            period.filled_at = after
            if num_bytes > period.largest.num_bytes:
                period.largest = choice.shape
            period.num_transfers += 1
            period.num_bytes += num_bytes
            period.num_descriptors += choice.shape.num_descriptors
            period.predicted_s += choice.predicted_s
        self._num_under_way += 1
        self._bytes_in_flight += num_bytes
        bytes_in_flight = None if self._num_untimed else self._bytes_in_flight
        self._in_flight.append(_InFlight(before, num_bytes, bytes_in_flight))

    def ended(self, now: Instant) -> tuple[TransferTime | None, Outcome | None]:
        """A transfer succeeded: its time, and what was carried, if it was the last one under way.

        It is taken to be the oldest one, as a link completes them about in their order. Those that
        were under way when one failed get no time, nor do those submitted while one of these is.

        A transfer is a measurement only where it was the only one under way, or where it was
        waited for longer than it was being filled (in which time this side did other work too).
        """
        self._num_under_way -= 1
        if self._num_untimed:
            self._num_untimed -= 1
            return None, None
        period, transfer = self._period, None
        oldest = self._in_flight.popleft()
        self._bytes_in_flight -= oldest.num_bytes
        if oldest.bytes_in_flight is not None:
            transfer = TransferTime(
                peer=self.peer,
                distance=self.distance,
                transport=self.transport.kind,
                direction=self.direction,
                num_bytes=oldest.bytes_in_flight,
                seconds=now - oldest.began_at,
            )
        if period is None or self._num_under_way:
            return transfer, None
        self._period = None
        if self.backoff.num_failures:
            self.backoff.record_success()
        observed_s = now - period.began_at
        waited_s, filling_s = now - period.filled_at, period.filled_at - period.began_at
        teaches = period.num_transfers == 1 or waited_s > filling_s
        if teaches:
            shape = TransferShape(period.num_bytes, period.num_descriptors)
            if shape.num_bytes >= MIN_BULK_BYTES:
                self._bulk_byte_s.append(max(observed_s / shape.num_bytes, MIN_BYTE_S))
            self.model = self.model.refine(shape, observed_s, alike=period.largest)
        outcome = Outcome(
            peer=self.peer,
            distance=self.distance,
            transport=self.transport.kind,
            direction=self.direction,
            num_transfers=period.num_transfers,
            num_bytes=period.num_bytes,
            predicted_s=period.predicted_s,
            observed_s=observed_s,
            refined=teaches,
        )
        return transfer, outcome

    def failed(self) -> None:
        """A transfer failed: the period that it was in is no measurement."""
        self._num_under_way -= 1
        self._forget_in_flight()

    def _forget_in_flight(self) -> None:
        """Which of those under way ends next is not known any more: none is a measurement."""
        self._num_untimed = self._num_under_way
        self._in_flight.clear()
        self._bytes_in_flight = 0
        self._period = None


logger = logging.getLogger(__name__)

TYPICAL: Final = TransferShape(1 << 20, 32)
"""A layer of some hundred tokens: whose best route a handoff waits for before it begins."""


LARGE: Final = TransferShape(TYPICAL.num_bytes << 4, TYPICAL.num_descriptors << 4)


@dataclass(frozen=True, slots=True)
class LinkReport:
    """The measured way to a peer (`push`) or from it (`pull`) that large transfers take.

    `encoding` is what the latest handoff's KV was written in; where that is not raw, a byte of raw
    KV takes `kv_byte_s` to be encoded, sent and decoded.
    """

    peer: str
    direction: Direction
    transport: str
    model: LinkModel
    encoding: str = RAW
    kv_byte_s: float | None = None

    @property
    def byte_s(self) -> float:
        """Seconds for a byte more, between a typical transfer and a large one."""
        num_bytes = LARGE.num_bytes - TYPICAL.num_bytes
        grown_s = self.model.predict(LARGE) - self.model.predict(TYPICAL)
        return max(MIN_BYTE_S, grown_s / num_bytes)

    @property
    def latency_s(self) -> float:
        """Seconds of a typical transfer that its bytes do not explain."""
        return max(0.0, self.model.predict(TYPICAL) - TYPICAL.num_bytes * self.byte_s)


class Reachability(StrEnum):
    """Whether a peer's pages can be reached."""

    READY = "ready"
    WAITING = "waiting"  # a route is being attached, or probed before it is used again
    NONE = "none"


@dataclass(frozen=True, slots=True)
class PeerTransportUp:
    """The peer's pages can be reached, over one more route."""

    peer: Peer


@dataclass(frozen=True, slots=True)
class PeerTransportLost:
    """A route to the peer was not attached, or broke. There may be others.

    `was_up`: it was in use, so that handoffs may have sent over it.
    """

    peer: Peer
    transport: str
    was_up: bool = False


class TransportChoice(Record, frozen=True):
    """What carries one transfer, and why."""

    peer_transport: PeerTransport
    choice: Choice


@dataclass(slots=True)
class _PeerTransports:
    """All routes to one peer, in the order in which they are listed."""

    peer: Peer
    peer_transports: dict[str, PeerTransport]
    chooser: Chooser
    encoding: str = RAW
    warned: set[tuple[str, str]] = field(default_factory=set)

    @property
    def models(self) -> dict[str, LinkModel]:
        return {kind: peer_transport.model for kind, peer_transport in self.peer_transports.items()}

    def find_best_measured(self) -> PeerTransport | None:
        """What carries large transfers, of those that are up and were measured."""
        return min(
            (
                each
                for each in self.peer_transports.values()
                if each.state is PeerTransportState.UP and each.model.is_measured
            ),
            key=lambda each: each.model.predict(LARGE),
            default=None,
        )

    def in_state(self, *states: PeerTransportState) -> list[str]:
        return [
            kind
            for kind, peer_transport in self.peer_transports.items()
            if peer_transport.state in states
        ]


class PeerTransportTable:  # noqa: PLR0904 -- a method for each event (ADR 0005)
    """Routes from this worker to its peers. Owner: the agent's thread.

    `transports` are in the operator's order. `preferred_op` is what this worker prefers as a
    receiver. `probed_transports` are those over which it has a probe buffer.
    """

    def __init__(
        self,
        transports: tuple[Transport, ...],
        *,
        clock: Clock,
        rule: ChoiceRule,
        preferred_op: TransferOp,
        probed_transports: Collection[str],
        observer: LinkObserver,
    ) -> None:
        self.observer = observer
        self._transports, self._clock = transports, clock
        self.now = clock.now
        """When a submission begins: for `submitted`."""
        self._rule: ChoiceRule = rule
        self._preferred_op, self._probed_transports = preferred_op, probed_transports
        self._by_peer: dict[int, _PeerTransports] = {}
        self._lost: list[PeerTransportLost] = []  # since the last `tick`

    def attach_preferred(self, peer: Peer) -> list[PeerTransportLost]:
        """A peer sent its Hello: attach all that will probably be used; what failed at once."""
        reads = peer.dialed is not None
        if reads and self._preferred_op != "READ":
            return []
        wants_writes = peer.hello is not None and peer.hello.preferred_op == "WRITE"
        return self.attach_all(peer) if reads or wants_writes else []

    def attach_all(self, peer: Peer) -> list[PeerTransportLost]:
        """Attach all routes to a peer, unless that was begun; what failed at once."""
        if id(peer) in self._by_peer:
            return []
        transports = self._make_transports(peer)
        local = frozenset(
            kind for kind, each in transports.items() if each.transport.capabilities.same_host_only
        )
        known = self._by_peer[id(peer)] = _PeerTransports(
            peer, transports, Chooser(self._rule, local)
        )
        return [
            lost
            for peer_transport in known.peer_transports.values()
            for lost in self._attach(known, peer_transport)
        ]

    def can_read(self, peer: Peer) -> bool:
        """Whether a peer that was dialed is, or soon may be, read."""
        known = self._by_peer.get(id(peer))
        return bool(known and known.in_state(PeerTransportState.ATTACHING, PeerTransportState.UP))

    def can_be_written(self, peer: Peer, avoid: Collection[str]) -> bool:
        """Whether a peer that was dialed has another transport to write with."""
        return any(kind not in avoid for kind in self._in_common(peer))

    def reach(self, peer: Peer, avoid: Collection[str] = ()) -> Reachability:
        """Whether the peer's pages can be reached, by other routes than those to avoid."""
        known = self._by_peer.get(id(peer))
        if known is None:
            return Reachability.NONE
        hopeful: list[str] = []
        are_up = True
        for kind, peer_transport in known.peer_transports.items():
            is_up = peer_transport.state is PeerTransportState.UP
            if kind not in avoid and (is_up or peer_transport.is_new):
                hopeful.append(kind)
                are_up = are_up and is_up
        if hopeful and are_up:
            return Reachability.READY  # whichever is chosen
        choice = known.chooser.choose(TYPICAL, known.models, hopeful)
        if choice is not None and known.peer_transports[choice.used].state is PeerTransportState.UP:
            return Reachability.READY
        soon = known.in_state(PeerTransportState.ATTACHING, PeerTransportState.HALF_OPEN)
        return Reachability.WAITING if set(soon) - set(avoid) else Reachability.NONE

    def is_attaching(self, peer: Peer) -> bool:
        """Whether a route is being attached; one that is attached and half-open is not."""
        known = self._by_peer.get(id(peer))
        return known is not None and any(known.in_state(PeerTransportState.ATTACHING))

    def is_up(self, peer: Peer, avoid: Collection[str] = ()) -> bool:
        """Whether something can be moved now, be it by the second best."""
        known = self._by_peer.get(id(peer))
        for kind, each in () if known is None else known.peer_transports.items():
            if each.state is PeerTransportState.UP and kind not in avoid:
                return True
        return False

    def admit_writes(
        self, peer: Peer, grant: TicketId, pages: NDArray[np.int64], encoding: str
    ) -> None:
        """A peer has opened a write grant: the transports that want to know it learn of it."""
        for each in self.of(peer):
            admitter = as_admitter(each.transport)
            if admitter is not None and encoding in each.remotes:
                admitter.admit_writes(each.remotes[encoding], grant, pages)

    def forget_grant(self, peer: Peer, grant: TicketId) -> None:
        """A peer closes a write grant without asking."""
        for each in self.of(peer):
            admitter = as_admitter(each.transport)
            if admitter is not None:
                for remote in each.remotes.values():
                    admitter.forget_grant(remote, grant)

    def shares_host(self, peer: Peer) -> bool:
        """Whether a transport is up to the peer that reaches nothing beyond this host."""
        known = self._by_peer.get(id(peer))
        return any(
            each.state is PeerTransportState.UP and each.transport.capabilities.same_host_only
            for each in (() if known is None else known.peer_transports.values())
        )

    def choose(
        self, peer: Peer, shape: TransferShape, avoid: Collection[str] = ()
    ) -> TransportChoice | None:
        """What carries one transfer to (or from) the peer; None if nothing can now."""
        known = self._by_peer.get(id(peer))
        if known is None:
            return None
        models: dict[str, LinkModel] = {}
        usable: list[str] = []
        for kind, each in known.peer_transports.items():
            models[kind] = each.model
            if each.state is PeerTransportState.UP and kind not in avoid:
                usable.append(kind)
        choice = known.chooser.choose(shape, models, usable)
        if choice is None:
            return None
        if choice.expected != choice.used:
            self._warn(known, choice)
        peer_transport = known.peer_transports[choice.used]
        self.observer.chosen(peer_transport.direction, choice)
        return TransportChoice(peer_transport, choice)

    def submitted(self, chosen: TransportChoice, began_at: Instant) -> None:
        """A transfer was submitted over the way."""
        chosen.peer_transport.submitted(chosen.choice, began_at, self._clock.now())

    def completed(self, peer_transport: PeerTransport) -> None:
        """A transfer over the route succeeded."""
        transfer, outcome = peer_transport.ended(self._clock.now())
        if transfer is not None:
            self.observer.transferred(transfer)
        if outcome is not None:
            self.observer.carried(outcome)

    def penalize(self, peer: Peer, kind: str, reason: str) -> None:
        """A route did not do what it should: leave it alone for a while.

        Handoffs may wait for one that was not up: the next `tick` reports that it is lost.
        """
        known = self._by_peer.get(id(peer))
        peer_transport = None if known is None else known.peer_transports.get(kind)
        if (
            known is not None
            and peer_transport is not None
            and peer_transport.state is not PeerTransportState.DOWN
        ):
            if peer_transport.state is not PeerTransportState.UP:
                self._lost.append(PeerTransportLost(known.peer, kind))
            self._back_off(known, peer_transport, reason)

    def attached(self, transport: Transport, remote: RemoteId) -> PeerTransportUp | None:
        """A transport reports that a remote can be reached."""
        found = self._find(transport, remote)
        if found is None:
            return None
        known, peer_transport = found
        if not peer_transport.remote_attached(remote):
            return None
        half_open = peer_transport.backoff.num_failures and self._can_be_tried(
            known.peer, peer_transport
        )
        peer_transport.state = PeerTransportState.HALF_OPEN if half_open else PeerTransportState.UP
        return PeerTransportUp(known.peer)

    def lost(
        self, transport: Transport, remote: RemoteId, error: BatonError
    ) -> PeerTransportLost | None:
        """A remote is gone, or could not be attached."""
        found = self._find(transport, remote)
        if found is None:
            return None
        known, peer_transport = found
        was_up = peer_transport.state is PeerTransportState.UP
        self._back_off(known, peer_transport, str(error))
        return PeerTransportLost(known.peer, peer_transport.kind, was_up)

    def explain(self, peer: Peer) -> BatonError:
        """Why a peer cannot be reached."""
        known = self._by_peer.get(id(peer))
        if known is None or not known.peer_transports:
            ours = ", ".join(transport.kind for transport in self._transports)
            theirs = (
                ", ".join(region.transport for region in peer.negotiated.theirs.regions) or "none"
            )
            where = "" if peer.shares_clock else ", which is on another host"
            return PeerUnreachableError(
                f"no transport in common with {peer.name}{where}: {ours} here, {theirs} there"
            )
        reasons = (f"{r.kind}: {r.reason}" for r in known.peer_transports.values() if r.reason)
        return PeerUnreachableError("; ".join(reasons) or "no transport is left for this handoff")

    def tick(self) -> list[PeerTransportLost]:
        """Attach again what has cooled; what failed at once, or was lost by `penalize`."""
        now = self._clock.now()
        penalized, self._lost = self._lost, []
        return penalized + [
            lost
            for known in self._by_peer.values()
            for peer_transport in known.peer_transports.values()
            if peer_transport.state is PeerTransportState.DOWN
            and peer_transport.backoff.is_over(now)
            for lost in self._attach(known, peer_transport)
        ]

    def describe(
        self, find_kv_byte_s: Callable[[Peer, LinkReport], float | None]
    ) -> list[LinkReport]:
        """What large transfers to, or from, each peer are predicted to take, if measured."""
        reports = []
        for known in self._by_peer.values():
            best = known.find_best_measured()
            if best is not None:
                name, encoding = known.peer.name, known.encoding
                report = LinkReport(name, best.direction, best.kind, best.model, encoding)
                kv_byte_s = find_kv_byte_s(known.peer, report)
                reports.append(replace(report, kv_byte_s=kv_byte_s))
        return reports

    def record_handoff(self, peer: Peer, encoding: str, distance: str) -> None:
        """A handoff to, or from, a peer begins, in this encoding, over this distance."""
        peer.distance = distance
        known = self._by_peer.get(id(peer))
        if known is not None:
            known.encoding = encoding
            for each in known.peer_transports.values():
                each.distance = distance

    def find_bulk_byte_s(self, peer: Peer) -> float | None:
        """Seconds for each byte of large transfers to, or from, a peer; None if not measured."""
        known = self._by_peer.get(id(peer))
        best = None if known is None else known.find_best_measured()
        return None if best is None else best.bulk_byte_s

    def forget(self, peer: Peer) -> None:
        """The link to a peer ended: detach, which fails its unfinished transfers."""
        known = self._by_peer.pop(id(peer), None)
        if known is not None:
            for peer_transport in known.peer_transports.values():
                peer_transport.drop()

    def of(self, peer: Peer) -> tuple[PeerTransport, ...]:
        """All routes to a peer."""
        known = self._by_peer.get(id(peer))
        return () if known is None else tuple(known.peer_transports.values())

    def probed(self, peer: Peer, kind: str, model: LinkModel) -> PeerTransportUp | None:
        """Probes over a route were right, and cost so much."""
        known = self._by_peer.get(id(peer))
        peer_transport = None if known is None else known.peer_transports.get(kind)
        if (
            known is None
            or peer_transport is None
            or peer_transport.state is PeerTransportState.DOWN
        ):
            return None
        if peer_transport.state is PeerTransportState.HALF_OPEN:
            peer_transport.state = PeerTransportState.UP
            logger.info("handoff: %s is reached by %s again", peer.name, kind)
        else:
            peer_transport.probed(model)
            self.observer.measured(peer_transport.direction, kind, model)
        return PeerTransportUp(known.peer)

    def _make_transports(self, peer: Peer) -> dict[str, PeerTransport]:
        direction: Direction = "push" if peer.dialed is None else "pull"
        in_common = self._in_common(peer)
        if direction == "pull":
            in_common = self._readable(in_common)
        return {
            kind: PeerTransport(
                peer.name,
                transport,
                _find_descriptors(peer, kind),
                direction,
                default_link_model(transport.capabilities),
            )
            for kind, transport in in_common.items()
        }

    def _readable(self, in_common: dict[str, Transport]) -> dict[str, Transport]:
        """Those that read; by the listed order none, unless the first one does."""
        first = next(iter(in_common.values()), None)
        if self._rule == "listed" and first and not first.capabilities.reads:
            return {}
        return {kind: each for kind, each in in_common.items() if each.capabilities.reads}

    def _in_common(self, peer: Peer) -> dict[str, Transport]:
        """Those that both have; to another host without those that cannot leave this one.

        They would fail each time, and be expected, as they are the quickest: a mismatch that is
        none. Between network namespaces of one host they fail too, and that is reported: there the
        operator can have them work.
        """
        theirs = {region.transport for region in peer.negotiated.theirs.regions}
        return {
            each.kind: each
            for each in self._transports
            if each.kind in theirs and (not each.capabilities.same_host_only or peer.shares_clock)
        }

    def _attach(
        self, known: _PeerTransports, peer_transport: PeerTransport
    ) -> list[PeerTransportLost]:
        try:
            peer_transport.attach()
        except BatonError as exc:
            self._back_off(known, peer_transport, str(exc))
            return [PeerTransportLost(known.peer, peer_transport.kind)]
        peer_transport.state = PeerTransportState.ATTACHING
        return []

    def _back_off(self, known: _PeerTransports, peer_transport: PeerTransport, reason: str) -> None:
        """Leave a route alone; the first time in a row it is the operator's business."""
        is_first = not peer_transport.backoff.num_failures
        delay_s = peer_transport.backoff.record_failure(self._clock.now())
        peer_transport.reason = reason
        peer_transport.drop()
        peer, kind = known.peer.name, peer_transport.kind
        if peer_transport.direction == "pull" and not self.can_read(known.peer):
            text = "handoff: %s cannot be read and writes instead: %s: %s"
            logger.log(logging.WARNING if is_first else logging.INFO, text, peer, kind, reason)
        else:
            text = "handoff: %s is not reached by %s, tried again in %.1f s: %s"
            logger.info(text, peer, kind, delay_s, reason)

    def _warn(self, known: _PeerTransports, choice: Choice) -> None:
        pair = choice.expected, choice.used
        if pair in known.warned:
            return
        known.warned.add(pair)
        reason = known.peer_transports[choice.expected].reason or "it failed this handoff"
        logger.warning(
            "handoff: %s is reached by %s, not %s: %s",
            known.peer.name,
            choice.used,
            choice.expected,
            reason,
        )

    def _can_be_tried(self, peer: Peer, peer_transport: PeerTransport) -> bool:
        """Whether both sides have a probe buffer for it: one that failed then has to be probed."""
        kind, theirs = peer_transport.kind, () if peer.hello is None else peer.hello.probe_buffers
        return kind in self._probed_transports and any(each.transport == kind for each in theirs)

    def _find(
        self, transport: Transport, remote: RemoteId
    ) -> tuple[_PeerTransports, PeerTransport] | None:
        for known in self._by_peer.values():
            peer_transport = known.peer_transports.get(transport.kind)
            if (
                peer_transport is not None
                and peer_transport.transport is transport
                and remote in peer_transport.remotes.values()
            ):
                return known, peer_transport
        return None


def _find_descriptors(peer: Peer, kind: str) -> dict[str, RegionDescriptor]:
    """A transport's descriptors of a peer's regions: of raw KV, and of each encoding."""
    views = {RAW: peer.negotiated, **peer.encoded_views}
    return {
        encoding: region
        for encoding, negotiated in views.items()
        for region in negotiated.theirs.regions
        if region.transport == kind
    }


REFERENCE: Final = "reference"
"""In place of a transport, in traces of handoffs in which nothing moved."""


class TransportUsage(MutableRecord):
    """Bytes by transport. A transfer over another one than expected is never lost in the sum."""

    _bytes: dict[str, int] = msgspec.field(default_factory=dict)
    _mismatch: tuple[str, str] | None = None

    def record_choice(self, choice: Choice) -> None:
        """One transfer, as it was chosen."""
        self.add_bytes(choice.used, choice.shape.num_bytes)
        if choice.expected != choice.used and self._mismatch is None:
            self._mismatch = choice.expected, choice.used

    def add_bytes(self, transport: str, num_bytes: int) -> None:
        """One transfer that the peer chose."""
        self._bytes[transport] = self._bytes.get(transport, 0) + num_bytes

    def record_failover(self, expected: str, used: str) -> None:
        """A transport failed, and another one went on."""
        self._mismatch = self._mismatch or (expected, used)

    def write_into(self, trace: RequestSpan) -> None:
        """The pair that the trace shows: a mismatch if there was one, else what carried most."""
        if self._mismatch is not None:
            trace.expected_transport, trace.transport = self._mismatch
        elif self._bytes:
            most = max(self._bytes, key=self._bytes.__getitem__)
            trace.expected_transport = trace.transport = most


@dataclass(frozen=True, slots=True)
class LinkOptions:
    """The rule, and the bounds of measuring, for each peer and direction.

    By rule "listed" nothing is measured, and the first transport that works carries everything.
    """

    rule: ChoiceRule = "measured"
    bounds: ProbeBounds = field(default_factory=ProbeBounds)
