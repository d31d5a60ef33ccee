"""A simulated store: blocks by name that the workers of one host share, and what those report."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Final

from baton.events.blocks import STORE_MEDIUM
from baton.events.journal import CacheJournal
from baton.kv.identity import BlockHash

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from baton.events.blocks import BlockRemoved, BlockStored

NUM_REMEMBERED: Final = 1 << 20
NAME_BYTES: Final = 8


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
    """What one worker reports of its store. Owner: one simulation."""

    def __init__(self, store: SimulatedStore) -> None:
        self._store = store
        self._journal, self._num_read = CacheJournal(NUM_REMEMBERED), 0

    def add(self, names: Sequence[int], token_ids: NDArray[np.int32], salt: str) -> None:
        """It has put a sequence's blocks there. `token_ids` `[len(names) * block_size]`."""
        hashes = [_hash(name) for name in names]
        self._journal.add_stored(hashes, None, token_ids, salt, medium=STORE_MEDIUM)

    def look_for(self, names: Sequence[int]) -> None:
        """It looks whether these are still there, if it has reported them."""
        for name in names:
            if name not in self._store:
                self._journal.add_removed(_hash(name), STORE_MEDIUM)

    def take_events(self) -> tuple[BlockStored | BlockRemoved, ...]:
        """What has changed since the last call."""
        page = self._journal.read(self._num_read)
        self._num_read = page.last
        return page.events


def _hash(name: int) -> BlockHash:
    return BlockHash(name.to_bytes(NAME_BYTES, "little"))
