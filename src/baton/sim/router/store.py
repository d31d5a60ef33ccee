"""A simulated store: blocks by name that the workers of one host share, and what those report."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from baton.events.blocks import EntriesRemoved, EntriesStored, pack_names

if TYPE_CHECKING:
    from collections.abc import Sequence

    from baton.ids import StoreId


class SimulatedStore:
    """`num_blocks` blocks; those that were unused for longest leave first.

    Owner: one simulation.
    """

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._names: OrderedDict[int, None] = OrderedDict()

    def __contains__(self, name: int) -> bool:
        """Whether this block is here."""
        return name in self._names

    def count_stored(self, names: Sequence[int]) -> int:
        """How many of these are here, from the first on."""
        for num, name in enumerate(names):
            if name not in self._names:
                return num
        return len(names)

    def use(self, names: Sequence[int]) -> None:
        """They are loaded: they leave later. Of a sequence its last blocks leave first."""
        for name in reversed(names):
            self._names.move_to_end(name)

    def keep(self, names: Sequence[int]) -> list[int]:
        """A sequence's blocks are put here. The names that had to leave."""
        self._names.update(dict.fromkeys(names))
        self.use(names)
        num_over = max(0, len(self._names) - self._num_blocks)
        return [self._names.popitem(last=False)[0] for _ in range(num_over)]


class StoreReporter:
    """What one worker reports of its store, whose entries are blocks. Owner: one simulation."""

    def __init__(
        self, tier: StoreId, store: SimulatedStore, naming: bytes, block_size: int
    ) -> None:
        self._tier, self._store = tier, store
        self._naming, self._block_size = naming, block_size
        self._reported: set[int] = set()
        self._events: list[EntriesStored | EntriesRemoved] = []

    def add(self, names: Sequence[int]) -> None:
        """It has put a sequence's blocks there."""
        self._report(EntriesStored, [name for name in names if name not in self._reported])
        self._reported.update(names)

    def look_for(self, names: Sequence[int]) -> None:
        """It looks whether these are still there, if it has reported them."""
        gone = [n for n in names if n in self._reported and n not in self._store]
        self._report(EntriesRemoved, gone)
        self._reported.difference_update(gone)

    def take_events(self) -> list[EntriesStored | EntriesRemoved]:
        """What has changed since the last call."""
        events, self._events = self._events, []
        return events

    def _report(self, kind: type[EntriesStored | EntriesRemoved], names: Sequence[int]) -> None:
        if names:
            packed = pack_names(names)
            self._events.append(kind(self._tier, self._naming, self._block_size, packed))
