"""Whether the store is asked for a prompt's beginning, and when its answer is late."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("transformers")

from baton.engines.interface import Colocated
from baton.engines.lookup_cost import (
    FORGOTTEN_AFTER_S,
    HELD_SHARE,
    LOAD_TIMEOUT_S,
    WAIT_GUESS_S,
)
from baton.engines.transformers.pinned_blocks import KeptBlocks
from baton.engines.transformers.prefixes import EnginePrefixes
from baton.engines.transformers.queued_prefixes import PendingLoad, PendingLookup
from baton.engines.transformers.scheduler import Plan, Work
from baton.handoff.interface import EngineSteps, LoadOrder, PrefixFound
from baton.ids import TicketId
from baton.kv.identity import HashDomain, compute_block_hashes
from baton.kv.pool import BlockPool
from baton.protocol.worker_http import StoreLoads
from baton.testing.clocks import ManualClock
from tests.unit.engines.harness import make_prompt

NUM_TOKENS = 160
TOKEN_S = 1e-3
STEP_TOKENS = 64


class RecordingStore:
    """A `PrefixStore` that only notes what it is asked."""

    block_size = 16

    def __init__(self) -> None:
        self.steps = EngineSteps()
        self.asked: list[TicketId] = []
        self.loads: list[LoadOrder] = []
        self.aborted: list[TicketId] = []
        self.num_dropped_tokens = 0

    def drop(self, num_tokens) -> None:
        self.num_dropped_tokens += num_tokens

    def start_lookup(self, order) -> None:
        self.asked.append(order.id)

    def start_load(self, order) -> None:
        self.loads.append(order)

    def abort_load(self, order) -> None:
        self.aborted.append(order)


class Setting:
    """One engine's, with a store."""

    def __init__(self) -> None:
        self.clock, self.store = ManualClock(), RecordingStore()
        self.pool = BlockPool(16)
        self.trace = SimpleNamespace(held_s=0.0)
        self.prefixes = EnginePrefixes(
            self.store, KeptBlocks(self.pool, 0), self.clock, STEP_TOKENS
        )
        self._num = 0

    def compute(self) -> None:
        """A step of a prompt, at `TOKEN_S` a token."""
        sequence = SimpleNamespace(num_computed=0, num_prefill_tokens=NUM_TOKENS)
        plan = Plan(work=[Work(sequence, NUM_TOKENS)])
        self.prefixes.observe_step(plan, NUM_TOKENS * TOKEN_S)

    def count_worth_holding(self) -> int:
        worth = self.prefixes.compute_worth_asking()
        assert worth.queued_tokens == self.store.block_size
        return worth.held_tokens

    def make_lookup(self) -> PendingLookup:
        self._num += 1
        order = TicketId(self._num.to_bytes(16, "big"))
        request = SimpleNamespace(
            tenant_salt="", prompt_ids=make_prompt(NUM_TOKENS), trace=self.trace
        )
        sequence = SimpleNamespace(
            request=request, block_size=16, num_prompt_tokens=NUM_TOKENS, load_id=order
        )
        return PendingLookup(sequence, order, 0)

    def look_up(self) -> TicketId:
        """A request that waits for nothing but the answer."""
        lookup = self.make_lookup()
        self.prefixes.look_up(lookup)
        self.prefixes.hold(lookup.sequence)
        return lookup.id

    def answer(self, num_tokens: int, after_s: float) -> None:
        order = self.look_up()
        self.clock.advance(after_s)
        self.prefixes.find(PrefixFound(order, num_tokens, after_s))

    def begin_load(self) -> TicketId:
        lookup = self.make_lookup()
        self.prefixes.begin(PendingLoad(lookup.sequence, lookup.id, 0, NUM_TOKENS, ()))
        return lookup.id

    def load(self, num_tokens: int, after_s: float) -> None:
        order = self.begin_load()
        self.clock.advance(after_s)
        self.prefixes.finish(order, num_tokens)


@pytest.fixture(name="it")
def it_fixture() -> Setting:
    return Setting()


def test_before_anything_is_known_every_full_block_is_asked_for(it):
    assert it.count_worth_holding() == it.store.block_size


def test_a_short_prompt_is_asked_for_where_the_answer_is_expected_within_its_share(it):
    it.compute()
    num_tokens = it.count_worth_holding()
    assert num_tokens * TOKEN_S * HELD_SHARE == pytest.approx(WAIT_GUESS_S, rel=0.05)
    for _ in range(40):
        it.answer(0, after_s=0.004)
    assert it.count_worth_holding() == pytest.approx(4 * num_tokens, rel=0.05)


def test_a_prompt_of_several_steps_is_asked_for_in_any_case(it):
    it.compute()
    for _ in range(40):
        it.answer(0, after_s=1.0)
    worth = it.prefixes.compute_worth_asking()
    assert worth.unheld_tokens == STEP_TOKENS + 1


def test_a_prompt_is_held_for_a_tolerated_share_of_what_it_takes_to_compute(it):
    it.compute()
    order, limit_s = it.look_up(), NUM_TOKENS * TOKEN_S * HELD_SHARE
    assert it.prefixes.next_deadline - it.clock.now() == pytest.approx(limit_s)
    it.clock.advance(0.99 * limit_s)
    assert it.prefixes.take_held_too_long() == []
    it.clock.advance(0.02 * limit_s)
    assert it.prefixes.take_held_too_long() == [order]
    assert it.prefixes.take_held_too_long() == []
    assert it.trace.held_s == pytest.approx(1.01 * limit_s)
    assert it.prefixes.next_deadline - it.clock.now() > LOAD_TIMEOUT_S / 2


def test_what_waits_behind_others_is_not_held_yet(it):
    it.compute()
    lookup = it.make_lookup()
    it.prefixes.look_up(lookup)
    it.clock.advance(1.0)
    assert it.prefixes.take_held_too_long() == []
    usual = it.count_worth_holding()
    assert it.prefixes.find(PrefixFound(lookup.id, 0, 0.001)) is None
    assert it.count_worth_holding() == usual, "no request waited for that second"


def test_before_it_is_known_what_computing_takes_a_prompt_is_held_until_the_answer_is_late(it):
    order = it.look_up()
    it.clock.advance(0.99 * LOAD_TIMEOUT_S)
    assert it.prefixes.take_held_too_long() == it.prefixes.take_late() == []
    it.clock.advance(0.01 * LOAD_TIMEOUT_S)
    assert it.prefixes.take_late() == [order]


def test_what_is_mostly_found_is_waited_for_longer(it):
    it.compute()
    before = it.count_worth_holding()
    for _ in range(3):
        it.answer(0, after_s=0.001)
        it.answer(NUM_TOKENS, after_s=0.001)
    still = it.count_worth_holding()
    assert still == pytest.approx(before, abs=1), "half is found: a miss costs as before"
    for _ in range(20):
        it.answer(NUM_TOKENS, after_s=0.001)
    assert it.count_worth_holding() == it.store.block_size


def test_after_a_long_wait_a_prompt_is_asked_for_on_trial_and_not_held(it):
    it.compute()
    usual = it.count_worth_holding()
    for _ in range(40):
        it.answer(0, after_s=1.0)
    assert it.count_worth_holding() > 5 * usual
    assert it.prefixes.compute_worth_asking().unheld_tokens == STEP_TOKENS + 1
    it.clock.advance(FORGOTTEN_AFTER_S + 1)
    assert it.prefixes.compute_worth_asking().unheld_tokens == it.store.block_size
    lookup = it.make_lookup()
    it.prefixes.look_up(lookup)
    it.clock.advance(0.1)  # a step
    it.prefixes.find(PrefixFound(lookup.id, 0, took_s=WAIT_GUESS_S))
    assert it.count_worth_holding() == usual


def test_a_store_that_is_late_is_not_asked_until_it_has_answered(it):
    order = it.begin_load()
    assert it.prefixes.take_late() == []
    it.clock.advance(LOAD_TIMEOUT_S)
    assert it.prefixes.take_late() == it.store.aborted == [order]
    assert order in it.prefixes
    assert it.prefixes.compute_worth_asking() is None
    it.prefixes.end(order)
    assert order not in it.prefixes
    assert it.prefixes.compute_worth_asking() is not None


def test_a_load_is_late_once_it_has_made_no_progress_for_too_long(it):
    order = it.begin_load()
    (load,) = it.store.loads
    for _ in range(5):
        it.clock.advance(0.9 * LOAD_TIMEOUT_S)
        assert it.prefixes.take_late() == []
        load.progress.last_at = it.clock.now()
        assert it.prefixes.next_deadline == it.clock.now() + LOAD_TIMEOUT_S
    it.clock.advance(LOAD_TIMEOUT_S)
    assert it.prefixes.take_late() == it.store.aborted == [order]
    assert it.prefixes.loads == StoreLoads(1, 0, pytest.approx(5.5 * LOAD_TIMEOUT_S))


def test_a_lookup_that_is_late_keeps_others_from_asking_until_it_is_answered(it):
    order = it.look_up()
    it.clock.advance(LOAD_TIMEOUT_S)
    assert it.prefixes.take_late() == [order]
    assert it.store.aborted == []
    assert it.prefixes.compute_worth_asking() is None
    assert it.prefixes.find(PrefixFound(order, NUM_TOKENS, 3.0)) is None
    assert it.prefixes.compute_worth_asking() is not None


def test_loads_are_counted_with_what_they_took(it):
    it.load(0, after_s=0.5)
    assert it.prefixes.loads == StoreLoads(0, 0, 0.0), "nothing was there any more"
    it.load(NUM_TOKENS, after_s=0.25)
    it.load(32, after_s=0.5)
    assert it.prefixes.loads == StoreLoads(2, NUM_TOKENS + 32, 0.75)
    it.begin_load()
    it.clock.advance(LOAD_TIMEOUT_S)
    it.prefixes.take_late()
    assert it.prefixes.loads == StoreLoads(3, NUM_TOKENS + 32, 0.75 + LOAD_TIMEOUT_S)


def test_what_there_is_no_room_to_keep_is_counted(it):
    """The setting's share for it is no block."""
    hashes = compute_block_hashes(HashDomain("f", "", 16), make_prompt(NUM_TOKENS))
    for block, known in zip(it.pool.try_allocate(len(hashes)), hashes, strict=True):
        it.pool.publish(block, known)
    sequence = SimpleNamespace(
        load_id=None,
        ticket=None,
        kind=Colocated(),
        block_size=16,
        num_computed=NUM_TOKENS,
        num_cached_tokens=0,
        hashes=lambda _: hashes,
    )
    it.prefixes.leave(sequence)
    assert it.store.num_dropped_tokens == NUM_TOKENS


def test_a_store_that_does_not_answer_is_given_nothing_to_keep():
    """Its orders, and the token ids in them, would pile up for as long as it hangs."""
    it, kept = Setting(), []
    it.prefixes._kept = KeptBlocks(it.pool, 16)
    it.store.start_keep = kept.append
    hashes = compute_block_hashes(HashDomain("f", "", 16), make_prompt(NUM_TOKENS))
    for block, known in zip(it.pool.try_allocate(len(hashes)), hashes, strict=True):
        it.pool.publish(block, known)
    sequence = SimpleNamespace(
        load_id=None,
        ticket=None,
        kind=Colocated(),
        block_size=16,
        num_computed=NUM_TOKENS,
        num_cached_tokens=0,
        hashes=lambda _: hashes,
        request=SimpleNamespace(tenant_salt=""),
        token_ids=lambda first, stop: make_prompt(stop)[first:],
    )
    order = it.look_up()
    it.clock.advance(LOAD_TIMEOUT_S)
    assert it.prefixes.take_late() == [order]
    it.prefixes.leave(sequence)
    assert not kept
    assert it.store.num_dropped_tokens == NUM_TOKENS
    it.prefixes.find(PrefixFound(order, 0, 3.0))
    sequence.load_id = it.begin_load()
    it.prefixes.leave(sequence)
    assert len(kept) == 1, "its load was aborted, and the store is well"
    sequence.num_computed = 0
    order = it.look_up()
    it.clock.advance(LOAD_TIMEOUT_S)
    assert order in it.prefixes.take_late()
    dropped = it.store.num_dropped_tokens
    sequence.load_id, sequence.num_cached_tokens = None, 32
    it.prefixes.leave(sequence)
    assert it.store.num_dropped_tokens == dropped, "a preempted one has nothing to keep"


def test_of_a_prompt_that_is_more_than_may_be_held_the_beginning_is_kept() -> None:
    pool, unit = BlockPool(16), 32
    hashes = compute_block_hashes(HashDomain("f", "", 16), make_prompt(NUM_TOKENS))
    blocks = pool.try_allocate(len(hashes))
    for block, known in zip(blocks, hashes, strict=True):
        pool.publish(block, known)
    pool.release(blocks)
    kept, num_free = KeptBlocks(pool, 5), pool.num_free
    sequence = SimpleNamespace(
        block_size=16,
        num_computed=NUM_TOKENS,
        num_cached_tokens=0,
        hashes=lambda _: hashes,
        token_ids=lambda start, stop: make_prompt(NUM_TOKENS)[start:stop],
        request=SimpleNamespace(tenant_salt=""),
    )
    order = kept.hold(sequence, unit)
    assert order.token_ids.tolist() == make_prompt(NUM_TOKENS)[:64].tolist()
    assert order.blocks.blocks.tolist() == blocks[:5]
    assert kept.take_refused_tokens() == NUM_TOKENS - 64
    assert kept.num_blocks == num_free - pool.num_free == 5
    assert kept.hold(sequence, unit) is None, "another one holds them"
    kept.release(order.id)
    assert pool.num_free == num_free
    sequence.num_cached_tokens = 64
    assert kept.hold(sequence, unit) is None, "the beginning is nothing new"
    assert pool.num_free == num_free
