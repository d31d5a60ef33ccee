"""Quantiles within 1 % of the sample's, whatever is added and in whatever order it is merged."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np
import pytest
from ddsketch import DDSketch
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.telemetry.log_histogram import (
    MAX_VALUE,
    MIN_VALUE,
    NUM_BUCKETS,
    BucketCounts,
    LogHistogram,
)
from tests.examples import examples

if TYPE_CHECKING:
    import random

SHARES = (0.0, 0.5, 0.9, 0.99, 0.999, 1.0)
in_range = st.floats(MIN_VALUE, MAX_VALUE, exclude_max=True)
anything = st.floats(allow_nan=True, allow_infinity=True)


def histogram(values: list[float]) -> LogHistogram:
    made = LogHistogram()
    for value in values:
        made.add(value)
    return made


def exact(values: list[float], share: float) -> float:
    return sorted(values)[int(share * (len(values) - 1))]


@given(st.lists(in_range, min_size=1, max_size=200))
def test_quantiles_are_within_one_percent(values: list[float]) -> None:
    counts = histogram(values).counts()
    for share in SHARES:
        assert counts.quantile(share) == pytest.approx(exact(values, share), rel=0.01)


@given(st.lists(st.lists(anything, max_size=30), min_size=1, max_size=5), st.randoms())
def test_merging_in_any_order_and_through_the_wire_is_adding_all(
    parts: list[list[float]], rng: random.Random
) -> None:
    whole = histogram([value for part in parts for value in part]).counts()
    rng.shuffle(parts)
    merged = LogHistogram()
    for part in parts:
        wire = msgspec.json.encode(histogram(part).counts())
        merged.merge(msgspec.json.decode(wire, type=BucketCounts))
    assert merged.counts() == whole
    assert sum(whole.counts) == sum(map(len, parts))


@given(st.lists(in_range, max_size=50), st.lists(in_range, max_size=50))
def test_what_was_added_since_then(before: list[float], after: list[float]) -> None:
    whole = histogram(before)
    baseline = whole.counts()
    whole.merge(histogram(after).counts())
    assert whole.counts().minus(baseline) == histogram(after).counts()


@settings(max_examples=examples(15))
@given(st.integers(0, 2**32), st.floats(1e-4, 1.0))
def test_a_tail_of_two_percent_is_as_exact_as_ddsketch(seed: int, fast_s: float) -> None:
    rng = np.random.default_rng(seed)
    is_slow = rng.random(5_000) < 0.02
    times = np.exp(rng.normal(np.log(fast_s), 0.2, 5_000)) * np.where(is_slow, 100.0, 1.0)
    ours, oracle = LogHistogram(), DDSketch(relative_accuracy=0.01)
    for value in times.tolist():
        ours.add(value)
        oracle.add(value)
    for share in (0.5, 0.9, 0.98, 0.99, 0.999):
        value = exact(times.tolist(), share)
        assert ours.counts().quantile(share) == pytest.approx(value, rel=0.01)
        assert ours.counts().quantile(share) == pytest.approx(
            oracle.get_quantile_value(share), rel=0.0202
        )


def test_what_is_out_of_range() -> None:
    below = histogram([0.0, -1.0, 1e-9, float("nan")]).counts()
    assert (below.buckets, below.counts) == ((0,), (4,))
    assert below.quantile(1.0) == 0.0
    above = histogram([MAX_VALUE, 1e9, float("inf")]).counts()
    assert (above.buckets, above.counts) == ((NUM_BUCKETS + 1,), (3,))
    assert above.quantile(0.5) == MAX_VALUE
    assert BucketCounts().quantile(0.5) is None


@pytest.mark.parametrize(
    "wire",
    [
        b"[[1,2],[1]]",
        b"[[2,1],[1,1]]",
        b"[[1,1],[1,1]]",
        b"[[-1],[1]]",
        b"[[99999],[1]]",
        b"[[1],[0]]",
        b"[[1],[18446744073709551616]]",
    ],
)
def test_buckets_that_no_histogram_has_are_refused(wire: bytes) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(wire, type=BucketCounts)


def test_counts_of_many_reports_can_be_added() -> None:
    most = BucketCounts((3,), (1 << 45,))
    added = LogHistogram.of([most] * (1 << 17)).counts()
    assert added == BucketCounts((3,), (1 << 62,))
    for wire in (b"[[3],[0]]", b"[[3],[%d]]" % ((1 << 45) + 1)):
        with pytest.raises(msgspec.ValidationError):
            msgspec.json.decode(wire, type=BucketCounts)
