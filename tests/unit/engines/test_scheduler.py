"""The scheduler under random arrivals, cancellations and handoff events. No model, no tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from msgspec.structs import replace

from baton.clock import Instant
from baton.engines.interface import (
    Colocated,
    DecodeRequest,
    GenerationRequest,
    PrefillRequest,
    RequestKind,
    SamplingParams,
)
from baton.engines.transformers.pinned_blocks import SharedBlocks
from baton.engines.transformers.queued_prefixes import WorthAsking
from baton.engines.transformers.scheduler import Limits, Scheduler, Work
from baton.engines.transformers.sequence import Sequence, Status
from baton.events.blocks import BlocksExpected
from baton.events.journal import LEAST_EXPECTED_TOKENS, CacheJournal
from baton.handoff.interface import KVLanded
from baton.ids import RequestId, TicketId
from baton.kv.identity import HashDomain, compute_block_hashes
from baton.kv.layout import LayerLayout
from baton.kv.pool import BlockPool
from baton.telemetry.trace import RequestSpan
from tests.examples import examples
from tests.unit.handoff.orders import make_ticket

if TYPE_CHECKING:
    from baton.auth.ticket import Ticket
    from baton.engines.transformers.queued_prefixes import PendingLoad, PendingLookup
    from baton.handoff.interface import KeepOrder

BLOCK_SIZE = 4
NUM_BLOCKS = 14
LIMITS = Limits(
    max_batch_tokens=13,
    max_num_seqs=4,
    min_handoff_tokens=4,
    max_held_blocks=24,
    max_kept_blocks=8,
)
FULL = LayerLayout.gqa(1, 8)
WINDOWED = LayerLayout.gqa(1, 8, window_tokens=6)


def number_ticket(number: int) -> Ticket:
    return replace(make_ticket(), id=TicketId(number.to_bytes(16, "big")))


def make_sequence(
    num_tokens: int, max_tokens: int, leg: RequestKind, *, start: int = 0, number: int = 0
) -> Sequence:
    """A request for `num_tokens` tokens that count from `start`; `number` is its arrival."""
    request = GenerationRequest(
        RequestId(f"r{number:04}"),
        np.arange(start, start + num_tokens, dtype=np.int32),
        SamplingParams(max_tokens=max_tokens),
        leg,
        "",
        Instant(1e9),
        RequestSpan(request_id=f"r{number}", worker="w", epoch="e", role="colocated"),
    )
    return Sequence(request, HashDomain("m", "", BLOCK_SIZE), seed=0, arrival=number)


def make_scheduler(num_blocks: int = NUM_BLOCKS, *layers: LayerLayout) -> Scheduler:
    return Scheduler(BlockPool(num_blocks), LIMITS, layers or (FULL,))


def carry_out(scheduler: Scheduler, work: Work) -> KeepOrder | None:
    """What the engine does once a step is computed: token 1 is always sampled.

    What a request leaves where that was its last token is to be kept.
    """
    sequence, samples = work.sequence, work.samples
    scheduler.advance(work)
    if not samples:
        return None
    if isinstance(sequence.kind, PrefillRequest):
        scheduler.hold(sequence)
        return None
    if sequence.append(1, ()) is None:
        return None
    order = scheduler.kept_blocks.hold(sequence, BLOCK_SIZE)
    scheduler.end(sequence)
    return order


class SchedulerMachine(RuleBasedStateMachine):
    """Every ticket's events come in an order that the handoff's contract allows."""

    @initialize(windowed=st.booleans(), has_store=st.booleans())
    def build(self, windowed: bool, has_store: bool) -> None:
        layers = (FULL, WINDOWED) if windowed else (FULL,)
        self.scheduler = make_scheduler(NUM_BLOCKS, *layers)
        self.scheduler.worth_asking = WorthAsking(8, 14, 4) if has_store else None
        self.num_arrived = 0
        self.lookups: dict[TicketId, PendingLookup] = {}
        self.loads: dict[TicketId, PendingLoad] = {}
        self.live: dict[RequestId, Sequence] = {}
        self.receiving: dict[TicketId, Sequence] = {}
        self.closing: set[TicketId] = set()
        self.sending: dict[TicketId, Sequence] = {}
        self.keeps: dict[TicketId, KeepOrder] = {}

    @rule(
        num_tokens=st.integers(1, 30),
        max_tokens=st.integers(1, 20),
        kind=st.sampled_from(("colocated", "prefill", "decode")),
        start=st.sampled_from((0, 0, 0, 100)),
    )
    def arrive(self, num_tokens: int, max_tokens: int, kind: str, start: int) -> None:
        self.num_arrived += 1
        ticket = number_ticket(self.num_arrived + (1 << 64))  # else they are names of loads
        legs = {
            "colocated": Colocated(),
            "prefill": PrefillRequest(ticket),
            "decode": DecodeRequest(ticket),
        }
        sequence = make_sequence(
            num_tokens, max_tokens, legs[kind], start=start, number=self.num_arrived
        )
        self.live[sequence.request.id] = sequence
        self.scheduler.add(sequence)

    @rule()
    def step(self) -> None:
        self._step()

    def _step(self) -> int:
        """How many tokens were computed."""
        plan = self.scheduler.schedule()
        assert plan.num_tokens <= LIMITS.max_batch_tokens
        for lookup in plan.lookups:
            assert lookup.id not in self.lookups
            self.lookups[lookup.id] = lookup
        for load in plan.loads:
            assert len(load.blocks) * BLOCK_SIZE >= load.stop - load.start > 0
            self.loads[load.id] = load
        assert {s.load_id for s in plan.held} <= self.lookups.keys()
        for receive in plan.expected:
            assert receive.start == receive.sequence.num_computed
            self.receiving[receive.ticket.id] = receive.sequence
        for sequence, ticket in plan.offered:
            self.sending[ticket.id] = sequence
        assert len({work.sequence.request.id for work in plan.work}) == len(plan.work)
        for work in plan.work:
            room = len(work.sequence.blocks) * BLOCK_SIZE
            assert 0 < work.sequence.num_computed + work.num_tokens <= room
            assert work.sequence.status is Status.RUNNING
        for work in plan.work:
            order = carry_out(self.scheduler, work)
            if order is not None:
                self.keeps[order.id] = order
        return plan.num_tokens

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        if self.live:
            sequence = self.live[data.draw(st.sampled_from(sorted(self.live)))]
            self._end(sequence)

    @rule(data=st.data(), good=st.booleans())
    def end_a_receive(self, data: st.DataObject, good: bool) -> None:
        if self.receiving:
            self._end_receive(data.draw(st.sampled_from(sorted(self.receiving))), good)

    @rule(data=st.data(), num_more=st.integers(0, 30))
    def answer_a_lookup(self, data: st.DataObject, num_more: int) -> None:
        if self.lookups:
            order = data.draw(st.sampled_from(sorted(self.lookups)))
            lookup = self.lookups.pop(order)
            num_found = min(lookup.start + num_more, lookup.sequence.num_prompt_tokens)
            self.scheduler.find_stored(order, num_found if num_found > lookup.start else None)

    @rule(data=st.data())
    def wait_too_long_for_a_lookup(self, data: st.DataObject) -> None:
        if self.lookups:
            self.scheduler.compute_meanwhile(data.draw(st.sampled_from(sorted(self.lookups))))

    @rule(data=st.data(), num_lost=st.integers(0, 30))
    def end_a_load(self, data: st.DataObject, num_lost: int) -> None:
        if self.loads:
            self._end_load(data.draw(st.sampled_from(sorted(self.loads))), num_lost)

    @rule(data=st.data())
    def give_up_a_load(self, data: st.DataObject) -> None:
        if self.loads:
            order = data.draw(st.sampled_from(sorted(self.loads)))
            assert self.scheduler.give_up_load(order) is self.loads.pop(order).sequence
            self.closing.add(order)

    @rule(data=st.data())
    def become_quiescent(self, data: st.DataObject) -> None:
        if self.closing:
            self._become_quiescent(data.draw(st.sampled_from(sorted(self.closing))))

    @rule(data=st.data(), good=st.booleans())
    def end_a_send(self, data: st.DataObject, good: bool) -> None:
        if self.sending:
            self._end_send(data.draw(st.sampled_from(sorted(self.sending))), good)

    @rule(data=st.data())
    def end_a_keep(self, data: st.DataObject) -> None:
        if self.keeps:
            self._end_keep(data.draw(st.sampled_from(sorted(self.keeps))))

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        self.scheduler.check_invariants()
        self.live = {i: s for i, s in self.live.items() if s.status is not Status.ENDED}
        for order in self.keeps.values():
            hashes = compute_block_hashes(HashDomain("m", "", BLOCK_SIZE), order.token_ids)
            is_held = self.scheduler.pool.find_cached(hashes) == len(hashes)
            assert is_held or order.guard.is_revoked
        held = [s for s in self.live.values() if s.blocks]
        for sequence in held:
            assert len(set(sequence.blocks)) == len(sequence.blocks)

    def teardown(self) -> None:
        """Let every handoff end well or ill: then everything is answered, and nothing is held."""
        if not hasattr(self, "scheduler"):
            return
        for turn in range(2_000):
            busy = self._step()
            for order in sorted(self.lookups):
                lookup = self.lookups.pop(order)
                stop = lookup.sequence.num_prompt_tokens
                self.scheduler.find_stored(order, stop if turn % 2 else None)
            for order in sorted(self.loads):
                self._end_load(order, num_lost=turn % 3)
            for order in sorted(self.keeps):
                self._end_keep(order)
            for ticket in sorted(self.receiving):
                self._end_receive(ticket, good=turn % 2 == 0)
            for ticket in sorted(self.closing):
                self._become_quiescent(ticket)
            for ticket in sorted(self.sending):
                sequence = self.sending[ticket]
                if sequence.status is not Status.RUNNING:
                    self._end_send(ticket, good=True)
            self.agrees()
            handoffs = self.receiving or self.closing or self.sending
            orders = self.lookups or self.loads or self.keeps or handoffs
            if not (busy or self.live or orders):
                break
        assert not self.live
        assert self.scheduler.pool.num_free == NUM_BLOCKS

    def _end(self, sequence: Sequence) -> None:
        self.scheduler.end(sequence)
        del self.live[sequence.request.id]
        ticket, load = sequence.ticket, sequence.load_id
        if ticket is not None and self.receiving.pop(ticket.id, None) is not None:
            self.closing.add(ticket.id)
        if load is not None:
            self.lookups.pop(load, None)
            if self.loads.pop(load, None) is not None:
                self.closing.add(load)

    def _end_keep(self, order: TicketId) -> None:
        del self.keeps[order]
        assert self.scheduler.kept_blocks.release(order)

    def _end_load(self, order: TicketId, num_lost: int) -> None:
        load = self.loads.pop(order)
        num_tokens = max(load.start, load.stop - num_lost)
        assert self.scheduler.finish_load(order, num_tokens) is load
        first = load.start // BLOCK_SIZE
        hashes = load.sequence.hashes(num_tokens)[: load.sequence.num_prompt_tokens // BLOCK_SIZE]
        cached = [self.scheduler.pool.find_cached([each]) for each in hashes[first:]]
        assert all(cached), "what was loaded is found by its hash"

    def _end_receive(self, ticket: TicketId, good: bool) -> None:
        sequence = self.receiving.pop(ticket)
        if good:
            assert self.scheduler.land(KVLanded(ticket, None), 0) is sequence
            if sequence.append(1, ()) is not None:
                self.scheduler.end(sequence)
        else:
            assert self.scheduler.fall_back(ticket) is sequence
            self.closing.add(ticket)

    def _become_quiescent(self, ticket: TicketId) -> None:
        self.scheduler.pinned_blocks.release_quarantined(ticket)
        self.closing.remove(ticket)

    def _end_send(self, ticket: TicketId, good: bool) -> None:
        sequence = self.sending[ticket]
        if good and sequence.status is Status.RUNNING:
            return  # nothing is sent before it is computed
        del self.sending[ticket]
        assert self.scheduler.finish_send(ticket) is sequence
        if sequence.status is not Status.ENDED:
            self.scheduler.end(sequence)


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=examples(30), stateful_step_count=30, deadline=None)


def test_decoding_goes_before_prefill_within_the_budget() -> None:
    scheduler = make_scheduler()
    old = make_sequence(8, 5, Colocated(), number=1)
    new = make_sequence(20, 5, Colocated(), start=50, number=2)
    scheduler.add(old)
    carry_out(scheduler, scheduler.schedule().work[0])
    scheduler.add(new)
    work = scheduler.schedule().work
    assert [(w.sequence, w.num_tokens) for w in work] == [(old, 1), (new, 12)]
    assert [w.samples for w in work] == [True, False]


def test_the_youngest_gives_way_and_the_oldest_goes_on() -> None:
    scheduler = make_scheduler(6)
    old, young = (make_sequence(8, 12, Colocated(), start=n, number=n) for n in (0, 50))
    for sequence in (old, young):
        scheduler.add(sequence)
        for work in scheduler.schedule().work:
            carry_out(scheduler, work)
    for _ in range(30):
        for work in scheduler.schedule().work:
            carry_out(scheduler, work)
        if old.status is Status.ENDED:
            break
        assert old.status is Status.RUNNING
    assert old.status is Status.ENDED
    assert scheduler.num_preemptions > 0


def keep_one(scheduler: Scheduler, num_tokens: int) -> KeepOrder:
    """Of a request that has ended."""
    scheduler.add(make_sequence(num_tokens, 1, Colocated()))
    (work,) = scheduler.schedule().work
    order = carry_out(scheduler, work)
    assert order is not None
    return order


def test_a_request_gets_the_blocks_of_what_is_to_be_kept_where_it_lacks_them() -> None:
    scheduler = make_scheduler(4)
    first, second = keep_one(scheduler, 4), keep_one(scheduler, 8)
    scheduler.add(make_sequence(9, 1, Colocated(), start=50, number=1))
    assert len(scheduler.schedule().work) == 1
    assert (first.guard.is_revoked, second.guard.is_revoked) == (False, True)
    assert scheduler.kept_blocks.num_blocks == 1
    for order in (first, second):
        assert scheduler.kept_blocks.release(order.id)
        assert not scheduler.kept_blocks.release(order.id)


def test_a_request_that_would_not_fit_in_any_case_takes_no_blocks_from_what_is_to_be_kept() -> None:
    scheduler = make_scheduler(4)
    order = keep_one(scheduler, 8)
    scheduler.add(make_sequence(20, 1, Colocated(), start=50, number=1))
    assert not scheduler.schedule().work
    assert not order.guard.is_revoked


def test_what_is_to_be_kept_gives_way_before_a_running_request_does() -> None:
    scheduler = make_scheduler(5)
    order = keep_one(scheduler, 8)
    growing = make_sequence(4, 12, Colocated(), start=50, number=1)
    scheduler.add(growing)
    for _ in range(9):  # up to 12 tokens in the three blocks that are free
        (work,) = scheduler.schedule().work
        carry_out(scheduler, work)
    assert not order.guard.is_revoked
    (work,) = scheduler.schedule().work
    assert order.guard.is_revoked
    assert work.sequence is growing
    assert scheduler.num_preemptions == 0


def test_a_revoked_import_that_does_not_fit_keeps_back_no_smaller_one() -> None:
    pool = BlockPool(NUM_BLOCKS)
    shared = SharedBlocks(pool)
    for number, num_imported in enumerate((2 * NUM_BLOCKS, 3, 4, NUM_BLOCKS)):
        importer = make_sequence(1, 1, Colocated(), number=number)
        importer.blocks = list(range(NUM_BLOCKS, NUM_BLOCKS + num_imported))
        importer.imported = range(num_imported)
        shared.import_blocks(number_ticket(number).id, importer)
        shared.revoke(number_ticket(number).id)
    copies = shared.try_copy_revoked(spare=2)
    assert [len(imported) for imported, _ in copies] == [3, 4]
    assert [len(own) for _, own in copies] == [3, 4]
    assert shared.take_pending_releases() == [number_ticket(1).id, number_ticket(2).id]
    shared.check_invariants()


def test_offered_blocks_are_never_taken_away() -> None:
    scheduler = make_scheduler(5)
    offered = make_sequence(12, 1, PrefillRequest(make_ticket()), start=50, number=1)
    growing = make_sequence(3, 9, Colocated())
    for sequence in (growing, offered):
        scheduler.add(sequence)
    for _ in range(20):
        for work in scheduler.schedule().work:
            carry_out(scheduler, work)
    assert offered.status is Status.OFFERED
    assert len(offered.blocks) == 3
    assert growing.status is Status.WAITING


@pytest.mark.parametrize(("layers", "num_published"), [((FULL,), 5), ((FULL, WINDOWED), 1)])
def test_blocks_that_lack_dead_tokens_of_a_window_are_not_published(
    layers: tuple[LayerLayout, ...], num_published: int
) -> None:
    scheduler = make_scheduler(NUM_BLOCKS, *layers)
    ticket = make_ticket()
    scheduler.add(make_sequence(20, 5, DecodeRequest(ticket)))
    scheduler.schedule()
    scheduler.land(KVLanded(ticket.id, None), 0)
    # Of 20 tokens a window of 6 lets the next one see [15, 20): block 4 alone is whole.
    assert scheduler.pool.num_cached == num_published


def find_all(scheduler: Scheduler, *sequences: Sequence) -> None:
    """The store has all of these prompts."""
    for sequence in sequences:
        assert sequence.load_id is not None
        scheduler.find_stored(sequence.load_id, sequence.num_prompt_tokens)


def test_what_waits_behind_a_long_prompt_is_loaded_meanwhile_and_keeps_its_place() -> None:
    scheduler = make_scheduler()
    scheduler.worth_asking = WorthAsking(BLOCK_SIZE, 14, BLOCK_SIZE)
    long, between, stored = (
        make_sequence(n, 1, Colocated(), start=50 * at, number=at)
        for at, n in enumerate((25, 10, 12), 1)
    )
    for sequence in (long, between, stored):
        scheduler.add(sequence)
    plan = scheduler.schedule()
    assert [each.sequence for each in plan.lookups] == [long, between, stored]
    assert plan.work == []
    for sequence in (long, between):
        scheduler.find_stored(sequence.load_id, None)
    find_all(scheduler, stored)
    plan = scheduler.schedule()
    assert [work.sequence for work in plan.work] == [long]
    (load,) = plan.loads
    assert (load.sequence, load.start, load.stop) == (stored, 0, 12)
    assert scheduler.finish_load(load.id, 12) is load
    order = []
    while long.status is not Status.ENDED or stored.status is not Status.ENDED:
        carried = plan.work
        for work in carried:
            carry_out(scheduler, work)
        plan = scheduler.schedule()
        order += [work.sequence for work in plan.work if work.is_prefill]
        assert plan.work or stored.status is Status.ENDED
    assert order.index(between) < order.index(stored)
    assert stored.num_cached_tokens == 8, "the last block is computed: its last token has to be"


def test_a_load_takes_no_blocks_that_those_ahead_of_it_need() -> None:
    scheduler = make_scheduler(8)
    scheduler.worth_asking = WorthAsking(BLOCK_SIZE, 14, BLOCK_SIZE)
    running, ahead, stored = (
        make_sequence(n, 2, Colocated(), start=50 * at, number=at)
        for at, n in enumerate((16, 12, 12), 1)
    )
    for sequence in (running, ahead, stored):
        scheduler.add(sequence)
    scheduler.schedule()
    for sequence in (running, ahead):
        scheduler.find_stored(sequence.load_id, None)
    find_all(scheduler, stored)
    plan = scheduler.schedule()
    assert [work.sequence for work in plan.work] == [running]
    assert scheduler.pool.num_free == 4
    assert plan.loads == [], "its 3 blocks are free, but 3 are of the prompt ahead of it"


def test_an_answer_that_comes_late_is_of_use_for_what_is_not_computed_yet() -> None:
    scheduler = make_scheduler()
    scheduler.worth_asking = WorthAsking(BLOCK_SIZE, 14, BLOCK_SIZE)
    sequence = make_sequence(40, 1, PrefillRequest(make_ticket()), number=1)
    scheduler.add(sequence)
    (lookup,) = scheduler.schedule().lookups
    scheduler.compute_meanwhile(lookup.id)
    plan = scheduler.schedule()
    assert plan.work[0].num_tokens == LIMITS.max_batch_tokens
    assert plan.offered == [], "its blocks are not fixed yet"
    carry_out(scheduler, plan.work[0])
    find_all(scheduler, sequence)
    plan = scheduler.schedule()
    (load,) = plan.loads
    assert (plan.work, load.start, load.stop) == ([], 12, 40)
    scheduler.finish_load(load.id, 40)
    plan = scheduler.schedule()
    assert [offered for offered, _ in plan.offered] == [sequence]
    assert (plan.work[0].num_tokens, sequence.num_cached_tokens) == (4, 24)


def test_a_prompt_is_offered_at_the_latest_with_its_last_step() -> None:
    scheduler = make_scheduler()
    scheduler.worth_asking = WorthAsking(BLOCK_SIZE, 14, BLOCK_SIZE)
    sequence = make_sequence(20, 1, PrefillRequest(make_ticket()), number=1)
    scheduler.add(sequence)
    (lookup,) = scheduler.schedule().lookups
    scheduler.compute_meanwhile(lookup.id)
    plan = scheduler.schedule()
    assert (len(plan.work), plan.offered) == (1, [])
    carry_out(scheduler, plan.work[0])
    plan = scheduler.schedule()
    assert len(plan.offered) == 1
    carry_out(scheduler, plan.work[0])
    find_all(scheduler, sequence)
    assert sequence.status is Status.OFFERED
    assert scheduler.schedule().loads == []


def test_what_would_not_be_held_for_the_answer_is_looked_for_if_it_waits_in_any_case() -> None:
    scheduler = make_scheduler()
    scheduler.worth_asking = WorthAsking(1_000, 1_000, queued_tokens=BLOCK_SIZE)
    first, second = (make_sequence(13, 1, Colocated(), start=50 * n, number=n) for n in (1, 2))
    for sequence in (first, second):
        scheduler.add(sequence)
    plan = scheduler.schedule()
    assert [work.sequence for work in plan.work] == [first], "it takes the whole step"
    assert [lookup.sequence for lookup in plan.lookups] == [second]
    carry_out(scheduler, plan.work[0])
    plan = scheduler.schedule()
    assert ([work.sequence for work in plan.work], plan.held) == ([second], [])


def test_a_prompt_of_several_steps_is_looked_for_and_computed_meanwhile() -> None:
    scheduler = make_scheduler()
    num_step = LIMITS.max_batch_tokens
    scheduler.worth_asking = WorthAsking(1_000, num_step + 1, queued_tokens=BLOCK_SIZE)
    sequence = make_sequence(30, 1, Colocated())
    scheduler.add(sequence)
    plan = scheduler.schedule()
    assert [lookup.sequence for lookup in plan.lookups] == [sequence]
    assert [(work.sequence, work.num_tokens) for work in plan.work] == [(sequence, num_step)]


def test_a_prompt_for_which_a_step_has_no_room_is_not_held() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_sequence(26, 1, Colocated(), number=1))
    carry_out(scheduler, scheduler.schedule().work[0])
    scheduler.worth_asking = WorthAsking(BLOCK_SIZE, 14, BLOCK_SIZE)
    sequence = make_sequence(8, 1, Colocated(), start=50, number=2)
    scheduler.add(sequence)
    plan = scheduler.schedule()
    assert [lookup.sequence for lookup in plan.lookups] == [sequence]
    assert plan.held == []
    carry_out(scheduler, plan.work[0])
    assert scheduler.schedule().held == [sequence]


def test_what_a_new_prompt_will_store_is_reported_before_it_is_computed():
    journal = CacheJournal()
    scheduler = Scheduler(BlockPool(100), LIMITS, (FULL,), journal)
    num_tokens = LEAST_EXPECTED_TOKENS + 2 * BLOCK_SIZE
    scheduler.add(make_sequence(num_tokens, 1, Colocated()))
    (event,) = journal.read(0).events
    ids = np.arange(num_tokens - BLOCK_SIZE, dtype="<i4")  # the last token is computed in any case
    assert event == BlocksExpected(None, ids.tobytes(), BLOCK_SIZE)
    while scheduler.num_waiting or scheduler.num_running:
        for work in scheduler.schedule().work:
            carry_out(scheduler, work)
    last = journal.last
    scheduler.add(make_sequence(num_tokens, 1, Colocated(), number=1))
    scheduler.add(make_sequence(LEAST_EXPECTED_TOKENS - 1, 1, Colocated(), start=500, number=2))
    assert journal.last == last, "what is cached, or is little, is not reported"
    scheduler.add(make_sequence(2 * num_tokens, 1, Colocated(), number=3))
    (event,) = journal.read(last).events
    hashes = compute_block_hashes(
        HashDomain("m", "", BLOCK_SIZE), np.arange(num_tokens, dtype=np.int32), None
    )
    assert event.parent == hashes[-1]
    rest = np.arange(num_tokens, 2 * num_tokens - BLOCK_SIZE, dtype="<i4")
    assert event.packed_ids == rest.tobytes()
