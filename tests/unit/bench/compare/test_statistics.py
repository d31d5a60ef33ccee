"""Statistics against known answers, and against what their words promise."""

import numpy as np
import pytest

from baton.bench import statistics
from baton.bench.compare import is_worse_by, judge, put_in_words
from baton.bench.statistics import (
    Contrast,
    Interval,
    Pool,
    Run,
    contrast,
    permute,
    rank_sum,
    student,
)


@pytest.fixture(autouse=True)
def few_resamples(monkeypatch):
    """How many there are says only how exact the ends of an interval are."""
    monkeypatch.setattr(statistics, "NUM_RATIO_RESAMPLES", 120)


def run_of(values):
    return Run(tuple(np.array([each]) for each in values))


def test_rank_sum_as_published():
    # scipy.stats.mannwhitneyu(…, method="asymptotic", use_continuity=True)
    males, females = np.array([19, 22, 16, 29, 24.0]), np.array([20, 11, 17, 12.0])
    assert rank_sum(males, females) == pytest.approx(0.1113469, abs=1e-6)
    assert rank_sum(np.ones(5), np.ones(6)) == 1.0


def test_students_test_as_published():
    # scipy.stats.ttest_ind(…, equal_var=True)
    assert student(np.array([1.0, 2, 4]), np.array([3.0, 7])) == pytest.approx(0.2503, abs=1e-4)
    assert student(np.array([1.0]), np.array([2.0, 2.1])) == pytest.approx(0.0524, abs=1e-4)
    assert student(np.array([1.0, 1.0]), np.array([2.0, 2.0])) == 0.0
    assert student(np.array([1.0, 1.0]), np.array([1.0, 1.0])) == 1.0
    assert student(np.array([1.0]), np.array([2.0])) == 0.0


def test_permutation_is_exact_for_few():
    assert permute(np.array([1.0, 2, 3, 4]), np.array([5.0, 6, 7, 8])) == pytest.approx(2 / 70)
    assert permute(np.array([1.0, 2]), np.array([1.0, 2])) == 1.0


def test_permutation_of_many_is_sampled():
    rng = np.random.default_rng(1)
    one = rng.normal(size=20)
    assert permute(one, one + 3) < 0.001
    assert permute(one, rng.normal(size=20)) > 0.01


def test_quantiles_are_samples_and_weights_are_repetitions():
    pool = Pool([run_of([3.0, 1.0, 2.0, 4.0])])
    assert (pool.compute("p50"), pool.compute("p99"), pool.compute("mean")) == (2.0, 4.0, 2.5)
    weights = np.array([0.0, 1.0, 5.0, 0.0])  # of 3, 1, 2, 4
    assert pool.compute("p50", weights) == 2.0
    assert pool.compute("mean", weights) == pytest.approx((1 + 5 * 2) / 6)


def test_resampling_draws_as_many_as_there_are_within_each_run():
    pool = Pool([run_of([1.0, 2.0]), run_of([3.0, 4.0, 5.0])])
    rng = np.random.default_rng(0)
    drawn = [pool.resample(rng) for _ in range(50)]
    assert {(each[:2].sum(), each[2:].sum()) for each in drawn} == {(4, 0), (2, 3), (0, 6)}


def test_the_interval_holds_the_truth_about_as_often_as_it_says():
    rng = np.random.default_rng(3)
    held = 0
    for trial in range(40):
        a = run_of(rng.lognormal(0.0, 0.5, 60))
        b = run_of(1.2 * rng.lognormal(0.0, 0.5, 60))
        held += contrast([a], [b], "mean", seed=trial).interval.holds(1.2)
    assert held >= 33  # 38 expected


def test_the_same_twice_is_seldom_called_different():
    rng = np.random.default_rng(4)
    called = 0
    for trial in range(40):
        a, b = (run_of(rng.lognormal(0.0, 0.5, 60)) for _ in range(2))
        called += judge(contrast([a], [b], "mean", seed=trial), "lower") in {"better", "worse"}
    assert called <= 6  # 2 expected


def test_gaps_of_one_request_are_not_independent_facts():
    """Ten requests of a thousand equal gaps each know no more than ten numbers."""
    rng = np.random.default_rng(5)
    levels = rng.lognormal(0.0, 0.5, (2, 10))
    many = [Run(tuple(np.full(1000, level) for level in side)) for side in levels]
    few = [run_of(side) for side in levels]
    wide, reference = (contrast([a], [b], "mean") for a, b in (many, few))
    assert wide.interval.low == pytest.approx(reference.interval.low)
    assert wide.p_value == pytest.approx(reference.p_value)


def test_runs_that_differ_among_themselves_decide_nothing():
    """Requests differ a little, runs a lot: between runs there is no evidence of anything."""
    rng = np.random.default_rng(6)
    sides = [
        [run_of(level + rng.normal(0, 0.01, 50)) for level in levels]
        for levels in ((1.0, 2.0, 1.5, 1.2), (1.9, 1.1, 1.6, 1.4))
    ]
    found = contrast(*sides, "mean")
    assert found.test == "runs"
    assert judge(found, "lower") == "undecided"
    single = contrast([sides[0][0]], [sides[1][0]], "mean")
    assert single.test == "requests"
    assert judge(single, "lower") == "worse"  # which is why the printed words say "in these runs"
    assert "in these runs" in put_in_words(single, "worse")


@pytest.mark.parametrize("num_runs", [2, 3])
def test_few_runs_of_equal_servers_seldom_differ_and_those_of_a_halved_one_do(num_runs):
    """3 % between runs and 2 % within: each request alone seems to show the run's difference."""
    rng = np.random.default_rng(9)

    def judgement_of(mean):
        a, b = (
            [run_of(level * rng.normal(of, 0.02, 20)) for level in rng.normal(1.0, 0.03, num_runs)]
            for of in (1.0, mean)
        )
        return judge(contrast(a, b, "mean"), "higher")

    found = [judgement_of(1.0) for _ in range(25)]
    assert found.count("worse") + found.count("better") <= 3  # 1 expected
    assert {judgement_of(0.5) for _ in range(3)} == {"worse"}


def test_several_runs_that_agree_decide():
    rng = np.random.default_rng(7)
    sides = [[run_of(rng.normal(level, 0.05, 30)) for _ in range(5)] for level in (1.0, 1.3)]
    found = contrast(*sides, "mean")
    assert found.p_value == pytest.approx(2 / 252)
    assert judge(found, "lower") == "worse"
    assert judge(found, "higher") == "better"


def verdict_of(ratio, low, high, p):
    return Contrast(1.0, ratio, ratio, Interval(low, high), p, "runs")


def test_verdicts():
    assert judge(verdict_of(1.1, 1.05, 1.2, 0.01), "lower") == "worse"
    assert judge(verdict_of(1.1, 1.05, 1.2, 0.01), "higher") == "better"
    assert judge(verdict_of(1.1, 1.05, 1.2, 0.2), "lower") == "undecided"
    assert judge(verdict_of(1.1, 0.95, 1.2, 0.01), "lower") == "undecided"
    assert judge(verdict_of(1.01, 0.98, 1.03, 0.4), "lower") == "same"
    worse = verdict_of(1.1, 1.05, 1.2, 0.01)
    assert is_worse_by(worse, "worse", 0.05)
    assert not is_worse_by(worse, "worse", 0.15)
    assert not is_worse_by(worse, "undecided", 0.05)
    assert "+10.0 %" in put_in_words(worse, "worse")


def test_a_side_of_zeros():
    found = contrast([run_of([0.0, 0.0])], [run_of([1.0, 2.0])], "mean")
    assert found.ratio == float("inf")
    assert contrast([run_of([0.0])], [run_of([0.0])], "mean").ratio == 1.0
