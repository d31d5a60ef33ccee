"""What a worker costs is learned from what was seen, and never becomes absurd."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.router.learning import MOST_FACTOR, LearnedLine, WorkerCost

sizes = st.floats(0, 1e6)
seconds = st.floats(0, 1e4)


@given(st.lists(st.tuples(sizes, seconds), max_size=100))
def test_no_observation_makes_a_cost_negative(seen):
    line = WorkerCost(LearnedLine((0.01, 1e-4), 1000.0))
    for size, took_s in seen:
        line.observe(size, took_s)
        assert line.line.fixed >= 0
        assert line.line.each >= 0
        assert 1 / MOST_FACTOR <= line.factor <= MOST_FACTOR
        assert 0 <= line.error <= 1
    assert line.num_seen == len(seen)


@given(fixed=st.floats(1e-4, 1.0), each=st.floats(1e-6, 1e-2), seed=st.integers(0, 100))
def test_a_line_is_found_whatever_was_guessed(fixed, each, seed):
    rng, line = random.Random(seed), WorkerCost(LearnedLine((0.005, 5e-5), 1000.0))
    for _ in range(300):
        size = rng.uniform(10, 4000)
        line.observe(size, fixed + each * size)
    for size in (10, 1000, 4000):
        assert line.predict(size) == pytest.approx(fixed + each * size, rel=0.05)
    assert line.error < 0.05


@given(size=st.floats(1, 4000), took_s=st.floats(1e-3, 10.0))
def test_of_a_single_size_its_own_cost_is_learned(size, took_s):
    line = WorkerCost(LearnedLine((0.005, 5e-5), 1000.0))
    for _ in range(300):
        line.observe(size, took_s)
    assert line.predict(size) == pytest.approx(took_s, rel=0.01)


def test_what_changed_is_noticed():
    line = WorkerCost(LearnedLine((0.005, 5e-5), 1000.0))
    for took_s in (0.1, 1.0):
        for _ in range(150):
            line.observe(500.0, took_s)
        assert line.predict(500.0) == pytest.approx(took_s, rel=0.05)


def test_workers_that_see_different_sizes_share_the_line():
    """What one has not seen is predicted from the other, and the slow one is known to be slow."""
    shared, rng = LearnedLine((0.005, 5e-5), 1000.0), random.Random(1)
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
