"""How long a transport that failed is left alone: doubled each time. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from baton.clock import Instant

MIN_BACKOFF_S: Final = 0.5
MAX_BACKOFF_S: Final = 60.0
_LONG_AGO: Final = Instant(0.0)


@dataclass(slots=True)
class Backoff:
    """One link's failures in a row."""

    num_failures: int = 0
    until: Instant = _LONG_AGO

    def record_failure(self, now: Instant) -> float:
        """One more failure: for how many seconds it cools."""
        delay_s = min(MAX_BACKOFF_S, MIN_BACKOFF_S * 2.0**self.num_failures)
        self.num_failures = min(self.num_failures + 1, 16)
        self.until = Instant(now + delay_s)
        return delay_s

    def record_success(self) -> None:
        """It carried something: the next failure is a first one."""
        self.num_failures = 0

    def is_over(self, now: Instant) -> bool:
        """Whether it may be tried again."""
        return now >= self.until
