"""How far another process's monotonic clock is from ours, by round trips, with its error bound.

A request that was sent at `sent_at` and answered at `received_at` with the other clock's `at_s`
shows that `at_s` was read between the two. The offset `at_s - (sent_at + received_at) / 2` is
therefore wrong by half the round trip at most, and by what the clocks drift apart since `sent_at`:
it may have been read then.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import msgspec

MAX_DRIFT: Final = 1e-4
"""Seconds a second by which two clocks may drift apart: twice what crystals are specified for."""


class ClockEstimate(msgspec.Struct, frozen=True):
    """`offset_s`: their clock minus ours; right to within `error_s` seconds."""

    offset_s: float
    error_s: float


SAME_CLOCK: Final = ClockEstimate(0.0, 0.0)


@dataclass(frozen=True, slots=True)
class _Sample:
    offset_s: float
    half_trip_s: float
    sent_at: float

    def error_s(self, now: float) -> float:
        return self.half_trip_s + MAX_DRIFT * max(0.0, now - self.sent_at)


class ClockOffset:
    """One other process's clock. Keeps the sample whose bound is tightest now. Reads no clock."""

    def __init__(self) -> None:
        self._domain = ""
        self._is_same = False
        self._best: _Sample | None = None

    def observe_same(self, domain: str) -> None:
        """The other process reads the same clock as we do."""
        self._domain, self._is_same, self._best = domain, True, None

    def observe(self, domain: str, at_s: float, sent_at: float, received_at: float) -> None:
        """Its clock, named `domain`, showed `at_s` between `sent_at` and `received_at` of ours."""
        half_trip_s = (received_at - sent_at) / 2
        if half_trip_s < 0:
            return
        new = _Sample(at_s - (sent_at + received_at) / 2, half_trip_s, sent_at)
        best, before = self._best, self._domain
        self._domain, self._is_same = domain, False
        if best is None or before != domain:  # the first, or its host was started again
            self._best = new
            return
        error_s = best.error_s(received_at)
        new_error_s = new.error_s(received_at)
        has_jumped = abs(new.offset_s - best.offset_s) > error_s + new_error_s
        if has_jumped or new_error_s <= error_s:
            self._best = new

    def estimate(self, now: float) -> ClockEstimate | None:
        """The offset as it is known now; None before the first round trip."""
        if self._is_same:
            return SAME_CLOCK
        best = self._best
        return None if best is None else ClockEstimate(best.offset_s, best.error_s(now))
