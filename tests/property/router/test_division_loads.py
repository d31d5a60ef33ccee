"""Loads that come and go, before workers of which the router predicts wrongly what they achieve."""

from __future__ import annotations

from bisect import bisect_right
from itertools import pairwise, product

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


BURST_S = 15.0


def bursts(policy, views, pause_s, loads=(LONG_PROMPTS, SHORT_PROMPTS), seed=0, num_rounds=3):
    """Of each load in turns: good requests a second of those that began in each burst of 15 s."""
    world, began_at = World(policy, views, 0, 0, STEPS_OF_GPUS, seed), []
    for _, load in product(range(num_rounds), loads):
        num_clients, world.num_tokens, world.num_answer_tokens = load
        began_at.append(world.simulation.now)
        world.burst(num_clients, BURST_S, pause_s)
    world.simulation.run()
    num_good = [0] * len(began_at)
    for each in world.simulation.outcomes:
        if each.ttft_s <= TTFT_S and each.tpot_s <= TPOT_S:
            num_good[bisect_right(began_at, each.began_at) - 1] += 1
    per_s = [num / BURST_S for num in num_good]
    return [per_s[at :: len(loads)] for at in range(len(loads))]


def adaptive(tpot_s=TPOT_S):
    return CostPolicy(CostOptions(ttft_s=TTFT_S, tpot_s=tpot_s))


@pytest.mark.parametrize("pause_s", [pytest.param(30.0, marks=pytest.mark.every), 3.0])
def test_each_load_has_its_division_from_the_second_time_on(pause_s):
    """One worker for prefill suits the few with long prompts, and not the many with short ones."""
    many_by_replicas = min(bursts(RoundRobin(), replicas(2), pause_s)[1][1:])
    few, many = bursts(RoundRobin(), split(1, 1), pause_s)
    assert max(many) < 0.2 * many_by_replicas
    found_few, found_many = bursts(adaptive(), replicas(2), pause_s)
    assert min(found_few[1:]) >= 0.9 * min(few), (found_few, few)
    assert min(found_many[1:]) >= 0.8 * many_by_replicas, (found_many, many_by_replicas)


WITHOUT_A_PAUSE = {
    "few long prompts, many short ones": (LONG_PROMPTS, SHORT_PROMPTS),
    "as many long prompts as short ones": ((8, 2048, 32), (8, 512, 128)),
    "few and many long prompts": (LONG_PROMPTS, (16, 2048, 32)),
    "few and many short prompts": ((4, 512, 128), SHORT_PROMPTS),
}

IN_TESTS = {"few long prompts, many short ones"}


@pytest.mark.parametrize(
    ("num_workers", "seed"),
    [
        (2, 0),
        pytest.param(2, 1, marks=pytest.mark.every),
        pytest.param(4, 0, marks=pytest.mark.every),
    ],
)
@pytest.mark.parametrize(
    "loads",
    [
        pytest.param(loads, id=name, marks=() if name in IN_TESTS else pytest.mark.every)
        for name, loads in WITHOUT_A_PAUSE.items()
    ],
)
def test_loads_that_follow_each_other_at_once_have_their_divisions(loads, num_workers, seed):
    """From the second time on, compared with the best division of each burst.

    A change costs some of its 15 s: it has to be seen, and requests of both loads are under way.
    """
    loads = [(num * num_workers // 2, *tokens) for num, *tokens in loads]

    def good(policy, views):
        return [sum(found[1:]) for found in bursts(policy, views, 0.0, loads, seed)]

    fixed = [good(RoundRobin(), replicas(num_workers))]
    fixed += [good(RoundRobin(), split(num, num_workers - num)) for num in range(1, num_workers)]
    found, best = sum(good(adaptive(), replicas(num_workers))), sum(map(max, *fixed))
    assert found >= 0.7 * best, (found, best, fixed)


def test_what_keeps_few_limits_is_left_also_if_no_better_is_predicted(monkeypatch):
    """The prediction is wrong for a reason that the router does not know."""
    monkeypatch.setattr(
        "baton.router.demand.predict_goodput", lambda *args: 100.0 if args[3] else 0.0
    )
    policy, seen = adaptive(), []
    world = World(policy, replicas(2), *SHORT_PROMPTS[1:], STEPS_OF_GPUS)
    for until_s in range(1, 90):
        world.run(SHORT_PROMPTS[0], float(until_s))
        seen.append(len(policy._divisions["demo"].prefills))
    assert 1 in seen
    assert set(seen[-40:]) == {0}


def test_where_no_division_keeps_a_limit_trials_become_rare():
    slow = {"step_s": 0.04, "step_answer_s": 0.006, "prefill_token_s": 6e-4}
    costs = msgspec.structs.replace(STEPS_OF_GPUS, **slow)
    policy = adaptive(tpot_s=0.02)
    world, seen = World(policy, replicas(4), 512, 32, costs), []
    for until_s in range(1, 200):
        world.run(32, float(until_s))
        seen.append(len(policy._divisions["demo"].prefills))
    assert set(seen) == {0, 1, 2, 3}
    tries = sum(one < other for one, other in pairwise(seen))
    assert tries <= 9, "three divisions, each again after a minute, and after two more"
    assert seen.count(0) >= 0.5 * len(seen)
