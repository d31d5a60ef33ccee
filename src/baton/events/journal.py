"""What a worker's prefix cache and its store have kept and removed, read from a number on."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from baton.events.blocks import DEFAULT_MEDIUM, BlockRemoved, BlockStored, EventDomain

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

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
    medium: str


@dataclass(frozen=True, slots=True)
class _Removed:
    block_hash: BlockHash
    medium: str


class CacheJournal:
    """One worker's. Any thread reads and writes.

    Each medium holds blocks of its own: a block may be in several.
    """

    def __init__(self, num_remembered: int = NUM_REMEMBERED) -> None:
        self._lock = threading.Lock()
        self._last = 0
        self._latest: deque[_Stored | _Removed] = deque(maxlen=num_remembered)
        self._held: dict[str, dict[BlockHash, _Stored]] = {}

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
        *,
        medium: str = DEFAULT_MEDIUM,
    ) -> None:
        """Blocks that follow one another were stored. `token_ids` `[num_blocks * block_size]`."""
        raw, num_bytes = token_ids.astype("<i4").tobytes(), token_ids.nbytes // len(hashes)
        with self._lock:
            held = self._held.setdefault(medium, {})
            for at, block_hash in enumerate(hashes):
                if block_hash not in held:
                    own = raw[at * num_bytes : (at + 1) * num_bytes]
                    salt = tenant_salt if parent is None else ""
                    stored = held[block_hash] = _Stored(block_hash, parent, own, salt, medium)
                    self._add(stored)
                parent = block_hash

    def add_removed(self, block_hash: BlockHash, medium: str = DEFAULT_MEDIUM) -> None:
        """A block is not there any more, because its room was needed."""
        with self._lock:
            if self._held.get(medium, {}).pop(block_hash, None) is not None:
                self._add(_Removed(block_hash, medium))

    def read(self, after: int) -> JournalPage:
        """What happened since event number `after`; 0: from the beginning on."""
        with self._lock:
            last, first = self._last, self._last - len(self._latest)
            is_whole = not first <= after <= last
            held = [each.copy() for each in self._held.values()] if is_whole else []
            latest = [] if is_whole else [*self._latest][after - first :]
        found = [entry for each in held for entry in _parents_first(each)] if is_whole else latest
        return JournalPage(last, is_whole, tuple(_as_events(found)))

    def _add(self, entry: _Stored | _Removed) -> None:
        self._latest.append(entry)
        self._last += 1


def _parents_first(held: Mapping[BlockHash, _Stored]) -> Iterator[_Stored]:
    """One medium's blocks: one that was stored again after what follows it comes before that."""
    seen: set[BlockHash] = set()
    for entry in held.values():
        chain: list[_Stored] = []
        at: _Stored | None = entry
        while at is not None and at.block_hash not in seen:
            seen.add(at.block_hash)
            chain.append(at)
            at = None if at.parent is None else held.get(at.parent)
        yield from reversed(chain)


def _as_events(entries: Iterable[_Stored | _Removed]) -> Iterator[BlockStored | BlockRemoved]:
    """What follows one another, in one event: of a sequence's blocks, or of what was removed."""
    run: list[_Stored] = []
    removed: list[_Removed] = []
    for entry in entries:
        if isinstance(entry, _Removed):
            if run:
                yield _join(run)
                run = []
            if removed and removed[-1].medium != entry.medium:
                yield _join_removed(removed)
                removed = []
            removed.append(entry)
            continue
        if removed:
            yield _join_removed(removed)
            removed = []
        if run and (run[-1].block_hash, run[-1].medium) != (entry.parent, entry.medium):
            yield _join(run)
            run = []
        run.append(entry)
    if run:
        yield _join(run)
    if removed:
        yield _join_removed(removed)


def _join_removed(run: list[_Removed]) -> BlockRemoved:
    hashes = tuple(each.block_hash for each in run)
    return BlockRemoved(BATON_HASHES, hashes, run[0].medium, 0)


def _join(run: list[_Stored]) -> BlockStored:
    first = run[0]
    packed_ids = b"".join([each.packed_ids for each in run])
    return BlockStored(
        BATON_HASHES,
        tuple(each.block_hash for each in run),
        first.parent,
        packed_ids,
        len(first.packed_ids) // 4,
        first.medium,
        0,
        first.salt,
    )
