"""What a worker's prefix cache and its store have kept and removed, read from a number on."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol, TypeAlias

from baton.events.blocks import (
    DEFAULT_MEDIUM,
    ENTRY_NAME_BYTES,
    BlockRemoved,
    BlocksExpected,
    BlockStored,
    EntriesRemoved,
    EntriesStored,
    EventDomain,
    StoreEvent,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from baton.events.blocks import ExternalHash
    from baton.kv.identity import BlockHash

BATON_HASHES: Final = EventDomain("baton/sha256")
NUM_REMEMBERED: Final = 8192
"""Blocks and entries, of the latest events; who asks for older ones gets all that is held."""

LEAST_EXPECTED_TOKENS: Final = 128
"""Fewer tokens of a queued prompt are not worth an event."""
MOST_EXPECTED_BLOCKS: Final = 1024
"""Of one queued prompt. One that filled the memory of the journal would make every gateway ask for
all that is held."""

JournalEvent: TypeAlias = BlockStored | BlockRemoved | BlocksExpected | StoreEvent


@dataclass(frozen=True, slots=True)
class JournalPage:
    """What happened up to event number `last`. `is_whole`: of nothing, all that is held now.

    `is_incomplete`: all that is known of what is held; the rest was reported in events that are
    lost.
    """

    last: int
    is_whole: bool
    events: tuple[JournalEvent, ...]
    is_incomplete: bool = False


@dataclass(frozen=True, slots=True)
class _Stored:
    """A block, with its tokens as in `pack_ids`: a fifth of what Python's integers take."""

    block_hash: ExternalHash
    parent: ExternalHash | None
    packed_ids: bytes
    salt: str


@dataclass(frozen=True, slots=True)
class _Removed:
    block_hash: ExternalHash


_Change: TypeAlias = _Stored | _Removed | BlocksExpected | StoreEvent


class ReportedStore(Protocol):
    """Who reports of a store, and knows all that it has reported and not taken back."""

    def list_reported(self) -> Sequence[StoreEvent]:
        """Events that give all of it. Called with the journal's lock held."""
        ...


class CacheJournal:
    """One worker's. Any thread reads and writes.

    Blocks of the cache are kept here; what is in the store by `store`, which holds `lock` while it
    changes that and adds the event.
    """

    def __init__(self, num_remembered: int = NUM_REMEMBERED) -> None:
        self.lock = threading.RLock()
        self.store: ReportedStore | None = None
        self._last = self._last_expected = 0
        self._latest: deque[_Change] = deque()
        self._num_latest, self._num_remembered = 0, num_remembered
        self._held: dict[ExternalHash, _Stored] = {}
        self._is_incomplete = False

    @property
    def last(self) -> int:
        """The number of the latest event; 0 before the first."""
        return self._last

    @property
    def last_expected(self) -> int:
        """The number of the latest event of a queued prompt; 0 before the first."""
        return self._last_expected

    def add_stored(
        self,
        hashes: list[BlockHash],
        parent: BlockHash | None,
        token_ids: NDArray[np.int32],
        tenant_salt: str,
    ) -> None:
        """Blocks that follow one another were stored. `token_ids` `[num_blocks * block_size]`."""
        raw, num_bytes = token_ids.astype("<i4").tobytes(), token_ids.nbytes // len(hashes)
        with self.lock:
            for at, block_hash in enumerate(hashes):
                if block_hash not in self._held:
                    own = raw[at * num_bytes : (at + 1) * num_bytes]
                    salt = tenant_salt if parent is None else ""
                    stored = self._held[block_hash] = _Stored(block_hash, parent, own, salt)
                    self._add(stored)
                parent = block_hash

    def add_expected(
        self,
        parent: BlockHash | None,
        token_ids: NDArray[np.int32],
        block_size: int,
        tenant_salt: str,
    ) -> None:
        """A prompt is queued whose full blocks `[num_blocks * block_size]` after `parent` it lacks.

        Forgotten like any event, and not among what is held. Of a long prompt the first
        `MOST_EXPECTED_BLOCKS` alone.
        """
        raw = token_ids[: MOST_EXPECTED_BLOCKS * block_size].astype("<i4").tobytes()
        salt = tenant_salt if parent is None else ""
        with self.lock:
            self._add(BlocksExpected(parent, raw, block_size, salt))
            self._last_expected = self._last

    def add_reported(self, event: BlockStored, num_blocks: int) -> None:
        """An engine has reported its first `num_blocks` as stored.

        Those that are held, too: an engine reports them again where a gateway lacks them.
        """
        num_bytes, parent = 4 * event.block_size, event.parent
        with self.lock:
            for at, block_hash in enumerate(event.hashes[:num_blocks]):
                own = event.packed_ids[at * num_bytes : (at + 1) * num_bytes]
                salt = event.salt if parent is None else ""
                stored = self._held[block_hash] = _Stored(block_hash, parent, own, salt)
                self._add(stored)
                parent = block_hash

    def clear(self, *, is_incomplete: bool = False) -> None:
        """Nothing is known of the cache: who reads begins anew, without what was before.

        `is_incomplete`: there may be blocks all the same, until the next time.
        """
        with self.lock:
            self._held.clear()
            self._latest.clear()
            self._num_latest, self._is_incomplete = 0, is_incomplete
            self._last += 1

    def add_removed(self, block_hash: ExternalHash) -> None:
        """A block is not there any more, because its room was needed."""
        with self.lock:
            if self._held.pop(block_hash, None) is not None:
                self._add(_Removed(block_hash))

    def add_of_store(self, event: StoreEvent) -> None:
        """Something changed in the store, as `store` knows already."""
        with self.lock:
            self._add(event)

    def read(self, after: int) -> JournalPage:
        """What happened since event number `after`; 0: from the beginning on."""
        with self.lock:
            last, first = self._last, self._last - len(self._latest)
            is_whole = not first <= after <= last
            held = self._held.copy() if is_whole else {}
            latest = [] if is_whole else [*self._latest][after - first :]
            of_store = self.store.list_reported() if is_whole and self.store is not None else ()
            is_incomplete = is_whole and self._is_incomplete
        changes = [*_parents_first(held), *of_store] if is_whole else latest
        return JournalPage(last, is_whole, tuple(_as_events(changes)), is_incomplete)

    def _add(self, change: _Change) -> None:
        """Remember it. Of as many blocks as are remembered in all the oldest are forgotten."""
        self._latest.append(change)
        self._last += 1
        self._num_latest += _count_named(change)
        while self._num_latest > self._num_remembered:
            gone = self._latest.popleft()
            self._num_latest -= _count_named(gone)


def _count_named(change: _Change) -> int:
    if isinstance(change, _Stored):  # the usual case, on the engine's thread
        return 1
    if isinstance(change, EntriesStored | EntriesRemoved):
        return len(change.names) // ENTRY_NAME_BYTES
    if isinstance(change, BlocksExpected):
        return len(change.packed_ids) // (4 * change.block_size)
    return 1


def _parents_first(held: Mapping[ExternalHash, _Stored]) -> Iterator[_Stored]:
    """A block that was stored again after what follows it comes before that."""
    seen: set[ExternalHash] = set()
    for entry in held.values():
        chain: list[_Stored] = []
        at: _Stored | None = entry
        while at is not None and at.block_hash not in seen:
            seen.add(at.block_hash)
            chain.append(at)
            at = None if at.parent is None else held.get(at.parent)
        yield from reversed(chain)


def _as_events(changes: Iterable[_Change]) -> Iterator[JournalEvent]:
    """What follows one another, in one event: of a sequence's blocks, or of what was removed."""
    stored: list[_Stored] = []
    removed: list[_Removed] = []
    for change in changes:
        if removed and not isinstance(change, _Removed):
            yield _join_removed(removed)
            removed = []
        if stored and not (isinstance(change, _Stored) and change.parent == stored[-1].block_hash):
            yield _join(stored)
            stored = []
        if isinstance(change, _Stored):
            stored.append(change)
        elif isinstance(change, _Removed):
            removed.append(change)
        else:
            yield change
    if stored:
        yield _join(stored)
    if removed:
        yield _join_removed(removed)


def _join_removed(run: list[_Removed]) -> BlockRemoved:
    hashes = tuple(each.block_hash for each in run)
    return BlockRemoved(BATON_HASHES, hashes, DEFAULT_MEDIUM, 0)


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
