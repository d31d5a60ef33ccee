"""One rank's orders to a scripted store, through the hooks of a step."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from baton.engines.lookup_cost import LOAD_TIMEOUT_S
from baton.engines.vllm.rank_prefixes import ANSWER_GUESS_S, KEEP_TIMEOUT_S
from baton.engines.vllm.step_orders import (
    NO_ORDERS,
    Keep,
    LookUp,
    PrefixOrders,
    StartLoad,
    StepOrders,
    StepReport,
)
from baton.errors import StoreError
from baton.handoff.interface import (
    BlocksQuiescent,
    EngineSteps,
    HandoffEvent,
    KeepOrder,
    KVLanded,
    KVSent,
    LoadOrder,
    LookupOrder,
    PrefixFound,
)
from baton.handoff.read_prefixes import ReadOrder
from baton.protocol.worker_http import StoreLoads
from tests.unit.engines_vllm.test_rank_handoffs import RankHarness, harness, make_harness
from tests.unit.engines_vllm.test_step_counts import count_calls

if TYPE_CHECKING:
    from baton.ids import TicketId

__all__ = ["harness"]

IDS = np.arange(16, dtype=np.int32).tobytes()


class RecordingStore:
    """A `ReadsPrefixes` that only notes what it is asked, and has read tokens up to `num_read`."""

    block_size = 8

    def __init__(self) -> None:
        self.orders: list[LookupOrder | LoadOrder | KeepOrder] = []
        self.steps = EngineSteps()
        self.aborted: list[TicketId] = []
        self.hurries: list[bool] = []
        self.num_dropped_tokens = 0
        self.loaded: list[LoadOrder] = []
        self.released: list[TicketId] = []
        self.num_read = 16

    def put_in_blocks(self, order: LoadOrder) -> int:
        self.loaded.append(order)
        return self.num_read

    def release(self, order: TicketId) -> None:
        self.released.append(order)

    def start_lookup(self, order: LookupOrder) -> None:
        self.orders.append(order)

    def start_load(self, order: LoadOrder) -> None:
        self.orders.append(order)

    def start_keep(self, order: KeepOrder) -> None:
        self.orders.append(order)

    def hurry(self, *, is_hurried: bool) -> None:
        self.hurries.append(is_hurried)

    def abort_load(self, order: TicketId) -> None:
        self.aborted.append(order)

    def drop(self, num_tokens: int) -> None:
        self.num_dropped_tokens += num_tokens


@pytest.fixture(name="store")
def store_fixture() -> RecordingStore:
    return RecordingStore()


@pytest.fixture(name="stored")
def stored_fixture(store: RecordingStore) -> RankHarness:
    return make_harness(store)


def look_up(name: str = "r") -> PrefixOrders:
    return PrefixOrders(lookups=(LookUp(name, "", IDS, 4, 0.0, None),))


def load(name: str = "r", lookup_s: float = 0.0) -> PrefixOrders:
    """Tokens [4, 16), in blocks of 4."""
    return PrefixOrders(loads=(StartLoad(name, "", IDS, 4, 0.0, None, 1, (21, 22, 23), lookup_s),))


def read_load() -> PrefixOrders:
    return PrefixOrders(read_loads=load(lookup_s=0.25).loads)


def keep(name: str = "r") -> PrefixOrders:
    return PrefixOrders(keeps=(Keep(name, "", IDS, (20, 21, 22, 23)),))


def run(
    harness: RankHarness, prefixes: PrefixOrders | None = None, wait_s: float = 0.0
) -> tuple[set[str], set[int], StepReport | None]:
    """One step: requests whose loads are over, invalid blocks, and the report."""
    rank = harness.rank
    rank.begin_step(NO_ORDERS if prefixes is None else StepOrders(prefixes=prefixes))
    rank.end_step()
    _, received = rank.get_finished(set(), wait_s)
    return received, rank.take_invalid_blocks(), rank.take_report()


def answer(harness: RankHarness, event: HandoffEvent) -> None:
    harness.port._emit(event)


def test_a_lookup_is_reported(stored: RankHarness, store: RecordingStore) -> None:
    assert run(stored, look_up()) == (set(), set(), None)
    (order,) = store.orders
    answer(stored, PrefixFound(order.id, 8))
    assert run(stored) == (set(), set(), StepReport(found=(("r", 8),)))
    assert run(stored) == (set(), set(), None)


def test_a_step_without_tokens_waits_for_the_answer_of_a_lookup(stored: RankHarness) -> None:
    run(stored, look_up(), wait_s=0.01)
    assert stored.wake_event.num_waits == 1


def test_a_lookup_between_two_steps_returns_the_answer(
    stored: RankHarness, store: RecordingStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    (lookup,) = look_up().lookups

    def find(order: LookupOrder) -> None:
        answer(stored, PrefixFound(order.id, 16, is_read=True))

    monkeypatch.setattr(store, "start_lookup", find)
    assert stored.rank.look_up(lookup, 0.01) == StepReport(found=(("r", 16),), read=("r",))
    assert run(stored) == (set(), set(), None), "it is reported once"
    run(stored, read_load())
    assert len(store.loaded) == 1


def test_an_answer_that_is_late_between_two_steps_is_a_later_steps(
    stored: RankHarness, store: RecordingStore
) -> None:
    (lookup,) = look_up().lookups
    before = stored.clock.now()
    assert stored.rank.look_up(lookup, 0.01) == StepReport()
    assert stored.clock.now() - before == pytest.approx(0.01)
    answer(stored, PrefixFound(store.orders[0].id, 8))
    assert run(stored) == (set(), set(), StepReport(found=(("r", 8),)))


def test_a_store_that_hangs_is_not_asked_between_two_steps_either(
    stored: RankHarness, store: RecordingStore
) -> None:
    (lookup,) = look_up().lookups
    stored.rank.look_up(lookup, 0.01)
    stored.clock.advance(LOAD_TIMEOUT_S)
    assert run(stored) == (set(), set(), StepReport(found=(("r", 4),)))
    before = stored.clock.now()
    assert stored.rank.look_up(lookup, 0.01) == StepReport(found=(("r", 4),))
    assert stored.clock.now() == before
    assert len(store.orders) == 1


def test_what_was_read_is_in_blocks_before_the_step_computes(
    stored: RankHarness, store: RecordingStore
) -> None:
    run(stored, look_up())
    (lookup,) = store.orders
    assert isinstance(lookup, ReadOrder)
    answer(stored, PrefixFound(lookup.id, 16, is_read=True))
    assert run(stored) == (set(), set(), StepReport(found=(("r", 16),), read=("r",)))
    stored.rank.begin_step(StepOrders(prefixes=read_load()))
    (order,) = store.loaded
    assert (order.id, order.start, len(order.prompt_ids)) == (lookup.id, 4, 16)
    assert (order.blocks.first, order.blocks.blocks.tolist()) == (1, [21, 22, 23])
    stored.rank.end_step()
    assert stored.rank.get_finished(set(), 0.0) == (set(), set()), "vLLM does not wait for it"
    assert stored.rank.take_invalid_blocks() == set()
    assert stored.rank.store_loads == StoreLoads(1, 12, 0.25)
    assert store.released == []


def test_a_step_does_not_compute_over_what_is_not_in_place(
    stored: RankHarness, store: RecordingStore
) -> None:
    run(stored, look_up())
    answer(stored, PrefixFound(store.orders[0].id, 16, is_read=True))
    run(stored)
    store.num_read = 8
    with pytest.raises(AssertionError, match="8 tokens of 16"):
        run(stored, read_load())


def test_what_was_read_for_a_request_that_ended_is_released(
    stored: RankHarness, store: RecordingStore
) -> None:
    release = PrefixOrders(released=("r",))
    run(stored, look_up())
    answer(stored, PrefixFound(store.orders[0].id, 16, is_read=True))
    run(stored)
    run(stored, release)
    run(stored, release)
    assert store.released == [store.orders[0].id]
    run(stored, look_up())
    run(stored, release)  # while it is being read
    answer(stored, PrefixFound(store.orders[1].id, 16, is_read=True))
    assert run(stored)[2] == StepReport(found=(("r", 16),))
    assert store.released == [order.id for order in store.orders]


@pytest.mark.parametrize("is_released", [False, True])
def test_a_load_has_the_id_of_the_lookup_that_found_it(
    stored: RankHarness, store: RecordingStore, is_released: bool
) -> None:
    """The store remembers what it has found, and does not look again."""
    run(stored, look_up())
    (lookup,) = store.orders
    answer(stored, PrefixFound(lookup.id, 16))
    run(stored)
    if is_released:
        run(stored, PrefixOrders(released=("r",)))
    run(stored, load())
    load_order = store.orders[-1]
    assert isinstance(load_order, LoadOrder)
    assert (load_order.id == lookup.id) is not is_released
    answer(stored, KVLanded(load_order.id, None, 16))
    assert run(stored) == ({"r"}, set(), None)
    run(stored, load())
    assert store.orders[-1].id not in {lookup.id, load_order.id}, "once"


def test_a_release_of_what_another_rank_has_read_does_not_end_a_load(
    stored: RankHarness, store: RecordingStore
) -> None:
    run(stored, PrefixOrders(loads=load().loads, released=("r",)))
    answer(stored, KVLanded(store.orders[0].id, None, 8))
    assert run(stored) == ({"r"}, {22, 23}, None)


def test_what_is_read_too_late_is_released(stored: RankHarness, store: RecordingStore) -> None:
    run(stored, look_up())
    stored.clock.advance(LOAD_TIMEOUT_S)
    assert run(stored) == (set(), set(), StepReport(found=(("r", 4),)))
    answer(stored, PrefixFound(store.orders[0].id, 16, is_read=True))
    assert run(stored) == (set(), set(), None)
    assert store.released == [store.orders[0].id]


def test_an_answer_is_waited_for_as_long_as_answers_take(
    stored: RankHarness, store: RecordingStore
) -> None:
    def measure_wait(wait_s: float) -> float:
        began = stored.clock.now()
        run(stored, wait_s=wait_s)
        return stored.clock.now() - began

    def take(seconds: float) -> None:
        run(stored, look_up())
        stored.clock.advance(seconds)
        answer(stored, PrefixFound(store.orders[-1].id, 4))
        run(stored)

    run(stored, look_up())
    assert measure_wait(0.01) == pytest.approx(ANSWER_GUESS_S)
    take(0.008)
    assert measure_wait(0.01) == pytest.approx(0.008)
    assert measure_wait(0.002) == pytest.approx(0.002)
    take(0.003)  # a prompt that is not stored
    assert measure_wait(0.01) == pytest.approx(0.007)


def test_what_is_kept_is_not_waited_for(stored: RankHarness, store: RecordingStore) -> None:
    run(stored, keep(), wait_s=0.01)
    assert stored.wake_event.num_waits == 0
    (order,) = store.orders
    answer(stored, KVSent(order.id))
    assert run(stored) == (set(), set(), StepReport(kept=("r",)))


@pytest.mark.parametrize(
    ("num_tokens", "invalid"),
    [(16, set()), (12, {23}), (13, {23}), (8, {22, 23}), (4, {21, 22, 23})],
)
def test_blocks_that_lack_tokens_are_computed(
    stored: RankHarness, store: RecordingStore, num_tokens: int, invalid: set[int]
) -> None:
    run(stored, load())
    (order,) = store.orders
    answer(stored, KVLanded(order.id, None, num_tokens))
    assert run(stored) == ({"r"}, invalid, None)


def test_an_aborted_load_ends_without_anything_to_compute(
    stored: RankHarness, store: RecordingStore
) -> None:
    run(stored, load())
    run(stored, PrefixOrders(aborted=("r",)))
    (order,) = store.orders
    assert store.aborted == [order.id]
    answer(stored, BlocksQuiescent(order.id))
    assert run(stored) == ({"r"}, set(), None)


def test_a_late_load_ends_and_its_blocks_are_not_written_any_more(
    stored: RankHarness, store: RecordingStore
) -> None:
    run(stored, load())
    (order,) = store.orders
    assert isinstance(order, LoadOrder)
    stored.clock.advance(LOAD_TIMEOUT_S)
    assert run(stored) == ({"r"}, {21, 22, 23}, None)
    with pytest.raises(StoreError), order.guard:
        raise AssertionError("the blocks are the request's again")
    # The store is not asked before it has answered.
    assert run(stored, look_up("next")) == (set(), set(), StepReport(found=(("next", 4),)))
    assert run(stored, load("found-before")) == ({"found-before"}, {21, 22, 23}, None)
    assert store.orders == [order]
    answer(stored, KVLanded(order.id, None, 16))
    assert run(stored) == (set(), set(), None)
    run(stored, look_up("after"))
    assert len(store.orders) == 2


def test_a_load_that_makes_progress_is_not_late(stored: RankHarness, store: RecordingStore) -> None:
    run(stored, load())
    (order,) = store.orders
    assert isinstance(order, LoadOrder)
    for _ in range(5):
        stored.clock.advance(0.9 * LOAD_TIMEOUT_S)
        assert run(stored) == (set(), set(), None)
        order.progress.last_at = stored.clock.now()
    stored.clock.advance(LOAD_TIMEOUT_S)
    assert run(stored) == ({"r"}, {21, 22, 23}, None)


def test_blocks_of_what_is_not_kept_in_time_are_released(
    stored: RankHarness, store: RecordingStore
) -> None:
    run(stored, keep())
    (order,) = store.orders
    assert isinstance(order, KeepOrder)
    stored.clock.advance(LOAD_TIMEOUT_S)
    assert run(stored) == (set(), set(), None)
    stored.clock.advance(KEEP_TIMEOUT_S)
    assert run(stored) == (set(), set(), StepReport(kept=("r",)))
    with pytest.raises(StoreError), order.guard:
        raise AssertionError("the blocks may be another request's")


def test_a_step_that_asks_nothing_of_the_store_costs_no_more(
    stored: RankHarness, harness: RankHarness
) -> None:
    for each in (stored, harness):
        run(each)
    assert count_calls(lambda: run(stored)) == count_calls(lambda: run(harness))


def test_a_long_queue_of_what_is_kept_does_not_keep_prompts_from_asking(
    stored: RankHarness, store: RecordingStore
) -> None:
    run(stored, keep())
    stored.clock.advance(KEEP_TIMEOUT_S)
    run(stored)
    run(stored, look_up("next"))
    assert len(store.orders) == 2
    answer(stored, KVSent(store.orders[0].id))  # what was late, now that nobody waits for it
    assert run(stored) == (set(), set(), None)


def test_loads_are_reported_with_what_requests_waited_for_them(
    stored: RankHarness, store: RecordingStore, harness: RankHarness
) -> None:
    assert harness.rank.store_loads is None
    assert stored.rank.store_loads == StoreLoads(0, 0, 0.0)
    run(stored, load(lookup_s=0.25))
    stored.clock.advance(0.5)
    answer(stored, KVLanded(store.orders[-1].id, None, 12))
    run(stored)
    assert stored.rank.store_loads == StoreLoads(1, 8, 0.75)
    run(stored, look_up("is not stored"))
    answer(stored, PrefixFound(store.orders[-1].id, 4))
    run(stored, load("was evicted"))
    answer(stored, KVLanded(store.orders[-1].id, None, 4))
    run(stored, load("left"))
    run(stored, PrefixOrders(aborted=("left",)))
    answer(stored, BlocksQuiescent(store.orders[-1].id))
    run(stored)
    assert stored.rank.store_loads == StoreLoads(1, 8, 0.75)


@pytest.mark.parametrize("orders", [look_up(), load()])
def test_what_requests_waited_for_nothing_is_reported(
    stored: RankHarness, store: RecordingStore, orders: PrefixOrders
) -> None:
    run(stored, orders)
    stored.clock.advance(LOAD_TIMEOUT_S)
    run(stored)
    run(stored, load("not asked for"))
    assert len(store.orders) == 1
    assert stored.rank.store_loads == StoreLoads(1, 0, LOAD_TIMEOUT_S)


def test_the_store_can_see_whether_the_rank_computes(
    stored: RankHarness, store: RecordingStore
) -> None:
    stored.rank.begin_step(NO_ORDERS)
    assert (store.steps.num_begun, store.steps.num_ended) == (1, 0)
    stored.rank.end_step()
    stored.rank.get_finished(set(), 0.0)
    assert (store.steps.num_begun, store.steps.num_ended) == (1, 1)


def test_between_two_steps_copies_are_waited_for_and_hurried(
    stored: RankHarness, store: RecordingStore
) -> None:
    (first,), (second,) = keep("first").keeps, keep("second").keeps
    stored.rank.keep(first)
    stored.rank.keep(second)
    order, _ = store.orders
    answer(stored, KVSent(order.id))
    assert stored.rank.await_kept(0.01) == StepReport(kept=("first",))
    assert store.hurries == [True, True, True, False]
    assert stored.rank.await_kept(0.01) == StepReport()
    assert store.hurries[-1] is False
