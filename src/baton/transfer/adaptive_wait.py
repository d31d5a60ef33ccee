"""How a thread waits for peers and is woken: it polls for a moment before it sleeps.

Waking a thread takes several times as long as most answers of a peer on the same host. So where
answers came quickly in the last waits, the next wait begins with a spin. Its cost is bounded: a
thread that receives nothing, or only now and then, sleeps at once.

Two threads that wait for each other can keep each other asleep: where waking takes longer than a
spin (a virtual machine's core that its host has given away: 0.8 ms), the one that spins times out
before the other runs. So a spin that missed the answer by little is tried again, longer, a few
times: enough for the other side to see quick answers. To keep the two from doing so in step without
limit, streaks are drawn at random.
"""

from __future__ import annotations

import os
from random import Random
from typing import TYPE_CHECKING, Final, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

    from baton.clock import Clock

MAX_SPIN_S: Final = 0.0005
"""Several times what a peer on this host takes to answer if it does not have to be woken."""
MIN_STREAK: Final = 4
MAX_STREAK: Final = 16
SLEEP_FACTOR: Final = 4
"""How much longer the same answer takes to come to a sleeper: both sides' cores are idle then."""
NUM_LONG_SPINS: Final = 2
"""Spins of `SLEEP_FACTOR` times the length, in a row."""
MAX_LONG_SPIN_PAUSE: Final = 16
"""Spins without result that are not followed by trials, after trials that did not help."""

R = TypeVar("R")


class SpinPolicy:
    """Whether the next wait begins with a spin, from the last waits. Pure, except for draws.

    A *short* wait takes up to `max_spin_s` seconds, or `SLEEP_FACTOR` times that if it slept. After
    a streak of short waits, waits spin for `max_spin_s` at most. A spin without result ends that,
    and doubles the streak needed to begin again; a spin with a result halves it. If a spin had no
    result but the wait was short by the measure for sleep, up to `NUM_LONG_SPINS` spins of that
    length follow; the first of those that is short by itself ends them. Trials that did not help
    become rarer the more there were: some peers just take so long.

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
        """A wait is over; it took so long, spin and sleep."""
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
        """A spin missed the answer by little: begin a row of trials, or continue one."""
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


class Waker(Protocol):
    """Wakes a thread that sleeps in `select`. `wake` may be called on any thread."""

    def fileno(self) -> int:
        """Readable once it was rung."""
        ...

    def wake(self) -> None:
        """Wake the sleeper; again before it woke does nothing more."""
        ...

    def clear(self) -> None:
        """The sleeper woke."""
        ...

    def close(self) -> None:
        """No thread sleeps here any more; waking it does nothing then."""
        ...


class PipeWaker:
    """See `Waker`."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._is_closed = False

    def fileno(self) -> int:
        """See `Waker`."""
        return self._read

    def wake(self) -> None:
        """See `Waker`."""
        if self._is_closed:  # the descriptor may be another file's by now
            return
        try:
            os.write(self._write, b"\0")
        except BlockingIOError:
            pass  # it is full of wake-ups already
        except OSError:
            if not self._is_closed:
                raise

    def clear(self) -> None:
        """See `Waker`."""
        os.read(self._read, 65_536)

    def close(self) -> None:
        """See `Waker`."""
        self._is_closed = True
        os.close(self._read)
        os.close(self._write)
