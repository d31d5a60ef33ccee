"""A worker in virtual time: a piece of the oldest prompt, then a step of all answers, and so on."""

from __future__ import annotations

import heapq
from array import array
from collections import deque
from dataclasses import dataclass
from itertools import pairwise
from random import Random
from typing import TYPE_CHECKING, Final

from baton.events.blocks import (
    DEFAULT_MEDIUM,
    BlockRemoved,
    BlocksExpected,
    BlockStored,
    EventDomain,
)
from baton.events.journal import LEAST_EXPECTED_TOKENS
from baton.router.load import find_itl
from baton.sim.router.cache import SimulatedCache

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    from numpy.typing import NDArray

    from baton.events.blocks import BlockEvent
    from baton.router.load import RunningRequest
    from baton.router.placement import Placement
    from baton.sim.router.cache import Reservation
    from baton.sim.router.costs import SimulatedCosts
    from baton.sim.router.sessions import Turn
    from baton.sim.router.store import SimulatedStore

DOMAIN: Final = EventDomain("simulated")
ALMOST_NOTHING_S: Final = 1e-9


class Timeline:
    """What happens when; of equal times, what was asked first. `now` begins at 0, in seconds."""

    def __init__(self) -> None:
        self.now = 0.0
        self._num = 0
        self._queue: list[tuple[float, int, Callable[[], None]]] = []

    def after(self, delay_s: float, action: Callable[[], None]) -> None:
        """Have something happen `delay_s` from now."""
        self._num += 1
        heapq.heappush(self._queue, (self.now + delay_s, self._num, action))

    def run(self, until_s: float) -> None:
        """Let all happen that is due before then."""
        while self._queue and self._queue[0][0] < until_s:
            self.now, _, action = heapq.heappop(self._queue)
            action()


class Processors:
    """What workers compute on. The same seed, the same times. Owner: one simulation."""

    def __init__(self, num: int | None, jitter: float, seed: int) -> None:
        self._num, self._jitter = num, jitter
        self._num_busy = 0
        self._random = Random(seed)  # noqa: S311 - a simulation, no secret

    def begin(self, usual_s: float) -> float:
        """One worker more is busy: how long its piece takes, slowed by those that are now."""
        self._num_busy += 1
        if self._num is not None:
            usual_s *= max(1.0, self._num_busy / self._num)
        if self._jitter:
            usual_s *= self._random.lognormvariate(-0.5 * self._jitter**2, self._jitter)
        return usual_s

    def end(self) -> None:
        """It is not any more."""
        self._num_busy -= 1


@dataclass(slots=True, eq=False)
class Job:
    """A request on its way: `token_ids` of its prompt, `names` of the prompt's full blocks.

    `num_loaded` of its first tokens came from another worker, or the store. `num_saved` of its
    tokens were so, or cached where it was computed, which takes `chunk_s` at a time and `left_s`
    more. `kv` is what it holds at the worker that has it. `finish` is called when its answer is
    complete, before its
    blocks are released.
    """

    turn: Turn
    token_ids: NDArray[np.int32]
    names: list[int]
    placement: Placement
    running: RunningRequest
    began_at: float
    finish: Callable[[Job], None]
    kv: Reservation | None = None
    left_s: float = 0.0
    chunk_s: float = 0.0
    num_loaded: int = 0
    num_saved: int = 0
    first_at: float = 0.0
    itl_s: float | None = None


class SimulatedWorker:
    """Its loop, its queue, its answers, its cache. Owner: one simulation.

    `computed` is called with a job whose prompt is computed, `publish` with each event of the
    cache. What it has not cached it loads from `store`, if that takes less time.
    """

    def __init__(
        self,
        costs: SimulatedCosts,
        timeline: Timeline,
        processors: Processors,
        *,
        computed: Callable[[Job], None],
        publish: Callable[[BlockEvent], None] | None,
        store: SimulatedStore | None = None,
    ) -> None:
        self._costs, self._timeline, self._processors = costs, timeline, processors
        self._computed, self._publish = computed, publish
        self._store = store
        self.cache = SimulatedCache(costs.num_blocks)
        self._prompts: deque[Job] = deque()
        self._arriving: deque[Job] = deque()
        self._landed: list[Job] = []
        self._ends: list[tuple[int, int, Job]] = []
        self._num_steps = self._num_joined = 0
        self._step_ends = array("d")
        self._is_busy = self._is_stepping = self._was_chunk = False
        self._lacks_blocks = False

    def compute(self, job: Job) -> None:
        """A prompt to compute here, or to load as far as the store has it."""
        self._report_expected(job)
        if self._lacks_blocks or not self._start_load(job):
            self._prompts.append(job)
        self.wake()

    def _start_load(self, job: Job) -> bool:
        """Whether some of it is loaded now, beside what is computed: then it is in its blocks."""
        store, costs = self._store, self._costs
        if store is None or job.num_loaded or job.kv is not None:
            return False
        names = job.names[: self.count_findable(job)]
        num_stored, num_cached = store.count_stored(names), self.cache.count_cached(names)
        num_tokens = (num_stored - num_cached) * costs.block_size
        if num_tokens <= 0:
            return False
        takes_s = costs.load_takes_s(num_tokens)
        computed_s = costs.prefill_takes_s(num_tokens, num_cached * costs.block_size)
        if takes_s >= computed_s - costs.prefill_s or not self._reserve_to_compute(job):
            return False
        store.use(names[:num_stored])
        self._timeline.after(takes_s, lambda: self._end_load(job, num_stored, num_tokens))
        return True

    def _end_load(self, job: Job, num_stored: int, num_tokens: int) -> None:
        job.running.prefill.observe_loads(num_tokens, self._costs.load_takes_s(num_tokens))
        job.num_loaded = num_stored * self._costs.block_size
        self._begin(job)
        self._landed.append(job)
        self.wake()

    def receive(self, job: Job) -> None:
        """KV from another worker is here: the answer begins when there is room."""
        self._report_expected(job)
        self._arriving.append(job)
        self.wake()

    def _report_expected(self, job: Job) -> None:
        """What a queued prompt will store, as the embedded engine reports it."""
        if self._publish is None or not self._costs.reports_queued:
            return
        names, size = job.names[: self.count_findable(job)], self._costs.block_size
        num_cached = self.cache.count_cached(names)
        if (len(names) - num_cached) * size < LEAST_EXPECTED_TOKENS:
            return
        parent = names[num_cached - 1] if num_cached else None
        token_ids = job.token_ids[num_cached * size : len(names) * size]
        packed_ids = token_ids.astype("<i4").tobytes()
        self._publish(BlocksExpected(parent, packed_ids, size))

    def answer(self, job: Job) -> None:
        """The first token is there; the others come with steps."""
        job.first_at = self._timeline.now
        job.running.first_token(job.first_at)
        num_left = job.turn.num_answer_tokens - 1
        if num_left <= 0:
            self._end(job)
            return
        self._num_joined += 1
        end = self._num_steps + self._is_stepping + num_left
        heapq.heappush(self._ends, (end, self._num_joined, job))

    def release(self, job: Job) -> None:
        """What it holds here is free for others, or for those who ask the same."""
        self._release(job)
        self.wake()

    def store(self, job: Job, names: list[int], token_ids: NDArray[np.int32], first: int) -> None:
        """Blocks `[first, len(names))` of a sequence are here: others find them."""
        if job.kv is None or len(names) <= first:
            return
        num_new = self.cache.name(job.kv, names[first:])
        if num_new and self._publish is not None:
            size = self._costs.block_size
            ids = token_ids[first * size : len(names) * size].astype("<i4").tobytes()
            parent = names[first - 1] if first else None
            hashes = tuple(names[first:])
            self._publish(BlockStored(DOMAIN, hashes, parent, ids, size, DEFAULT_MEDIUM, 0))

    def wake(self) -> None:
        """Go on, if there is anything to do."""
        if self._is_busy:
            return
        while self._arriving and self._admit(self._arriving[0]):
            self._arriving.popleft()
        if self._landed:  # older ones are computed first
            self._prompts = deque(sorted((*self._prompts, *self._landed), key=_age))
            self._landed.clear()
        while self._prompts and self._start_load(self._prompts[0]):
            self._prompts.popleft()
            self._lacks_blocks = False
        is_turn = not (self._was_chunk and self._ends)
        job = self._find_computable() if is_turn else None
        if job is not None:
            takes_s = min(job.chunk_s, job.left_s)
            self._is_busy = self._was_chunk = True
            seen_s = self._processors.begin(takes_s)
            self._timeline.after(seen_s, lambda: self._end_chunk(job, takes_s))
        elif self._ends:
            takes_s = self._costs.step_takes_s(len(self._ends))
            self._is_busy, self._is_stepping, self._was_chunk = True, True, False
            self._timeline.after(self._processors.begin(takes_s), self._end_step)

    def _find_computable(self) -> Job | None:
        """The oldest prompt, if it has its blocks or gets them now; else one that has loaded.

        A younger one may have been loaded into blocks that the oldest waits for. While it does, no
        further ones are loaded: it would wait without limit.
        """
        if not self._prompts:
            return None
        oldest = self._prompts[0]
        if oldest.kv is None:
            self._lacks_blocks = not self._reserve_to_compute(oldest)
            if not self._lacks_blocks:
                self._begin(oldest)
        waiting = self._prompts if self._store is not None else (oldest,)
        return next((job for job in waiting if job.kv is not None), None)

    def _reserve_to_compute(self, job: Job) -> bool:
        turn, placement = job.turn, job.placement
        is_alone = placement.computing is placement.decode
        num_tokens = turn.num_tokens if is_alone else turn.num_prompt_tokens
        return self._reserve(job, num_tokens) is not None

    def _begin(self, job: Job) -> None:
        """It has its blocks, and in them what was cached and loaded: what is left to compute."""
        num_cached = 0 if job.kv is None else job.kv.num_cached * self._costs.block_size
        job.num_saved = max(job.num_loaded, num_cached)
        num_uncached = job.turn.num_prompt_tokens - job.num_saved
        job.left_s = self._costs.prefill_takes_s(num_uncached, job.num_saved)
        job.chunk_s = job.left_s * self._costs.chunk_tokens / num_uncached

    def _admit(self, job: Job) -> bool:
        kv = self._reserve(job, job.turn.num_tokens)
        if kv is None:
            return False
        self.store(job, job.names, job.token_ids, kv.num_cached)
        self.answer(job)
        return True

    def _reserve(self, job: Job, num_tokens: int) -> Reservation | None:
        num_findable = self.count_findable(job)
        job.kv = self.cache.reserve(job.names, num_findable, self._costs.count_blocks(num_tokens))
        if job.kv is not None and job.kv.evicted and self._publish is not None:
            self._publish(BlockRemoved(DOMAIN, tuple(job.kv.evicted), DEFAULT_MEDIUM, 0))
        return job.kv

    def count_findable(self, job: Job) -> int:
        """Blocks that may come from the cache: the last token is computed in any case."""
        return (job.turn.num_prompt_tokens - 1) // self._costs.block_size

    def _end_chunk(self, job: Job, took_s: float) -> None:
        self._is_busy = False
        self._processors.end()
        job.left_s -= took_s
        if job.left_s < ALMOST_NOTHING_S:
            self._prompts.remove(job)
            num_cached = 0 if job.kv is None else job.kv.num_cached
            self.store(job, job.names, job.token_ids, num_cached)
            job.running.prefilled(self._timeline.now)
            self._computed(job)
        self.wake()

    def _end_step(self) -> None:
        self._is_busy = self._is_stepping = False
        self._processors.end()
        self._num_steps += 1
        self._step_ends.append(self._timeline.now)
        while self._ends and self._ends[0][0] <= self._num_steps:
            self._end(heapq.heappop(self._ends)[2])
        self.wake()

    def _end(self, job: Job) -> None:
        first = self._num_steps - job.turn.num_answer_tokens + 1
        token_times = [job.first_at, *self._step_ends[first:]]
        job.itl_s = find_itl([after - before for before, after in pairwise(token_times)])
        job.running.end(self._timeline.now, job.turn.num_answer_tokens, job.itl_s)
        job.finish(job)
        self._release(job)

    def _release(self, job: Job) -> None:
        if job.kv is not None:
            self.cache.release(job.kv)
            job.kv = None


def _age(job: Job) -> float:
    return job.began_at
