"""When computed KV that nobody takes keeps everybody else waiting.

A prefill worker holds blocks for a decode worker that has no room yet, and that one holds blocks
for prompts which this worker has no room to compute: each waits for the other. Whoever has nothing
to compute for a while, though somebody waits, withdraws the oldest offer that was not granted: its
decode worker computes that prompt, and all others go on. KV that is on its way is not touched.
"""

from __future__ import annotations

from typing import Final

from baton.clock import Instant

PATIENCE_S: Final = 1.0
IMPATIENCE_S: Final = 0.1
"""If one offer was not enough: until the next."""
STALLED: Final = "its KV was not taken while others waited for the room"


class StallWatch:
    """Told of the engine once a turn. Owned by the engine's thread.

    `ends_at` is when patience ends, None where nobody waits in vain.
    """

    def __init__(self) -> None:
        self.ends_at: Instant | None = None

    def is_over(self, now: Instant, *, in_vain: bool) -> bool:
        """Whether an offer is to be withdrawn now.

        `in_vain`: nothing is computed, though somebody waits for room and KV is held.
        """
        if not in_vain:
            self.ends_at = None
            return False
        if self.ends_at is None:
            self.ends_at = Instant(now + PATIENCE_S)
        if now < self.ends_at:
            return False
        self.ends_at = Instant(now + IMPATIENCE_S)
        return True
