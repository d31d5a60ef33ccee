"""How a thread waits that others talk to: it looks again for a moment before it goes to sleep.

To be woken takes several times as long as most answers of a peer on the same host take to come. So
where answers have come quickly of late, the next one is awaited awake. What that may cost is
bounded: a thread that has nothing to hear, or hears now and then, sleeps at once.

Two that wait for each other can hold each other asleep: where to be woken takes longer than a wait
is awake (a virtual machine's core that its host has given away: 0.8 ms), whoever is awake waits
in vain for one who sleeps. So a wait in vain that only just was is tried again, awake for longer,
a few times: enough for the other one to find answers quick. Neither may do so in step with the
other for ever, so streaks are drawn.
"""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Final, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

    from baton.clock import Clock

MAX_SPIN_S: Final = 0.0005
"""Several times what a peer on this host takes to answer that is awake itself."""
MIN_STREAK: Final = 4
MAX_STREAK: Final = 16
SLEEP_FACTOR: Final = 4
"""How much longer the same answer takes to come to a sleeper: both sides' cores are idle then."""
NUM_LONG_SPINS: Final = 2
"""Waits awake for `SLEEP_FACTOR` times as long, in a row."""
MAX_LONG_SPIN_PAUSE: Final = 16
"""Waits in vain that are not followed by trials, after trials that helped nothing."""

R = TypeVar("R")


class SpinPolicy:
    """Whether the next wait is begun awake, from how the last ones went. Pure, but for draws.

    A *short* wait is one of up to `max_spin_s` seconds, or `SLEEP_FACTOR` times that asleep. After
    a streak of short ones waits are begun awake, for `max_spin_s` at most. One that was in vain
    ends that, and doubles the streak that it takes to begin again; one that was not halves it. One
    that was in vain, but would have been short asleep, is followed by `NUM_LONG_SPINS` at most that
    are awake for as long as that; the first of those that is short without it ends them. Trials
    that helped nothing are the rarer the more there were: some peers just take so long.

    Streaks are `MIN_STREAK` at first, and then drawn: half as long to half as long again.
    """

    def __init__(self, max_spin_s: float, rng: Random | None = None) -> None:
        self._max_spin_s, self._rng = max_spin_s, rng or Random()  # noqa: S311 (no secret)
        self._num_short = self._num_long_spins = 0
        self._needed = self._streak = MIN_STREAK
        self._pause = self._num_paused = 0
        self.spin_s = 0.0
        """How long the next wait spins: 0, `max_spin_s` or `SLEEP_FACTOR` times that."""

    def record(self, waited_s: float) -> None:
        """A wait is over; it took so long, awake and asleep."""
        spin_s = self.spin_s
        if waited_s <= self._max_spin_s:
            self._num_short += 1
            if self._num_long_spins:
                self._num_long_spins = self._pause = 0
            if spin_s > 0 and self._needed > MIN_STREAK:
                self._draw_streak(self._needed // 2)
        elif waited_s > self._max_spin_s * SLEEP_FACTOR:
            self._end_streak(spin_s)
        elif spin_s == 0:
            self._num_short += 1
        else:
            self._try_long_spin(spin_s)
        if self._num_long_spins:
            self.spin_s = self._max_spin_s * SLEEP_FACTOR
        else:
            self.spin_s = self._max_spin_s if self._num_short >= self._streak else 0.0

    def _try_long_spin(self, spin_s: float) -> None:
        """A wait awake was in vain, and only just: begin a row of trials, or go on in one."""
        if self._num_long_spins > 1:
            self._num_long_spins -= 1
        elif self._num_long_spins == 1:
            self._pause, self._num_paused = min(MAX_LONG_SPIN_PAUSE, max(1, 2 * self._pause)), 0
            self._end_streak(spin_s)
        elif self._num_paused < self._pause:
            self._num_paused += 1
            self._end_streak(spin_s)
        else:
            self._num_long_spins = NUM_LONG_SPINS

    def _end_streak(self, spin_s: float) -> None:
        self._num_short = self._num_long_spins = 0
        if spin_s > 0:
            self._draw_streak(self._needed * 2)

    def _draw_streak(self, needed: int) -> None:
        if needed <= MIN_STREAK:
            self._needed = self._streak = MIN_STREAK
        else:
            self._needed = min(MAX_STREAK, needed)
            self._streak = self._rng.randint(self._needed // 2, self._needed * 3 // 2)


class AdaptiveWaiter:
    """One thread's waits. `max_spin_s` 0: it always sleeps."""

    def __init__(self, clock: Clock, max_spin_s: float) -> None:
        self._clock, self._policy = clock, SpinPolicy(max_spin_s)

    def wait(self, poll: Callable[[float], list[R]], timeout_s: float) -> list[R]:
        """What `poll(timeout_s)` finds, which sleeps so long at most; `poll(0)` does not.

        Between two looks the interpreter's lock is free, so other threads of the process run.
        """
        clock, spin_s = self._clock, self._policy.spin_s
        began = clock.now()
        found: list[R] = []
        if spin_s > 0:
            end = began + spin_s
            while not (found := poll(0)) and clock.now() < end:
                pass
        if not found:
            found = poll(timeout_s)
        self._policy.record(clock.now() - began)
        return found
