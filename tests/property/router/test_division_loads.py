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
    step_answer_s=0.0015,
    step_free_answers=8,
    jitter=0.1,
)
"""A step takes the same time for up to eight answers, and then more: no line is right for both."""
TTFT_S, TPOT_S = 2.0, 0.0145
LONG_PROMPTS, SHORT_PROMPTS = (4, 2048, 32), (16, 512, 128)
"""Clients, tokens in, tokens out."""


def bursts(policy, views, pause_s, num_rounds=4):
    """Good requests a second in each burst of 15 s: few clients, then four times as many."""
    world, good = World(policy, views, 0, 0, STEPS_OF_GPUS), {LONG_PROMPTS: [], SHORT_PROMPTS: []}
    for _ in range(num_rounds):
        for load, found in good.items():
            num_clients, world.num_tokens, world.num_answer_tokens = load
            began_at = world.simulation.now
            world.burst(num_clients, 15.0, pause_s)
            ended = [each for each in world.simulation.outcomes if each.began_at >= began_at]
            num = sum(each.ttft_s <= TTFT_S and each.tpot_s <= TPOT_S for each in ended)
            found.append(num / 15.0)
    return good[LONG_PROMPTS], good[SHORT_PROMPTS]


def adaptive(tpot_s=TPOT_S):
    return CostPolicy(CostOptions(ttft_s=TTFT_S, tpot_s=tpot_s))


@pytest.mark.parametrize("pause_s", [30.0, 3.0])
def test_each_load_has_its_division_from_the_second_time_on(pause_s):
    """One worker for prefill suits the few with long prompts, and not the many with short ones."""
    many_by_replicas = min(bursts(RoundRobin(), replicas(2), pause_s)[1][1:])
    few, many = bursts(RoundRobin(), split(1, 1), pause_s)
    assert max(many) < 0.2 * many_by_replicas
    found_few, found_many = bursts(adaptive(), replicas(2), pause_s)
    assert min(found_few[1:]) >= 0.9 * min(few), (found_few, few)
    assert min(found_many[1:]) >= 0.8 * many_by_replicas, (found_many, many_by_replicas)


def test_what_keeps_few_limits_is_left_also_if_no_better_is_predicted(monkeypatch):
    """The prediction is wrong for a reason that the router does not know."""
    monkeypatch.setattr(
        "baton.router.demand.predict_goodput", lambda *args: 100.0 if args[3] else 0.0
    )
    policy, seen = adaptive(), []
    world = World(policy, replicas(2), *SHORT_PROMPTS[1:], STEPS_OF_GPUS)
    for until_s in range(1, 120):
        world.run(SHORT_PROMPTS[0], float(until_s))
        seen.append(len(policy._divisions["demo"].prefills))
    assert 1 in seen
    assert set(seen[-60:]) == {0}


def test_where_no_division_keeps_a_limit_trials_become_rare():
    slow = {"step_s": 0.04, "step_answer_s": 0.006, "prefill_token_s": 6e-4}
    costs = msgspec.structs.replace(STEPS_OF_GPUS, **slow)
    policy = adaptive(tpot_s=0.02)
    world, seen = World(policy, replicas(4), 512, 32, costs), []
    for until_s in range(1, 400):
        world.run(32, float(until_s))
        seen.append(len(policy._divisions["demo"].prefills))
    assert set(seen) == {0, 1, 2, 3}
    tries = sum(one < other for one, other in pairwise(seen))
    assert tries <= 9, "three divisions, each again after a minute, and after two more"
    assert seen.count(0) >= 0.5 * len(seen)
