"""`lru`: the least recently used entry goes first."""

from __future__ import annotations

from typing import TYPE_CHECKING

from baton.registry import Plugin
from baton.store.capacity import choose_victims
from baton.store.eviction import Eviction, NoOptions

if TYPE_CHECKING:
    from collections.abc import Iterable

    from baton.store.capacity import StoredEntry
    from baton.store.eviction import EvictionPolicy


class LeastRecentlyUsed:
    """See `EvictionPolicy`."""

    remembers = False
    lookahead_share = 1 / 4  # its order does not depend on it

    def choose(self, entries: Iterable[StoredEntry], num_bytes: int, now: float) -> Eviction:
        """See `EvictionPolicy`."""
        del now
        return Eviction(choose_victims(entries, num_bytes))


def _build(_: NoOptions) -> EvictionPolicy:
    return LeastRecentlyUsed()


PLUGIN = Plugin(NoOptions, _build)
