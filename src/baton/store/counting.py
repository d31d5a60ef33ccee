"""What one process asked of a tier, and got: counted around the tier, which does not know."""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from baton.errors import StoreError, StoreFullError
from baton.store.interface import Level, Put

if TYPE_CHECKING:
    from collections.abc import Sequence

    from baton.store.interface import Body, EntryName, Lease, Tier, Usage


@dataclass(slots=True)
class TierCounts:
    """Since the tier was opened. Bytes are of bodies."""

    num_stored: int = 0
    num_already: int = 0
    num_full: int = 0
    num_failed: int = 0
    num_hits: int = 0
    num_misses: int = 0
    written_bytes: int = 0
    read_bytes: int = 0


@dataclass(frozen=True, slots=True)
class TierReport:
    """One tier of a store at one moment."""

    kind: str
    counts: TierCounts
    level: Level


class CountedTier:
    """See `Tier`. `kind` is what the tier is called in metrics.

    An entry that is leased counts as read. What the tier does of itself (handing down, looking
    before it writes) is not counted here; `uncounted` is the tier.
    """

    def __init__(self, kind: str, tier: Tier) -> None:
        self.uncounted = tier
        self._kind, self._counts = kind, TierCounts()
        self._open = threading.Lock()
        self._last: Level | None = None

    def find(self, names: Sequence[EntryName]) -> int:
        """See `Tier`."""
        return self.uncounted.find(names)

    def put(self, name: EntryName, body: Body) -> Put:
        """See `Tier`."""
        counts = self._counts
        try:
            done = self.uncounted.put(name, body)
        except StoreFullError:
            counts.num_full += 1
            raise
        except StoreError:
            counts.num_failed += 1
            raise
        if done is Put.STORED:
            counts.num_stored += 1
            counts.written_bytes += len(body)
        else:
            counts.num_already += 1
        return done

    def try_lease(self, name: EntryName) -> Lease | None:
        """See `Tier`."""
        lease = self.uncounted.try_lease(name)
        if lease is None:
            self._counts.num_misses += 1
            return None
        self._counts.num_hits += 1
        self._counts.read_bytes += lease.num_bytes
        return lease

    def discard(self, name: EntryName) -> None:
        """See `Tier`."""
        self.uncounted.discard(name)

    def usage(self) -> Usage:
        """See `Tier`."""
        return self.uncounted.usage()

    def level(self) -> Level:
        """See `Tier`. When it is closed: as it was then."""
        with self._open:
            return self._last or self.uncounted.level()

    def report(self) -> TierReport:
        """What was counted. From any thread.

        Raises:
            StoreError: the tier cannot be looked at.
        """
        return TierReport(self._kind, replace(self._counts), self.level())

    def close(self) -> None:
        """See `Tier`."""
        with self._open:
            if self._last is None:
                self._last = self._try_look()
            self.uncounted.close()

    def _try_look(self) -> Level:
        try:
            return self.uncounted.level()
        except StoreError:
            return Level(0, 0, 0, 0, 0)
