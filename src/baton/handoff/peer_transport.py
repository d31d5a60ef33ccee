"""One transport to one peer, in one direction: how it stands, what it costs, what it carries."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from baton.transfer.links.choice import Backoff, Outcome
from baton.transfer.links.cost_model import TransferShape

if TYPE_CHECKING:
    from baton.clock import Instant
    from baton.transfer.interface import RegionDescriptor, RemoteId, Transport
    from baton.transfer.links.choice import Choice, Direction
    from baton.transfer.links.cost_model import LinkModel


class PeerTransportState(StrEnum):
    """Whether a route can be gone."""

    ATTACHING = "attaching"
    UP = "up"
    HALF_OPEN = "half-open"  # attached; it failed before, and a probe decides whether it works
    DOWN = "down"  # until its backoff is over


@dataclass(slots=True)
class _Period:
    """From the first transfer over an idle route; `filled_at` is when the last was submitted."""

    began_at: Instant
    filled_at: Instant
    largest: TransferShape
    num_transfers: int = 0
    num_bytes: int = 0
    num_descriptors: int = 0
    predicted_s: float = 0.0


@dataclass(slots=True, eq=False)
class PeerTransport:
    """A way to write into a peer's pages, or to read them. Owner: the agent's thread."""

    transport: Transport
    descriptor: RegionDescriptor
    direction: Direction
    model: LinkModel
    state: PeerTransportState = PeerTransportState.DOWN
    remote: RemoteId | None = None
    reason: str = ""
    backoff: Backoff = field(default_factory=Backoff)
    _num_under_way: int = 0
    _period: _Period | None = None

    @property
    def kind(self) -> str:
        """The transport's name."""
        return self.transport.kind

    @property
    def attached(self) -> RemoteId:
        """The remote of a route that is up."""
        if self.remote is None:
            raise AssertionError(f"{self.kind} is not attached")
        return self.remote

    @property
    def is_new(self) -> bool:
        """Whether it is being attached and never failed: worth waiting for."""
        return self.state is PeerTransportState.ATTACHING and not self.backoff.num_failures

    @property
    def is_idle(self) -> bool:
        """Whether it carries nothing just now."""
        return self._num_under_way == 0

    def drop(self) -> None:
        """Forget the remote, whose transfers fail."""
        remote, self.remote = self.remote, None
        self.state = PeerTransportState.DOWN
        if remote is not None:
            self.transport.detach(remote)

    def submitted(self, choice: Choice, before: Instant, after: Instant) -> None:
        """A transfer was submitted, which took from `before` to `after`."""
        period = self._period
        if period is None:
            period = self._period = _Period(before, after, choice.shape)
        period.filled_at = after
        period.largest = max(period.largest, choice.shape, key=lambda shape: shape.num_bytes)
        period.num_transfers += 1
        period.num_bytes += choice.shape.num_bytes
        period.num_descriptors += choice.shape.num_descriptors
        period.predicted_s += choice.predicted_s
        self._num_under_way += 1

    def ended(self, now: Instant) -> Outcome | None:
        """A transfer succeeded: what was carried, if it was the last one under way.

        A transfer is a measurement only where it was the only one under way, or where it was
        waited for longer than it was being filled (in which time this side did other work too).
        """
        self._num_under_way -= 1
        period = self._period
        if period is None or self._num_under_way:
            return None
        self._period = None
        self.backoff.record_success()
        observed_s = now - period.began_at
        waited_s, filling_s = now - period.filled_at, period.filled_at - period.began_at
        teaches = period.num_transfers == 1 or waited_s > filling_s
        if teaches:
            shape = TransferShape(period.num_bytes, period.num_descriptors)
            self.model = self.model.refine(shape, observed_s, alike=period.largest)
        return Outcome(
            transport=self.kind,
            direction=self.direction,
            num_transfers=period.num_transfers,
            num_bytes=period.num_bytes,
            predicted_s=period.predicted_s,
            observed_s=observed_s,
            refined=teaches,
        )

    def failed(self) -> None:
        """A transfer failed: the period that it was in is no measurement."""
        self._num_under_way -= 1
        self._period = None
