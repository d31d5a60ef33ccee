"""An engine's heartbeat: that it computes, and which prompts it has yet to compute.

One reference, replaced as a whole by the engine's thread and read by any other. The instant in it
moves only when the thread that computes passes by: at the beginning of a step, and with each layer
that is ready. So no other thread reports for an engine that is stuck in a forward pass, waits for
a lock, or whose process was stopped.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from baton.clock import Instant

if TYPE_CHECKING:
    from collections.abc import Sequence

    from baton.auth.ticket import Ticket
    from baton.clock import Clock


@dataclass(frozen=True, slots=True)
class PendingPrefills:
    """Prefills that are queued or not all computed, as last reported, and when that was."""

    last_progress_at: Instant
    prompts: tuple[Ticket, ...]


class EngineHeartbeat:
    """`report_progress` and `tick` are the engine's thread's alone; `pending` is anybody's."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._pending = PendingPrefills(Instant(-math.inf), ())

    @property
    def pending(self) -> PendingPrefills:
        """The last report."""
        return self._pending

    def report_progress(self, prompts: Sequence[Ticket]) -> None:
        """See `HandoffPort.report_progress`."""
        self._pending = PendingPrefills(self._clock.now(), tuple(prompts))

    def tick(self) -> None:
        """A layer of the step is done."""
        self._pending = replace(self._pending, last_progress_at=self._clock.now())
