"""When computed KV is copied into the store, and how much at once: as the engine leaves room.

The engine's thread counts its steps, and this one reads the counts: to know that an engine is
idle takes no wake-up and no call on the engine's side. Pure: its caller reads the clock.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from baton.clock import Instant

if TYPE_CHECKING:
    from baton.handoff.interface import EngineSteps

IDLE_AFTER_S: Final = 0.02
"""Without a step. Also the delay of what is kept first: the answer leaves before it."""
IDLE_SHARE: Final = 0.5
"""Of a core, while the engine is idle: requests arrive on another thread of the same
interpreter."""
BUSY_BATCH_S: Final = 0.003
"""What a batch is to take: a step, or a lookup, that begins meanwhile waits for no more."""
IDLE_BATCH_S: Final = 0.004
"""For what a batch is to compute: while it waits for a disk, more of them are copied."""
LEARNING: Final = 0.2
"""Weight of the latest batch in what an entry is expected to take."""
_LEAST_S: Final = 1e-6


@dataclass(slots=True)
class KeepPace:
    """`share`: of a core, while the engine computes, for copies. Owner: the pool's thread.

    `is_hurried`: the engine waits for the copies.
    """

    steps: EngineSteps
    share: float
    is_hurried: bool = False
    _entry_s: float = field(default=0.0, init=False)
    _entry_used_s: float = field(default=0.0, init=False)
    _used_s: float = field(default=0.0, init=False)
    _ended_at: Instant = field(default=Instant(0.0), init=False)
    _starts_at: Instant = field(default=Instant(0.0), init=False)
    _num_seen: int = field(default=0, init=False)
    _busy_until: Instant = field(default=Instant(0.0), init=False)

    def start(self, now: Instant) -> None:
        """There is something to keep, after a time in which there was nothing."""
        self._starts_at = Instant(now + IDLE_AFTER_S)

    def is_busy(self, now: Instant) -> bool:
        """Whether the engine computes, or has within `IDLE_AFTER_S`, as far as was seen."""
        steps, num_seen = self.steps, self._num_seen
        self._num_seen = steps.num_begun + steps.num_ended
        if self._num_seen != num_seen or steps.num_ended != steps.num_begun:
            self._busy_until = Instant(now + IDLE_AFTER_S)
        return now < self._busy_until

    def compute_wait_s(self, now: Instant) -> float:
        """Seconds until the next batch, or until an engine that is busy may be idle; 0: now."""
        if self.is_hurried:
            return 0.0
        is_busy = self.is_busy(now)
        share = self.share if is_busy else max(self.share, IDLE_SHARE)
        next_at = self._ended_at + self._used_s * (1 / share - 1)
        wait_s = max(0.0, next_at - now, self._starts_at - now)
        return min(wait_s, IDLE_AFTER_S) if is_busy else wait_s

    def count_at_once(self, now: Instant, most: int) -> int:
        """How many entries to copy in one batch: at least one, at most `most`."""
        if not self._entry_s:
            return 1
        if self.is_busy(now):
            return max(1, min(most, int(BUSY_BATCH_S / self._entry_s)))
        return max(1, min(most, int(IDLE_BATCH_S / max(self._entry_used_s, _LEAST_S))))

    def observe(self, now: Instant, took_s: float, used_s: float, num_entries: int) -> None:
        """A batch of so many entries was copied; none: something else was done for them.

        It took `took_s`, of which this thread computed for `used_s`: while it waits, for a server
        or for the interpreter, it delays no step.
        """
        self._used_s, self._ended_at = used_s, now
        if num_entries:
            self._entry_s = _learn(self._entry_s, took_s / num_entries)
            self._entry_used_s = _learn(self._entry_used_s, used_s / num_entries)


def _learn(known_s: float, seen_s: float) -> float:
    known_s = known_s or seen_s
    return known_s + LEARNING * (seen_s - known_s)
