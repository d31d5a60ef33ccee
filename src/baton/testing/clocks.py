"""A clock that tests advance by hand."""

from __future__ import annotations

from baton.clock import Instant, UnixTime


class ManualClock:
    """A `Clock` for tests: starts at `now_s`, and stands still until `advance`."""

    def __init__(self, now_s: float = 1_000.0, unix_s: float = 1_800_000_000.0) -> None:
        self._now_s, self._unix_s = now_s, unix_s

    def now(self) -> Instant:
        """See `Clock`."""
        return Instant(self._now_s)

    def thread_time_s(self) -> float:
        """See `Clock`: whatever is done takes all of the time that passes."""
        return self._now_s

    def unix_now(self) -> UnixTime:
        """See `Clock`."""
        return UnixTime(self._unix_s)

    def advance(self, seconds: float) -> None:
        """Let both clocks run on by `seconds`.

        Raises:
            ValueError: a clock does not run backwards.
        """
        if seconds < 0:
            raise ValueError(f"time cannot go back by {-seconds} s")
        self._now_s += seconds
        self._unix_s += seconds
