"""The transports that reach a peer: all of them attached, and for each transfer the best chosen.

A peer is reached in one direction: this worker writes to the peers that dialed it ("push"), and
reads from those that it dialed ("pull"). What is *expected* to carry a transfer is the best of all
transports that both have; what is *used*, the best of those that work. They differ only where one
failed, and then the reason is kept: no slow path is silent.

    DOWN ── attach ──► ATTACHING ──► UP ── lost ──► DOWN ── its cooling is over ──► ATTACHING …
                           └► ON_TRIAL, if it had failed ── probes are right ──► UP
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from baton.errors import BatonError, PeerUnreachableError
from baton.handoff.route import Route, RouteState
from baton.transfer.links.choosing import Choice, Chooser
from baton.transfer.links.prior import guess
from baton.transfer.links.shape import TransferShape

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from baton.clock import Clock, Instant
    from baton.handoff.messages import Mover
    from baton.handoff.peers import Peer
    from baton.transfer.interface import RegionDescriptor, RemoteId, Transport
    from baton.transfer.links.choosing import ChoiceRule
    from baton.transfer.links.model import LinkModel
    from baton.transfer.links.outcome import Direction, LinkObserver

logger = logging.getLogger(__name__)

TYPICAL: Final = TransferShape(1 << 20, 32)
"""A layer of some hundred tokens: whose best route a handoff waits for before it begins."""


class Reach(StrEnum):
    """Whether a peer's pages can be reached."""

    READY = "ready"
    WAITING = "waiting"  # the best route is being attached
    NONE = "none"


@dataclass(frozen=True, slots=True)
class RouteFound:
    """The peer's pages can be reached, over one more route."""

    peer: Peer


@dataclass(frozen=True, slots=True)
class RouteLost:
    """A route to the peer was not attached, or broke. There may be others."""

    peer: Peer
    transport: str
    error: BatonError


@dataclass(frozen=True, slots=True)
class Way:
    """What carries one transfer, and why."""

    route: Route
    choice: Choice


@dataclass(slots=True)
class _Ways:
    """All routes to one peer, in the order in which they are listed."""

    peer: Peer
    routes: dict[str, Route]
    chooser: Chooser
    warned: set[tuple[str, str]] = field(default_factory=set)

    @property
    def models(self) -> dict[str, LinkModel]:
        return {kind: route.model for kind, route in self.routes.items()}

    def in_state(self, *states: RouteState) -> list[str]:
        return [kind for kind, route in self.routes.items() if route.state in states]


class RouteTable:  # noqa: PLR0904 -- a method for each event (ADR 0005)
    """Routes from this worker to its peers. Owner: the agent's thread.

    `transports` are in the operator's order. `mover` is what this worker prefers as a receiver.
    """

    def __init__(
        self,
        transports: tuple[Transport, ...],
        *,
        clock: Clock,
        rule: ChoiceRule,
        mover: Mover,
        observer: LinkObserver,
    ) -> None:
        self.observer = observer
        self._transports, self._clock = transports, clock
        self._rule: ChoiceRule = rule
        self._mover = mover
        self._ways: dict[int, _Ways] = {}

    def meet(self, peer: Peer) -> list[RouteLost]:
        """A peer introduced itself: attach all that will probably be used; what failed at once."""
        reads = peer.dialed is not None
        if reads and self._mover != "decode":
            return []
        wants_writes = peer.hello is not None and peer.hello.mover == "prefill"
        return self.seek(peer) if reads or wants_writes else []

    def seek(self, peer: Peer) -> list[RouteLost]:
        """Attach all routes to a peer, unless that was begun; what failed at once."""
        if id(peer) in self._ways:
            return []
        ways = self._ways[id(peer)] = _Ways(peer, self._lay(peer), Chooser(self._rule))
        return [lost for route in ways.routes.values() for lost in self._attach(ways, route)]

    def can_read(self, peer: Peer) -> bool:
        """Whether a peer that was dialed is, or soon may be, read."""
        ways = self._ways.get(id(peer))
        return bool(ways and ways.in_state(RouteState.ATTACHING, RouteState.UP))

    def can_be_written(self, peer: Peer, avoid: Collection[str]) -> bool:
        """Whether a peer that was dialed has another transport to write with."""
        return any(kind not in avoid for kind in self._in_common(peer))

    def reach(self, peer: Peer, avoid: Collection[str] = ()) -> Reach:
        """Whether the peer's pages can be reached, by other routes than those to avoid."""
        ways = self._ways.get(id(peer))
        if ways is None:
            return Reach.NONE
        hopeful = [
            kind
            for kind, route in ways.routes.items()
            if kind not in avoid and (route.state is RouteState.UP or route.is_new)
        ]
        choice = ways.chooser.choose(TYPICAL, ways.models, hopeful)
        if choice is not None and ways.routes[choice.used].state is RouteState.UP:
            return Reach.READY
        attaching = set(ways.in_state(RouteState.ATTACHING)) - set(avoid)
        return Reach.WAITING if attaching else Reach.NONE

    def is_up(self, peer: Peer, avoid: Collection[str] = ()) -> bool:
        """Whether something can be moved now, be it by the second best."""
        ways = self._ways.get(id(peer))
        return bool(ways and set(ways.in_state(RouteState.UP)) - set(avoid))

    def choose(self, peer: Peer, shape: TransferShape, avoid: Collection[str] = ()) -> Way | None:
        """What carries one transfer to (or from) the peer; None if nothing can now."""
        ways = self._ways.get(id(peer))
        if ways is None:
            return None
        usable = [kind for kind in ways.in_state(RouteState.UP) if kind not in avoid]
        choice = ways.chooser.choose(shape, ways.models, usable)
        if choice is None:
            return None
        if choice.is_mismatch:
            self._warn(ways, choice)
        route = ways.routes[choice.used]
        self.observer.chosen(route.direction, choice)
        return Way(route, choice)

    def now(self) -> Instant:
        """When a submission begins: for `posted`."""
        return self._clock.now()

    def posted(self, way: Way, began_at: Instant) -> None:
        """A transfer was submitted over the way."""
        way.route.posted(way.choice, began_at, self._clock.now())

    def carried(self, route: Route) -> None:
        """A transfer over the route succeeded."""
        outcome = route.ended(self._clock.now())
        if outcome is not None:
            self.observer.carried(outcome)

    def blame(self, peer: Peer, kind: str, reason: str) -> None:
        """A route did not do what it should: leave it alone for a while."""
        ways = self._ways.get(id(peer))
        route = None if ways is None else ways.routes.get(kind)
        if ways is not None and route is not None and route.state is not RouteState.DOWN:
            self._cool(ways, route, reason)

    def attached(self, transport: Transport, remote: RemoteId) -> RouteFound | None:
        """A transport says that a remote can be reached."""
        found = self._find(transport, remote)
        if found is None:
            return None
        ways, route = found
        on_trial = route.cooling.num_failures and self._can_be_tried(ways.peer, route)
        route.state = RouteState.ON_TRIAL if on_trial else RouteState.UP
        return RouteFound(ways.peer)

    def lost(self, transport: Transport, remote: RemoteId, error: BatonError) -> RouteLost | None:
        """A remote is gone, or could not be attached."""
        found = self._find(transport, remote)
        if found is None:
            return None
        ways, route = found
        self._cool(ways, route, str(error))
        return RouteLost(ways.peer, route.kind, error)

    def explain(self, peer: Peer) -> BatonError:
        """Why a peer cannot be reached."""
        ways = self._ways.get(id(peer))
        if ways is None or not ways.routes:
            ours = ", ".join(transport.kind for transport in self._transports)
            theirs = ", ".join(region.transport for region in peer.met.theirs.regions) or "none"
            return PeerUnreachableError(
                f"no transport in common with {peer.name}: {ours} here, {theirs} there"
            )
        reasons = (f"{r.kind}: {r.reason}" for r in ways.routes.values() if r.reason)
        return PeerUnreachableError("; ".join(reasons) or "no transport is left for this handoff")

    def tick(self) -> list[RouteLost]:
        """Attach again what has cooled; what failed at once."""
        now = self._clock.now()
        return [
            lost
            for ways in self._ways.values()
            for route in ways.routes.values()
            if route.state is RouteState.DOWN and route.cooling.is_over(now)
            for lost in self._attach(ways, route)
        ]

    def forget(self, peer: Peer) -> None:
        """The link to a peer ended: detach, which fails its unfinished transfers."""
        ways = self._ways.pop(id(peer), None)
        if ways is not None:
            for route in ways.routes.values():
                route.drop()

    def of(self, peer: Peer) -> Iterator[Route]:
        """All routes to a peer."""
        ways = self._ways.get(id(peer))
        yield from () if ways is None else tuple(ways.routes.values())

    def surveyed(self, peer: Peer, kind: str, model: LinkModel) -> RouteFound | None:
        """Probes over a route were right, and cost so much."""
        ways = self._ways.get(id(peer))
        route = None if ways is None else ways.routes.get(kind)
        if ways is None or route is None or route.state is RouteState.DOWN:
            return None
        if route.state is RouteState.ON_TRIAL:
            route.state = RouteState.UP
            logger.info("handoff: %s is reached by %s again", peer.name, kind)
        else:
            route.model = model
            self.observer.measured(route.direction, kind, model)
        return RouteFound(ways.peer)

    def _lay(self, peer: Peer) -> dict[str, Route]:
        direction: Direction = "push" if peer.dialed is None else "pull"
        in_common = self._in_common(peer)
        if direction == "pull":
            in_common = self._readable(in_common)
        return {
            kind: Route(transport, descriptor, direction, guess(transport.capabilities))
            for kind, (transport, descriptor) in in_common.items()
        }

    def _readable(
        self, in_common: dict[str, tuple[Transport, RegionDescriptor]]
    ) -> dict[str, tuple[Transport, RegionDescriptor]]:
        """Those that read; by the listed order none, unless the first one does."""
        first = next(iter(in_common.values()), None)
        if self._rule == "listed" and first and not first[0].capabilities.reads:
            return {}
        return {kind: pair for kind, pair in in_common.items() if pair[0].capabilities.reads}

    def _in_common(self, peer: Peer) -> dict[str, tuple[Transport, RegionDescriptor]]:
        regions = {region.transport: region for region in peer.met.theirs.regions}
        return {
            transport.kind: (transport, regions[transport.kind])
            for transport in self._transports
            if transport.kind in regions
        }

    def _attach(self, ways: _Ways, route: Route) -> list[RouteLost]:
        try:
            route.remote = route.transport.attach(route.descriptor)
        except BatonError as exc:
            self._cool(ways, route, str(exc))
            return [RouteLost(ways.peer, route.kind, exc)]
        route.state = RouteState.ATTACHING
        return []

    def _cool(self, ways: _Ways, route: Route, reason: str) -> None:
        """Leave a route alone; the first time in a row it is the operator's business."""
        is_first = not route.cooling.num_failures
        delay_s = route.cooling.failed(self._clock.now())
        route.reason = reason
        route.drop()
        peer, kind = ways.peer.name, route.kind
        if route.direction == "pull" and not self.can_read(ways.peer):
            text = "handoff: %s cannot be read and writes instead: %s: %s"
            logger.log(logging.WARNING if is_first else logging.INFO, text, peer, kind, reason)
        else:
            text = "handoff: %s is not reached by %s, tried again in %.1f s: %s"
            logger.info(text, peer, kind, delay_s, reason)

    def _warn(self, ways: _Ways, choice: Choice) -> None:
        pair = choice.expected, choice.used
        if pair in ways.warned:
            return
        ways.warned.add(pair)
        reason = ways.routes[choice.expected].reason or "it failed this handoff"
        logger.warning(
            "handoff: %s is reached by %s, not %s: %s",
            ways.peer.name,
            choice.used,
            choice.expected,
            reason,
        )

    def _can_be_tried(self, peer: Peer, route: Route) -> bool:
        scratch = () if peer.hello is None else peer.hello.scratch
        is_measured = self._rule == "measured"
        return is_measured and any(each.transport == route.kind for each in scratch)

    def _find(self, transport: Transport, remote: RemoteId) -> tuple[_Ways, Route] | None:
        for ways in self._ways.values():
            route = ways.routes.get(transport.kind)
            if route is not None and route.transport is transport and route.remote == remote:
                return ways, route
        return None
