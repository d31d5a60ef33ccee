"""vLLM's use of the store: both sides, under a model of vLLM's scheduler, with two ranks or one.

Each rank's store answers at once, in part, or long after the deadline, and then it still tries to
access the blocks that it was given. It has read what it found, or not. What must hold: a request
runs only on KV of its own tokens, in every rank; no rank's store touches blocks that are another's;
vLLM gets a report of each load once; nothing is left over in the end, nor in the stores' memory.
After a reset of vLLM's caches nothing is loaded that was looked for before it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from baton.engines.lookup_cost import LOAD_TIMEOUT_S, LookupCost
from baton.engines.vllm.kept_blocks import KeptBlocks
from baton.engines.vllm.prefix_admission import PrefixAdmission
from baton.engines.vllm.prefix_schedule import PrefixSchedule
from baton.engines.vllm.rank_prefixes import KEEP_TIMEOUT_S, RankPrefixes
from baton.engines.vllm.step_orders import PrefixOrders, StepReport
from baton.errors import StoreError
from baton.handoff.interface import EngineSteps, KeepOrder, LoadOrder, LookupOrder
from baton.handoff.read_prefixes import ReadOrder
from baton.kv.identity import Adapter
from baton.testing.clocks import ManualClock
from tests.examples import examples

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from baton.engines.vllm.step_orders import Keep, LookUp
    from baton.ids import TicketId

BLOCK_SIZE, ENTRY_TOKENS = 4, 6
NUM_BLOCKS = 40


class Status(StrEnum):
    WAITING = "waiting"
    LOADING = "loading"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass
class Block:
    number: int
    num_references: int = 0


class Pool:
    """As vLLM's `BlockPool`, as far as it is used. A block without references is free."""

    def __init__(self) -> None:
        self.blocks = [Block(number) for number in range(NUM_BLOCKS)]

    @property
    def free(self) -> list[int]:
        return [block.number for block in self.blocks if not block.num_references]

    def get_num_free_blocks(self) -> int:
        return len(self.free)

    def touch(self, blocks: Sequence[Block]) -> None:
        for block in blocks:
            assert block.num_references > 0, "it may be another's by now"
            block.num_references += 1

    def free_blocks(self, ordered_blocks: Iterable[Block]) -> None:
        for block in ordered_blocks:
            block.num_references -= 1
            assert block.num_references >= 0


@dataclass
class Request:
    """As vLLM's. Token ids are its own: no two requests have one in common."""

    request_id: str
    num_prompt_tokens: int
    all_token_ids: list[int]
    status: Status = Status.WAITING
    blocks: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    num_in_flight_tokens: int = 0
    cache_salt: str | None = None
    skip_reading_prefix_cache: bool = False

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)


def make_weights(num_resets: int) -> Adapter:
    """What computes requests after so many resets."""
    return Adapter("", str(num_resets))


class Rank:
    """One rank: its KV, and a store that has taken orders and has not answered them."""

    def __init__(self, clock: ManualClock) -> None:
        self.kv = [[-1] * BLOCK_SIZE for _ in range(NUM_BLOCKS)]
        self.orders: dict[TicketId, LookupOrder | LoadOrder | KeepOrder] = {}
        self.num_kept = self.num_dropped_tokens = 0
        self.adapter = make_weights(0)
        self.read: dict[TicketId, tuple[int, int]] = {}
        self.steps = EngineSteps()
        self.prefixes = RankPrefixes(self, block_size=BLOCK_SIZE, clock=clock)

    # As `PrefixStore`.

    @property
    def block_size(self) -> int:
        return ENTRY_TOKENS

    def start_lookup(self, order: LookupOrder) -> None:
        self.orders[order.id] = order

    def start_load(self, order: LoadOrder) -> None:
        assert order.adapter == self.adapter, "its weights were replaced"
        self.orders[order.id] = order

    def start_keep(self, order: KeepOrder) -> None:
        self.orders[order.id] = order

    def abort_load(self, order: TicketId) -> None:
        if self.orders.pop(order, None) is not None:
            self.prefixes.answered(order, 0)

    def hurry(self, *, is_hurried: bool) -> None:
        """Answers come when they come."""

    def drop(self, num_tokens: int) -> None:
        self.num_dropped_tokens += num_tokens

    def put_in_blocks(self, order: LoadOrder) -> int:
        assert order.adapter == self.adapter, "its weights were replaced"
        start, stop = self.read.pop(order.id)
        assert start <= order.start, "what is before was not read"
        assert len(order.prompt_ids) <= stop
        self._write(order, len(order.prompt_ids))
        return len(order.prompt_ids)

    def release(self, order: TicketId) -> None:
        self.read.pop(order, None)

    # What the store does.

    def answer(
        self, order: LookupOrder | LoadOrder | KeepOrder, num_entries: int, *, reads: bool = False
    ) -> None:
        """With at most `num_entries` entries from the prompt's beginning on."""
        del self.orders[order.id]
        num_tokens, is_read = 0, False
        try:
            match order:
                case KeepOrder():
                    with order.guard:
                        self._read(order)
                case LoadOrder():
                    num_tokens = max(order.start, self._most(order, num_entries))
                    with order.guard:
                        self._write(order, num_tokens)
                case LookupOrder():
                    num_tokens = max(order.start, self._most(order, num_entries))
                    is_read = reads and num_tokens > order.start
        except StoreError:
            num_tokens = 0
        if is_read:
            self.read[order.id] = order.start, num_tokens
        self.prefixes.answered(order.id, num_tokens, is_read=is_read)

    def _most(self, order: LookupOrder, num_entries: int) -> int:
        return min(num_entries, len(order.prompt_ids) // ENTRY_TOKENS) * ENTRY_TOKENS

    def _read(self, order: KeepOrder) -> None:
        assert len(order.token_ids) % ENTRY_TOKENS == 0
        table = order.blocks.blocks.tolist()
        for at, token in enumerate(order.token_ids.tolist()):
            assert self.kv[table[at // BLOCK_SIZE]][at % BLOCK_SIZE] == token, "kept as another's"
        self.num_kept += 1

    def _write(self, order: LoadOrder, num_tokens: int) -> None:
        table, first = order.blocks.blocks.tolist(), order.blocks.first
        for at in range(order.start, num_tokens):
            token = int(order.prompt_ids[at])
            self.kv[table[at // BLOCK_SIZE - first]][at % BLOCK_SIZE] = token


class VllmMachine(RuleBasedStateMachine):
    num_ranks = 2
    max_kept_blocks = 12

    def __init__(self) -> None:
        super().__init__()
        self.clock, self.pool = ManualClock(), Pool()
        self.step_s = 0.0
        self.ranks = [Rank(self.clock) for _ in range(self.num_ranks)]
        self.schedule = PrefixSchedule(
            LookupCost(self.clock.now()),
            num_ranks=self.num_ranks,
            block_size=BLOCK_SIZE,
            entry_tokens=ENTRY_TOKENS,
        )
        self.kept = KeptBlocks(self.max_kept_blocks, self.num_ranks)
        self.admission = PrefixAdmission(
            self.schedule, self.kept, block_size=BLOCK_SIZE, clock=self.clock
        )
        self.admission.bind(self.pool)
        self.requests: dict[str, Request] = {}
        self.reported: dict[str, int] = {}
        self.count = self.num_resets = 0

    # What clients do.

    @rule(num_tokens=st.integers(1, 40))
    def arrive(self, num_tokens: int) -> None:
        self.count += 1
        ids = [self.count * 1000 + at for at in range(num_tokens)]
        request = Request(f"r{self.count}", num_tokens, ids)
        self.requests[request.request_id] = request
        self.admission.arrived(request, lambda: make_weights(self.num_resets))

    @precondition(lambda self: self._live())
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self._finish(data.draw(st.sampled_from(self._live())))

    @precondition(lambda self: self._with(Status.LOADING))
    @rule(data=st.data())
    def abort_a_load(self, data: st.DataObject) -> None:
        self._finish(data.draw(st.sampled_from(self._with(Status.LOADING))))

    # What the store does.

    @precondition(lambda self: any(rank.orders for rank in self.ranks))
    @rule(data=st.data(), num_entries=st.integers(0, 7), reads=st.booleans())
    def answer(self, data: st.DataObject, num_entries: int, *, reads: bool) -> None:
        rank = data.draw(st.sampled_from([rank for rank in self.ranks if rank.orders]))
        order = data.draw(st.sampled_from(list(rank.orders.values())))
        rank.answer(order, num_entries, reads=reads)

    @precondition(lambda self: self._lookups())
    @rule(num_entries=st.integers(1, 7), reads=st.booleans())
    def find(self, num_entries: int, *, reads: bool) -> None:
        for rank, order in self._lookups():
            rank.answer(order, num_entries, reads=reads)

    @rule(seconds=st.sampled_from([0.01, LOAD_TIMEOUT_S, KEEP_TIMEOUT_S]))
    def wait(self, seconds: float) -> None:
        self.clock.advance(seconds)

    # What vLLM does.

    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        self._run(self._plan(data), data)

    @precondition(lambda self: self._running())
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        self._preempt(data.draw(st.sampled_from(self._running())))

    @precondition(lambda self: self._num_used() == sum(len(r.blocks) for r in self._running()))
    @rule()
    def reset(self) -> None:
        """vLLM refuses it while others than running requests have blocks."""
        for request in self._running():
            self._preempt(request)
        self.num_resets += 1
        for rank in self.ranks:
            rank.adapter = make_weights(self.num_resets)
        self.admission.reset()

    # What must hold.

    @invariant()
    def blocks_have_their_owners(self) -> None:
        self.schedule.check_invariants()
        for request in self.requests.values():
            assert all(self.pool.blocks[block].num_references for block in request.blocks)
        assert self._num_used() <= self._num_owned() + self.max_kept_blocks

    @invariant()
    def the_store_touches_no_block_of_another(self) -> None:
        loading = {
            block
            for request in self.requests.values()
            if request.status in {Status.LOADING, Status.FINISHED}
            for block in request.blocks
        }
        free = set(self.pool.free)
        for order in (order for rank in self.ranks for order in rank.orders.values()):
            if type(order) is ReadOrder:
                continue
            try:
                with order.guard:
                    blocks = set(order.blocks.blocks.tolist())
            except StoreError:
                continue
            assert blocks <= loading if isinstance(order, LoadOrder) else not blocks & free

    @invariant()
    def what_runs_has_its_own_kv(self) -> None:
        for request in self._running():
            for rank in self.ranks:
                for at in range(request.num_computed_tokens):
                    slot = rank.kv[request.blocks[at // BLOCK_SIZE]][at % BLOCK_SIZE]
                    assert slot == request.all_token_ids[at]

    def teardown(self) -> None:
        """Everything ends, and nothing is left, though the store never answers again."""
        for request in self._live():
            self._finish(request)
        self._run([])
        self.clock.advance(KEEP_TIMEOUT_S)
        for _ in range(2):
            self._run([])
        assert not self.requests
        assert not self.reported
        assert len(self.schedule) == len(self.kept) == 0
        assert len(self.pool.free) == NUM_BLOCKS
        for rank in self.ranks:
            for order in tuple(rank.orders.values()):
                rank.answer(order, 0)
            assert rank.prefixes.is_idle
            assert not rank.read

    # The model's inside.

    def _plan(self, data: st.DataObject) -> list[Request]:
        scheduled = []
        for request in [*self._running(), *self._waiting()]:
            if request.num_computed_tokens == 0 and not self._admit(request, data):
                continue
            chunk = data.draw(st.integers(1, 16), "chunk")
            stop = min(request.num_tokens, request.num_computed_tokens + chunk)
            if stop > request.num_computed_tokens and self._grow(request, stop):
                self._compute(request, request.num_computed_tokens, stop)
                request.num_computed_tokens, request.status = stop, Status.RUNNING
                scheduled.append(request)
        return scheduled

    def _admit(self, request: Request, data: st.DataObject) -> bool:
        """Whether it may compute now: False where it must wait, for the store or for blocks."""
        most_cached = (request.num_prompt_tokens - 1) // BLOCK_SIZE
        num_cached = BLOCK_SIZE * data.draw(st.integers(0, most_cached), "cached")
        weights = make_weights(self.num_resets)
        missing = self.admission.count_missing(request, num_cached, lambda: weights)
        assert missing == self.admission.count_missing(request, num_cached, lambda: weights)
        is_read = self.admission.is_read(request.request_id)
        if missing is None or not self._grow(request, num_cached + missing or 1):
            return False
        self._compute(request, 0, num_cached)  # as if another had: these are shared blocks
        request.num_computed_tokens = num_cached + missing
        assert request.num_computed_tokens <= request.num_prompt_tokens
        assert not is_read or request.num_computed_tokens < request.num_prompt_tokens
        self.admission.allocated(request, request.blocks, missing)
        if missing and not is_read:
            request.status = Status.LOADING
            return False
        return True

    def _run(self, scheduled: list[Request], data: st.DataObject | None = None) -> None:
        """One step of all ranks, and what vLLM makes of their reports."""
        num_scheduled = dict.fromkeys((request.request_id for request in scheduled), 16)
        output: Any = SimpleNamespace(
            total_num_scheduled_tokens=sum(num_scheduled.values()),
            num_scheduled_tokens=num_scheduled,
        )
        orders: PrefixOrders | None = self.admission.take_orders(output)
        self.clock.advance(self.step_s)
        report, invalid, received = StepReport(), set[int](), set[str]()
        for rank in self.ranks:
            if orders is not None:
                rank.prefixes.begin(orders)
            rank.prefixes.check_deadlines()
            for request in rank.prefixes.take_finished():
                self.reported[request] = self.reported.get(request, 0) + 1
                assert self.reported[request] <= self.num_ranks
            invalid |= rank.prefixes.take_invalid_blocks()
            found, kept = rank.prefixes.take_found(), rank.prefixes.take_kept()
            report = report.merge(StepReport((), found, kept, rank.prefixes.take_read()))
        received = {name for name, num in self.reported.items() if num == self.num_ranks}
        for name in received:
            del self.reported[name]
        for request in self._with(Status.LOADING):
            bad = [n for n, block in enumerate(request.blocks) if block in invalid]
            if bad:
                request.num_computed_tokens = min(request.num_computed_tokens, bad[0] * BLOCK_SIZE)
        if data is not None:
            self._sample(scheduled, data)
        self.admission.update_from_workers(received, report)
        for name in received:
            request = self.requests[name]
            if request.status is Status.FINISHED:
                self._free(request)
                del self.requests[name]
                continue
            assert request.status is Status.LOADING
            if request.num_computed_tokens == 0:
                self._free(request)
            request.num_computed_tokens = min(request.num_computed_tokens, request.num_tokens - 1)
            request.status = Status.WAITING

    def _sample(self, scheduled: list[Request], data: st.DataObject) -> None:
        """Requests stop before vLLM tells its connector of the step's reports."""
        for request in scheduled:
            if request.num_computed_tokens == request.num_tokens:
                request.all_token_ids.append(request.all_token_ids[-1] + 1)
                if data.draw(st.booleans(), "stops"):
                    self._finish(request)

    def _finish(self, request: Request) -> None:
        is_loading = request.status is Status.LOADING
        weights = make_weights(self.num_resets)
        self.admission.finish(request, request.blocks, weights, is_kept=True)
        request.status = Status.FINISHED
        if not is_loading:
            self._free(request)
            del self.requests[request.request_id]

    def _compute(self, request: Request, start: int, stop: int) -> None:
        for rank in self.ranks:
            for at in range(start, stop):
                block = request.blocks[at // BLOCK_SIZE]
                rank.kv[block][at % BLOCK_SIZE] = request.all_token_ids[at]

    def _grow(self, request: Request, num_tokens: int) -> bool:
        num_new = -(-num_tokens // BLOCK_SIZE) - len(request.blocks)
        free = self.pool.free
        if num_new > len(free):
            return False
        for block in free[: max(0, num_new)]:
            self.pool.blocks[block].num_references += 1
            request.blocks.append(block)
        return True

    def _preempt(self, request: Request) -> None:
        self._free(request)
        request.num_computed_tokens, request.status = 0, Status.WAITING

    def _free(self, request: Request) -> None:
        self.pool.free_blocks(self.pool.blocks[block] for block in request.blocks)
        request.blocks = []

    def _lookups(self) -> list[tuple[Rank, LookupOrder]]:
        return [
            (rank, order)
            for rank in self.ranks
            for order in rank.orders.values()
            if type(order) is ReadOrder
        ]

    def _num_used(self) -> int:
        return NUM_BLOCKS - len(self.pool.free)

    def _num_owned(self) -> int:
        return sum(len(request.blocks) for request in self.requests.values())

    def _with(self, status: Status) -> list[Request]:
        return [request for request in self.requests.values() if request.status is status]

    def _running(self) -> list[Request]:
        return self._with(Status.RUNNING)

    def _waiting(self) -> list[Request]:
        return self._with(Status.WAITING)

    def _live(self) -> list[Request]:
        return [r for r in self.requests.values() if r.status is not Status.FINISHED]


class OneThreadMachine(VllmMachine):
    """One rank, whose hooks the scheduler's thread calls: it is asked between two steps."""

    num_ranks = 1
    max_kept_blocks = 32
    """More than are free most of the time: then copies are waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.num_entries: int | None = 4
        self.step_s = 0.5
        self.admission.use_rank(self, 0.01)

    @rule(num_entries=st.none() | st.integers(0, 7), step_s=st.sampled_from([0.0, 0.5]))
    def answer_at_once(self, num_entries: int | None, step_s: float) -> None:
        """From now on; None: later, if ever. Only in a long step copies are waited for."""
        self.num_entries, self.step_s = num_entries, step_s

    # As `NearRank`.

    def look_up(self, lookup: LookUp | None, wait_s: float) -> StepReport:
        (rank,) = self.ranks
        if lookup is not None:
            rank.prefixes.begin(PrefixOrders(lookups=(lookup,)))
        for _, order in self._lookups():
            if self.num_entries is not None:
                rank.answer(order, self.num_entries, reads=True)
        if not rank.prefixes.has_found:
            self.clock.advance(wait_s)
        return StepReport(found=rank.prefixes.take_found(), read=rank.prefixes.take_read())

    def keep(self, keep: Keep) -> None:
        (rank,) = self.ranks
        rank.prefixes.begin(PrefixOrders(keeps=(keep,)))

    def await_kept(self, wait_s: float) -> StepReport:
        (rank,) = self.ranks
        for order in tuple(rank.orders.values()):
            if isinstance(order, KeepOrder) and self.num_entries is not None:
                rank.answer(order, self.num_entries)
        if not rank.prefixes.has_kept:
            self.clock.advance(wait_s)
        return StepReport(kept=rank.prefixes.take_kept())


TestVllmPrefixes = VllmMachine.TestCase
TestVllmPrefixes.settings = settings(
    max_examples=examples(75), stateful_step_count=40, deadline=None
)
TestOnOneThread = OneThreadMachine.TestCase
TestOnOneThread.settings = settings(
    max_examples=examples(50), stateful_step_count=40, deadline=None
)
