"""What an engine's prefix cache has stored and removed, for those who ask from a number on."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from baton.events.blocks import DEFAULT_MEDIUM, BlockRemoved, BlockStored, EventDomain

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

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


@dataclass(frozen=True, slots=True)
class _Stored:
    """A block, with its tokens as in `pack_ids`: a fifth of what Python's integers take."""

    block_hash: BlockHash
    parent: BlockHash | None
    packed_ids: bytes
    salt: str


class CacheJournal:
    """One engine's. The engine's thread writes, any thread reads."""

    def __init__(self, num_remembered: int = NUM_REMEMBERED) -> None:
        self._lock = threading.Lock()
        self._last = 0
        self._latest: deque[_Stored | BlockHash] = deque(maxlen=num_remembered)
        self._held: dict[BlockHash, _Stored] = {}

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
        raw, num_bytes = token_ids.astype("<i4").tobytes(), token_ids.nbytes // len(hashes)
        with self._lock:
            for at, block_hash in enumerate(hashes):
                if block_hash not in self._held:
                    own = raw[at * num_bytes : (at + 1) * num_bytes]
                    salt = tenant_salt if parent is None else ""
                    stored = self._held[block_hash] = _Stored(block_hash, parent, own, salt)
                    self._add(stored)
                parent = block_hash

    def add_removed(self, block_hash: BlockHash) -> None:
        """A block has lost its name, because its room was needed."""
        with self._lock:
            if self._held.pop(block_hash, None) is not None:
                self._add(block_hash)

    def read(self, after: int) -> JournalPage:
        """What happened since event number `after`; 0: from the beginning on."""
        with self._lock:
            last, first = self._last, self._last - len(self._latest)
            is_whole = not first <= after <= last
            found = [*self._held.values()] if is_whole else [*self._latest][after - first :]
        return JournalPage(last, is_whole, tuple(_as_events(found)))

    def _add(self, entry: _Stored | BlockHash) -> None:
        self._latest.append(entry)
        self._last += 1


def _as_events(entries: Iterable[_Stored | BlockHash]) -> Iterator[BlockStored | BlockRemoved]:
    """What follows one another, in one event: of a sequence's blocks, or of what was removed."""
    run: list[_Stored] = []
    removed: list[BlockHash] = []
    for entry in entries:
        if not isinstance(entry, _Stored):
            if run:
                yield _join(run)
                run = []
            removed.append(entry)
            continue
        if removed:
            yield BlockRemoved(BATON_HASHES, tuple(removed), DEFAULT_MEDIUM, 0)
            removed = []
        if run and run[-1].block_hash != entry.parent:
            yield _join(run)
            run = []
        run.append(entry)
    if run:
        yield _join(run)
    if removed:
        yield BlockRemoved(BATON_HASHES, tuple(removed), DEFAULT_MEDIUM, 0)


def _join(run: list[_Stored]) -> BlockStored:
    first = run[0]
    packed_ids = b"".join([each.packed_ids for each in run])
    return BlockStored(
        BATON_HASHES,
        tuple(each.block_hash for each in run),
        first.parent,
        packed_ids,
        len(first.packed_ids) // 4,
        DEFAULT_MEDIUM,
        0,
        first.salt,
    )
