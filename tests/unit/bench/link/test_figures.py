"""Samples → figures."""

import pytest

from baton.bench.link.report import compute_figures, compute_latency, find_percentile
from baton.rig.pages import Workload
from baton.rig.pair import Timings

MESSAGE = Workload("message", 1_000_000)


def test_rates_are_medians_of_rounds_and_their_range():
    rounds = [
        Timings((0.001, 0.001, 9.0), 4, 0.1, 0.2),  # an outlier in a round changes nothing
        Timings((0.002, 0.002, 0.002), 4, 0.1, 0.2),
        Timings((0.004, 0.004, 0.004), 4, 0.1, 0.2),
    ]
    rate = compute_figures(MESSAGE, rounds).gb_per_s
    assert (rate.median, rate.min, rate.max) == pytest.approx((0.5, 0.25, 1.0))


def test_cpu_is_shared_among_all_moves_the_warm_up_too():
    figures = compute_figures(MESSAGE, [Timings((0.001,), 2, 0.004, 0.008)])
    assert figures.driver_cpu_s_per_gb == pytest.approx(2.0)
    assert figures.owner_cpu_s_per_gb == pytest.approx(4.0)


def test_percentiles_are_samples():
    hundred = [float(number) for number in range(1, 101)]
    assert find_percentile(hundred, 0.99) == 99.0
    assert find_percentile([5.0], 0.99) == 5.0
    figures = compute_figures(MESSAGE, [Timings(tuple(hundred), 101, 0, 0)])
    assert figures.p99_us == 99e6


def test_a_descriptors_cost_is_the_transfers_time_by_their_number():
    figures = compute_figures(Workload("descriptors", 64 * 100), [Timings((1e-4,), 2, 0, 0)])
    assert figures.us_per_descriptor == pytest.approx(1.0)


def test_a_latency_is_of_all_samples_and_of_each_round():
    rounds = [
        Timings((1e-6, 2e-6, 9e-6), 4, 4e-6, 8e-6),
        Timings((3e-6, 4e-6, 5e-6), 4, 4e-6, 8e-6),
    ]
    latency = compute_latency(rounds)
    assert latency.p50_us == pytest.approx(3.5)
    assert latency.p99_us == pytest.approx(9.0)
    of_rounds = latency.p50_us_of_rounds
    assert (of_rounds.median, of_rounds.min, of_rounds.max) == pytest.approx((3.0, 2.0, 4.0))
    assert (latency.driver_cpu_us, latency.owner_cpu_us) == pytest.approx((1.0, 2.0))
