"""What one worker reports of its own cache and of its store, taken up into its model's indexes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, assert_never

from baton.events.blocks import (
    DEFAULT_MEDIUM,
    STORE_MEDIUM,
    AllBlocksCleared,
    BlockRemoved,
    BlocksExpected,
    BlockStored,
    EntriesRemoved,
    EntriesStored,
    Lost,
    Restarted,
    TiersListed,
    unpack_names,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from baton.events.blocks import ExternalHash, FeedEvent, StoreEvent
    from baton.ids import StoreId, WorkerId
    from baton.kv.prefix_names import PrefixNames
    from baton.router.prefix_index import PrefixIndex
    from baton.router.prefixes import ModelPrefixes

MAX_BLOCKS_OF_WORKER: Final = 1 << 21
MEDIA: Final = frozenset({DEFAULT_MEDIUM, STORE_MEDIUM})


class ReportedBlocks:
    """What one worker's cache holds, by the reporter's hashes. Owner: the gateway's thread."""

    def __init__(
        self, worker: WorkerId, find_index: Callable[[int], PrefixIndex], names: PrefixNames
    ) -> None:
        self._worker, self._find_index, self._names = worker, find_index, names
        self._name_of: dict[ExternalHash, int] = {}
        self.block_size = 0
        self.has_refused = False
        """Whether some of them found no room: what follows them is not known either."""

    def store(self, event: BlockStored) -> int:
        """Take up blocks that follow known ones; how many there are."""
        size, num = event.block_size, len(event.hashes)
        is_usable = (
            not event.group
            and num > 0
            and size > 0
            and len(event.packed_ids) == num * size * 4
            and len(self._name_of) + num <= MAX_BLOCKS_OF_WORKER
        )
        if not is_usable or self.block_size not in {0, size}:
            return 0
        if event.num_plain is not None:
            num = min(num, event.num_plain)
        names = self.name_blocks(event) if num else None
        if names is None:
            return 0
        self.block_size, names = size, names[:num]
        index = self._find_index(size)
        num_refused = index.store(self._worker, names, self.name_of(event.parent))
        if num_refused:
            self.has_refused = True
            refused = event.hashes[num - num_refused : num]
            index.note_refused(sum(each not in self._name_of for each in refused))
        self._name_of.update(zip(event.hashes, names, strict=False))
        return num

    def name_blocks(self, event: BlockStored | BlocksExpected) -> list[int] | None:
        """Names of an event's blocks; None where they follow one that is not known."""
        if event.parent is None:
            after = self._names.root(event.salt)
        elif event.parent in self._name_of:
            after = self._name_of[event.parent]
        else:
            return None
        return self._names.of_packed(event.packed_ids, event.block_size, after)

    def name_of(self, known: ExternalHash | None) -> int | None:
        """The name of a known block; None of none."""
        return None if known is None else self._name_of[known]

    def remove(self, hashes: Iterable[ExternalHash]) -> None:
        """They are not there any more."""
        gone = [self._name_of.pop(each) for each in hashes if each in self._name_of]
        if gone:
            self._find_index(self.block_size).remove(self._worker, gone)

    def list_names(self) -> set[int]:
        """Names of what is there."""
        return set(self._name_of.values())

    def clear(self) -> None:
        """Nothing is there."""
        if self.block_size:
            self._find_index(self.block_size).remove(self._worker, self._name_of.values())
        self._name_of, self.has_refused = {}, False


class WorkerPrefixes:
    """What one worker reports of its own cache and of its store. Owner: the gateway's thread.

    Of the cache only what is in the engine's own pool, and depends on nothing but tokens and the
    tenant's salt, is taken up: of other blocks the tokens alone do not show who could use them.
    """

    def __init__(self, worker: WorkerId, model: ModelPrefixes, names: PrefixNames) -> None:
        self._worker, self._model = worker, model
        self._cached = ReportedBlocks(worker, model.index_of, names)
        self.tiers: tuple[StoreId, ...] = ()
        """From which it loads, the quickest first."""
        self.num_ignored = 0
        self.reports_cache = True
        """Whether events of its own cache are followed: some workers report of a store alone."""

    @property
    def reported(self) -> set[int]:
        """Names of the blocks that its own cache holds; for checks."""
        return self._cached.list_names()

    @property
    def block_size(self) -> int:
        """Of its own cache's blocks; 0 before the first."""
        return self._cached.block_size

    def apply(self, event: FeedEvent, media: frozenset[str] = MEDIA, now: float = 0.0) -> None:
        """Take up one event of a feed that reports of these media alone.

        `now`: by the clock of `ModelPrefixes.find`.
        """
        match event:
            case BlockStored():
                num = self._cached.store(event) if self._is_of_cache(event, media) else 0
                self.num_ignored += len(event.hashes) - num
                if self._cached.has_refused:
                    self._model.incomplete.add(self._worker)
            case BlockRemoved():
                if self._is_of_cache(event, media) and not event.group:
                    self._cached.remove(event.hashes)
            case BlocksExpected():
                if DEFAULT_MEDIUM in media:
                    self._expect(event, now)
            case EntriesStored() | EntriesRemoved() | TiersListed():
                if STORE_MEDIUM in media:
                    self._apply_of_store(event)
            case AllBlocksCleared() | Restarted() | Lost():
                self.clear(media)
                if isinstance(event, Lost) and DEFAULT_MEDIUM in media:
                    self._model.incomplete.add(self._worker)
            case _ as never:
                assert_never(never)

    def clear(self, media: frozenset[str] = MEDIA) -> None:
        """Forget every block of these media."""
        if DEFAULT_MEDIUM in media:
            self._model.incomplete.discard(self._worker)
            self._model.drop_expected(self._worker)
            self._cached.clear()
        if STORE_MEDIUM in media:
            self.tiers = ()
            self._model.forget_stored(self._worker)

    def _expect(self, event: BlocksExpected, now: float) -> None:
        cached, size = self._cached, event.block_size
        names = cached.name_blocks(event) if cached.block_size in {0, size} else None
        if names is None:
            self.num_ignored += len(event.packed_ids) // (4 * size)
            return
        cached.block_size = size
        after = cached.name_of(event.parent)
        self._model.expect_queued(self._worker, size, names, after, now=now)

    def _apply_of_store(self, event: StoreEvent) -> None:
        if isinstance(event, TiersListed):
            self.tiers = event.tiers
            self._model.note_tiers()
            return
        entries = self._model.stored_entries(event.naming, event.block_size)
        names = unpack_names(event.names)
        if isinstance(event, EntriesRemoved):
            if entries is not None:
                entries.remove(self._worker, event.tier, names)
        elif entries is None or event.tier not in self.tiers:
            self.num_ignored += len(names)
        else:
            self.num_ignored += len(names) - entries.store(self._worker, event.tier, names)

    @staticmethod
    def _is_of_cache(event: BlockStored | BlockRemoved, media: frozenset[str]) -> bool:
        return event.medium == DEFAULT_MEDIUM and DEFAULT_MEDIUM in media
