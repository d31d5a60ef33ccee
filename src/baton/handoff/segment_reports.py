"""What the kernel sent over the transports' connections, reported by peer every few seconds.

A transport knows its peers by their epochs alone; here these get their names and distances.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Final

from baton.telemetry.transfers import PeerSegments
from baton.transfer.interface import CountsSegments, Transport

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from baton.clock import Instant
    from baton.handoff.peers import Peer
    from baton.ids import Epoch
    from baton.transfer.links.choice import LinkObserver

INTERVAL_S: Final = 2.5
"""Half of that at which a gateway reads the report."""
MAX_PEERS: Final = 2048
"""Whose names are known, those included whose link has ended."""


class SegmentReporter:
    """Owner: the agent's thread."""

    def __init__(
        self, transports: Sequence[Transport], peers: Iterable[Peer], observer: LinkObserver
    ) -> None:
        self._counters = [
            (each.kind, each) for each in transports if isinstance(each, CountsSegments)
        ]
        self._peers, self._observer = peers, observer
        self._names: OrderedDict[Epoch, tuple[str, str]] = OrderedDict()
        self._due_at = 0.0

    def tick(self, now: Instant) -> None:
        """Report, if it is time."""
        if now < self._due_at or not self._counters:
            return
        self._due_at = now + INTERVAL_S
        for peer in self._peers:
            self.remember(peer)
        for kind, counter in self._counters:
            taken = counter.take_segments()
            if taken is not None:
                named = [
                    PeerSegments(*self._names[epoch], counts)
                    for epoch, counts in taken.items()
                    if epoch in self._names
                ]
                self._observer.sent(kind, named)

    def remember(self, peer: Peer) -> None:
        """Its connections may be closed after its link has ended, and are counted then."""
        if peer.hello is None or not self._counters:
            return
        self._names[peer.hello.epoch] = peer.name, peer.distance
        self._names.move_to_end(peer.hello.epoch)
        if len(self._names) > MAX_PEERS:
            self._names.popitem(last=False)
