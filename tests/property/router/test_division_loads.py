"""Loads that come and go, before workers of which the router predicts wrongly what they achieve."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import pytest

from baton.router.cost import CostOptions, CostPolicy
from baton.router.simple import RoundRobin
from tests.property.router.division_world import COSTS, World, replicas, split

STEPS_OF_GPUS = msgspec.structs.replace(
    COSTS,
    prefill_token_s=1.6e-4,
    chunk_tokens=512,
    step_s=0.0084,
    step_answer_s=0.001,
    step_free_answers=8,
    jitter=0.1,
)
"""A step takes the same time for up to eight answers, and then more: no line is right for both."""
TTFT_S, TPOT_S = 0.4, 0.0135
SMALL, LARGE = 4, 16


def bursts(policy, views, num_rounds, pause_s=30.0):
    """Good requests a second in each burst of 15 s: few clients, then four times as many."""
    world, good = World(policy, views, 512, 128, STEPS_OF_GPUS), {SMALL: [], LARGE: []}
    for _ in range(num_rounds):
        for num_clients in good:
            began_at = world.simulation.now
            world.burst(num_clients, 15.0, pause_s)
            ended = [each for each in world.simulation.outcomes if each.ended_at > began_at]
            num = sum(each.ttft_s <= TTFT_S and each.tpot_s <= TPOT_S for each in ended)
            good[num_clients].append(num / 15.0)
    return good


def adaptive(ttft_s=TTFT_S, tpot_s=TPOT_S):
    return CostPolicy(CostOptions(ttft_s=ttft_s, tpot_s=tpot_s))


@pytest.mark.parametrize("pause_s", [30.0, 0.0])
def test_each_load_has_its_division_from_the_second_time_on(pause_s):
    """Few are served best by one for prefill and one for decode, many by both for both."""
    fixed = [
        bursts(RoundRobin(), views, 2, pause_s) for views in (replicas(2), split(1, 1))
    ]
    best = {num: max(min(each[num]) for each in fixed) for num in (SMALL, LARGE)}
    assert max(fixed[1][LARGE]) < 0.2 * best[LARGE], "a division that is good for few alone"
    found = bursts(adaptive(), replicas(2), 4, pause_s)
    assert min(found[SMALL][1:]) >= 0.95 * best[SMALL], (found, fixed)
    assert min(found[LARGE][1:]) >= 0.95 * best[LARGE], (found, fixed)


def test_what_keeps_few_limits_is_left_also_if_no_better_is_predicted(monkeypatch):
    """The prediction is wrong for a reason that the router does not know."""
    monkeypatch.setattr(
        "baton.router.demand.predict_goodput", lambda *args: 100.0 if args[3] else 0.0
    )
    fixed = bursts(RoundRobin(), replicas(2), 1)
    found = bursts(adaptive(), replicas(2), 3)
    assert min(found[LARGE][1:]) >= 0.95 * min(fixed[LARGE]), (found, fixed)


@pytest.mark.parametrize("num_workers", [2, 4])
def test_where_no_division_keeps_a_limit_trials_become_rare(num_workers):
    policy = adaptive(tpot_s=0.005)
    world, seen = World(policy, replicas(num_workers), 512, 128, STEPS_OF_GPUS), []
    for until_s in range(1, 600):
        world.run(8 * num_workers, float(until_s))
        seen.append(len(policy._divisions["demo"].prefills))
    tries = sum(one < other for one, other in pairwise(seen))
    assert 1 <= tries <= 5
    assert seen.count(0) >= 0.85 * len(seen)
    assert seen[-1] == 0
