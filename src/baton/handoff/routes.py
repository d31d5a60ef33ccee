"""Which transport reaches a peer: tried in order of preference, and remembered with proof.

A route is found once for each link to a peer, and serves one direction: this worker writes to the
peers that dialed it, and reads from those that it dialed. `expected` is the first transport that
both sides have; `used` is the one that attached. They differ only where an attempt failed, and then
the reason is kept: no slow path is silent.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from baton.errors import BatonError, PeerUnreachableError

if TYPE_CHECKING:
    from baton.errors import TransferError
    from baton.handoff.peers import Peer
    from baton.transfer.interface import RegionDescriptor, RemoteId, Transport

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Route:
    """A way to write into a peer's pages, or to read them."""

    transport: Transport
    remote: RemoteId
    expected: str

    @property
    def used(self) -> str:
        """The transport's name."""
        return self.transport.kind


@dataclass(frozen=True, slots=True)
class RouteFound:
    """The peer's pages can be reached."""

    peer: Peer
    route: Route


@dataclass(frozen=True, slots=True)
class RouteLost:
    """The peer's pages cannot be reached: nothing attached, or what was attached broke."""

    peer: Peer
    error: TransferError


@dataclass(slots=True)
class _Search:
    """The attempts at one peer. `route` is set once one attached."""

    peer: Peer
    candidates: list[tuple[Transport, RegionDescriptor]]
    reads: bool
    expected: str = field(init=False)
    attempt: tuple[Transport, RemoteId] | None = None
    route: Route | None = None
    reasons: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.expected = self.candidates[0][0].kind


class RouteTable:
    """Routes from this worker to its peers. Owner: the agent's thread.

    `transports` are in order of preference.
    """

    def __init__(self, transports: tuple[Transport, ...]) -> None:
        self._transports = transports
        self._searches: dict[int, _Search] = {}
        self._unreadable: set[int] = set()

    def find(self, peer: Peer) -> Route | None:
        """The route, if it is known."""
        search = self._searches.get(id(peer))
        return search.route if search else None

    def can_read(self, peer: Peer) -> bool:
        """Whether the first transport in common reads, and never failed to attach to this peer."""
        candidates = self._candidates(peer)
        return (
            bool(candidates)
            and candidates[0][0].capabilities.reads
            and id(peer) not in self._unreadable
        )

    def seek(self, peer: Peer) -> RouteLost | None:
        """Begin to look for a way to write, unless that was begun; answers if it is hopeless."""
        if id(peer) in self._searches:
            return None
        candidates = self._candidates(peer)
        if not candidates:
            ours = ", ".join(t.kind for t in self._transports)
            theirs = ", ".join(region.transport for region in peer.met.theirs.regions) or "none"
            error = PeerUnreachableError(
                f"no transport in common with {peer.name}: {ours} here, {theirs} there"
            )
            return RouteLost(peer, error)
        return self._begin(_Search(peer, candidates, reads=False))

    def seek_to_read(self, peer: Peer) -> RouteLost | None:
        """As `seek`, by the first transport in common alone; `can_read` holds."""
        if id(peer) in self._searches:
            return None
        candidates = self._candidates(peer)[:1]
        return self._begin(_Search(peer, candidates, reads=True))

    def attached(self, transport: Transport, remote: RemoteId) -> RouteFound | None:
        """A transport says that a remote can be reached."""
        search = self._by_attempt(transport, remote)
        if search is None:
            return None
        search.route = Route(transport, remote, search.expected)
        if transport.kind != search.expected:
            logger.warning(
                "handoff: %s is reached by %s, not %s: %s",
                search.peer.name,
                transport.kind,
                search.expected,
                "; ".join(search.reasons),
            )
        return RouteFound(search.peer, search.route)

    def lost(self, transport: Transport, remote: RemoteId, error: BatonError) -> RouteLost | None:
        """A remote is gone, or could not be attached; None while another transport is tried."""
        search = self._by_attempt(transport, remote)
        if search is None:
            return None
        transport.detach(remote)
        search.reasons.append(f"{transport.kind}: {error}")
        if search.route is not None:
            del self._searches[id(search.peer)]
            return RouteLost(search.peer, PeerUnreachableError(search.reasons[-1]))
        return self._try_next(search)

    def forget(self, peer: Peer) -> None:
        """The link to a peer ended: detach, which fails its unfinished transfers."""
        self._unreadable.discard(id(peer))
        search = self._searches.pop(id(peer), None)
        if search is not None and search.attempt is not None:
            transport, remote = search.attempt
            transport.detach(remote)

    def _candidates(self, peer: Peer) -> list[tuple[Transport, RegionDescriptor]]:
        regions = {region.transport: region for region in peer.met.theirs.regions}
        return [
            (transport, regions[transport.kind])
            for transport in self._transports
            if transport.kind in regions
        ]

    def _begin(self, search: _Search) -> RouteLost | None:
        self._searches[id(search.peer)] = search
        return self._try_next(search)

    def _by_attempt(self, transport: Transport, remote: RemoteId) -> _Search | None:
        for search in self._searches.values():
            if search.attempt == (transport, remote):
                return search
        return None

    def _try_next(self, search: _Search) -> RouteLost | None:
        while search.candidates:
            transport, descriptor = search.candidates.pop(0)
            try:
                search.attempt = (transport, transport.attach(descriptor))
            except BatonError as exc:
                search.reasons.append(f"{transport.kind}: {exc}")
            else:
                return None
        del self._searches[id(search.peer)]
        reasons = "; ".join(search.reasons)
        if search.reads:
            self._unreadable.add(id(search.peer))
            logger.warning(
                "handoff: %s cannot be read and writes instead: %s", search.peer.name, reasons
            )
        return RouteLost(search.peer, PeerUnreachableError(reasons))
