"""One rank's orders to the store: prompts to look for, to load and to keep, and their deadlines.

ordered ──answered──► reported
   └──late──► blocks taken back, reported ──answered──► forgotten

Lookups read what they find: then a later step's order puts it in place at once (`_put_in_blocks`).
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Final, TypeAlias

import numpy as np

from baton.clock import Instant
from baton.engines.lookup_cost import LOAD_TIMEOUT_S
from baton.engines.vllm.rank_prompts import on_host
from baton.engines.vllm.step_orders import Keep, LookUp, StartLoad
from baton.handoff.interface import KeepOrder, LoadOrder, LookupOrder
from baton.handoff.read_prefixes import ReadOrder
from baton.ids import TicketId
from baton.kv.copies import BlockTable
from baton.protocol.worker_http import StoreLoads
from baton.telemetry.log_limit import LimitedLog

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from baton.clock import Clock
    from baton.engines.vllm.step_orders import PrefixOrders, VllmRequestId
    from baton.handoff.interface import StreamPosition
    from baton.handoff.read_prefixes import ReadsPrefixes

logger = logging.getLogger(__name__)

KEEP_TIMEOUT_S: Final = 10.0
"""Then a request's blocks are released, whether they were copied or not."""

ANSWER_GUESS_S: Final = 0.001
LEARNING: Final = 0.2
"""Weight of an answer that was quicker than expected in what is expected of the next."""

LATE: Final = "the store has not answered in time: it is asked again once it has"

Task: TypeAlias = LookUp | StartLoad | Keep


@dataclass(slots=True)
class _Open:
    task: Task
    order: LookupOrder | LoadOrder | KeepOrder
    began_at: Instant
    deadline: Instant
    is_aborted: bool = False


class RankPrefixes:
    """Owned by vLLM's worker thread. `store` None: nothing is ever ordered.

    While the store does not answer, it is not asked: a store that hangs costs one request its time.
    """

    def __init__(
        self,
        store: ReadsPrefixes | None,
        *,
        block_size: int,
        clock: Clock,
        record_position: Callable[[], StreamPosition | None] = on_host,
    ) -> None:
        self._store, self._block_size, self._clock = store, block_size, clock
        self._record_position = record_position
        self._open: dict[TicketId, _Open] = {}
        self._ids: dict[VllmRequestId, TicketId] = {}
        """Of lookups and loads that are open: a request has one at most."""
        self._read: dict[VllmRequestId, TicketId] = {}
        """Lookups whose KV is in the store's memory, until it is in blocks or released."""
        self._found_by: dict[VllmRequestId, TicketId] = {}
        """Lookups that found what is not read yet: the load has the same order id, so that the
        store does not look again."""
        self._late: set[TicketId] = set()
        self._num_orders = self._num_awaited = 0
        self._found: list[tuple[VllmRequestId, int]] = []
        self._reported_read: list[VllmRequestId] = []
        self._kept: list[VllmRequestId] = []
        self._finished: set[VllmRequestId] = set()
        self._invalid_blocks: set[int] = set()
        self.answer_s = ANSWER_GUESS_S
        """What the slowest of the latest lookups and loads have taken, to the answer."""
        self._log = LimitedLog(logger, clock)
        self.loads = None if store is None else StoreLoads(0, 0, 0.0)
        """What the store has given; what came too late counts as no tokens. Any thread reads it."""

    def __contains__(self, order: TicketId) -> bool:
        """Whether the store has yet to answer an order of this name."""
        return order in self._open or order in self._late

    @property
    def is_idle(self) -> bool:
        """Whether nothing is under way, nor to be taken: no event of the store's can follow."""
        return not (self._open or self._late or self._finished or self._found or self._kept)

    @property
    def is_awaited(self) -> bool:
        """Whether requests wait for the store's next answer."""
        return self._num_awaited > 0

    @property
    def has_news(self) -> bool:
        """Whether there is an answer to take for which a request waits."""
        return bool(self._finished or self._found)

    @property
    def has_found(self) -> bool:
        """Whether a lookup was answered since `take_found`."""
        return bool(self._found)

    def begin(self, orders: PrefixOrders) -> None:
        """Carry out a step's orders."""
        if self._store is None:
            return
        for load in orders.read_loads:
            self._put_in_blocks(self._store, load)
        tasks: Iterable[Task] = chain(orders.lookups, orders.loads, orders.keeps)
        for task in tasks:
            self._begin(self._store, task)
        for request in orders.released:
            self._release(self._store, request)
        for request in orders.aborted:
            self._abort(self._store, request)
        if orders.num_dropped_tokens:
            self._store.drop(orders.num_dropped_tokens)

    def answered(self, order: TicketId, num_tokens: int, *, is_read: bool = False) -> None:
        """The store has looked, loaded tokens before `num_tokens`, or kept what it could.

        `is_read`: it has what it found in memory.
        """
        self._late.discard(order)
        closed = self._close(order) if order in self._open else None
        if is_read and self._store is not None:
            if closed is None or closed.is_aborted:
                self._store.release(order)
            else:
                self._read[closed.task.request] = order
                self._reported_read.append(closed.task.request)
        if closed is None:
            return
        is_remembered = not (is_read or closed.is_aborted)
        if is_remembered and type(closed.task) is LookUp and num_tokens > closed.task.start:
            self._found_by[closed.task.request] = order
        if not isinstance(closed.task, Keep):
            took_s = self._clock.now() - closed.began_at
            self.answer_s = max(took_s, self.answer_s + LEARNING * (took_s - self.answer_s))
        if isinstance(closed.task, StartLoad) and num_tokens > closed.task.start:
            self._count_load(closed, num_tokens - closed.task.start)
        self._end(closed, num_tokens)

    def check_deadlines(self) -> None:
        """End what is late: its requests wait no more, and its blocks are accessed no more."""
        if not self._open:
            return
        now = self._clock.now()
        late = [
            order
            for order, each in self._open.items()
            if each.deadline <= now and not _makes_progress(each.order, now)
        ]
        for order in late:
            closed = self._close(order)
            if isinstance(closed.order, LoadOrder | KeepOrder):
                closed.order.guard.revoke()
            if not isinstance(closed.task, Keep):  # those wait for each other, and for all loads
                self._late.add(order)
                self._log.warning("late", LATE)
                self._count_load(closed, 0)
            self._end(closed, 0)

    @property
    def has_kept(self) -> bool:
        """Whether blocks are needed no more that were before `take_kept`."""
        return bool(self._kept)

    def take_found(self) -> tuple[tuple[VllmRequestId, int], ...]:
        """Lookups that ended since the last call, each with the tokens that can be in place."""
        found, self._found = tuple(self._found), []
        return found

    def take_read(self) -> tuple[VllmRequestId, ...]:
        """Those of them whose KV is in memory."""
        read, self._reported_read = tuple(self._reported_read), []
        return read

    def take_kept(self) -> tuple[VllmRequestId, ...]:
        """Requests whose blocks are needed no more, since the last call."""
        kept, self._kept = tuple(self._kept), []
        return kept

    def take_finished(self) -> set[VllmRequestId]:
        """Loads that are over, each returned once, however it went."""
        finished, self._finished = self._finished, set()
        return finished

    def take_invalid_blocks(self) -> set[int]:
        """Blocks of those that were not loaded: vLLM computes their tokens itself."""
        blocks, self._invalid_blocks = self._invalid_blocks, set()
        return blocks

    def _begin(self, store: ReadsPrefixes, task: Task) -> None:
        timeout_s = KEEP_TIMEOUT_S if isinstance(task, Keep) else LOAD_TIMEOUT_S
        order, now = self._make_order(task), self._clock.now()
        started = _Open(task, order, now, Instant(now + timeout_s))
        if self._late:
            self._end(started, 0)
            if isinstance(task, Keep):
                store.drop(len(task.token_ids))
            return
        self._open[order.id] = started
        self._num_awaited += not isinstance(task, Keep)
        match order:
            case KeepOrder():
                store.start_keep(order)
            case LoadOrder():
                self._ids[task.request] = order.id
                store.start_load(order)
            case LookupOrder():
                self._ids[task.request] = order.id
                store.start_lookup(order)

    def _make_order(self, task: Task) -> LookupOrder | LoadOrder | KeepOrder:
        self._num_orders += 1
        # Tickets' ids are random: one that begins so does not happen.
        order = TicketId(b"pref" + self._num_orders.to_bytes(12, "big"))
        salt, ids = task.tenant_salt, task.token_ids
        if isinstance(task, Keep):
            table = _table(0, task.blocks)
            after = self._record_position()
            return KeepOrder(order, salt, ids, table, after=after, adapter=task.adapter)
        if isinstance(task, StartLoad):
            return self._make_load(self._found_by.pop(task.request, order), task)
        return ReadOrder(order, salt, ids, task.start, task.token_s, adapter=task.adapter)

    def _make_load(self, order: TicketId, load: StartLoad) -> LoadOrder:
        # Steps that were given to a GPU before may still use these blocks, for another request.
        return LoadOrder(
            order,
            load.tenant_salt,
            load.token_ids,
            load.start,
            load.token_s,
            _table(load.first_block, load.blocks),
            after=self._record_position(),
            adapter=load.adapter,
        )

    def _put_in_blocks(self, store: ReadsPrefixes, load: StartLoad) -> None:
        """Put what was read into blocks, before this step computes the rest of the prompt."""
        order = self._make_load(self._read.pop(load.request), load)
        began_at = self._clock.now()
        num_tokens = store.put_in_blocks(order)
        # vLLM has listed these blocks in its cache: it must not go on with others' bytes in them.
        if num_tokens != len(load.token_ids):
            raise AssertionError(f"{num_tokens} tokens of {len(load.token_ids)} were in memory")
        self._count_load(_Open(load, order, began_at, began_at), num_tokens - load.start)

    def _release(self, store: ReadsPrefixes, request: VllmRequestId) -> None:
        """What was read of a request's prompt is not needed, nor what is being read."""
        self._found_by.pop(request, None)
        order = self._read.pop(request, None)
        if order is not None:
            store.release(order)
        elif request in self._ids:
            lookup = self._open[self._ids[request]]
            lookup.is_aborted = not isinstance(lookup.task, StartLoad)

    def _close(self, order: TicketId) -> _Open:
        closed = self._open.pop(order)
        self._num_awaited -= not isinstance(closed.task, Keep)
        return closed

    def _count_load(self, ended: _Open, num_tokens: int) -> None:
        """A request has waited for the store, and got so many tokens; none if it was late."""
        if self.loads is None or ended.is_aborted:
            return
        seconds = self._clock.now() - ended.began_at
        if isinstance(ended.task, StartLoad):
            seconds += ended.task.lookup_s
        before = self.loads
        self.loads = StoreLoads(
            before.num_loads + 1, before.num_tokens + num_tokens, before.seconds + seconds
        )

    def _abort(self, store: ReadsPrefixes, request: VllmRequestId) -> None:
        order = self._ids.get(request)
        if order is not None:
            self._open[order].is_aborted = True
            store.abort_load(order)

    def _end(self, ended: _Open, num_tokens: int) -> None:
        task = ended.task
        if not isinstance(task, Keep):
            self._ids.pop(task.request, None)
        match task:
            case StartLoad():
                self._finished.add(task.request)
                if not ended.is_aborted:
                    self._invalid_blocks.update(self._find_missing(task, num_tokens))
            case LookUp():
                self._found.append((task.request, max(task.start, num_tokens)))
            case Keep():
                self._kept.append(task.request)

    def _find_missing(self, load: StartLoad, num_tokens: int) -> Sequence[int]:
        """Blocks that lack some of their tokens."""
        if num_tokens >= len(load.token_ids):
            return ()
        first = num_tokens // self._block_size - load.first_block
        return load.blocks[max(0, first) :]


def _makes_progress(order: LookupOrder | LoadOrder | KeepOrder, now: Instant) -> bool:
    """Whether it is a load that has put tokens in place lately."""
    return isinstance(order, LoadOrder) and now < order.progress.last_at + LOAD_TIMEOUT_S


def _table(first: int, blocks: Sequence[int]) -> BlockTable:
    return BlockTable(first, np.array(blocks, dtype=np.int64))
