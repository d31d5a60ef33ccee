"""When computed KV that nobody takes keeps everybody else waiting.

A prefill worker holds blocks for a decode worker that has no room yet, and that one holds blocks
for prompts which this worker has no room to compute: each waits for the other. Whoever has nothing
to compute for a while, though somebody waits, withdraws the oldest offer that was not granted: its
decode worker computes that prompt, and all others go on. KV that is on its way is not touched.
"""

from __future__ import annotations

from typing import Final

from baton.clock import Instant

STALL_TIMEOUT_S: Final = 1.0
STALL_RETRY_S: Final = 0.1
"""If one offer was not enough: until the next."""
STALL_REASON: Final = "its KV was not taken while others waited for the room"


class StallDetector:
    """Told of the engine once a turn. Owned by the engine's thread.

    `timeout_at` is when patience ends, None where nobody waits in vain.
    """

    def __init__(self) -> None:
        self.timeout_at: Instant | None = None

    def should_cancel(self, now: Instant, *, no_progress: bool) -> bool:
        """Whether an offer is to be withdrawn now.

        `no_progress`: nothing is computed, though somebody waits for room and KV is held.
        """
        if not no_progress:
            self.timeout_at = None
            return False
        if self.timeout_at is None:
            self.timeout_at = Instant(now + STALL_TIMEOUT_S)
        if now < self.timeout_at:
            return False
        self.timeout_at = Instant(now + STALL_RETRY_S)
        return True
