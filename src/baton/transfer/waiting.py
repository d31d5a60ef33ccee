"""How a thread waits that others talk to: it looks again for a moment before it goes to sleep.

To be woken takes several times as long as most answers of a peer on the same host take to come. So
where answers have come quickly of late, the next one is awaited awake. What that may cost is
bounded: a thread that has nothing to hear, or hears now and then, sleeps at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

    from baton.clock import Clock

LONGEST_AWAKE_S: Final = 0.0005
"""Several times what a peer on this host takes to answer that is awake itself."""
MIN_STREAK: Final = 4
MAX_STREAK: Final = 64
ASLEEP: Final = 4
"""How much longer the same answer takes to come to a sleeper: both sides' cores are idle then."""

R = TypeVar("R")


class Patience:
    """Whether the next wait is begun awake, from how the last ones went. Pure.

    A *short* wait is one of up to `longest_s` seconds, or `ASLEEP` times that asleep. After so many
    short ones in a row as `MIN_STREAK` says, waits are begun awake, for `longest_s` at most. One
    that was in vain ends that, and doubles the streak that it takes to begin again; one that was
    not halves it.
    """

    def __init__(self, longest_s: float) -> None:
        self._longest_s = longest_s
        self._num_short = 0
        self._needed = MIN_STREAK

    @property
    def awake_s(self) -> float:
        """For how long the next wait is spent awake: 0 or `longest_s`."""
        return self._longest_s if self._num_short >= self._needed else 0.0

    def note(self, waited_s: float) -> None:
        """A wait is over; it took so long, awake and asleep."""
        was_awake = self._num_short >= self._needed
        if waited_s <= self._longest_s * (1 if was_awake else ASLEEP):
            self._num_short += 1
            if was_awake:
                self._needed = max(MIN_STREAK, self._needed // 2)
        else:
            self._num_short = 0
            if was_awake:
                self._needed = min(MAX_STREAK, self._needed * 2)


class Waiting:
    """One thread's waits. `longest_s` 0: it always sleeps."""

    def __init__(self, clock: Clock, longest_s: float) -> None:
        self._clock, self._patience = clock, Patience(longest_s)

    def wait(self, look: Callable[[float], list[R]], timeout_s: float) -> list[R]:
        """What `look(timeout_s)` finds, which sleeps so long at most; `look(0)` does not.

        Between two looks the interpreter's lock is free, so other threads of the process run.
        """
        clock, awake_s = self._clock, self._patience.awake_s
        began = clock.now()
        found: list[R] = []
        if awake_s > 0:
            end = began + awake_s
            while not (found := look(0)) and clock.now() < end:
                pass
        if not found:
            found = look(timeout_s)
        self._patience.note(clock.now() - began)
        return found
