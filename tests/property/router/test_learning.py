"""What a worker costs is learned from what was seen, and never becomes absurd."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.router.learning import MOST_BEND, MOST_FACTOR, LearnedLine, PromptLine, WorkerCost

sizes = st.floats(0, 1e6)
seconds = st.floats(0, 1e4)


@given(st.lists(st.tuples(sizes, seconds), max_size=100))
def test_no_observation_makes_a_cost_negative(seen):
    line = WorkerCost(LearnedLine((0.01, 1e-4)))
    for size, took_s in seen:
        line.observe(size, took_s)
        assert line.line.fixed >= 0
        assert line.line.each >= 0
        assert 1 / MOST_FACTOR <= line.factor <= MOST_FACTOR
        assert 0 <= line.error <= 1
    assert line.num_seen == len(seen)


@given(fixed=st.floats(1e-4, 1.0), each=st.floats(1e-6, 1e-2), seed=st.integers(0, 100))
def test_a_line_is_found_whatever_was_guessed(fixed, each, seed):
    rng, line = random.Random(seed), WorkerCost(LearnedLine((0.005, 5e-5)))
    for _ in range(300):
        size = rng.uniform(10, 4000)
        line.observe(size, fixed + each * size)
    for size in (10, 1000, 4000):
        assert line.predict(size) == pytest.approx(fixed + each * size, rel=0.05)
    assert line.error < 0.05


@given(size=st.floats(1, 4000), took_s=st.floats(1e-3, 10.0))
def test_of_a_single_size_its_own_cost_is_learned(size, took_s):
    line = WorkerCost(LearnedLine((0.005, 5e-5)))
    for _ in range(300):
        line.observe(size, took_s)
    assert line.predict(size) == pytest.approx(took_s, rel=0.01)


@given(st.lists(st.tuples(sizes, sizes, seconds), max_size=100))
def test_no_prompt_makes_a_cost_negative(seen):
    cost = WorkerCost(PromptLine((0.005, 5e-5)))
    for num_tokens, num_before, took_s in seen:
        cost.observe(num_tokens, took_s, num_before)
        line = cost.line
        assert line.fixed >= 0
        assert line.each >= 0
        assert 0 <= line.bend <= MOST_BEND
        assert 0 <= line.predict(num_tokens, num_before) < np.inf
    assert cost.num_seen == len(seen)


@given(
    each=st.floats(1e-5, 1e-3),
    bend=st.sampled_from([0.0, 1e-5, 3e-5, 1e-4, 1e-3]),
    seed=st.integers(0, 100),
)
def test_what_tokens_before_it_add_to_a_token_is_found(each, bend, seed):
    """Of prompts of several lengths, some of them cached in part."""
    rng, cost = random.Random(seed), WorkerCost(PromptLine((0.005, 5e-5)))

    def takes_s(num_tokens, num_before):
        return 0.004 + each * num_tokens * (1 + bend * (num_before + num_tokens / 2))

    def draw():
        return rng.uniform(10, 8000), rng.choice([0.0, 0.0, rng.uniform(0, 8000)])

    for _ in range(300):
        num_tokens, num_before = draw()
        cost.observe(num_tokens, takes_s(num_tokens, num_before), num_before)
    assert cost.error < 0.05
    for num_tokens, num_before in (draw() for _ in range(20)):
        expected = pytest.approx(takes_s(num_tokens, num_before), rel=0.1, abs=0.01)
        assert cost.predict(num_tokens, num_before) == expected
    size, before = np.array([10.0, 4000.0]), np.array([4000.0, 0.0])
    assert [*cost.line.predict(size, before)] == [*map(cost.line.predict, size, before)]


def test_a_bend_stays_while_prompts_are_alike():
    rng, line = random.Random(1), PromptLine((0.005, 5e-5))
    for at in range(600):
        num_tokens = rng.uniform(100, 8000) if at < 300 else 1000.0
        line.observe(num_tokens, 5e-5 * num_tokens * (1 + 5e-5 * num_tokens))
    assert line.bend == pytest.approx(1e-4, rel=0.1)
    assert line.predict(8000.0) == pytest.approx(0.56, rel=0.1)


def test_noise_shows_no_bend():
    rng, line = random.Random(2), PromptLine((0.005, 5e-5))
    for _ in range(300):
        num_tokens = rng.uniform(100, 8000)
        line.observe(num_tokens, 5e-5 * num_tokens * rng.lognormvariate(0.0, 0.3))
    assert line.predict(8000.0) == pytest.approx(0.4, rel=0.3)
    assert line.predict(1000.0) == pytest.approx(0.05, rel=0.5)


def test_what_changed_is_noticed():
    line = WorkerCost(LearnedLine((0.005, 5e-5)))
    for took_s in (0.1, 1.0):
        for _ in range(150):
            line.observe(500.0, took_s)
        assert line.predict(500.0) == pytest.approx(took_s, rel=0.05)


def test_workers_that_see_different_sizes_share_the_line():
    """What one has not seen is predicted from the other, and the slow one is known to be slow."""
    shared, rng = LearnedLine((0.005, 5e-5)), random.Random(1)
    short, long, slow = (WorkerCost(shared) for _ in range(3))
    for _ in range(400):
        for cost, size, factor in (
            (short, rng.uniform(10, 200), 1),
            (long, rng.uniform(2000, 4000), 1),
            (slow, rng.uniform(10, 4000), 2),
        ):
            cost.observe(size, factor * (0.02 + 1e-4 * size))
    for size in (10, 4000):
        assert short.predict(size) == pytest.approx(long.predict(size), rel=0.15)
        assert slow.predict(size) > 1.5 * short.predict(size)


def noisy(rng, deviation=1.0):
    return rng.lognormvariate(0, deviation)


@given(seed=st.integers(0, 30))
def test_noise_makes_no_worker_slower_than_another(seed):
    """Of four that are the same, each seen one time in four."""
    shared, rng = LearnedLine((0.005, 5e-5)), random.Random(seed)
    workers = [WorkerCost(shared) for _ in range(4)]
    for at in range(400):
        size = rng.choice([80, 1100])
        workers[at % 4].observe(size, noisy(rng) * (0.02 + 2e-4 * size))
    assert max(each.factor for each in workers) < 2.5 * min(each.factor for each in workers)


def test_a_worker_that_was_slow_for_a_moment_is_tried_again():
    """It gets no request while it counts as slow; the others' observations let it come back."""
    shared = LearnedLine((0.005, 5e-5))
    slow, *others = workers = [WorkerCost(shared) for _ in range(4)]
    for _ in range(20):
        for each in workers:
            each.observe(1000.0, 0.5 if each is slow else 0.05)
    assert slow.factor > 3 * others[0].factor
    for _ in range(50):
        for each in others:
            each.observe(1000.0, 0.05)
    assert slow.factor < 1.2


def test_short_prompts_do_not_teach_that_long_ones_cost_nothing():
    """Noise would: the slope of a line through them may be anything, and caches worth nothing."""
    for seed in range(30):
        rng, line = random.Random(seed), LearnedLine((0.005, 5e-5))
        for _ in range(100):
            line.observe(rng.uniform(64, 96), noisy(rng, 0.7) * 0.05)
        assert line.predict(1100) > 2 * line.predict(80)


def test_one_observation_that_is_far_off_changes_little():
    line = LearnedLine((0.005, 5e-5))
    for _ in range(50):
        line.observe(100.0, 0.05)
    line.observe(100.0, 5.0)
    assert line.predict(100.0) < 1.2 * 0.05


@given(st.lists(st.tuples(st.integers(0, 3), sizes, seconds), max_size=60))
def test_policies_read_the_same_factors_as_workers_have(seen):
    shared = LearnedLine((0.005, 5e-5))
    workers = [WorkerCost(shared) for _ in range(4)]
    for at, size, took_s in seen:
        workers[at].observe(size, took_s)
    found = shared.factors(np.array([each.evidence for each in workers]).T)
    assert found == pytest.approx([each.factor for each in workers])


def test_what_a_worker_that_has_left_reports_late_counts_for_nothing():
    line = LearnedLine((0.01, 1e-4))
    stays, left = WorkerCost(line), WorkerCost(line)
    for cost in (stays, left):
        cost.observe(1000, 0.2)
    left.leave()
    before = (line.num_workers, line.num_seen, line.sum_of_logs, line.fixed, line.each)
    left.observe(1000, 5.0)
    assert (line.num_workers, line.num_seen, line.sum_of_logs, line.fixed, line.each) == before
    assert line.num_workers == 1
