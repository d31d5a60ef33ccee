"""What the workers of one model have of a prompt: as their events report, and as is expected.

A prompt that was just placed is expected to be held by its workers: their events come only once
it is computed, and some workers publish none. What is expected is forgotten after a while.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, assert_never

import numpy as np

from baton.events.blocks import (
    DEFAULT_MEDIUM,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Lost,
    Restarted,
)
from baton.router.prefix_index import PrefixIndex

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from numpy.typing import NDArray

    from baton.events.blocks import ExternalHash, FeedEvent
    from baton.ids import WorkerId
    from baton.router.placement import Placement
    from baton.router.prefix_names import PrefixNames

EXPECTED_WITH_EVENTS_S: Final = 10.0
EXPECTED_WITHOUT_S: Final = 120.0
"""How long a placed prompt counts as held there, of workers whose events are followed or not."""
MAX_EXPECTED_BLOCKS: Final = 1 << 18
DEFAULT_BLOCK_SIZE: Final = 16
"""Of workers that have not reported theirs: what vLLM and Baton's own engine use by default."""
MAX_BLOCKS_OF_WORKER: Final = 1 << 21


@dataclass(frozen=True, slots=True)
class PromptMatch:
    """A prompt of `num_tokens`, and how many of its first tokens each worker has.

    `names` are its blocks', by block size; `token_ids` `[num_tokens]` by the tokenizer of that
    digest.
    """

    num_tokens: int
    cached: Mapping[WorkerId, int] = field(default_factory=dict)
    names: Mapping[int, list[int]] = field(default_factory=dict)
    token_ids: NDArray[np.int32] | None = None
    tokenizer: str | None = None


class ModelPrefixes:
    """Of one model. Owner: the gateway's thread."""

    def __init__(self, names: PrefixNames, max_expected: int = MAX_EXPECTED_BLOCKS) -> None:
        self._names, self._max_expected = names, max_expected
        self._indexes: dict[int, PrefixIndex] = {}
        self._followed: dict[WorkerId, WorkerPrefixes] = {}
        self._expected: deque[_Expected] = deque()
        self._num_expected = 0

    @property
    def num_blocks(self) -> int:
        """Blocks that some worker holds, or is expected to."""
        return sum(index.num_blocks for index in self._indexes.values())

    def follow(self, worker: WorkerId) -> WorkerPrefixes:
        """What a worker's events are applied to, for one life of it."""
        self.forget(worker)
        followed = self._followed[worker] = WorkerPrefixes(worker, self, self._names)
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
        """Where blocks of that size are."""
        index = self._indexes.get(block_size)
        if index is None:
            index = self._indexes[block_size] = PrefixIndex()
        return index

    def find(self, token_ids: NDArray[np.int32], salt: str, now: float) -> PromptMatch:
        """Who has how much of a prompt `[num_tokens]`. `salt` is the tenant's, hashed."""
        while self._expected and self._expected[0].until <= now:
            self._drop(self._expected.popleft())
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
        return PromptMatch(len(token_ids), cached, names)

    def expect(self, match: PromptMatch, placement: Placement, now: float) -> None:
        """The prompt goes to these workers, which will hold it soon."""
        source = None if placement.num_prefix_tokens else placement.prefill
        views = (source, placement.decode)
        for worker in dict.fromkeys(view.id for view in views if view is not None):
            followed = self._followed.get(worker)
            size = DEFAULT_BLOCK_SIZE
            if followed is not None:
                size = followed.block_size or size
            lasts_s = EXPECTED_WITHOUT_S if followed is None else EXPECTED_WITH_EVENTS_S
            names, known = match.names.get(size, []), match.cached.get(worker, 0) // size
            if known < len(names) <= self._max_expected:
                after = names[known - 1] if known else None
                self.index_of(size).store(worker, names[known:], after)
                self._add(_Expected(now + lasts_s, worker, size, names[known:]))

    def drop_expected(self, worker: WorkerId) -> None:
        """What was expected of a worker will not come."""
        of_it = [each for each in self._expected if each.worker == worker]
        if of_it:
            self._expected = deque(each for each in self._expected if each.worker != worker)
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

    def _add(self, expected: _Expected) -> None:
        self._expected.append(expected)
        self._num_expected += len(expected.names)
        while self._num_expected > self._max_expected:
            self._drop(self._expected.popleft())

    def _drop(self, expected: _Expected) -> None:
        """It was not reported within its time, or was, and counts as that."""
        self._num_expected -= len(expected.names)
        followed = self._followed.get(expected.worker)
        gone = expected.names
        if followed is not None:
            gone = [name for name in gone if name not in followed.reported]
        self._indexes[expected.block_size].remove(expected.worker, reversed(gone))


@dataclass(frozen=True, slots=True)
class _Expected:
    """Blocks that a worker will hold if all goes well."""

    until: float
    worker: WorkerId
    block_size: int
    names: list[int]


class WorkerPrefixes:
    """One worker's blocks, by its engine's hashes. Owner: the gateway's thread.

    Only what is in the engine's own pool and depends on nothing but tokens and the tenant's salt
    is taken up: of other blocks the tokens alone do not show who could use them.
    """

    def __init__(self, worker: WorkerId, model: ModelPrefixes, names: PrefixNames) -> None:
        self._worker, self._model, self._names = worker, model, names
        self._name_of: dict[ExternalHash, int] = {}
        self.reported: set[int] = set()
        self.block_size = 0
        self.num_ignored = 0

    def apply(self, event: FeedEvent) -> None:
        """Take up one event of its feed."""
        match event:
            case BlockStored():
                if not self._store(event):
                    self.num_ignored += len(event.hashes)
            case BlockRemoved():
                if event.medium == DEFAULT_MEDIUM and not event.group:
                    self._remove(event.hashes)
            case AllBlocksCleared() | Restarted() | Lost():
                self.clear()
            case _ as never:
                assert_never(never)

    def clear(self) -> None:
        """Forget every block: it holds nothing."""
        self._model.drop_expected(self._worker)
        if self.block_size:
            self._model.index_of(self.block_size).remove(self._worker, self.reported)
        self._name_of, self.reported = {}, set()

    def _store(self, event: BlockStored) -> bool:
        """Whether it was taken up."""
        size, num = event.block_size, len(event.hashes)
        is_usable = (
            event.medium == DEFAULT_MEDIUM
            and not event.group
            and event.is_plain
            and num > 0
            and len(event.packed_ids) == num * size * 4
            and len(self.reported) + num <= MAX_BLOCKS_OF_WORKER
        )
        if not is_usable or self.block_size not in {0, size}:
            return False
        if event.parent is None:
            after = self._names.root(event.salt)
        elif event.parent in self._name_of:
            after = self._name_of[event.parent]
        else:
            return False
        self.block_size = size
        names = self._names.of(np.frombuffer(event.packed_ids, "<i4"), size, after)
        index = self._model.index_of(size)
        index.store(self._worker, names, None if event.parent is None else after)
        self._name_of.update(zip(event.hashes, names, strict=True))
        self.reported.update(names)
        return True

    def _remove(self, hashes: Iterable[ExternalHash]) -> None:
        gone = [self._name_of.pop(each) for each in hashes if each in self._name_of]
        if gone:
            self.reported.difference_update(gone)
            self._model.index_of(self.block_size).remove(self._worker, gone)
