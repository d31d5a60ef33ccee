"""How fast a queue drains, measured while there is one. Pure: times are given."""

from __future__ import annotations

from math import exp, inf
from typing import Final

RATE_WINDOW_S: Final = 10.0
FORGET_AFTER_S: Final = 60.0
"""An idle queue's rate counts for less: the fleet may be another one."""
LEAST_TAKEN: Final = 4
LEAST_RATE_S: Final = 0.25
"""Before so many were taken in so long, the rate is not known."""


class DrainRate:
    """Tokens that are taken in a second while others wait; the latest count most."""

    def __init__(self) -> None:
        self._tokens = self._seconds = 0.0
        self._num_taken = 0
        self._at: float | None = None
        self._idle_since = -inf

    def begin(self, now: float) -> None:
        """The queue is no longer empty."""
        if self._idle_since > -inf:
            self._decay(exp((self._idle_since - now) / FORGET_AFTER_S))
        self._at = now

    def take(self, num_tokens: int, now: float) -> None:
        """A request was taken."""
        self._elapse(now)
        self._tokens += num_tokens
        self._num_taken = min(LEAST_TAKEN, self._num_taken + 1)

    def end(self, now: float) -> None:
        """The queue is empty."""
        self._elapse(now)
        self._at, self._idle_since = None, now

    def find(self, now: float) -> float | None:
        """Tokens a second; None: not known."""
        self._elapse(now)
        if self._num_taken < LEAST_TAKEN or self._seconds < LEAST_RATE_S or self._tokens <= 0:
            return None
        return self._tokens / self._seconds

    def _elapse(self, now: float) -> None:
        if self._at is not None and now > self._at:
            elapsed_s = now - self._at
            self._decay(exp(-elapsed_s / RATE_WINDOW_S))
            self._seconds += elapsed_s
            self._at = now

    def _decay(self, share: float) -> None:
        self._tokens *= share
        self._seconds *= share
