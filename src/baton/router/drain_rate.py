"""How fast a queue drains, measured while there is one. Pure: times are given."""

from __future__ import annotations

from math import exp, inf
from typing import Final

RATE_WINDOW_S: Final = 10.0
LEAST_COUNTED: Final = 8
"""So many of the latest count, however long they took: a pause is not what is to be expected."""
FORGET_AFTER_S: Final = 60.0
"""An idle queue's rate counts for less: the fleet may be another one."""
AT_ONCE_S: Final = 0.05
"""Those that are taken within it were taken for the same reason, after the same time."""
LEAST_TAKEN: Final = 4
LEAST_RATE_S: Final = 0.25
"""Before so many were taken in so long, the rate is not known."""


class DrainRate:
    """Tokens that are taken in a second while others wait; the latest count most.

    What is taken counts with the time since something was taken before. The first ones of a queue
    do not: until then the workers computed what they got at once, before there was a queue.
    """

    def __init__(self) -> None:
        self._tokens = self._seconds = 0.0
        self._num_taken = 0
        self._last_at: float | None = None
        self._counts = False
        self._idle_since = -inf

    def begin(self, now: float) -> None:
        """The queue is no longer empty."""
        if self._idle_since > -inf:
            self._decay((now - self._idle_since) / FORGET_AFTER_S)

    def take(self, num_tokens: int, now: float) -> None:
        """A request was taken."""
        gap_s = inf if self._last_at is None else now - self._last_at
        if AT_ONCE_S < gap_s < inf:
            self._decay(min(gap_s / RATE_WINDOW_S, 1 / LEAST_COUNTED))
            self._seconds += gap_s
            self._counts = True
        if self._counts:
            self._tokens += num_tokens
            self._num_taken = min(LEAST_TAKEN, self._num_taken + 1)
        if gap_s > AT_ONCE_S:
            self._last_at = now

    def end(self, now: float) -> None:
        """The queue is empty."""
        self._last_at, self._idle_since, self._counts = None, now, False

    def find(self, now: float) -> float | None:
        """Tokens a second; None: not known. Less, the longer none is taken after another."""
        if self._num_taken < LEAST_TAKEN or self._seconds < LEAST_RATE_S or self._tokens <= 0:
            return None
        since_s = 0.0 if self._last_at is None else max(0.0, now - self._last_at)
        return self._tokens / (self._seconds + since_s)

    def _decay(self, times: float) -> None:
        share = exp(-times)
        self._tokens *= share
        self._seconds *= share
