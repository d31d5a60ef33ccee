"""Drift of one link; benchmarks/bench_drift.py has the rates of false alarms and the delays."""

from __future__ import annotations

import math
import random
import time
from copy import deepcopy
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.clock import Instant
from baton.telemetry.drift import (
    DEFAULTS,
    LARGE,
    MAX_CAUTION,
    NUM_LATER,
    NUM_OF_CLASS,
    SMALL,
    DriftDetector,
    DriftOptions,
    DriftState,
    learn_reference,
)

SIZES = [1 << power for power in (14, 16, 18, 20, 22)]
LATENCY_S, BYTE_S = 100e-6, 1 / 2e9
NUM_REFERENCE = DriftOptions().num_reference
DRIFTED = DriftState.DRIFTED


@dataclass
class Link:
    """Times of transfers: lognormal around a line."""

    seed: int
    spread: float = 0.3
    latency_s: float = LATENCY_S
    byte_s: float = BYTE_S
    sizes: list[int] = field(default_factory=lambda: SIZES)
    rng: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)

    def transfer(self) -> tuple[int, float]:
        size = self.rng.choice(self.sizes)
        expected_s = self.latency_s + size * self.byte_s
        return size, expected_s * math.exp(self.rng.gauss(0, self.spread))


def learned(link: Link, options: DriftOptions = DEFAULTS) -> DriftDetector:
    detector = DriftDetector(Instant(0.0), options)
    for _ in range(NUM_REFERENCE):
        assert detector.state is DriftState.LEARNING
        detector.observe(*link.transfer(), Instant(0.0))
    assert detector.state is DriftState.STEADY
    return detector


def transfers_until(detector: DriftDetector, link: Link, state: DriftState, most: int) -> int:
    for number in range(1, most + 1):
        if detector.observe(*link.transfer(), Instant(1.0)) is state:
            return number
    raise AssertionError(f"not {state} within {most} transfers")


@pytest.mark.parametrize("seed", range(3))
def test_a_steady_link_does_not_drift(seed):
    link = Link(seed)
    detector = learned(link)
    for _ in range(5000):
        assert detector.observe(*link.transfer(), Instant(1.0)) is DriftState.STEADY
    assert 0.7 < detector.ratio < 1.4


@pytest.mark.parametrize(("factor", "most"), [(1.3, 150), (2.0, 30), (10.0, 20)])
def test_a_slower_link_drifts_and_its_return_ends_that(factor, most):
    link = Link(7)
    detector = learned(link)
    slow = Link(8, latency_s=factor * LATENCY_S, byte_s=factor * BYTE_S)
    transfers_until(detector, slow, DriftState.DRIFTED, most)
    assert detector.num_drifts == 1
    for _ in range(200):
        assert detector.observe(*slow.transfer(), Instant(2.0)) is DriftState.DRIFTED
    assert detector.ratio == pytest.approx(factor, rel=0.5)
    transfers_until(detector, link, DriftState.STEADY, 200)
    assert detector.num_drifts == 1


def test_lost_bandwidth_and_added_latency_are_seen_by_size():
    for slow in (Link(8, byte_s=10 * BYTE_S), Link(9, latency_s=0.02)):
        detector = learned(Link(7))
        transfers_until(detector, slow, DriftState.DRIFTED, 60)


def test_rare_stalls_and_one_burst_of_them_are_no_drift():
    link = Link(3)
    detector = learned(link)
    for number in range(5000):
        size, seconds = link.transfer()
        is_stalled = number % 100 == 0 or 2000 <= number < 2006
        state = detector.observe(size, seconds * (10 if is_stalled else 1), Instant(1.0))
        assert state is DriftState.STEADY


def test_other_work_that_slows_every_sixth_transfer_is_no_drift():
    link = Link(4, spread=0.1)
    detector = learned(link)
    for number in range(3000):
        size, seconds = link.transfer()
        busy = 3.0 if number % 6 == 0 else 1.0
        assert detector.observe(size, seconds * busy, Instant(1.0)) is DriftState.STEADY


@pytest.mark.parametrize("factor", [1.5, 3.0, 30.0])
def test_a_quiet_link_that_is_slow_for_a_moment_does_not_drift(factor):
    link = Link(4, spread=0.03)
    detector = learned(link)
    for number in range(5000):
        size, seconds = link.transfer()
        is_slow = number % 500 < LARGE.num_recent // 2
        state = detector.observe(size, seconds * (factor if is_slow else 1), Instant(1.0))
        assert state is DriftState.STEADY


def shift_for_moments(detector: DriftDetector, link: Link, duration_s: float) -> float:
    """100 times 40 transfers take twice as long, for `duration_s`; when it ends."""
    now = 0.0
    for number in range(100 * 500):
        size, seconds = link.transfer()
        is_slow = number % 500 < 40
        now += duration_s / 40
        detector.observe(size, seconds * (2 if is_slow else 1), Instant(now))
    return now


def test_short_drifts_raise_the_thresholds_until_they_are_none():
    link = Link(4)
    detector = learned(link)
    shift_for_moments(detector, link, duration_s=1.0)
    assert 1 <= detector.num_drifts <= 6
    transfers_until(detector, Link(5, byte_s=3 * BYTE_S, latency_s=3 * LATENCY_S), DRIFTED, 200)


def test_long_drifts_do_not_raise_the_thresholds():
    link = Link(4)
    detector = learned(link)
    shift_for_moments(detector, link, duration_s=2 * DriftOptions().short_drift_s)
    assert detector.num_drifts >= 95


def test_without_short_drifts_the_thresholds_return():
    link, slow = Link(4), Link(5, byte_s=1.4 * BYTE_S, latency_s=1.4 * LATENCY_S)
    detector = learned(link, DriftOptions(num_calm=1000))
    shift_for_moments(detector, link, duration_s=1.0)
    num_cautious = transfers_until(deepcopy(detector), slow, DRIFTED, 1000)
    for _ in range(5000):
        detector.observe(*link.transfer(), Instant(1e6))
    assert transfers_until(detector, slow, DRIFTED, 60) < num_cautious / 4


@pytest.mark.parametrize("seed", range(3))
def test_a_drift_ends_though_some_transfers_stay_slow(seed):
    """Their sum stays above 0; the median is as it was."""
    link = Link(seed)
    detector = learned(link)
    link.byte_s, link.latency_s = 3 * BYTE_S, 3 * LATENCY_S
    transfers_until(detector, link, DriftState.DRIFTED, 40)
    link.byte_s, link.latency_s = BYTE_S, LATENCY_S
    for number in range(1, 1000):
        size, seconds = link.transfer()
        slowed = seconds * 8 if number % 5 == 0 else seconds
        if detector.observe(size, slowed, Instant(2.0)) is DriftState.STEADY:
            break
    assert detector.state is DriftState.STEADY
    assert number >= NUM_LATER // 2, "fewer are chance"
    assert detector.since == Instant(2.0)


def test_a_faster_link_is_learned_again_so_that_its_old_speed_is_a_drift():
    detector = learned(Link(5))
    fast = Link(6, latency_s=LATENCY_S / 3, byte_s=BYTE_S / 3)
    transfers_until(detector, fast, DriftState.LEARNING, 60)
    assert detector.num_drifts == 0
    for _ in range(NUM_REFERENCE):
        detector.observe(*fast.transfer(), Instant(1.0))
    assert detector.state is DriftState.STEADY
    transfers_until(detector, Link(5), DriftState.DRIFTED, 60)


def test_a_drift_becomes_the_reference_after_a_day():
    detector = learned(Link(5))
    slow = Link(8, latency_s=3 * LATENCY_S, byte_s=3 * BYTE_S)
    transfers_until(detector, slow, DriftState.DRIFTED, 40)
    day_s = DriftOptions().accept_after_s
    assert detector.observe(*slow.transfer(), Instant(day_s - 1)) is DriftState.DRIFTED
    assert detector.observe(*slow.transfer(), Instant(day_s + 2)) is DriftState.LEARNING
    for _ in range(NUM_REFERENCE + 500):
        detector.observe(*slow.transfer(), Instant(day_s + 3))
    assert detector.state is DriftState.STEADY


def test_smaller_sizes_than_the_reference_has_seen_are_learned_before_they_are_tested():
    detector = learned(Link(5, sizes=[1 << 20, 1 << 22]))
    small = Link(6, latency_s=30 * LATENCY_S, sizes=[1 << 14])
    for _ in range(NUM_OF_CLASS + 1000):
        assert detector.observe(*small.transfer(), Instant(1.0)) is DriftState.STEADY
    slow = Link(6, latency_s=90 * LATENCY_S, sizes=[1 << 14])
    transfers_until(detector, slow, DriftState.DRIFTED, 60)


def test_larger_sizes_are_tested_by_what_the_reference_has_of_smaller_ones():
    """Those that wait for a slow link go together, and are larger than any that was seen."""
    detector = learned(Link(5, sizes=[1 << 16, 1 << 18]))
    slow = Link(6, byte_s=10 * BYTE_S, sizes=[1 << 20, 1 << 22])
    transfers_until(detector, slow, DriftState.DRIFTED, 40)
    large = Link(6, byte_s=1.4 * BYTE_S, sizes=[1 << 20, 1 << 22])
    detector = learned(Link(5, sizes=[1 << 16, 1 << 18]))
    for _ in range(2000):
        assert detector.observe(*large.transfer(), Instant(1.0)) is DriftState.STEADY


@pytest.mark.parametrize("byte_s", [0.0, BYTE_S, 1e-6])
def test_the_reference_knows_what_a_size_takes(byte_s):
    link = Link(1, spread=0.2, byte_s=byte_s)
    reference = learn_reference([link.transfer() for _ in range(NUM_REFERENCE)])
    for size in SIZES:
        residual = reference.residual(size, LATENCY_S + size * byte_s)
        assert residual == pytest.approx(0, abs=0.12)


def test_transfers_that_resemble_the_one_before_raise_the_threshold():
    rng, value, alike = random.Random(2), 0.0, []
    for _ in range(NUM_REFERENCE):
        value = 0.9 * value + rng.gauss(0, 0.13)
        alike.append((1 << 20, 1e-3 * math.exp(value)))
    independent = random.Random(3).sample(alike, len(alike))
    of_alike, of_independent = learn_reference(alike), learn_reference(independent)
    assert of_alike.spread == pytest.approx(of_independent.spread)
    assert of_alike.variance > 3 * of_independent.variance


@given(
    st.lists(
        st.tuples(
            st.integers(0, 1 << 40),
            st.floats(0, 1e6, allow_nan=False),
            st.floats(0, 1e5, allow_nan=False),
        ),
        min_size=1,
        max_size=200,
    )
)
def test_any_times_and_sizes_leave_a_state_and_finite_figures(transfers):
    detector = DriftDetector(Instant(0.0), DriftOptions(num_reference=32))
    for size, seconds, now in transfers:
        state = detector.observe(size, seconds, Instant(now))
        assert state is detector.state
        assert (detector.reference is None) == (state is DriftState.LEARNING)
        if detector.ratio is not None:
            assert math.isfinite(detector.ratio)
        assert len(detector._recent) <= SMALL.num_recent
        assert 0.0 <= detector._slower <= detector._threshold
        assert 0.0 <= detector._much_slower <= detector._much_slower_threshold
        assert 1 <= detector._caution <= MAX_CAUTION


def test_a_transfer_costs_little():
    link = Link(1)
    detector = learned(link)
    transfers = [link.transfer() for _ in range(20_000)]
    began = time.thread_time()
    for size, seconds in transfers:
        detector.observe(size, seconds, Instant(1.0))
    taken_s = time.thread_time() - began
    assert taken_s / len(transfers) < 10e-6  # some 1 us: bench_drift.py
