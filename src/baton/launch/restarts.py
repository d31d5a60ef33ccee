"""When a process that ended is started again. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from baton.clock import Instant

MAX_DOUBLINGS: Final = 30


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """Each restart waits twice as long as the one before.

    A process that has served for `stable_s` before it ends starts again after `first_delay_s`. One
    that ends again after `max_restarts` restarts without that has ended too often.
    """

    max_restarts: int = 5
    stable_s: float = 60.0
    first_delay_s: float = 0.5
    max_delay_s: float = 300.0


class RestartHistory:
    """One process's ends in succession. Owned by one event loop."""

    def __init__(self, policy: RestartPolicy) -> None:
        self.policy = policy
        self._ready_at: Instant | None = None
        self.num_ends = 0

    def note_ready(self, now: Instant) -> None:
        """It serves from now on."""
        self._ready_at = now

    def next_delay_s(self, now: Instant) -> float:
        """Count one more end: how long to wait before the restart."""
        policy = self.policy
        if self._ready_at is not None and now - self._ready_at >= policy.stable_s:
            self.num_ends = 0
        self._ready_at = None
        self.num_ends += 1
        num_doublings = min(self.num_ends - 1, MAX_DOUBLINGS)
        return min(policy.first_delay_s * 2.0**num_doublings, policy.max_delay_s)

    @property
    def has_ended_too_often(self) -> bool:
        """Stays true until it has served for long enough, and ended after that."""
        return self.num_ends > self.policy.max_restarts
