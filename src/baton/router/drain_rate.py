"""How fast a queue drains, measured while there is one. Pure: times are given."""

from __future__ import annotations

from math import exp, inf
from typing import Final

RATE_WINDOW_S: Final = 10.0
LEAST_COUNTED: Final = 8
"""So many of the latest count, however long they took: a pause is not what is to be expected."""
FORGET_AFTER_S: Final = 60.0
"""An idle queue's rate counts for less: the fleet may be another one."""
LEAST_TAKEN: Final = 4
LEAST_RATE_S: Final = 0.25
"""Before so many were taken in so long, the rate is not known."""


class DrainRate:
    """Tokens that are taken in a second while others wait; the latest count most.

    Times between two that were taken count. That until the first one does not: it is what the
    workers need for those that they got at once, before there was a queue.
    """

    def __init__(self) -> None:
        self._tokens = self._seconds = 0.0
        self._num_taken = 0
        self._last_at: float | None = None
        self._idle_since = -inf

    def begin(self, now: float) -> None:
        """The queue is no longer empty."""
        if self._idle_since > -inf:
            self._decay((now - self._idle_since) / FORGET_AFTER_S)

    def take(self, num_tokens: int, now: float) -> None:
        """A request was taken."""
        if self._last_at is not None:
            gap_s = max(0.0, now - self._last_at)
            self._decay(min(gap_s / RATE_WINDOW_S, 1 / LEAST_COUNTED))
            self._seconds += gap_s
            self._tokens += num_tokens
            self._num_taken = min(LEAST_TAKEN, self._num_taken + 1)
        self._last_at = now

    def end(self, now: float) -> None:
        """The queue is empty."""
        self._last_at, self._idle_since = None, now

    def find(self, now: float) -> float | None:
        """Tokens a second; None: not known. Less, the longer none has been taken."""
        if self._num_taken < LEAST_TAKEN or self._seconds < LEAST_RATE_S or self._tokens <= 0:
            return None
        since_s = 0.0 if self._last_at is None else max(0.0, now - self._last_at)
        return self._tokens / (self._seconds + since_s)

    def _decay(self, times: float) -> None:
        share = exp(-times)
        self._tokens *= share
        self._seconds *= share
