"""When a process that died may start again. Pure: instants come in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from baton.clock import Instant


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """At most `max_restarts` in any `window_s`; each waits twice as long as the one before."""

    max_restarts: int = 5
    window_s: float = 60.0
    first_delay_s: float = 0.5
    max_delay_s: float = 8.0


class RestartBudget:
    """One process's restarts of late. Owned by the launcher's event loop."""

    def __init__(self, policy: RestartPolicy) -> None:
        self._policy = policy
        self._recent: list[Instant] = []

    def next_delay_s(self, now: Instant) -> float | None:
        """Count one more death; how long to wait before the restart, or None: no more of them."""
        self._recent = [at for at in self._recent if now - at < self._policy.window_s]
        if len(self._recent) >= self._policy.max_restarts:
            return None
        delay_s = self._policy.first_delay_s * 2 ** len(self._recent)
        self._recent.append(now)
        return float(min(delay_s, self._policy.max_delay_s))

    @property
    def num_recent(self) -> int:
        """Restarts granted within the window that ended at the last call."""
        return len(self._recent)
