"""`s3fifo`: entries that were used once only go before those that were used again.

S3-FIFO (Yang et al., "FIFO Queues are All You Need for Cache Eviction", SOSP 2023,
https://doi.org/10.1145/3600006.3613147). New entries are in a small queue, from which they go to
the protected one if they were used there; victims of the small queue that return soon are
protected at once. The small queue has half of the tier, not the paper's tenth: see ADR 34.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from baton.registry import Plugin
from baton.store.eviction import Eviction, NoOptions

if TYPE_CHECKING:
    from collections.abc import Iterable

    from baton.store.capacity import StoredEntry
    from baton.store.eviction import EvictionPolicy
    from baton.store.interface import EntryName

SMALL_SHARE: Final = 0.5
"""Of the bytes of all entries that can be evicted."""
LOOKAHEAD_SHARE: Final = 1 / 16
"""With a quarter, entries are requeued too early: a small tier found a tenth less (ADR 39)."""
REQUEUE_STEP_S: Final = 1e-5
"""Between two entries that are requeued at once: it keeps their order: places are 4 us apart."""


@dataclass(frozen=True, slots=True)
class S3Fifo:
    """See `EvictionPolicy`. The benchmark has others than the defaults."""

    small_share: float = SMALL_SHARE
    remembers: bool = True
    lookahead_share: float = LOOKAHEAD_SHARE

    def choose(self, entries: Iterable[StoredEntry], num_bytes: int, now: float) -> Eviction:
        """See `EvictionPolicy`."""
        evictable = sorted(
            (entry for entry in entries if not entry.is_pinned),
            key=lambda entry: (entry.queued_at, entry.name),
        )
        small = deque(entry for entry in evictable if not entry.is_protected)
        protected = deque(entry for entry in evictable if entry.is_protected)
        small_bytes = sum(entry.num_bytes for entry in small)
        small_limit = self.small_share * sum(entry.num_bytes for entry in evictable)
        victims: list[StoredEntry] = []
        requeued: dict[EntryName, StoredEntry] = {}
        freed = num_requeued = 0
        while freed < num_bytes and (small or protected):
            from_small = bool(small) and (small_bytes >= small_limit or not protected)
            entry = small.popleft() if from_small else protected.popleft()
            small_bytes -= entry.num_bytes if from_small else 0
            if entry.num_uses:
                num_uses = 0 if from_small else entry.num_uses - 1
                num_requeued += 1
                queued_at = now + num_requeued * REQUEUE_STEP_S
                entry = replace(entry, num_uses=num_uses, is_protected=True, queued_at=queued_at)
                protected.append(entry)
                requeued[entry.name] = entry
            else:
                requeued.pop(entry.name, None)
                victims.append(entry)
                freed += entry.num_bytes
        return Eviction(victims, tuple(requeued.values()))


def _build(_: NoOptions) -> EvictionPolicy:
    return S3Fifo()


PLUGIN = Plugin(NoOptions, _build)
