"""What an engine's prefix cache has stored and removed, for those who ask from a number on."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from baton.events.blocks import DEFAULT_MEDIUM, BlockRemoved, BlockStored, EventDomain

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from baton.kv.identity import BlockHash

BATON_HASHES: Final = EventDomain("baton/sha256")
NUM_REMEMBERED: Final = 8192
"""Events; who asks for older ones gets all blocks that are held instead."""


@dataclass(frozen=True, slots=True)
class JournalPage:
    """What happened up to event number `last`. `is_whole`: of nothing, all that is held now."""

    last: int
    is_whole: bool
    events: tuple[BlockStored | BlockRemoved, ...]


class CacheJournal:
    """One engine's. The engine's thread writes, any thread reads."""

    def __init__(self, num_remembered: int = NUM_REMEMBERED) -> None:
        self._lock = threading.Lock()
        self._last = 0
        self._latest: deque[BlockStored | BlockRemoved] = deque(maxlen=num_remembered)
        self._held: dict[BlockHash, BlockStored] = {}

    @property
    def last(self) -> int:
        """The number of the latest event; 0 before the first."""
        return self._last

    def add_stored(
        self,
        hashes: list[BlockHash],
        parent: BlockHash | None,
        token_ids: NDArray[np.int32],
        tenant_salt: str,
    ) -> None:
        """Blocks that follow one another were stored. `token_ids` `[num_blocks * block_size]`."""
        tokens: list[int] = token_ids.tolist()
        size = len(tokens) // len(hashes)
        with self._lock:
            for at, block_hash in enumerate(hashes):
                if block_hash not in self._held:
                    own = tuple(tokens[at * size : (at + 1) * size])
                    salt = tenant_salt if parent is None else ""
                    event = BlockStored(
                        BATON_HASHES, (block_hash,), parent, own, size, DEFAULT_MEDIUM, 0, salt
                    )
                    self._held[block_hash] = event
                    self._add(event)
                parent = block_hash

    def add_removed(self, block_hash: BlockHash) -> None:
        """A block has lost its name, because its room was needed."""
        with self._lock:
            if self._held.pop(block_hash, None) is not None:
                self._add(BlockRemoved(BATON_HASHES, (block_hash,), DEFAULT_MEDIUM, 0))

    def read(self, after: int) -> JournalPage:
        """What happened since event number `after`; 0: from the beginning on."""
        with self._lock:
            first = self._last - len(self._latest)
            if first <= after <= self._last:
                fresh = list(self._latest)[after - first :]
                return JournalPage(self._last, is_whole=False, events=tuple(fresh))
            return JournalPage(self._last, is_whole=True, events=tuple(self._held.values()))

    def _add(self, event: BlockStored | BlockRemoved) -> None:
        self._latest.append(event)
        self._last += 1
