"""What the scheduler's side asks of the store, over stand-ins for vLLM's requests and steps."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from baton.auth.ticket import hash_tenant
from baton.engines.lookup_cost import HELD_SHARE, LOAD_TIMEOUT_S, LookupCost
from baton.engines.vllm.kept_blocks import KeptBlocks
from baton.engines.vllm.prefix_admission import PrefixAdmission
from baton.engines.vllm.prefix_schedule import MAX_AHEAD, MAX_UNDER_WAY, PrefixSchedule
from baton.engines.vllm.step_orders import NO_ORDERS, PrefixOrders, StepReport
from tests.unit.engines_vllm.test_admission import (
    FACTS,
    admission,
    clock,
    make_lora,
    receiving,
    request,
    sending,
    step,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from baton.engines.vllm.admission import Admission
    from baton.engines.vllm.step_orders import Keep, LookUp
    from baton.testing.clocks import ManualClock

__all__ = ["admission", "clock"]  # fixtures

BLOCK_SIZE, ENTRY_TOKENS, NUM_RANKS = 4, 8, 2
STORED = replace(FACTS, modes=("push", "pull", "pool"))
PROMPT = list(range(100, 121))


class Pool:
    num_gpu_blocks = 51

    def __init__(self) -> None:
        self.blocks = list(range(100))
        self.references = [1] * 100
        self.num_free = 50

    def get_num_free_blocks(self) -> int:
        return self.num_free

    def touch(self, blocks: list[int]) -> None:
        for block in blocks:
            self.references[block] += 1

    def free_blocks(self, ordered_blocks: Any) -> None:
        for block in ordered_blocks:
            self.references[block] -= 1


@pytest.fixture(name="pool")
def pool_fixture() -> Pool:
    return Pool()


@pytest.fixture(name="stored")
def stored_fixture(admission: Admission, clock: ManualClock, pool: Pool) -> Admission:
    """With a store, and two ranks that have it."""
    schedule = PrefixSchedule(
        LookupCost(clock.now()),
        num_ranks=NUM_RANKS,
        block_size=BLOCK_SIZE,
        entry_tokens=ENTRY_TOKENS,
    )
    kept = KeptBlocks(6, NUM_RANKS)
    admission.use_store(PrefixAdmission(schedule, kept, block_size=BLOCK_SIZE, clock=clock))
    admission.set_ranks(dict.fromkeys(range(NUM_RANKS), STORED))
    admission.bind(pool)
    return admission


def asking(name: str = "r", params: dict[str, object] | None = None, **changes: object) -> Any:
    fields: dict[str, object] = {
        "prompt_token_ids": PROMPT,
        "all_token_ids": [*PROMPT, 7],
        "num_prompt_tokens": len(PROMPT),
        "num_tokens": len(PROMPT) + 1,
        "num_computed_tokens": len(PROMPT),
        "num_in_flight_tokens": 0,
        "cache_salt": "tenant",
        "skip_reading_prefix_cache": False,
        "pooling_params": None,
    }
    return request(params, name, **(fields | changes))


def plan(admission: Admission) -> PrefixOrders | None:
    """One step's orders to the store."""
    return admission.step(SimpleNamespace(**vars(step()), total_num_scheduled_tokens=0)).prefixes


def report(admission: Admission, **fields: Any) -> None:
    admission.update_from_workers(None, None, StepReport(**fields))


def test_what_all_ranks_have_is_loaded_behind_what_is_cached(
    stored: Admission, clock: ManualClock
) -> None:
    asked = asking()
    assert stored.count_missing(asked, 4) is None
    orders = plan(stored)
    assert orders is not None
    (lookup,) = orders.lookups
    assert (lookup.start, lookup.tenant_salt) == (4, hash_tenant("tenant"))
    assert lookup.token_ids.tolist() == PROMPT
    report(stored, found=(("r", 16),))
    assert stored.count_missing(asked, 4) is None, "the other rank has not answered"
    clock.advance(0.5)
    report(stored, found=(("r", 8),))
    assert stored.count_missing(asked, 4) == 4
    clock.advance(1.0)
    assert stored.count_missing(asked, 8) == 0, "vLLM's cache has grown"
    stored.allocated(asked, ([30, 31, 32],), 4)
    assert stored.is_stored(asked)
    orders = plan(stored)
    assert orders is not None
    (load,) = orders.loads
    assert (load.start, load.first_block, load.blocks) == (4, 1, (31,))
    assert load.token_ids.tolist() == PROMPT[:8]
    assert load.lookup_s == 0.5, "what it waited for blocks is not the store's"
    stored.update_from_workers({"r"}, None, None)
    stored.allocated(asked, ([30, 31, 32, 33, 34, 35],), 0)
    assert stored.count_missing(asked, 0) == 0, "it is asked for once"
    assert plan(stored) is None


@dataclass
class NearRank:
    """The only rank, on the scheduler's thread: it has read `num_found` tokens; None: is late."""

    num_found: int | None = 16
    lookups: list[LookUp] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)
    wait: Callable[[float], StepReport] = lambda _: StepReport()
    keeps: list[Keep] = field(default_factory=list)
    kept_waits: list[float] = field(default_factory=list)
    copy: Callable[[float], StepReport] = lambda _: StepReport()

    def look_up(self, lookup: LookUp | None, wait_s: float) -> StepReport:
        self.waits.append(wait_s)
        if lookup is None:
            return self.wait(wait_s)
        self.lookups.append(lookup)
        if self.num_found is None:
            return StepReport()
        return StepReport(found=((lookup.request, self.num_found),), read=(lookup.request,))

    def keep(self, keep: Keep) -> None:
        self.keeps.append(keep)

    def await_kept(self, wait_s: float) -> StepReport:
        self.kept_waits.append(wait_s)
        return self.copy(wait_s)


@pytest.fixture(name="near")
def near_fixture(admission: Admission, clock: ManualClock, pool: Pool) -> NearRank:
    """`admission` has a store, and this rank."""
    schedule = PrefixSchedule(
        LookupCost(clock.now()), num_ranks=1, block_size=BLOCK_SIZE, entry_tokens=ENTRY_TOKENS
    )
    kept = KeptBlocks(6, 1)
    admission.use_store(PrefixAdmission(schedule, kept, block_size=BLOCK_SIZE, clock=clock))
    admission.set_ranks({0: STORED})
    admission.bind(pool)
    near = NearRank()
    admission.use_rank(near, 0.002)
    return near


@pytest.mark.parametrize(("found", "released"), [((16, 4), ("r",)), ((4, 4), None)])
def test_ranks_forget_what_they_found_where_another_has_nothing(
    stored: Admission, found: tuple[int, int], released: tuple[str, ...] | None
) -> None:
    asked = asking()
    assert stored.count_missing(asked, 4) is None
    assert plan(stored) is not None
    report(stored, found=tuple(("r", num_tokens) for num_tokens in found))
    assert stored.count_missing(asked, 4) == 0
    orders = plan(stored)
    assert (None if orders is None else orders.released) == released


def test_a_rank_on_this_thread_is_asked_without_a_step(
    admission: Admission, near: NearRank
) -> None:
    asked = asking()
    assert admission.count_missing(asked, 4) == 12
    assert [lookup.start for lookup in near.lookups] == [4]
    assert admission.is_read(asked)
    admission.allocated(asked, ([30, 31, 32, 33, 34, 35],), 12)
    orders = plan(admission)
    assert orders is not None
    assert orders == PrefixOrders(read_loads=orders.read_loads)


def test_a_rank_on_this_thread_that_is_late_answers_with_a_step(
    admission: Admission, near: NearRank
) -> None:
    near.num_found = None
    asked = asking()
    assert admission.count_missing(asked, 4) is None
    assert admission.count_missing(asked, 4) is None, "it is asked once"
    assert plan(admission) is None
    report(admission, found=(("r", 16),), read=("r",))
    assert admission.count_missing(asked, 4) == 12
    assert len(near.lookups) == 1


def test_nothing_that_runs_waits_for_a_rank_on_this_thread(
    admission: Admission, near: NearRank
) -> None:
    first, second, third = asking("first"), asking("second"), asking("third")
    assert admission.count_missing(first, 0) == 16
    admission.allocated(first, ([30, 31, 32, 33, 34, 35],), 16)
    assert admission.count_missing(second, 0) is None
    orders = plan(admission)
    assert orders is not None
    assert [lookup.request for lookup in orders.lookups] == ["second"]
    admission.finish(first, ())
    assert admission.count_missing(third, 0) == 16
    assert [lookup.request for lookup in near.lookups] == ["first", "third"]


def test_a_rank_of_several_is_not_asked_alone(stored: Admission) -> None:
    near = NearRank()
    stored.use_rank(near, 0.002)
    assert stored.count_missing(asking(), 4) is None
    assert not near.lookups


def find(admission: Admission, *num_tokens: int, num_read: int) -> Any:
    """A request whose prompt the ranks have looked for behind its first 4 tokens."""
    asked = asking()
    assert admission.count_missing(asked, 4) is None
    plan(admission)
    report(admission, found=tuple(("r", n) for n in num_tokens), read=("r",) * num_read)
    return asked


def test_what_all_ranks_have_read_is_in_blocks_before_the_rest_is_computed(
    stored: Admission,
) -> None:
    asked = find(stored, 16, 8, num_read=2)
    assert stored.count_missing(asked, 4) == 4
    assert stored.is_read(asked)
    stored.allocated(asked, ([30, 31, 32, 33, 34, 35],), 4)
    assert stored.is_stored(asked)
    assert not stored.is_read(asked)
    orders = plan(stored)
    assert orders is not None
    (load,) = orders.read_loads
    assert (load.start, load.first_block, load.blocks) == (4, 1, (31,))
    assert load.token_ids.tolist() == PROMPT[:8]
    assert orders == PrefixOrders(read_loads=(load,))
    stored.finish(asked, range(30, 36))
    orders = plan(stored)
    assert orders is not None
    assert len(orders.keeps) == 1, "its blocks are vLLM's, as those of any request"


@pytest.mark.parametrize("num_running", [0, MAX_UNDER_WAY])
def test_what_was_read_waits_for_no_other_load(stored: Admission, num_running: int) -> None:
    asked = find(stored, 16, 16, num_read=2)
    for n in range(num_running):
        stored.count_missing(asking(f"r{n}"), 0)
    assert stored.count_missing(asked, 4) == 12


@pytest.mark.parametrize("num_read", [0, 1])
def test_what_a_rank_has_not_read_is_loaded(stored: Admission, num_read: int) -> None:
    asked = find(stored, 16, 16, num_read=num_read)
    assert stored.count_missing(asked, 4) == 12
    assert not stored.is_read(asked)
    stored.allocated(asked, ([30, 31, 32, 33],), 12)
    orders = plan(stored)
    assert orders is not None
    assert len(orders.loads) == 1
    assert orders.released == ("r",) * num_read


def test_vllm_computes_at_least_a_token_of_what_was_read(stored: Admission) -> None:
    asked = asking(num_prompt_tokens=16)
    assert stored.count_missing(asked, 0) is None
    plan(stored)
    report(stored, found=(("r", 16),) * 2, read=("r",) * 2)
    assert stored.count_missing(asked, 0) == 16
    assert not stored.is_read(asked)
    assert plan(stored) == PrefixOrders(released=("r",))


def test_what_was_read_is_not_used_where_tokens_before_it_are_gone(stored: Admission) -> None:
    asked = find(stored, 16, 16, num_read=2)
    assert stored.count_missing(asked, 0) == 16
    assert not stored.is_read(asked)
    stored.allocated(asked, ([30, 31, 32, 33],), 16)
    orders = plan(stored)
    assert orders is not None
    assert [load.start for load in orders.loads] == [0]
    assert orders.released == ("r",)


@pytest.mark.parametrize("num_read", [0, 2])
def test_what_was_read_is_released_once_it_is_not_needed(stored: Admission, num_read: int) -> None:
    asked = asking(num_computed_tokens=0)
    stored.count_missing(asked, 4)
    plan(stored)
    if num_read:
        report(stored, found=(("r", 16),) * 2, read=("r",) * 2)
        stored.count_missing(asked, 4)
    stored.finish(asked)  # while it waits for blocks, or for the answer
    assert plan(stored) == PrefixOrders(released=("r",))


@pytest.mark.parametrize(("waited_s", "is_asked"), [(LOAD_TIMEOUT_S, True), (0.5, False)])
def test_a_store_that_hung_is_asked_again(
    stored: Admission, clock: ManualClock, waited_s: float, *, is_asked: bool
) -> None:
    """What it usually takes is another thing: a store that is slow is asked for long prompts."""
    output = step()
    output.total_num_scheduled_tokens = 640
    stored.step(SimpleNamespace(**vars(output)))
    clock.advance(0.64)
    stored.update_from_workers(None, None, None)
    assert stored.count_missing(asking("late"), 0) is None
    plan(stored)
    clock.advance(waited_s)
    report(stored, found=(("late", 0),) * 2)
    assert stored.count_missing(asking("late"), 0) == 0
    assert (stored.count_missing(asking("next"), 0) is None) is is_asked


def test_what_vllm_has_cached_since_is_released(stored: Admission) -> None:
    asked = find(stored, 16, 16, num_read=2)
    assert stored.count_missing(asked, 16) == 0
    stored.allocated(asked, ([30, 31, 32, 33, 34, 35],), 0)
    assert plan(stored) == PrefixOrders(released=("r",))


@pytest.mark.parametrize(
    ("params", "changes"),
    [
        (None, {"num_prompt_tokens": ENTRY_TOKENS - 1}),
        (None, {"skip_reading_prefix_cache": True}),
        (None, {"lora_request": make_lora("/nowhere")}),
        (None, {"pooling_params": object()}),
        (None, {"mm_features": [object()]}),
        ({"baton_info": True}, {}),
    ],
    ids=["short", "logprobs", "lora", "pooling", "images", "probe"],
)
def test_what_the_store_cannot_have_is_not_asked_for(
    stored: Admission, params: dict[str, object] | None, changes: dict[str, object]
) -> None:
    assert stored.count_missing(asking(params=params, **changes), 0) == 0
    assert plan(stored) is None


def test_what_a_prefill_server_sends_is_not_asked_for(stored: Admission) -> None:
    assert stored.count_missing(asking(params=receiving()), 0) == len(PROMPT)
    assert plan(stored) is None


def test_where_a_rank_has_no_store_nothing_is_asked_or_kept(stored: Admission) -> None:
    stored.set_ranks({0: STORED, 1: FACTS})
    asked = asking()
    assert stored.count_missing(asked, 0) == 0
    assert stored.finish(asked, range(6)) == (False, None)
    assert stored.step(step()).prefixes is None


def test_a_rank_has_few_orders_at_once(stored: Admission) -> None:
    names = [f"r{n}" for n in range(MAX_UNDER_WAY + 1)]
    assert {stored.count_missing(asking(name), 0) for name in names} == {None}
    orders = plan(stored)
    assert orders is not None
    assert [lookup.request for lookup in orders.lookups] == names[:-1]
    report(stored, found=((names[0], 0), (names[0], 0)))
    assert stored.count_missing(asking(names[-1]), 0) is None
    orders = plan(stored)
    assert orders is not None
    assert [lookup.request for lookup in orders.lookups] == names[-1:]


def fill_places(admission: Admission) -> None:
    for n in range(MAX_UNDER_WAY):
        assert admission.count_missing(asking(f"under way {n}"), 0) is None
    plan(admission)


def compute_a_step(admission: Admission, clock: ManualClock, token_s: float) -> None:
    output = step()
    output.total_num_scheduled_tokens = 640
    admission.step(SimpleNamespace(**vars(output)))
    clock.advance(640 * token_s)
    admission.update_from_workers(None, None, None)


@pytest.mark.parametrize("token_s", [0.0, 0.01])
def test_a_prompt_that_waits_for_a_place_for_too_long_is_computed(
    stored: Admission, clock: ManualClock, token_s: float
) -> None:
    """As long as others are held for an answer; where it is not known what computing takes: 2 s."""
    limit_s = LOAD_TIMEOUT_S
    if token_s:
        compute_a_step(stored, clock, token_s)
        limit_s = HELD_SHARE * token_s * len(PROMPT)
    fill_places(stored)
    asked = asking("next")
    for _ in range(2):
        assert stored.count_missing(asked, 0) is None
        clock.advance(0.501 * limit_s)
    assert stored.count_missing(asked, 0) == 0
    assert plan(stored) is None


def test_a_prompt_that_was_found_waits_to_be_loaded_no_longer_than_computing_takes(
    stored: Admission, clock: ManualClock
) -> None:
    compute_a_step(stored, clock, 0.01)
    asked = find(stored, 16, 16, num_read=0)
    assert stored.count_missing(asked, 4) == 12
    fill_places(stored)
    for _ in range(2):
        assert stored.count_missing(asked, 4) is None
        clock.advance(0.501 * 0.12)
    assert stored.count_missing(asked, 4) == 0
    stored.allocated(asked, ([30, 31, 32, 33, 34, 35],), 0)
    assert plan(stored) == PrefixOrders(released=("r",))


def test_blocks_are_held_until_every_rank_has_kept_them(stored: Admission, pool: Pool) -> None:
    asked = asking()
    assert stored.finish(asked, range(10, 16)) == (False, None), "vLLM ends it as any other"
    orders = plan(stored)
    assert orders is not None
    (keep,) = orders.keeps
    assert keep.blocks == (10, 11, 12, 13)
    assert keep.token_ids.tolist() == PROMPT[:16]
    assert [pool.references[block] for block in range(9, 16)] == [1, 2, 2, 2, 2, 1, 1]
    assert stored.finish(asking("another"), range(20, 26)) == (False, None)
    orders = plan(stored)
    assert orders is not None
    assert [keep.blocks for keep in orders.keeps] == [(20, 21)]
    assert orders.num_dropped_tokens == 8, "six are held at most"
    report(stored, kept=("r", "another", "another"))
    assert pool.references[10] == 2
    report(stored, kept=("r",))
    assert set(pool.references) == {1}


def test_of_requests_with_the_same_id_one_is_kept_at_a_time(stored: Admission, pool: Pool) -> None:
    """vLLM leaves ids as clients repeat them with VLLM_DISABLE_REQUEST_ID_RANDOMIZATION=1."""
    stored.finish(asking(), range(10, 16))
    plan(stored)
    stored.finish(asking(), range(20, 26))
    assert plan(stored) == PrefixOrders(num_dropped_tokens=16)
    report(stored, kept=("r",))
    assert pool.references[10] == 2, "a rank is copying it"
    report(stored, kept=("r",))
    assert set(pool.references) == {1}
    stored.finish(asking(), range(20, 26))
    orders = plan(stored)
    assert orders is not None
    assert [keep.blocks for keep in orders.keeps] == [(20, 21, 22, 23)]


def end_in_a_crowded_step(
    admission: Admission, clock: ManualClock, pool: Pool, names: str, step_s: float
) -> None:
    """Requests of 16 tokens end in a step that has taken so long, while no block is free."""
    pool.num_free = 0
    output = step()
    output.total_num_scheduled_tokens = 640
    admission.step(SimpleNamespace(**vars(output)))
    clock.advance(step_s)
    for number, name in enumerate(names):
        admission.finish(asking(name), range(10 * number, 10 * number + 6))


def test_where_no_block_is_free_copies_are_waited_for_between_two_steps(
    admission: Admission, near: NearRank, clock: ManualClock, pool: Pool
) -> None:
    """More than may be held end in one step: each waits until those before are copied."""

    def copy(_: float) -> StepReport:
        clock.advance(0.004)
        return StepReport(kept=(near.keeps[len(near.kept_waits) - 1].request,))

    near.copy = copy
    end_in_a_crowded_step(admission, clock, pool, "abc", 0.4)
    assert [keep.request for keep in near.keeps] == ["a", "b", "c"]
    assert all(len(keep.token_ids) == 16 for keep in near.keeps)
    assert pool.references[20] == 2
    admission.update_from_workers(None, None, None)
    assert set(pool.references) == {1}, "nothing is held as vLLM plans the next step"
    assert near.kept_waits == pytest.approx([0.02, 0.016, 0.012]), "a twentieth of the step"
    assert plan(admission) is None


@pytest.mark.parametrize("step_s", [0.0, 0.09])
def test_after_a_short_step_few_blocks_are_held_and_little_is_waited_for(
    admission: Admission, near: NearRank, clock: ManualClock, pool: Pool, step_s: float
) -> None:
    near.copy = lambda wait_s: clock.advance(wait_s) or StepReport()
    kept = KeptBlocks(8, 1)
    schedule = PrefixSchedule(
        LookupCost(clock.now()), num_ranks=1, block_size=BLOCK_SIZE, entry_tokens=ENTRY_TOKENS
    )
    admission.use_store(PrefixAdmission(schedule, kept, block_size=BLOCK_SIZE, clock=clock))
    admission.use_rank(near, 0.002)
    admission.bind(pool)
    end_in_a_crowded_step(admission, clock, pool, "ab", step_s)
    assert [len(keep.token_ids) for keep in near.keeps] == [8], "a quarter of eight blocks"
    admission.update_from_workers(None, None, None)
    assert near.kept_waits == pytest.approx([0.05 * step_s])
    assert pool.references[0] == 2
    report(admission, kept=("a",))
    assert set(pool.references) == {1}


def test_copies_that_do_not_end_are_waited_for_once_in_a_step(
    admission: Admission, near: NearRank, clock: ManualClock, pool: Pool
) -> None:
    near.copy = lambda wait_s: clock.advance(wait_s) or StepReport()
    end_in_a_crowded_step(admission, clock, pool, "abc", 10.0)
    assert [keep.request for keep in near.keeps] == ["a"]
    admission.update_from_workers(None, None, None)
    assert near.kept_waits == pytest.approx([0.05]), "however long the step was"
    orders = plan(admission)
    assert orders is not None
    assert orders.num_dropped_tokens == 32


def test_while_copies_do_not_end_in_time_few_blocks_are_held(
    admission: Admission, near: NearRank, clock: ManualClock, pool: Pool
) -> None:
    """Else a slow tier would keep all that may be held from vLLM, step after step."""
    near.copy = lambda wait_s: clock.advance(wait_s) or StepReport()
    schedule = PrefixSchedule(
        LookupCost(clock.now()), num_ranks=1, block_size=BLOCK_SIZE, entry_tokens=ENTRY_TOKENS
    )
    kept = KeptBlocks(8, 1)
    admission.use_store(PrefixAdmission(schedule, kept, block_size=BLOCK_SIZE, clock=clock))
    admission.use_rank(near, 0.002)
    admission.bind(pool)
    end_in_a_crowded_step(admission, clock, pool, "a", 0.4)
    admission.update_from_workers(None, None, StepReport())
    end_in_a_crowded_step(admission, clock, pool, "b", 0.4)
    admission.update_from_workers(None, None, StepReport(kept=("a",)))
    assert [len(keep.token_ids) for keep in near.keeps] == [16]
    end_in_a_crowded_step(admission, clock, pool, "c", 0.4)
    assert [len(keep.token_ids) for keep in near.keeps] == [16, 8]
    near.copy = lambda _: StepReport(kept=("c",))
    admission.update_from_workers(None, None, None)
    end_in_a_crowded_step(admission, clock, pool, "d", 0.4)
    assert [len(keep.token_ids) for keep in near.keeps] == [16, 8, 16]


def test_where_nothing_is_copied_nothing_is_waited_for(
    admission: Admission, near: NearRank, clock: ManualClock, pool: Pool
) -> None:
    """A prompt of more than may be held: its beginning is kept at once."""
    end_in_a_crowded_step(admission, clock, pool, "", 0.4)
    ids = list(range(41))
    long = asking(
        prompt_token_ids=ids[:40],
        all_token_ids=ids,
        num_prompt_tokens=40,
        num_tokens=41,
        num_computed_tokens=40,
    )
    admission.finish(long, range(10))
    assert [len(keep.token_ids) for keep in near.keeps] == [24]
    assert not any(near.kept_waits)


def test_what_ends_between_two_steps_is_copied_with_the_next(
    admission: Admission, near: NearRank, clock: ManualClock, pool: Pool
) -> None:
    """A client leaves: nothing waits for the copies before vLLM plans a step."""
    end_in_a_crowded_step(admission, clock, pool, "", 0.4)
    admission.update_from_workers(None, None, None)
    admission.finish(asking(), range(6))
    assert not near.keeps
    assert not near.kept_waits


def test_a_step_of_prompts_teaches_also_where_another_is_planned_before_it_ends(
    admission: Admission, near: NearRank, clock: ManualClock
) -> None:
    """As with asynchronous scheduling. Then a store that is slow is not asked for short prompts."""
    for num_tokens in (640, 1):
        output = step()
        output.total_num_scheduled_tokens = num_tokens
        admission.step(SimpleNamespace(**vars(output)))
        clock.advance(0.0064)
    admission.update_from_workers(None, None, None)
    assert admission.count_missing(asking("a"), 0) == 0
    assert not near.lookups


def test_where_blocks_are_free_nothing_is_waited_for(
    admission: Admission, near: NearRank, clock: ManualClock, pool: Pool
) -> None:
    end_in_a_crowded_step(admission, clock, pool, "", 0.4)
    pool.num_free = 6
    admission.finish(asking(), range(6))
    admission.update_from_workers(None, None, None)
    orders = plan(admission)
    assert orders is not None
    assert len(orders.keeps) == 1
    assert not near.keeps
    assert not near.kept_waits


@pytest.mark.parametrize(
    "changes",
    [
        {"status": SimpleNamespace(name="FINISHED_ERROR")},
        {"num_computed_tokens": ENTRY_TOKENS - 1},
        {"num_in_flight_tokens": len(PROMPT) - ENTRY_TOKENS + 1},
        {"lora_request": make_lora("/nowhere")},
    ],
    ids=["failed", "short", "in-flight", "lora"],
)
def test_what_is_not_of_the_prompts_tokens_alone_is_not_kept(
    stored: Admission, changes: dict[str, object]
) -> None:
    stored.finish(asking(**changes), range(10, 16))
    assert plan(stored) is None


def test_a_prefill_of_mode_pool_keeps_its_prompt_by_itself(stored: Admission) -> None:
    for mode in ("pool", "push"):
        asked = asking(mode, params=sending(mode), cache_salt=None)
        stored.arrived(asked)
        stored.finish(asked, range(10, 16))
        orders = plan(stored)
        assert (orders is not None) is (mode == "push")


def test_blocks_of_an_aborted_load_are_not_kept(stored: Admission, pool: Pool) -> None:
    asked = asking()
    stored.count_missing(asked, 0)
    report(stored, found=(("r", 16), ("r", 16)))
    assert stored.count_missing(asked, 0) == 16
    stored.allocated(asked, ([10, 11, 12, 13],), 16)
    plan(stored)
    stored.finish(asked, range(10, 14))
    assert plan(stored) == PrefixOrders(aborted=("r",))
    assert set(pool.references) == {1}


def test_a_prefills_trace_counts_what_was_loaded(stored: Admission) -> None:
    asked = asking(params=sending())
    stored.arrived(asked)
    assert stored.count_missing(asked, 4) is None
    report(stored, found=(("r", 16), ("r", 16)))
    assert stored.count_missing(asked, 4) == 12
    stored.allocated(asked, ([10, 11, 12, 13],), 12)
    stored.update_from_workers({"r"}, None, None)
    planned = step(new=(("r", list(range(10, 16)), 12, 9),))  # a rank lacked an entry
    planned.total_num_scheduled_tokens = 9
    (offer,) = stored.step(planned).offers
    assert (offer.num_cached_tokens, offer.num_loaded_tokens) == (12, 8)


def test_what_a_token_takes_is_learned_from_steps_of_prompts(
    stored: Admission, clock: ManualClock
) -> None:
    def ask(name: str) -> float:
        assert stored.count_missing(asking(name), 0) is None
        orders = plan(stored)
        assert orders is not None
        return orders.lookups[0].token_s

    assert ask("before") == 0
    for num_tokens, num_requests in ((640, 2), (64, 64)):  # those of the second only decode
        output = step(cached=tuple((f"d{n}", None, 0, 1) for n in range(num_requests)))
        output.total_num_scheduled_tokens = num_tokens
        stored.step(output)
        clock.advance(0.64)
        stored.update_from_workers(None, None, None)
    assert ask("after") == pytest.approx(0.001)


def test_a_step_without_news_of_the_store_is_as_any_other(stored: Admission) -> None:
    plan(stored)
    output = SimpleNamespace(**vars(step()), total_num_scheduled_tokens=0)
    assert stored.step(output) is NO_ORDERS


def test_of_a_prompt_that_is_more_than_may_be_held_the_beginning_is_kept(
    stored: Admission, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored._prefixes._kept, "_max_blocks", 3)
    stored.finish(asking(), range(10, 16))
    orders = plan(stored)
    assert orders is not None
    (keep,) = orders.keeps
    assert (keep.blocks, orders.num_dropped_tokens) == ((10, 11), 8)
    assert keep.token_ids.tolist() == PROMPT[:8]
    assert [pool.references[block] for block in range(9, 16)] == [1, 2, 2, 1, 1, 1, 1]


def test_no_more_blocks_are_held_than_are_free_besides(stored: Admission, pool: Pool) -> None:
    pool.num_free = 3
    stored.finish(asking(), range(10, 16))
    orders = plan(stored)
    assert orders is not None
    assert [keep.blocks for keep in orders.keeps] == [(10, 11)]
    assert orders.num_dropped_tokens == 8
    stored.finish(asking("another"), range(20, 26))
    assert plan(stored) == PrefixOrders(num_dropped_tokens=16)
    report(stored, kept=("r",) * NUM_RANKS)
    pool.num_free = 4
    stored.finish(asking("third"), range(20, 26))
    orders = plan(stored)
    assert orders is not None
    assert [keep.request for keep in orders.keeps] == ["third"]


def test_a_few_blocks_are_held_where_requests_fill_the_pool(
    stored: Admission, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool.num_free = 0
    monkeypatch.setattr(stored._prefixes._kept, "_max_blocks", 16)
    stored.finish(asking(), range(10, 16))
    orders = plan(stored)
    assert orders is not None
    assert [keep.blocks for keep in orders.keeps] == [(10, 11, 12, 13)]
    stored.finish(asking("another"), range(20, 26))
    assert plan(stored) == PrefixOrders(num_dropped_tokens=16)


def start(admission: Admission, name: str = "first") -> None:
    """Let vLLM admit a request that nobody looks for."""
    admission.allocated(asking(name), ([1, 2],), 0)


def test_a_prompt_is_looked_for_as_it_arrives_at_a_busy_server(
    admission: Admission, near: NearRank
) -> None:
    near.num_found = None
    idle, busy = asking("idle"), asking("busy")
    admission.arrived(idle)
    assert not near.lookups, "vLLM asks about it at once"
    start(admission)
    admission.arrived(busy)
    assert [(lookup.request, lookup.start) for lookup in near.lookups] == [("busy", 0)]
    assert near.waits == [0.0], "nothing that runs waits for it"
    report(admission, found=(("busy", 16),), read=("busy",))
    assert admission.count_missing(busy, 4) == 12
    assert admission.is_read(busy)
    assert len(near.lookups) == 1
    admission.allocated(busy, ([30, 31, 32, 33, 34, 35],), 12)
    orders = plan(admission)
    assert orders is not None
    (load,) = orders.read_loads
    assert (load.start, load.first_block, load.blocks) == (4, 1, (31, 32, 33))
    assert load.lookup_s == 0.0


@pytest.mark.parametrize("answer_s", [0.02, 0.04])
def test_a_step_waits_a_small_share_of_its_time_for_a_rank_on_this_thread(
    admission: Admission, near: NearRank, clock: ManualClock, answer_s: float
) -> None:
    near.num_found = None
    compute_a_step(admission, clock, 0.001)
    assert admission.count_missing(asking("missing"), 0) is None
    plan(admission)
    clock.advance(0.64)  # others' steps: an answer that has to wait for one is not waited for
    report(admission, found=(("missing", 0),))
    assert admission.count_missing(asking("missing"), 0) == 0
    start(admission)
    admission.arrived(asking())

    def wait(wait_s: float) -> StepReport:
        clock.advance(min(wait_s, answer_s))
        return StepReport() if wait_s < answer_s else StepReport(found=(("r", 16),))

    near.wait = wait
    began_at = clock.now()
    assert admission.count_missing(asking(), 0) == (16 if answer_s < 0.032 else 0)
    assert clock.now() - began_at == pytest.approx(min(answer_s, 0.032))
    admission.arrived(asking("more"))
    assert admission.count_missing(asking("more"), 0) == 0, "0.032 s for all of them"
    assert clock.now() - began_at == pytest.approx(0.032)


def test_ranks_are_asked_ahead_with_the_next_step(stored: Admission) -> None:
    start(stored)
    for name in ("r", "s"):
        stored.arrived(asking(name))
    orders = plan(stored)
    assert orders is not None
    assert [lookup.request for lookup in orders.lookups] == ["r", "s"]
    report(stored, found=(("r", 16), ("r", 8)))
    assert stored.count_missing(asking("r"), 4) == 4
    assert stored.count_missing(asking("s"), 4) is None, "it waits for the answer from now on"
    stored.finish(asking("s", num_computed_tokens=0))
    assert plan(stored) == PrefixOrders(released=("s",))


@pytest.mark.parametrize("step_s", [0.001, 10.0])
def test_an_answer_that_is_not_there_is_waited_for_where_that_is_short(
    stored: Admission, clock: ManualClock, step_s: float
) -> None:
    compute_a_step(stored, clock, 0.001)
    late = asking("late")
    assert stored.count_missing(late, 0) is None
    plan(stored)
    clock.advance(min(step_s, 0.99 * LOAD_TIMEOUT_S))
    report(stored, found=(("late", 0),) * 2)
    assert stored.count_missing(late, 0) == 0
    start(stored)
    stored.arrived(asking())
    plan(stored)
    is_short = step_s < 1
    assert stored.count_missing(asking(), 0) == (None if is_short else 0)
    assert plan(stored) == (None if is_short else PrefixOrders(released=("r",)))
    report(stored, found=(("r", 16),) * 2)
    assert stored.count_missing(asking(), 0) == (16 if is_short else 0)


def test_what_waited_in_the_queue_says_nothing_of_the_stores_time(
    stored: Admission, clock: ManualClock
) -> None:
    compute_a_step(stored, clock, 0.001)
    start(stored)
    stored.arrived(asking())
    plan(stored)
    clock.advance(1.5)
    report(stored, found=(("r", 0),) * 2)
    assert stored.count_missing(asking(), 0) == 0
    assert stored.count_missing(asking("next"), 0) is None


def test_few_are_asked_ahead_at_once_in_the_order_of_arrival(stored: Admission) -> None:
    start(stored)
    names = [f"r{n}" for n in range(MAX_AHEAD + 3)]
    for name in names:
        stored.arrived(asking(name))
    stored.finish(asking(names[-3], num_computed_tokens=0))
    orders = plan(stored)
    assert orders is not None
    assert [lookup.request for lookup in orders.lookups] == names[:MAX_AHEAD]
    report(stored, found=((names[0], 0), (names[0], 0), (names[1], 0)))
    orders = plan(stored)
    assert orders is not None
    assert [lookup.request for lookup in orders.lookups] == names[-2:-1]
    stored._prefixes._schedule.check_invariants()
    stored.reset()
    stored._prefixes._schedule.check_invariants()
    assert stored.count_missing(asking(names[2]), 0) == 0, "found before the reset"


@pytest.mark.parametrize(
    ("params", "changes"),
    [
        (None, {"num_prompt_tokens": ENTRY_TOKENS - 1}),
        (None, {"skip_reading_prefix_cache": True}),
        (None, {"lora_request": make_lora("/nowhere")}),
        (None, {"pooling_params": object()}),
        ({"baton_info": True}, {}),
        (receiving(), {}),
    ],
    ids=["short", "logprobs", "lora", "pooling", "probe", "sent"],
)
def test_what_the_store_cannot_have_is_not_asked_for_ahead(
    stored: Admission, params: dict[str, object] | None, changes: dict[str, object]
) -> None:
    start(stored)
    stored.arrived(asking(params=params, **changes))
    assert plan(stored) is None
