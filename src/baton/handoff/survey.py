"""Measures the links to peers: probes into scratch memory, while no handoff waits.

The side that moves the bytes surveys: one link at a time, small probes first, and each is verified
before the next is made, so that a transport which brings wrong bytes is found here.

    push:  attach ── ProbeAsked ─► ProbeReady ── write ─► completed and Probed ── write … ProbeOver
    pull:  attach ── own landing pages are free ── read ──► completed, looked at ── read …

A peer that answers too late is not measured: its link keeps its prior.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from baton.clock import Instant
from baton.errors import BatonError
from baton.handoff.messages import ProbeAsked, Probed, ProbeNotice, ProbeOver, encode
from baton.handoff.route import RouteState
from baton.ids import new_ticket_id
from baton.transfer.interface import (
    Attached,
    PageRead,
    PageWrite,
    ReadCompleted,
    ReadFailed,
    RemoteLost,
    WriteCompleted,
    WriteFailed,
)
from baton.transfer.links.probes import PLAN, RECOVERY, ProbeSeries
from baton.transfer.links.scratch import digest_of, lay_probe

if TYPE_CHECKING:
    from baton.handoff.landing import Landing
    from baton.handoff.messages import ProbeReady
    from baton.handoff.peers import Peer, PeerTable
    from baton.handoff.route import Route
    from baton.handoff.routes import RouteFound, RouteTable
    from baton.ids import TicketId
    from baton.transfer.interface import RemoteId, TransferEvent, TransferId, Transport
    from baton.transfer.links.probes import Probe, ProbeBounds

logger = logging.getLogger(__name__)

STEP_TIMEOUT_S: Final = 1.0
PATIENCE_S: Final = 2.0
"""A worker that is never idle surveys after so long, between the transfers of its handoffs."""


@dataclass(slots=True, eq=False)
class _Survey:
    """One link that is being measured."""

    peer: Peer
    route: Route
    series: ProbeSeries
    remote: RemoteId
    deadline: Instant
    window: TicketId
    is_attached: bool = False
    is_ready: bool = False
    transfer: TransferId | None = None
    posted_at: Instant | None = None
    took_s: float | None = None
    was_intact: bool | None = None

    @property
    def is_push(self) -> bool:
        return self.route.direction == "push"

    @property
    def flies(self) -> bool:
        return self.posted_at is not None


@dataclass(frozen=True, slots=True)
class _Waiting:
    peer: Peer
    route: Route
    since: Instant


class Surveyor:
    """The surveys of one agent. Owner: the agent's thread."""

    def __init__(
        self, routes: RouteTable, peers: PeerTable, landing: Landing, bounds: ProbeBounds
    ) -> None:
        self._routes, self._peers, self._landing = routes, peers, landing
        self._bounds = bounds
        self._waiting: dict[tuple[int, str], _Waiting] = {}
        self._done: set[tuple[int, str]] = set()
        self._active: _Survey | None = None

    def ask(self, peer: Peer) -> None:
        """Survey the links to a peer that were not yet, and those that are on trial."""
        for route in self._routes.of(peer):
            key = id(peer), route.kind
            is_new = route.state is RouteState.UP and key not in self._done
            if (is_new or route.state is RouteState.ON_TRIAL) and key not in self._waiting:
                self._waiting[key] = _Waiting(peer, route, self._routes.now())

    def forget(self, peer: Peer) -> None:
        """The link to a peer ended."""
        if self._active is not None and self._active.peer is peer:
            self._end(self._active)
        for key in [key for key in (*self._waiting, *self._done) if key[0] == id(peer)]:
            self._waiting.pop(key, None)
            self._done.discard(key)

    def step(self, *, num_handoffs: int, is_moving: bool) -> RouteFound | None:
        """Make the next probe, unless a handoff waits; what was found out, at the end of one."""
        survey = self._active
        if survey is not None and self._routes.now() > survey.deadline:
            self._give_up(survey, "no answer to a probe")
            return None
        if is_moving:
            return None
        if survey is None:
            survey = self._begin_next(num_handoffs)
        if survey is None or survey.flies or not self._is_ready(survey):
            return None
        probe = survey.series.next()
        if probe is None:
            return self._conclude(survey)
        self._post(survey, probe)
        return None

    def heard(self, message: ProbeReady | Probed) -> None:
        """The peer answers."""
        survey = self._active
        if survey is None or survey.window != message.id:
            return
        if isinstance(message, Probed):
            survey.was_intact = message.is_intact
            self._take(survey)
        else:
            survey.is_ready = True

    def moved(self, transport: Transport, event: TransferEvent) -> bool:
        """A transport says something: whether it is about a survey."""
        survey = self._active
        if survey is None or survey.route.transport is not transport:
            return False
        match event:
            case Attached(remote) if remote == survey.remote:
                survey.is_attached = True
                if survey.is_push:
                    self._peers.say(survey.peer, ProbeAsked(survey.window, survey.route.kind))
            case RemoteLost(remote, error) if remote == survey.remote:
                self._give_up(survey, str(error))
            case WriteCompleted(transfer) | ReadCompleted(transfer) if transfer == survey.transfer:
                survey.took_s = self._routes.now() - (survey.posted_at or 0.0)
                self._look(survey)
            case WriteFailed(transfer, error) | ReadFailed(transfer, error) if (
                transfer == survey.transfer
            ):
                self._give_up(survey, str(error))
            case _:
                return False
        return True

    def _begin_next(self, num_handoffs: int) -> _Survey | None:
        now = self._routes.now()
        for key, waiting in tuple(self._waiting.items()):
            route = waiting.route
            on_trial = route.state is RouteState.ON_TRIAL
            if num_handoffs and not on_trial and now - waiting.since < PATIENCE_S:
                continue
            del self._waiting[key]
            self._done.add(key)
            survey = self._begin(waiting.peer, route, on_trial=on_trial)
            if survey is not None:
                return survey
        return None

    def _begin(self, peer: Peer, route: Route, *, on_trial: bool) -> _Survey | None:
        offered = () if peer.hello is None else peer.hello.scratch
        descriptor = next((each for each in offered if each.transport == route.kind), None)
        is_usable = route.state in {RouteState.UP, RouteState.ON_TRIAL}
        if descriptor is None or not is_usable or not self._landing.has_memory:
            return None
        bounds = self._bounds.share(max(1, len(list(self._routes.of(peer)))))
        series = ProbeSeries(bounds, route.model, RECOVERY if on_trial else PLAN)
        try:
            remote = route.transport.attach(descriptor)
        except BatonError as exc:
            logger.info("handoff: %s is not measured over %s: %s", peer.name, route.kind, exc)
            return None
        self._active = _Survey(peer, route, series, remote, self._deadline(), new_ticket_id())
        return self._active

    def _is_ready(self, survey: _Survey) -> bool:
        if not survey.is_attached:
            return False
        if not survey.is_push and not survey.is_ready:
            survey.is_ready = self._landing.try_take(survey.window)
        return survey.is_ready

    def _post(self, survey: _Survey, probe: Probe) -> None:
        copies, region = lay_probe(probe), self._landing.region
        survey.took_s = survey.was_intact = None
        survey.deadline = self._deadline()
        digest = digest_of(probe)
        survey.posted_at = self._routes.now()
        transport = survey.route.transport
        try:
            if survey.is_push:
                notice = encode(ProbeNotice(probe.num_pages, digest))
                survey.transfer = transport.submit(
                    PageWrite(survey.remote, survey.window, region.handle, copies, notice)
                )
            else:
                survey.transfer = transport.read(PageRead(survey.remote, region.handle, copies))
        except BatonError as exc:
            self._give_up(survey, str(exc))

    def _look(self, survey: _Survey) -> None:
        """A read is here: see what it brought. A write's bytes are the peer's to look at."""
        probe = survey.series.next()
        if not survey.is_push and probe is not None:
            survey.was_intact = self._landing.is_intact(probe.num_pages, digest_of(probe))
        self._take(survey)

    def _take(self, survey: _Survey) -> None:
        if survey.took_s is None or survey.was_intact is None:
            return
        if not survey.was_intact:
            self._give_up(survey, "a probe brought other bytes than were sent", is_wrong=True)
            return
        survey.series.made(survey.took_s)
        survey.posted_at = survey.transfer = None

    def _conclude(self, survey: _Survey) -> RouteFound | None:
        self._end(survey)
        model, kind = survey.series.model, survey.route.kind
        logger.info(
            "handoff: %s over %s (%s): %.1f us, %.3f us a descriptor, %.2f GB/s",
            survey.peer.name,
            kind,
            survey.route.direction,
            model.latency_s * 1e6,
            model.descriptor_s * 1e6,
            model.bandwidth / 1e9,
        )
        return self._routes.surveyed(survey.peer, kind, model)

    def _give_up(self, survey: _Survey, reason: str, *, is_wrong: bool = False) -> None:
        """The link is not measured; one that is wrong, or on trial, is left alone."""
        self._end(survey)
        kind = survey.route.kind
        logger.info("handoff: %s is not measured over %s: %s", survey.peer.name, kind, reason)
        if is_wrong or survey.route.state is RouteState.ON_TRIAL:
            self._routes.blame(survey.peer, kind, reason)

    def _end(self, survey: _Survey) -> None:
        self._active = None
        survey.route.transport.detach(survey.remote)
        if survey.is_push and survey.is_attached:
            self._peers.say(survey.peer, ProbeOver(survey.window))
        if not survey.is_push and survey.is_ready:
            self._landing.give_back(survey.window)

    def _deadline(self) -> Instant:
        return Instant(self._routes.now() + STEP_TIMEOUT_S)
