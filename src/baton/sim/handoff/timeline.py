"""Virtual time: what happens when, in an order that the seed alone decides."""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import TYPE_CHECKING

from baton.clock import Instant, UnixTime

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random

EPOCH_S = 1_800_000_000.0
MAX_STEP = 200_000
"""Happenings of one run: more are a livelock."""


class StuckError(BaseException):
    """So much happened that it will go on without limit."""


class Timeline:
    """What is to happen, by time; of equal times, what was asked first.

    One thread owns a run. `noise` is its only source of chance. `now_s` begins at 0.
    """

    def __init__(self, rng: Random, *, keeps_log: bool) -> None:
        self.now_s = 0.0
        self.rng = rng
        self.log: list[str] | None = [] if keeps_log else None
        self.num_steps = 0
        self._next = 0
        self._queue: list[tuple[float, int, Callable[[], None]]] = []

    def after(self, delay_s: float, action: Callable[[], None]) -> None:
        """Have something happen `delay_s` from now."""
        self.at(self.now_s + delay_s, action)

    def at(self, at_s: float, action: Callable[[], None]) -> None:
        """Have something happen at an instant."""
        self._next += 1
        heapq.heappush(self._queue, (at_s, self._next, action))

    def step(self) -> bool:
        """Let the next thing happen; whether there was one.

        Raises:
            StuckError: a run does not end.
        """
        if not self._queue:
            return False
        at_s, _, action = heapq.heappop(self._queue)
        self.now_s = max(self.now_s, at_s)
        self.num_steps += 1
        if self.num_steps > MAX_STEP:
            raise StuckError(f"{self.num_steps} steps, and no end")
        action()
        return True

    def sleep(self, seconds: float) -> None:
        """Let time pass for who called, in the middle of what it does: others go on."""
        until_s = self.now_s + seconds
        while self._queue and self._queue[0][0] <= until_s:
            self.step()
        self.now_s = max(self.now_s, until_s)

    def note(self, who: str, what: str) -> None:
        """Write a line of the log, if one is kept."""
        if self.log is not None:
            self.log.append(f"{self.now_s * 1000:10.3f} ms  {who:<8} {what}")


@dataclass(frozen=True, slots=True)
class SkewedClock:
    """A host's clock: it began at another instant, runs at another rate, and is set wrong."""

    timeline: Timeline
    offset_s: float
    rate: float
    unix_skew_s: float

    def now(self) -> Instant:
        """See `Clock`."""
        return Instant(self.offset_s + self.timeline.now_s * self.rate)

    def thread_time_s(self) -> float:
        """See `Clock`."""
        return self.timeline.now_s

    def unix_now(self) -> UnixTime:
        """See `Clock`."""
        return UnixTime(EPOCH_S + self.timeline.now_s + self.unix_skew_s)
