"""How many requests workers can use: as they report, as configured, and as they turn out to run."""

from __future__ import annotations

from math import inf

import pytest

from baton.auth.ticket import WorkerRef
from baton.ids import Epoch, WorkerId
from baton.protocol.worker_http import Role, WorkerLoad
from baton.router.fleet import ModelWorkers, WorkerView
from baton.router.load import FleetLoad
from baton.router.placement import Placement
from baton.router.room import AHEAD_S, LEAST_SEEN, LEAST_SPARE, UNLIMITED, FleetRoom, spare_for


def view(name: str, role: Role = Role.BOTH, *, available: bool = True) -> WorkerView:
    ref = WorkerRef(WorkerId(name), Epoch("0" * 32), "127.0.0.1:1")
    return WorkerView(ref, role, "demo", "f", frozenset({"tcp"}), available=available)


A, B = view("a"), view("b")
P, D = view("p", Role.PREFILL), view("d", Role.DECODE)


def report(num_waiting: int = 0, **more) -> WorkerLoad:
    return WorkerLoad(num_waiting, 100, 50, 16, **more)


def begin(load: FleetLoad, num: int, decode: WorkerView = A, prefill: WorkerView | None = None):
    return [load.begin(Placement(prefill, decode), 10, 0.0) for _ in range(num)]


@pytest.fixture(name="load")
def load_fixture() -> FleetLoad:
    return FleetLoad()


def test_nothing_is_held_back_of_workers_that_report_nothing(load):
    room = FleetRoom(load)
    begin(load, 1000)
    assert room.look(ModelWorkers.of([A]), 0.0, 1000).num_free == inf
    room.note_report(A.id, "demo", report())
    room.note_report(A.id, "demo", None)
    assert room.look(ModelWorkers.of([A]), 0.0, 1000).num_free == inf


def test_a_worker_that_does_not_answer_for_once_gets_no_more_than_it_runs(load):
    """A vLLM server's own control server may be late, most likely while it is busy."""
    room = FleetRoom(load)
    begin(load, 12)
    room.note_report(A.id, "demo", report(max_running=8))
    room.note_report(A.id, "demo", None)
    assert room.limit(A.id) == 12
    assert room.look(ModelWorkers.of([A]), 0.0, 12).num_free == 0
    room.note_report(A.id, "demo", short(9, max_running=8))
    assert room.limit(A.id) < 12
    room.note_report(A.id, "demo", None)
    assert room.limit(A.id) == 12, "nobody knows what waits there"
    room.forget([A.id])
    assert room.limit(A.id) == inf


@pytest.mark.parametrize("configured", [None, 8])
def test_a_worker_is_full_with_what_it_runs_and_a_few_that_wait(load, configured):
    room, served = FleetRoom(load, configured), ModelWorkers.of([A, B])
    room.note_report(A.id, "demo", report(max_running=8))
    room.note_report(B.id, "demo", report(max_running=8))
    assert room.limit(A.id) == 8 + spare_for(8) == 12
    begin(load, 12, A)
    begin(load, 9, B)
    looked = room.look(served, 0.0, 21)
    assert (looked.num_free, looked.full) == (3, {A.id})
    assert load.costs("demo").columns.most_running[load.of(B.id, "demo").row] == inf
    room.note_report(B.id, "demo", report(max_running=8))
    assert load.costs("demo").columns.most_running[load.of(B.id, "demo").row] == 8
    begin(load, 3, B)
    looked = room.look(served, 0.0, 24)
    assert (looked.num_free, looked.full) == (0, {A.id, B.id})


def test_a_worker_that_is_not_available_counts_for_nothing(load):
    room = FleetRoom(load, 8)
    begin(load, 12, A)
    gone = view("b", available=False)
    assert room.look(ModelWorkers.of([A, gone]), 0.0, 12).num_free == 0
    assert room.look(ModelWorkers.of([gone]), 0.0, 12).num_free == inf, "placement has the reason"


def short(num_waiting: int, **more) -> WorkerLoad:
    """Of a worker without blocks for those that wait there."""
    return WorkerLoad(num_waiting, 100, 3, 16, **more)


def test_a_worker_without_blocks_gets_as_many_as_it_runs(load):
    """It has blocks for 20 requests, though it may run 64."""
    room, running = FleetRoom(load), begin(load, 50)
    room.note_report(A.id, "demo", short(30, max_running=64))
    assert room.limit(A.id) == 20 + spare_for(64)
    for each in running[:22]:
        each.end(1.0)
    room.note_report(A.id, "demo", short(8, max_running=64))
    assert room.limit(A.id) == 20 + spare_for(64), "it stays so while some wait there"
    room.note_report(A.id, "demo", short(0, max_running=64))
    assert room.limit(A.id) == 56, "it may have more room than it had"
    for each in running:
        each.end(2.0)
    room.note_report(A.id, "demo", report(0, max_running=64))
    assert room.limit(A.id) == 72


def test_requests_that_wait_for_the_next_step_alone_do_not_count(load):
    room = FleetRoom(load)
    begin(load, 40)
    room.note_report(A.id, "demo", report(40, max_running=64))
    assert room.limit(A.id) == 72, "they have just come"
    room.note_report(A.id, "demo", report(5, max_running=64))
    assert room.limit(A.id) == 72, "as many as come during a step"


def test_others_may_have_filled_a_worker(load):
    room = FleetRoom(load)
    begin(load, 3)
    for _ in range(2):
        room.note_report(A.id, "demo", report(40, max_running=64))
        room.note_report(B.id, "demo", report(40))
    assert room.limit(A.id) == spare_for(64), "a gateway among several keeps a few"
    assert room.limit(B.id) == LEAST_SPARE


def test_a_target_for_each_token_bounds_the_answers_of_a_worker(load):
    room, served, now = FleetRoom(load), ModelWorkers.of([D]), 0.0
    for num in (2, 4, 8) * 20:  # a step takes 10 ms and 5 ms for each answer
        answers = begin(load, num, D)
        for each in answers:
            each.first_token(now)
        now += 49 * (0.01 + 0.005 * num)
        for each in answers:
            each.end(now, 50)
        now += 60.0
    begin(load, 4, D)
    assert room.look(served, now, 4).num_free == inf
    assert 5 <= room.look(served, now, 4, tpot_s=0.06).num_free <= 7
    looked = room.look(served, now, 4, tpot_s=0.02)
    assert (looked.num_free, looked.full) == (0, {D.id})
    idle = ModelWorkers.of([D, view("idle", Role.DECODE)])
    assert room.look(idle, now, 4, tpot_s=0.001).num_free == inf, "one answer is as fast as can be"


def test_a_target_for_gaps_bounds_the_answers_of_a_worker_by_steps_without_prompts(load):
    room, served, now = FleetRoom(load), ModelWorkers.of([D]), 0.0
    for num in (2, 4, 8) * 20:  # as above
        answers = begin(load, num, D)
        for each in answers:
            each.first_token(now)
        now += 49 * (0.01 + 0.005 * num)
        for each in answers:
            each.end(now, 50)
        now += 60.0
    for each in begin(load, 4, D):
        each.first_token(now)
    alone = room.look(served, now, 4, itl_s=0.06).num_free
    assert 5 <= alone <= 7
    load.begin(Placement(None, D), 20_000, now)  # the step of a prompt is placement's matter
    assert room.look(served, now, 5, itl_s=0.06).num_free == alone - 1
    assert room.look(served, now, 5, tpot_s=0.06).num_free < alone - 1
    assert room.look(served, now, 5, itl_s=0.02).full == {D.id}


def test_prefill_workers_have_limits_too(load):
    room, served = FleetRoom(load), ModelWorkers.of([P, D])
    room.note_report(P.id, "demo", report(max_running=4))
    room.note_report(D.id, "demo", report(max_running=64))
    requests = begin(load, 8, D, P)
    looked = room.look(served, 0.0, 8)
    assert (looked.num_free, looked.full) == (0, {P.id})
    requests[0].prefilled(1.0)
    assert room.look(served, 1.0, 8).num_free == 1


def test_a_prompt_waits_while_every_worker_has_enough_before_it(load):
    room, served, now = FleetRoom(load), ModelWorkers.of([A, B]), 0.0
    for worker in (A, B):
        for _ in range(2 * LEAST_SEEN):
            running = load.begin(Placement(None, worker), 1000, now)
            now += 0.2
            running.first_token(now)
            running.end(now)
    for worker in (A, B):
        assert room.look(served, now, 8).num_free == inf
        for _ in range(4):
            load.begin(Placement(None, worker), 1000, now)
    assert room.look(served, now, 8).num_free == 0
    assert room.look(served, now + 0.8 - AHEAD_S + 0.1, 8).num_free == inf


def test_what_is_not_known_to_be_slow_is_not_held_back(load):
    room = FleetRoom(load)
    for _ in range(100):
        load.begin(Placement(None, A), 100_000, 0.0)
    assert load.of(A.id, "demo").queue_s(0.0) > 100
    assert room.look(ModelWorkers.of([A]), 0.0, 100).num_free == inf


def test_a_worker_that_is_gone_is_full_no_more(load):
    room = FleetRoom(load)
    for worker, most in ((A, 4), (B, 64)):
        room.note_report(worker.id, "demo", report(max_running=most))
    assert room.limit(A.id) < inf
    room.forget([A.id, WorkerId("never reported")])
    assert room.limit(A.id) == inf
    begin(load, 30, B)
    assert room.look(ModelWorkers.of([B]), 0.0, 30) == UNLIMITED, "none can be full"
