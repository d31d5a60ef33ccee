"""When computed KV that nobody takes keeps everybody else waiting.

A prefill worker holds blocks for a decode worker that has no room yet, and that one holds blocks
for prompts which this worker has no room to compute: each waits for the other. Whoever has nothing
to compute for a while, though somebody waits, gives the oldest such handoff up: its decode worker
computes that prompt, and all others go on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from baton.clock import Instant

if TYPE_CHECKING:
    from baton.engines.transformers.scheduler import Scheduler
    from baton.engines.transformers.sequence import Sequence

PATIENCE_S: Final = 1.0


class StallWatch:
    """Looks at the scheduler once a turn. Owned by the engine's thread."""

    def __init__(self) -> None:
        self._since: Instant | None = None

    def find_victim(self, scheduler: Scheduler, now: Instant, *, is_busy: bool) -> Sequence | None:
        """The sequence to give up, if it is time; the next one has as much time again."""
        oldest = scheduler.custody.oldest_lent
        if is_busy or not scheduler.num_waiting or oldest is None:
            self._since = None
            return None
        if self._since is None:
            self._since = now
        if now < self._since + PATIENCE_S:
            return None
        self._since = now
        return oldest

    def ends_at(self) -> Instant | None:
        """When patience ends; None where nobody waits in vain."""
        return None if self._since is None else Instant(self._since + PATIENCE_S)
