"""Who is ejected, for how long, and that every worker comes back: under all orders of events."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from baton.auth.ticket import WorkerRef
from baton.ids import Epoch, WorkerId
from baton.protocol.worker_http import Role
from baton.router.failover import EVERY_MODE
from baton.router.fleet import Fleet, WorkerView
from baton.router.health import (
    APART_S,
    CERTAIN,
    FORGET_S,
    MAX_EJECTION_S,
    PROBES_TO_EJECT,
    REQUESTS_TO_EJECT,
    TRIAL_S,
    EjectionCause,
    HealthOptions,
    HealthState,
    SlowStart,
    WorkerHealth,
    may_eject,
)
from baton.router.load import FleetLoad
from baton.router.placement import POLICIES, Placement, PlacementRequest
from baton.router.simple import LeastLoaded, RoundRobin
from tests.examples import examples

OPTIONS = HealthOptions(ejection_s=5.0, slow_start_s=10.0)
INDEX = st.integers(0, 7)


class FleetHealth(RuleBasedStateMachine):
    """Workers of one model, of which any may be late, fail, leave and come back."""

    @initialize(num_workers=st.integers(1, 5))
    def start(self, num_workers: int) -> None:
        self.now = 100.0
        self.workers = [WorkerHealth(OPTIONS) for _ in range(num_workers)]

    def pick(self, index: int) -> tuple[WorkerHealth, bool]:
        worker = self.workers[index % len(self.workers)]
        return worker, may_eject([other for other in self.workers if other is not worker])

    def check_suspicion(self, worker: WorkerHealth, *, was_usable: bool) -> None:
        """A worker that was ejected on a suspicion left another, and is not one of too many."""
        if was_usable and not worker.is_usable:
            assert any(other.is_usable for other in self.workers)
            suspected = [w for w in self.workers if w.cause is not None and w.cause not in CERTAIN]
            assert len(suspected) <= max(1, len(self.workers) // 2)

    @rule(seconds=st.sampled_from([0.01, 0.2, 1.0, 7.0, 61.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(index=INDEX)
    def probe_ok(self, index: int) -> None:
        worker, _ = self.pick(index)
        before = worker.state
        worker.probe_ok(self.now)
        if before is HealthState.EJECTED and worker.cause is not EjectionCause.FAILED:
            is_back = self.now >= worker.ends_at
            assert worker.is_usable is (is_back and not worker.is_suspected)

    @rule(index=INDEX, took=st.sampled_from([0.5, 2.0]))
    def probe_late(self, index: int, took: float) -> None:
        worker, is_spare = self.pick(index)
        was_usable, was_active = worker.is_usable, worker.active_at >= self.now
        began_at = self.now
        self.now += took
        worker.probe_late(began_at, self.now, "late", may_eject=is_spare)
        self.check_suspicion(worker, was_usable=was_usable)
        if was_usable and (was_active or not is_spare):
            assert worker.is_usable

    @rule(index=INDEX)
    def probe_failed(self, index: int) -> None:
        self.pick(index)[0].probe_failed(self.now, "it reports an error")

    @rule(index=INDEX)
    def refused(self, index: int) -> None:
        worker, _ = self.pick(index)
        worker.lose(EjectionCause.GONE, self.now, "connection refused")
        assert worker.state is HealthState.EJECTED

    @rule(index=INDEX, is_suspected=st.booleans())
    def heartbeats(self, index: int, is_suspected: bool) -> None:
        worker, _ = self.pick(index)
        cause = worker.cause
        worker.is_suspected = is_suspected
        assert worker.cause is cause
        assert worker.is_usable is (cause is None and not is_suspected)
        assert not (is_suspected and worker.takes_trial)

    @rule(index=INDEX)
    def request_failed(self, index: int) -> None:
        worker, is_spare = self.pick(index)
        was_usable = worker.is_usable
        worker.failed(self.now, "answered 500", may_eject=is_spare)
        self.check_suspicion(worker, was_usable=was_usable)
        self.now += APART_S

    @rule(index=INDEX)
    def connection_cut(self, index: int) -> None:
        worker, is_spare = self.pick(index)
        was_usable = worker.is_usable
        worker.suspect()
        worker.failed(self.now, "cut", may_eject=is_spare)
        self.check_suspicion(worker, was_usable=was_usable)

    @rule(index=INDEX)
    def answered(self, index: int) -> None:
        self.pick(index)[0].answered(self.now)

    @rule(index=INDEX)
    def begin_trial(self, index: int) -> None:
        worker, _ = self.pick(index)
        if worker.takes_trial:
            worker.begin_trial(self.now)
            assert not worker.takes_trial, "one at a time"

    @rule(index=INDEX)
    def end_trial(self, index: int) -> None:
        self.pick(index)[0].end_trial()

    @invariant()
    def holds(self) -> None:
        for worker in self.workers:
            worker.check_invariants()
            if worker.cause is not None:
                assert worker.ends_at - self.now <= MAX_EJECTION_S

    def teardown(self) -> None:
        """Whatever happened, a worker that is well is used again within a bounded time."""
        for worker in getattr(self, "workers", ()):
            at = self.now
            worker.is_suspected = False
            while not worker.is_usable:
                at += 1.0
                assert at - self.now <= MAX_EJECTION_S + TRIAL_S + 2
                worker.probe_ok(at)
                if worker.takes_trial:
                    worker.begin_trial(at)
                    worker.answered(at)
            worker.answered(at)
            worker.probe_ok(at + OPTIONS.slow_start_s + 0.001)  # sums are rounded
            assert worker.state is HealthState.HEALTHY


TestFleetHealth = FleetHealth.TestCase


@given(st.lists(st.booleans(), max_size=50))
def test_late_probes_never_eject_a_worker_that_answers_in_between(late: list[bool]) -> None:
    health, now = WorkerHealth(OPTIONS), 0.0
    for is_late in late:
        began_at, now = now, now + 2.0
        health.answered(now - 1.0)
        if is_late:
            health.probe_late(began_at, now, "late", may_eject=True)
        else:
            health.probe_ok(now)
        assert health.state is HealthState.HEALTHY


@given(st.integers(1, 30))
def test_each_ejection_lasts_longer_up_to_a_bound_and_is_forgotten(times: int) -> None:
    health, now, lasted = WorkerHealth(OPTIONS), 0.0, []
    for _ in range(times):
        for _ in range(REQUESTS_TO_EJECT):
            assert health.is_usable
            health.failed(now, "answered 500", may_eject=True)
            now += 2 * APART_S
        assert health.state is HealthState.EJECTED
        lasted.append(health.ends_at - now)
        now = health.ends_at
        health.probe_ok(now)
        assert health.state is HealthState.HALF_OPEN
        health.begin_trial(now)
        health.answered(now)
    assert lasted == sorted(lasted)
    assert lasted[-1] <= MAX_EJECTION_S
    for _ in range(times):
        now += FORGET_S + 1
        health.probe_ok(now)
    assert health.num_ejections == 0


def test_a_failed_trial_ejects_at_once_for_longer():
    health = WorkerHealth(OPTIONS)
    for at in range(REQUESTS_TO_EJECT):
        health.failed(float(at), "answered 500", may_eject=True)
    first_s = health.ends_at - (REQUESTS_TO_EJECT - 1)
    health.probe_ok(100.0)
    health.begin_trial(100.0)
    health.failed(100.0, "answered 500", may_eject=True)
    assert health.state is HealthState.EJECTED
    assert health.ends_at - 100.0 > first_s


def test_a_trial_without_an_end_is_not_the_last_one():
    health = WorkerHealth(OPTIONS)
    for at in range(REQUESTS_TO_EJECT):
        health.failed(float(at), "answered 500", may_eject=True)
    health.probe_ok(100.0)
    health.begin_trial(100.0)
    health.probe_ok(100.0 + TRIAL_S - 1)
    assert not health.takes_trial
    health.probe_ok(100.0 + TRIAL_S)
    assert health.takes_trial


def test_a_batch_that_dies_is_one_failure():
    health = WorkerHealth(OPTIONS)
    for _ in range(32):
        health.failed(1.0, "answered 500", may_eject=True)
    assert health.state is HealthState.DOUBTED


def test_a_broken_connection_and_one_late_probe_are_enough():
    health = WorkerHealth(OPTIONS)
    health.suspect()
    health.probe_late(1.0, 3.0, "late", may_eject=True)
    assert (health.state, health.cause) == (HealthState.EJECTED, EjectionCause.LATE)
    health.probe_ok(3.5)
    assert health.state is HealthState.RECOVERING


def test_what_is_not_well_by_its_own_word_is_out_even_as_the_last():
    health = WorkerHealth(OPTIONS)
    for _ in range(PROBES_TO_EJECT):
        health.probe_failed(1.0, "/health answered 500")
    assert health.cause is EjectionCause.UNWELL


def view(
    name: str,
    slow_start: SlowStart | None = None,
    *,
    half_open: bool = False,
    role: Role = Role.BOTH,
) -> WorkerView:
    ref = WorkerRef(WorkerId(name), Epoch("0" * 32), "127.0.0.1:1")
    tcp = frozenset({"tcp"})
    return WorkerView(
        ref, role, "m", "f", tcp, available=True, half_open=half_open, slow_start=slow_start
    )


@settings(max_examples=examples(25))
@given(st.integers(1, 4), st.floats(0, 12))
def test_in_a_slow_start_a_worker_takes_its_share_of_its_turns(num_others: int, at: float) -> None:
    slow = SlowStart(0.0, 10.0)
    fleet = Fleet.of([view("slow", slow), *(view(f"w{i}") for i in range(num_others))])
    policy, counts = RoundRobin(), {"slow": 0, "w0": 0}
    for _ in range(100 * (num_others + 1)):
        placement = policy.place(fleet, PlacementRequest("m", at=at), FleetLoad())
        assert isinstance(placement, Placement)
        counts[placement.decode.id] = counts.get(placement.decode.id, 0) + 1
    policy.check_invariants()
    share = counts["slow"] / counts["w0"]
    assert abs(share - slow.share(at)) < 0.05


@given(st.lists(st.floats(0, 10), min_size=1, max_size=4))
def test_where_all_start_slowly_one_serves(sinces: list[float]) -> None:
    fleet = Fleet.of([view(f"w{i}", SlowStart(since, 10.0)) for i, since in enumerate(sinces)])
    for policy in (RoundRobin(), LeastLoaded()):
        for _ in range(10):
            placement = policy.place(fleet, PlacementRequest("m", at=10.0), FleetLoad())
            assert isinstance(placement, Placement)


@pytest.mark.parametrize("policy", ["round_robin", "least_loaded", "prefix", "cost"])
def test_a_worker_that_is_just_back_gets_few_of_the_first_requests(policy):
    fleet = Fleet.of([view("slow", SlowStart(0.0, 10.0)), view("w0"), view("w1")])
    chooser, load, chosen = POLICIES.build(policy, {})("auto"), FleetLoad(), []
    for _ in range(20):
        request = PlacementRequest("m", num_prompt_tokens=500, at=1.0)
        placement = chooser.place(fleet, request, load)
        assert isinstance(placement, Placement)
        load.begin(placement, 500, 1.0)
        chosen.append(placement.decode.id)
    assert chosen.count("slow") <= 2


def test_the_next_request_is_the_trial_but_no_retry_is():
    fleet = Fleet.of([view("w0"), view("trial", half_open=True)])
    policy = RoundRobin()
    first = policy.place(fleet, PlacementRequest("m"), FleetLoad())
    assert isinstance(first, Placement)
    assert first.decode.id == "trial"
    again = policy.place(fleet, PlacementRequest("m", frozenset({WorkerId("trial")})), FleetLoad())
    assert isinstance(again, Placement)
    assert again.decode.id == "w0"


@pytest.mark.parametrize("policy", ["round_robin", "least_loaded", "prefix", "cost"])
def test_a_prefill_worker_gets_its_trial_even_where_a_handoff_is_not_worth_it(policy):
    trial = view("trial", half_open=True, role=Role.PREFILL)
    fleet = Fleet.of([trial, view("other", role=Role.PREFILL), view("w0")])
    chooser, load = POLICIES.build(policy, {})("auto"), FleetLoad()
    placement = chooser.place(fleet, PlacementRequest("m", num_prompt_tokens=10), load)
    assert isinstance(placement, Placement)
    assert placement.prefill is trial
    retry = PlacementRequest("m", frozenset({trial.id}), num_prompt_tokens=10)
    placement = chooser.place(fleet, retry, load)
    assert isinstance(placement, Placement)
    assert placement.prefill is not trial
    decode_only = PlacementRequest("m", num_prompt_tokens=10, failed_modes=EVERY_MODE)
    placement = chooser.place(fleet, decode_only, load)
    assert isinstance(placement, Placement)
    assert (placement.prefill, placement.decode.id) == (None, "w0")
