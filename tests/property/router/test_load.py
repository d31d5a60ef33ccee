"""The bookkeeping of requests under way: it comes back to nothing, and queues are predicted."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from baton.auth.ticket import WorkerRef
from baton.ids import Epoch, WorkerId
from baton.protocol.worker_http import Role
from baton.router.demand import Limits
from baton.router.fleet import WorkerView
from baton.router.learning import LearnedLine, WorkerCost
from baton.router.load import MOST_WORKERS, FleetLoad, RunningRequest
from baton.router.placement import Placement
from baton.router.topology import MOST_PLACES, Distance


def view(name: str) -> WorkerView:
    ref = WorkerRef(WorkerId(name), Epoch("0" * 32), "127.0.0.1:1")
    return WorkerView(ref, Role.BOTH, "demo", "f", frozenset({"tcp"}), available=True)


WORKERS = [view(f"w{i}") for i in range(3)]


class LoadMachine(RuleBasedStateMachine):
    """Requests begin, are prefilled, stream and end in any order that a gateway may see."""

    def __init__(self) -> None:
        super().__init__()
        self.load, self.now = FleetLoad(), 0.0
        self.running: list[tuple[RunningRequest, Placement, int]] = []
        self.prefilled: list[RunningRequest] = []

    @rule(
        prefill=st.sampled_from([None, *WORKERS]),
        decode=st.sampled_from(WORKERS),
        num_tokens=st.integers(0, 100_000),
    )
    def begin(self, prefill, decode, num_tokens):
        if prefill is decode:
            prefill = None
        placement = Placement(prefill, decode)
        running = self.load.begin(placement, num_tokens, self.now)
        self.running.append((running, placement, num_tokens))

    @rule(elapsed_s=st.floats(0, 100))
    def time_passes(self, elapsed_s):
        self.now += elapsed_s

    @precondition(lambda self: self.running)
    @rule(data=st.data(), what=st.sampled_from(["prefilled", "first_token"]))
    def goes_on(self, data, what):
        running, _, _ = data.draw(st.sampled_from(self.running))
        getattr(running, what)(self.now)
        self.prefilled.append(running)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), num_streamed=st.integers(0, 200), again=st.booleans())
    def ends(self, data, num_streamed, again):
        at = data.draw(st.integers(0, len(self.running) - 1))
        running, _, _ = self.running.pop(at)
        running.end(self.now, num_streamed)
        if again:  # a late report of a worker
            running.prefilled(self.now)
            running.first_token(self.now)
            running.end(self.now)

    @rule(worker=st.sampled_from(WORKERS))
    def is_gone(self, worker):
        if not self.load.of(worker.id, "demo").num_requests:
            row = self.load.of(worker.id, "demo").row
            self.load.forget("demo", frozenset({worker.id}))
            assert self.load.find(worker.id, "demo") is None
            assert self.load.of(worker.id, "demo").row == row, "the next one gets its row"

    @invariant()
    def each_worker_has_what_it_was_given(self):
        for worker in WORKERS:
            activity = self.load.of(worker.id, "demo")
            waiting = [
                num_tokens
                for running, placement, num_tokens in self.running
                if (placement.prefill or placement.decode) is worker
                and running not in self.prefilled
            ]
            answers = sum(placement.decode is worker for _, placement, _ in self.running)
            assert (activity.num_prefills, activity.prefill_tokens) == (len(waiting), sum(waiting))
            assert activity.num_decodes == answers
            assert activity.queue_s(self.now) >= 0
            assert 0 <= activity.prefill_share(self.now) <= 1
            if not self.running:
                assert activity.num_requests == 0


TestLoad = LoadMachine.TestCase


def test_the_queue_of_a_steady_worker_is_predicted():
    """Prompts one after the other, of 0.2 s each: ten of them wait 2 s."""
    load, now = FleetLoad(), 0.0
    (worker,) = WORKERS[:1]
    for _ in range(60):
        running = load.begin(Placement(None, worker), 1000, now)
        now += 0.2
        running.first_token(now)
        running.end(now)
    waiting = [load.begin(Placement(None, worker), 1000, now) for _ in range(10)]
    assert load.of(worker.id, "demo").queue_s(now) == pytest.approx(2.0, rel=0.05)
    for done, running in enumerate(waiting, start=1):  # it has become twice as slow
        now += 0.4
        running.first_token(now)
        if done == 5:
            assert load.of(worker.id, "demo").queue_s(now) >= 5 * 0.2 * 0.95
    assert load.of(worker.id, "demo").queue_s(now) == pytest.approx(0.0, abs=0.05)
    assert load.of(worker.id, "demo").prefill_cost.predict(1000) > 0.22


def test_the_pace_of_answers_is_learned_without_the_prompts_between():
    load, now = FleetLoad(), 100.0
    (worker,) = WORKERS[:1]
    for _ in range(200):
        streams = [load.begin(Placement(None, worker), 10, now) for _ in range(4)]
        for each in streams:
            each.first_token(now)
        now += 99 * 0.05
        for each in streams:
            each.end(now, 100)
        now += 60.0
    assert load.of(worker.id, "demo").step_cost.predict(4) == pytest.approx(0.05, rel=0.1)


def test_answers_in_one_piece_do_not_pile_up_a_queue():
    """Their prompts are never reported as computed; the worker is four times as fast as guessed."""
    load, now = FleetLoad(), 0.0
    (worker,) = WORKERS[:1]
    takes_s = load.of(worker.id, "demo").prefill_cost.predict(1000) / 4
    running = [load.begin(Placement(None, worker), 1000, now) for _ in range(4)]
    for _ in range(2000):
        now += takes_s
        running.pop(0).end(now)
        running.append(load.begin(Placement(None, worker), 1000, now))
    assert load.of(worker.id, "demo").queue_s(now) < 20 * takes_s


def test_workers_of_lives_that_are_over_are_forgotten_in_the_end_and_busy_ones_are_not():
    load = FleetLoad()
    running = load.begin(Placement(None, WORKERS[0]), 10, 0.0)
    for n in range(MOST_WORKERS + 10):
        load.begin(Placement(None, view(f"old-{n}")), 10, 0.0).end(1.0)
    assert load.find(WorkerId("old-0"), "demo") is None
    assert load.find(WORKERS[0].id, "demo").num_decodes == 1
    running.end(1.0)
    assert load.find(WORKERS[0].id, "demo").num_requests == 0


def test_a_worker_that_is_gone_takes_its_costs_and_its_place_with_it():
    load = FleetLoad()
    costs = load.costs("demo")
    for n in range(MOST_PLACES + 50):
        worker = replace(view(f"gone{n}"), topology=f"z/r/h{n}")
        running = load.begin(Placement(WORKERS[0], worker), 100, float(n))
        load.rows([worker, WORKERS[0]])
        running.prefilled(n + 0.1)
        running.first_token(n + 0.2)
        running.end(n + 0.5, 10)
        assert costs.step.num_workers == 1
        assert costs.handoffs.cost_of(WORKERS[0], worker).num_seen == 1
        assert costs.handoffs.places.number(worker.topology) > 0, "it has a place of its own"
        load.forget("demo", frozenset({worker.id}))
        assert costs.step.num_workers == 0
        assert costs.step.sum_of_logs == 0
    assert sum(line.num_workers for line in costs.handoffs.lines) == 0
    assert costs.prefill.num_workers == 1, "the one that stayed"
    assert {costs.handoffs.source(each) for each in Distance} >= {"learned"}


def test_what_is_learned_of_those_that_stay_does_not_change():
    line = LearnedLine((0.01, 1e-4))
    stays, leaves = WorkerCost(line), WorkerCost(line)
    for _ in range(50):
        stays.observe(100, 0.02)
        leaves.observe(100, 0.06)
    assert line.num_workers == 2
    assert leaves.factor > stays.factor
    leaves.leave()
    leaves.leave()  # once is enough
    assert line.num_workers == 1
    assert line.mean_log == pytest.approx(stays.log)
    assert stays.factor == pytest.approx(1.0)
    assert leaves.factor == 1.0


@pytest.mark.parametrize(
    ("target_s", "itl_s", "is_good"),
    [(0.1, 0.2, False), (0.1, 0.05, True), (0.1, None, True), (None, 9.0, True)],
)
def test_an_answer_is_good_if_it_keeps_its_target_for_gaps(target_s, itl_s, is_good):
    load, worker = FleetLoad(), WORKERS[0]
    running, other = (load.begin(Placement(None, worker), 10, 0.0) for _ in range(2))
    other.limit_gaps(0.5)
    if target_s is not None:
        running.limit_gaps(target_s)
    columns, row = load.costs("demo").columns, load.of(worker.id, "demo").row
    assert columns.gap_limit_s[row] == (target_s or 0.5)
    running.first_token(1.0)
    running.end(2.0, 10, itl_s)
    assert (columns.num_limited[row], columns.gap_limit_s[row]) == (1, 0.5)
    other.end(2.0)
    assert (columns.num_limited[row], columns.gap_limit_s[row]) == (0, inf)
    (ended,) = load.costs("demo").ended
    assert Limits(ttft_s=10.0, tpot_s=1.0).are_met(ended) is is_good
