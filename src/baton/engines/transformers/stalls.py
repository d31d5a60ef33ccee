"""When computed KV that nobody takes keeps everybody else waiting.

A prefill worker holds blocks for a decode worker that has no room yet, and that one holds blocks
for prompts which this worker has no room to compute: each waits for the other. Whoever has nothing
to compute for a while, though somebody waits, withdraws the oldest offer that was not granted: its
decode worker computes that prompt, and all others go on. KV that is on its way is not touched.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from baton.clock import Instant

if TYPE_CHECKING:
    from baton.engines.transformers.scheduler import Scheduler

PATIENCE_S: Final = 1.0


class StallWatch:
    """Looks at the scheduler once a turn. Owned by the engine's thread."""

    def __init__(self) -> None:
        self._since: Instant | None = None

    @property
    def ends_at(self) -> Instant | None:
        """When patience ends; None where nobody waits in vain."""
        return None if self._since is None else Instant(self._since + PATIENCE_S)

    def is_over(self, scheduler: Scheduler, now: Instant, *, is_busy: bool) -> bool:
        """Whether an offer is to be withdrawn; the next one has as much time again."""
        if is_busy or not scheduler.num_waiting or not scheduler.custody.lent:
            self._since = None
            return False
        if self._since is None:
            self._since = now
        if now < self._since + PATIENCE_S:
            return False
        self._since = now
        return True
