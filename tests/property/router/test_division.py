"""Workers of both roles divide the labour where that keeps the limits, and only there."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.protocol.worker_http import WorkerLoad
from baton.router.cost import CostOptions, CostPolicy
from baton.router.demand import Demand, Limits, find_room, predict_goodput, predict_share
from baton.router.division import Division
from baton.router.fleet import Fleet
from baton.router.load import EndedRequest, FleetLoad
from baton.router.placement import Placement
from baton.router.simple import RoundRobin
from baton.sim.router.sessions import Session, TokenRun, Turn
from baton.sim.router.simulation import Simulation
from tests.examples import examples
from tests.property.router.division_world import COSTS, World, replicas, split


def goodput(policy, views, case, until_s=120.0, since_s=60.0, itl_s=None):
    num_tokens, num_answer_tokens, num_clients, ttft_s, tpot_s = case
    world = World(policy, views, num_tokens, num_answer_tokens, itl_s=itl_s)
    world.run(num_clients, until_s)
    return world.goodput(since_s, ttft_s, tpot_s)


CASES = {
    # tokens in, out, at once, limits of TTFT and TPOT in s
    "long prompts, tight TPOT": (2048, 32, 4, 2.0, 0.022),
    "long prompts, loose TPOT": (2048, 32, 4, 2.0, 0.1),
    "long prompts, more at once": (2048, 32, 8, 5.0, 0.03),
    "balanced, loose": (512, 128, 16, 1.0, 0.05),
    "balanced, tight": (512, 128, 16, 2.0, 0.02),
    "long answers": (128, 512, 16, 1.0, 0.03),
    "one at a time": (512, 128, 1, 1.0, 0.05),
}


IN_TESTS = {  # `make chaos` has all cases, with two workers and with four
    ("long prompts, tight TPOT", 2),
    ("long answers", 2),
    ("one at a time", 2),
}
CELLS = [
    pytest.param(case, num, id=f"{name}-{num}", marks=marks)
    for name, case in CASES.items()
    for num in (2, 4)
    for marks in (() if (name, num) in IN_TESTS else pytest.mark.every,)
]


@pytest.mark.parametrize(("case", "num_workers"), CELLS)
def test_it_is_as_good_as_the_better_of_replicas_and_the_best_split(case, num_workers):
    num_tokens, num_answer_tokens, num_clients, ttft_s, tpot_s = case
    case = num_tokens, num_answer_tokens, num_clients * num_workers // 2, ttft_s, tpot_s
    fixed = [  # what learns nothing is settled early
        goodput(RoundRobin(), views, case, until_s=60.0, since_s=20.0)
        for views in (
            replicas(num_workers),
            *(split(num, num_workers - num) for num in range(1, num_workers)),
        )
    ]
    assert max(fixed) > 0, "there is nothing to be as good as"
    policy = CostPolicy(CostOptions(ttft_s=ttft_s, tpot_s=tpot_s))
    found = goodput(policy, replicas(num_workers), case)
    assert found >= 0.9 * max(fixed), (found, fixed)


PIECE_S = COSTS.chunk_tokens * COSTS.prefill_token_s


@pytest.mark.parametrize(
    ("num_tokens", "num_answer_tokens", "num_workers"),
    [
        (2048, 32, 2),
        pytest.param(2048, 128, 4, marks=pytest.mark.every),
        pytest.param(2048, 32, 4, marks=pytest.mark.every),
        pytest.param(2048, 128, 2, marks=pytest.mark.every),
    ],
)
def test_gaps_beyond_their_target_are_a_reason_to_divide_and_gaps_within_it_are_none(
    num_workers, num_tokens, num_answer_tokens
):
    """Replicas miss a target of half a piece of a prompt always, one of two pieces never."""
    case = num_tokens, num_answer_tokens, 2 * num_workers, 5.0, 0.1
    splits = [split(num, num_workers - num) for num in range(1, num_workers)]
    target_s = 0.5 * PIECE_S
    fixed = partial(goodput, case=case, until_s=40.0, since_s=10.0, itl_s=target_s)
    divided = max(fixed(RoundRobin(), views) for views in splits)
    assert fixed(RoundRobin(), replicas(num_workers)) < 0.1 * divided
    found = {
        itl_s: goodput(
            CostPolicy(CostOptions(ttft_s=5.0)), replicas(num_workers), case, 70.0, 40.0, itl_s
        )
        for itl_s in (None, target_s, 2 * PIECE_S)
    }
    assert found[target_s] >= 0.9 * divided
    assert found[2 * PIECE_S] == found[None], "a target that is kept changes nothing"


def independent(num, seed, per_s, num_tokens, num_answer_tokens):
    """Requests that come whatever is answered, half to one and a half times as long as these."""
    rng, at = Random(seed), 0.0
    for number in range(num):
        at += rng.expovariate(per_s)
        run = TokenRun(str(number), int(rng.uniform(0.5, 1.5) * num_tokens))
        turn = Turn((run,), int(rng.uniform(0.5, 1.5) * num_answer_tokens))
        yield Session((turn,), arrival_s=at)


def replay(policy, views, requests, ttft_s, tpot_s):
    """The share of good requests, and the numbers of workers that only prefilled at some time."""
    simulation, seen = Simulation([policy], views, COSTS), set()
    requests = list(requests)
    simulation.replay(iter(requests))
    for until_s in range(1, int(requests[-1].arrival_s)):
        simulation.run(float(until_s))
        seen |= {len(each.prefills) for each in getattr(policy, "_divisions", {}).values()}
    simulation.run()
    outcomes = simulation.outcomes
    good = [each for each in outcomes if each.ttft_s <= ttft_s and each.tpot_s <= tpot_s]
    return len(good) / len(outcomes), seen


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.every)])
def test_independent_arrivals_are_divided_where_more_of_them_are_good(seed):
    """Long prompts delay the tokens of answers beyond their limit."""
    limits, load = (3.0, 0.016), (300, seed, 3.0, 2048, 32)
    replicated, _ = replay(RoundRobin(), replicas(4), independent(*load), *limits)
    divided, _ = replay(RoundRobin(), split(2, 2), independent(*load), *limits)
    assert replicated < 0.85 < 0.99 < divided
    policy = CostPolicy(CostOptions(ttft_s=limits[0], tpot_s=limits[1]))
    found, seen = replay(policy, replicas(4), independent(*load), *limits)
    assert seen > {0}
    assert found >= 0.95 * divided


@pytest.mark.parametrize(
    ("per_s", "num_tokens", "num_answer_tokens"),
    [(16.0, 512, 128), pytest.param(7.0, 1100, 210, marks=pytest.mark.every)],
)
def test_no_division_is_tried_for_independent_arrivals_that_are_good_without(
    per_s, num_tokens, num_answer_tokens
):
    """Taken for closed loops they are divided: more of them would be served."""
    load, limits = (350, 0, per_s, num_tokens, num_answer_tokens), (2.0, 0.1)
    replicated, _ = replay(RoundRobin(), replicas(4), independent(*load), *limits)
    found, seen = replay(CostPolicy(CostOptions()), replicas(4), independent(*load), *limits)
    assert seen == {0}
    assert found >= replicated > 0.9


def test_a_clear_case_is_divided_before_a_whole_window_has_passed():
    """Replicas keep the limits of one request in ten. A window of 8 s begins after 3 s."""
    policy = CostPolicy(CostOptions(ttft_s=2.0, tpot_s=0.022))
    world = World(policy, replicas(2), 2048, 32)
    world.run(4, 9.5)
    assert len(policy._divisions["demo"].prefills) == 1


def test_it_follows_a_load_that_changes_and_does_not_swing():
    policy = CostPolicy(CostOptions(ttft_s=2.0, tpot_s=0.022))
    world, seen = World(policy, replicas(2), 2048, 32), []
    for until_s in range(10, 260):
        if until_s == 110:  # from long prompts to long answers
            world.num_tokens, world.num_answer_tokens = 64, 512
        world.run(4 if until_s < 110 else 24, float(until_s))
        seen.append(len(policy._divisions["demo"].prefills))
    changes = sum(one != other for one, other in pairwise(seen))
    assert set(seen[60:95]) == {1}, "a worker computes the prompts, another the answers"
    assert set(seen[-60:]) == {0}, "both compute answers"
    assert changes <= 4
    assert world.goodput(210.0, 2.0, 0.022) >= 0.9 * 24 / (512 * (0.01 + 12 * 0.0004))


def test_loads_that_come_and_go_find_their_division_again():
    """Each is gone before a trial of some seconds is over, and the next one is four times it."""

    def good_of_small_bursts(policy, views):
        world, good = World(policy, views, 2048, 32), []
        for _ in range(4):
            began_at = world.simulation.now
            world.burst(4, 15.0, 30.0)
            good.append(world.goodput(began_at, 2.0, 0.018))
            world.burst(16, 15.0, 30.0)
        return good

    found = good_of_small_bursts(CostPolicy(CostOptions(ttft_s=2.0, tpot_s=0.018)), replicas(2))
    fixed = good_of_small_bursts(RoundRobin(), split(1, 1))
    assert max(good_of_small_bursts(RoundRobin(), replicas(2))) < 0.2 * min(fixed)
    assert min(found[1:]) >= 0.95 * min(fixed[1:]), (found, fixed)


def test_a_division_that_achieves_less_is_taken_back_and_not_tried_again_for_a_while(monkeypatch):
    """The prediction is wrong for a reason that the router does not know."""
    monkeypatch.setattr(
        "baton.router.demand.predict_goodput", lambda *args: 100.0 if args[3] else 1.0
    )
    policy = CostPolicy(CostOptions(ttft_s=1.0, tpot_s=0.03))
    world, seen = World(policy, replicas(2), 128, 512), []
    for until_s in range(1, 250):
        world.run(16, float(until_s))
        seen.append(len(policy._divisions["demo"].prefills))
    assert 1 in seen, "it was never tried"
    tries = sum(one < other for one, other in pairwise(seen))
    assert tries <= 3
    assert sum(seen) < 0.45 * len(seen)


def serve(division, load, workers, now):
    """Four clients ask at once and wait for half a second, then a look."""
    asked = [load.begin(Placement(None, workers[at % 2]), 100, now - 0.5) for at in range(4)]
    for running in asked:
        running.first_token(now - 0.4)
    for running in asked:
        running.end(now, 10)
    division.look(workers, load, now)
    return len(division.prefills)


def test_a_division_is_given_up_when_requests_pile_up(monkeypatch):
    """Before what it achieves could be counted, and it is not tried with even more requests."""
    monkeypatch.setattr(
        "baton.router.demand.predict_goodput", lambda *args: 100.0 if args[3] else 1.0
    )
    division, load, workers = Division(Limits(1.0, 0.1)), FleetLoad(), replicas(2)
    waiting, since = [], None
    for now in range(120):
        num_prefill = serve(division, load, workers, float(now))
        if since is None and num_prefill == 1:
            since = now
            waiting = [load.begin(Placement(None, workers[0]), 100, now + 0.5) for _ in range(2)]
        elif since is not None and now == since + 1:
            assert num_prefill == 1, "two more under way may be chance"
            waiting.append(load.begin(Placement(None, workers[0]), 100, now + 0.5))
        elif since is not None and now < since + 61:
            assert num_prefill == 0, now - since
    assert since is not None
    assert len(waiting) == 3
    assert num_prefill == 1, "a minute later it is tried again"


def test_what_fewer_workers_have_shown_says_nothing_of_more(monkeypatch):
    """Of two workers one that only prefilled was too slow; of four it is tried at once."""
    monkeypatch.setattr(
        "baton.router.demand.predict_goodput", lambda *args: 100.0 if args[3] else 1.0
    )
    division, load, workers = Division(Limits(1.0, 0.1)), FleetLoad(), replicas(2)
    now = 0
    while not serve(division, load, workers, float(now)):
        now += 1
    for _ in range(6):
        load.begin(Placement(None, workers[0]), 100, now + 0.5)
    assert serve(division, load, workers, now + 1.0) == 0, "requests pile up"
    workers = replicas(4)
    tried = [serve(division, load, workers, now + 2.0 + after) for after in range(40)]
    assert next(filter(None, tried)) == 1


def test_a_worker_has_room_for_fewer_requests_where_their_lengths_differ():
    """It holds 100,000 tokens; requests have 1,000 on the average, or 200 and 1,800 in turns."""
    room = 0, 6250, 6250, 16
    for spread in (0, 800):
        ended = [
            EndedRequest(1.0, 900 + (spread if at % 2 else -spread), 0, 100, 0.1, 0.01)
            for at in range(100)
        ]
        most = find_room(WorkerLoad(*room), ended)
        assert 1000 * most + 2 * spread * most**0.5 == pytest.approx(100_000)
    assert most < 86
    assert find_room(WorkerLoad(*room, max_running=32), ended) == 32
    assert find_room(None, ended) == float("inf")


def test_workers_that_are_gone_leave_the_division():
    policy = CostPolicy(CostOptions(ttft_s=2.0, tpot_s=0.022))
    world = World(policy, replicas(2), 2048, 32)
    world.run(4, 30.0)
    (prefill,) = policy._divisions["demo"].prefills
    left = [each for each in world.views if each.id != prefill]
    world.simulation.fleet, before = Fleet.of(left), len(world.simulation.outcomes)
    world.run(4, 50.0)
    assert len(world.simulation.outcomes) > before + 10
    assert policy._divisions["demo"].prefills == frozenset()


def test_for_throughput_there_is_no_division():
    policy = CostPolicy(CostOptions(objective="throughput", ttft_s=2.0, tpot_s=0.022))
    World(policy, replicas(2), 2048, 32).run(4, 30.0)
    assert policy._divisions == {}


@settings(max_examples=examples(100))
@given(
    demand=st.builds(
        Demand,
        num_at_once=st.floats(1, 1000),
        prefill_s=st.floats(1e-4, 100),
        cold_prefill_s=st.floats(1e-4, 100),
        handoff_s=st.floats(0, 1),
        cold_handoff_s=st.floats(0, 1),
        num_answer_tokens=st.floats(1, 4096),
        step_s=st.tuples(st.floats(0, 1), st.floats(0, 0.01)),
        most_at_once=st.floats(1, 1000),
        piece_s=st.floats(0, 10),
        num_pieces=st.floats(1, 100),
        gap_limits=st.sampled_from([(), ((0.05, 1.0),), ((0.02, 0.3), (1.0, 0.7))]),
    ),
    limits=st.builds(Limits, st.floats(1e-3, 100), st.floats(1e-3, 10)),
    num_workers=st.integers(1, 64),
    share=st.floats(0, 1, exclude_max=True),
    per_s=st.floats(1e-3, 1e4),
)
def test_no_more_is_predicted_than_can_be(demand, limits, num_workers, share, per_s):
    num_prefill = int(share * num_workers)
    rate = predict_goodput(demand, limits, num_workers, num_prefill)
    computing = num_prefill or num_workers
    assert 0 <= rate <= 1.01 * computing / demand.prefill_s
    assert rate <= 1.01 * demand.num_at_once / demand.prefill_s
    room = (num_workers - num_prefill) * demand.most_at_once
    assert rate <= 1.01 * room / demand.prefill_s, "blocks are held while a prompt is computed"
    good = predict_share(demand, limits, num_workers, num_prefill, rate=per_s)
    assert 0 <= good <= 1
    without = replace(demand, gap_limits=())
    assert rate <= predict_goodput(without, limits, num_workers, num_prefill)
    assert good <= predict_share(without, limits, num_workers, num_prefill, rate=per_s)
    if per_s > computing / demand.prefill_s:
        assert good == 0, "more come than can be computed"
