"""What the workers of one model have of a prompt: as their events report, and as is expected.

Workers also report what is in the tiers of their stores. A tier has what any of its workers
reports: each takes back what it has reported itself and does not find any more. A prompt may be in
several tiers in part: a worker loads each part from the quickest of its tiers that has it.

A prompt that was just placed is expected to be held by its workers: they report its blocks only
once they are computed, and some workers publish no events. Baton's own also report prompts that
are queued there, so that what one gateway has placed is expected by the others, too. What is
expected is forgotten after a while.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from heapq import heapify, heappop, heappush
from itertools import count
from typing import TYPE_CHECKING, Final

from baton.kv.prefix_names import PrefixNames
from baton.router.prefix_index import PrefixIndex
from baton.router.stored_entries import StoredEntries, TierLists
from baton.router.worker_prefixes import WorkerPrefixes

if TYPE_CHECKING:
    from collections.abc import Mapping
    from collections.abc import Set as AbstractSet

    import numpy as np
    from numpy.typing import NDArray

    from baton.ids import WorkerId
    from baton.router.placement import Placement

EXPECTED_WITH_EVENTS_S: Final = 10.0
EXPECTED_WITHOUT_S: Final = 120.0
"""How long a placed prompt counts as held there, of workers whose events are followed or not."""
MAX_EXPECTED_BLOCKS: Final = 1 << 18
DEFAULT_BLOCK_SIZE: Final = 16
"""Of workers that have not reported theirs: what vLLM and Baton's own engine use by default."""
MAX_FORMS: Final = 8
"""Of entries: by which secret they are named, and how many tokens they have."""


@dataclass(frozen=True, slots=True)
class PromptMatch:
    """A prompt of `num_tokens`, and how many of its first tokens each worker has.

    `stored` is how many each can load from its store. `names` are its blocks', by block size;
    `token_ids` `[num_tokens]` by the tokenizer of that digest. `incomplete` as in `ModelPrefixes`.
    """

    num_tokens: int
    cached: Mapping[WorkerId, int] = field(default_factory=dict)
    stored: Mapping[WorkerId, int] = field(default_factory=dict)
    names: Mapping[int, list[int]] = field(default_factory=dict)
    token_ids: NDArray[np.int32] | None = None
    tokenizer: str | None = None
    incomplete: AbstractSet[WorkerId] = frozenset()

    def may_have_more(self, worker: WorkerId) -> bool:
        """Whether it may have most of the prompt cached, of which it has reported less than half.

        What is cached all the time, as a system prompt is, a vLLM server reports only once: who
        has missed that must ask, or never knows what follows it.
        """
        return worker in self.incomplete and 2 * self.cached.get(worker, 0) < self.num_tokens


class ModelPrefixes:
    """Of one model. Owner: the gateway's thread."""

    def __init__(self, names: PrefixNames, max_expected: int = MAX_EXPECTED_BLOCKS) -> None:
        self._names, self._max_expected = names, max_expected
        self._indexes: dict[int, PrefixIndex] = {}
        self._stored: dict[tuple[bytes, int], StoredEntries] = {}
        self._namings: dict[bytes, PrefixNames] = {}
        self._tier_lists: TierLists | None = None
        self._followed: dict[WorkerId, WorkerPrefixes] = {}
        self._expected: list[_Expected] = []  # a heap: what ends first comes first
        self._numbers = count()
        self._num_expected = 0
        self.incomplete: set[WorkerId] = set()
        """Workers of whose blocks some are not known: an event was lost, or there was no room."""
        self._until: dict[WorkerId, dict[int, float]] = {}
        """Of workers that report nothing of their caches: until when each block is expected."""

    @property
    def num_blocks(self) -> int:
        """Blocks that some worker holds, or is expected to."""
        return sum(index.num_blocks for index in self._indexes.values())

    @property
    def num_refused_blocks(self) -> int:
        """Blocks of which it is not known who holds them, for want of room; since the start."""
        return sum(index.num_refused for index in self._indexes.values())

    @property
    def num_stored_blocks(self) -> int:
        """Entries that are in some store."""
        return sum(entries.num_entries for entries in self._stored.values())

    def follow(self, worker: WorkerId) -> WorkerPrefixes:
        """What a worker's events are applied to, for one incarnation of it."""
        self.forget(worker)
        followed = WorkerPrefixes(worker, self, self._names)
        self._followed[worker] = followed
        return followed

    def forget(self, worker: WorkerId) -> None:
        """It is gone, or its events are not followed any more: nothing is known of it."""
        followed = self._followed.pop(worker, None)
        if followed is not None:
            followed.clear()
        self.drop_expected(worker)
        for index in self._indexes.values():
            index.forget(worker)

    def index_of(self, block_size: int) -> PrefixIndex:
        """Where blocks of that size in workers' caches are."""
        return _find_or_add(self._indexes, block_size)

    def stored_entries(self, naming: bytes, block_size: int) -> StoredEntries | None:
        """Where entries of that size, so named, are; None: there are too many other forms."""
        entries = self._stored.get((naming, block_size))
        if entries is None and len(self._stored) < MAX_FORMS:
            entries = self._stored[naming, block_size] = StoredEntries()
            self._namings.setdefault(naming, PrefixNames(naming))
        return entries

    def note_tiers(self) -> None:
        """Some worker loads from other tiers than before."""
        self._tier_lists = None

    def forget_stored(self, worker: WorkerId) -> None:
        """Nothing that a worker has reported of its store counts any more."""
        self.note_tiers()
        for entries in self._stored.values():
            entries.forget(worker)

    def find(self, token_ids: NDArray[np.int32], salt: str, now: float) -> PromptMatch:
        """Who has how much of a prompt `[num_tokens]`. `salt` is the tenant's, hashed."""
        self._drop_late(now)
        root = self._names.root(salt)
        cached: dict[WorkerId, int] = {}
        names = {
            size: self._names.of(token_ids, size, root)
            for size in self._indexes or (DEFAULT_BLOCK_SIZE,)
        }
        for size, index in self._indexes.items():
            most = (len(token_ids) - 1) // size  # an engine computes the last token in any case
            for worker, num_blocks in index.find_matches(names[size]).items():
                cached[worker] = min(num_blocks, most) * size
        stored = self._find_stored(token_ids, salt)
        return PromptMatch(len(token_ids), cached, stored, names, incomplete=self.incomplete)

    def _find_stored(self, token_ids: NDArray[np.int32], salt: str) -> dict[WorkerId, int]:
        """Tokens of a prompt, from the first on, that each worker can load from its tiers."""
        stored: dict[WorkerId, int] = {}
        for (naming, size), entries in self._stored.items():
            if not entries.num_entries:
                continue
            whole = token_ids[: (len(token_ids) - 1) // size * size]  # the last one is computed
            by = self._namings[naming]
            matches = entries.find_matches(by.of(whole, size, by.root(salt)), self._list_tiers())
            if not matches:
                continue
            for worker, followed in self._followed.items():
                num = size * matches.get(followed.tiers, 0)
                if num:
                    stored[worker] = max(num, stored.get(worker, 0))
        return stored

    def _list_tiers(self) -> TierLists:
        if self._tier_lists is None:
            self._tier_lists = TierLists(each.tiers for each in self._followed.values())
        return self._tier_lists

    def expect(self, match: PromptMatch, placement: Placement, now: float) -> None:
        """The prompt goes to these workers, which will hold it soon."""
        source = None if placement.num_prefix_tokens else placement.prefill
        views = (source, placement.decode)
        for worker in dict.fromkeys(view.id for view in views if view is not None):
            followed = self._followed.get(worker)
            size = DEFAULT_BLOCK_SIZE
            if followed is not None:
                size = followed.block_size or size
            has_events = followed is not None and followed.reports_cache
            lasts_s = EXPECTED_WITH_EVENTS_S if has_events else EXPECTED_WITHOUT_S
            names, known = match.names.get(size, []), match.cached.get(worker, 0) // size
            if not has_events and (until := self._until.get(worker)):
                # No event shows that they are used again.
                until.update((name, now + lasts_s) for name in names if name in until)
            if known < len(names) <= self._max_expected:
                after = names[known - 1] if known else None
                self.index_of(size).expect(worker, names[known:], after)
                self._add(worker, size, names[known:], now + lasts_s)
                if not has_events:
                    until = self._until.setdefault(worker, {})
                    until.update(dict.fromkeys(names[known:], now + lasts_s))

    def expect_queued(
        self, worker: WorkerId, block_size: int, names: list[int], after: int | None, *, now: float
    ) -> None:
        """A worker reports that these blocks of a queued prompt will be stored there.

        `after` is the block before the first; None: they begin the prompt. What is held or expected
        already, of a prompt that was placed here for instance, stays as it is.
        """
        self._drop_late(now)
        index = self.index_of(block_size)
        known = index.count_held(worker, names)
        if known:
            names, after = names[known:], names[known - 1]
        if 0 < len(names) <= self._max_expected:
            index.expect(worker, names, after)
            self._add(worker, block_size, names, now + EXPECTED_WITH_EVENTS_S)

    def drop_expected(self, worker: WorkerId) -> None:
        """What was expected of a worker will not come."""
        self._until.pop(worker, None)
        of_it = [each for each in self._expected if each.worker == worker]
        if of_it:
            self._expected = [each for each in self._expected if each.worker != worker]
            heapify(self._expected)
            for each in of_it:
                self._drop(each)

    def check_invariants(self) -> None:
        """Raise AssertionError where an index holds what is neither reported nor expected."""
        if self._num_expected != sum(len(each.names) for each in self._expected):
            raise AssertionError("expected blocks are counted wrongly")
        for size, index in self._indexes.items():
            index.check_invariants()
            known: dict[WorkerId, set[int]] = {}
            for worker, followed in self._followed.items():
                if followed.block_size == size:
                    known.setdefault(worker, set()).update(followed.reported)
            for each in self._expected:
                if each.block_size == size:
                    known.setdefault(each.worker, set()).update(each.names)
            for worker, held in index.holdings().items():
                if not held <= known.get(worker, set()):
                    raise AssertionError(f"{worker} holds blocks of unknown origin")
        for entries in self._stored.values():
            entries.check_invariants()
            if any(worker not in self._followed for worker, _ in entries.holdings()):
                raise AssertionError("a worker reports entries and is not followed")

    def _add(self, worker: WorkerId, block_size: int, names: list[int], until: float) -> None:
        number = next(self._numbers)
        heappush(self._expected, _Expected(until, number, worker, block_size, names))
        self._num_expected += len(names)
        while self._num_expected > self._max_expected:
            self._drop(heappop(self._expected))

    def _drop_late(self, now: float) -> None:
        """Forget what was expected by now."""
        while self._expected and self._expected[0].until <= now:
            expected = heappop(self._expected)
            until = self._until.get(expected.worker, {})
            used = [name for name in expected.names if until.get(name, now) > now]
            if not used:
                self._drop(expected)
                continue
            left = [name for name in expected.names if until.get(name, now) <= now]
            self._num_expected -= len(used)
            self._drop(replace(expected, names=left))
            ends_at = min(until[name] for name in used)
            self._add(expected.worker, expected.block_size, used, ends_at)

    def _drop(self, expected: _Expected) -> None:
        """It was not reported within its time, or was, and counts as that."""
        self._num_expected -= len(expected.names)
        index = self._indexes[expected.block_size]
        index.drop_expected(expected.worker, reversed(expected.names))
        until = self._until.get(expected.worker, {})
        for name in expected.names if until else ():
            until.pop(name, None)


@dataclass(frozen=True, slots=True, order=True)
class _Expected:
    """Blocks that a worker will hold if all goes well; ordered by its end, then by `number`."""

    until: float
    number: int
    worker: WorkerId
    block_size: int
    names: list[int]


def _find_or_add(indexes: dict[int, PrefixIndex], block_size: int) -> PrefixIndex:
    index = indexes.get(block_size)
    if index is None:
        index = indexes[block_size] = PrefixIndex()
    return index
