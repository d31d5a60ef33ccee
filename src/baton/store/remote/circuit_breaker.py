"""When a server that failed is asked again. Pure: no I/O, no clock.

    closed ──fail──► open ──the back-off is over: try_begin_trial──► half-open
      ▲                ▲────────────────────fail─────────────────────────┤
      └──────────────────────────────pass_trial──────────────────────────┘

Each failure doubles the next back-off. A trial that succeeds does not reset it, a request does: a
server that answers trials and then fails requests is left alone for longer each time.
"""

from __future__ import annotations

from enum import Enum
from typing import Final

from baton.clock import Instant

MIN_BACKOFF_S: Final = 1.0
MAX_BACKOFF_S: Final = 30.0


class BreakerState(Enum):
    """Whether requests are sent."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half-open"


class CircuitBreaker:
    """Of one server, or of one kind of request to it. One owner thread."""

    def __init__(
        self, min_backoff_s: float = MIN_BACKOFF_S, max_backoff_s: float = MAX_BACKOFF_S
    ) -> None:
        self._min_backoff_s, self._max_backoff_s = min_backoff_s, max_backoff_s
        self.state = BreakerState.CLOSED
        self.backoff_s = min_backoff_s
        self.retry_at: Instant = Instant(0.0)

    @property
    def is_closed(self) -> bool:
        """Whether requests may be sent."""
        return self.state is BreakerState.CLOSED

    def fail(self, now: Instant) -> None:
        """A request or the trial failed. Later failures of one outage change nothing."""
        if self.state is BreakerState.OPEN:
            return
        self.state = BreakerState.OPEN
        self.retry_at = Instant(now + self.backoff_s)
        self.backoff_s = min(2 * self.backoff_s, self._max_backoff_s)

    def succeed(self) -> None:
        """A request succeeded. One that was sent before the failure changes nothing."""
        if self.is_closed:
            self.backoff_s = self._min_backoff_s

    def try_begin_trial(self, now: Instant) -> bool:
        """Whether the caller is to send the one trial now."""
        if self.state is not BreakerState.OPEN or now < self.retry_at:
            return False
        self.state = BreakerState.HALF_OPEN
        return True

    def pass_trial(self) -> None:
        """The trial succeeded."""
        if self.state is BreakerState.HALF_OPEN:
            self.state = BreakerState.CLOSED

    def check_invariants(self) -> None:
        """Raise AssertionError if the back-off is out of its bounds."""
        if not self._min_backoff_s <= self.backoff_s <= self._max_backoff_s:
            raise AssertionError(f"a back-off of {self.backoff_s} s")
