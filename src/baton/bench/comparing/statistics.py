"""Two sides' samples → a ratio, its interval, and how likely chance alone is. Pure, seeded.

Samples of one request belong together (its gaps between tokens), and so do requests of one run.
Resampling draws runs, then clusters in them; it never pretends that a thousand gaps of ten requests
were a thousand independent facts.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations
from math import comb, erfc, sqrt
from typing import TYPE_CHECKING, Final, Literal, TypeAlias, assert_never

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    Floats: TypeAlias = NDArray[np.float64]

NUM_RESAMPLES: Final = 1000
CONFIDENCE: Final = 0.95
MOST_PERMUTATIONS: Final = 20_000
LEAST_RUNS: Final = 4
"""Of each side, for a test between runs: with 4 and 4 its smallest p is 0.029."""

Statistic = Literal["mean", "p50", "p99"]


@dataclass(frozen=True, slots=True)
class Run:
    """One run's samples: `clusters[i]` are those of one request (or slice of time)."""

    clusters: tuple[Floats, ...]

    @property
    def num_clusters(self) -> int:
        """Requests, or slices, with samples."""
        return len(self.clusters)


@dataclass(frozen=True, slots=True)
class Interval:
    """A 95 % interval."""

    low: float
    high: float

    def holds(self, value: float) -> bool:
        """Whether a value is in it."""
        return self.low <= value <= self.high


@dataclass(frozen=True, slots=True)
class Contrast:
    """B against A. `p_value`: of a difference this large, or larger, by chance."""

    a: float
    b: float
    ratio: float
    interval: Interval
    p_value: float
    test: Literal["runs", "requests"]


class Pool:
    """One side's samples, sorted once, so that each resampling is a weighting."""

    def __init__(self, runs: Sequence[Run]) -> None:
        clusters = [cluster for run in runs for cluster in run.clusters]
        self._starts = np.cumsum([0, *(run.num_clusters for run in runs)])
        owners = np.repeat(np.arange(len(clusters)), [len(each) for each in clusters])
        values = np.concatenate(clusters)
        order = np.argsort(values, kind="stable")
        self._values, self._owners = values[order], owners[order]

    def compute(self, statistic: Statistic, weights: Floats | None = None) -> float:
        """The statistic; `weights[i]` is how often cluster i was drawn (all once for None)."""
        drawn = None if weights is None else weights[self._owners]
        match statistic:
            case "mean":
                return float(np.average(self._values, weights=drawn))
            case "p50":
                return self._quantile(0.5, drawn)
            case "p99":
                return self._quantile(0.99, drawn)
            case other:
                assert_never(other)

    def resample(self, rng: np.random.Generator) -> Floats:
        """Draw as many runs as there are, then as many clusters in each as it has."""
        num_runs = len(self._starts) - 1
        weights = np.zeros(self._starts[-1])
        for run in rng.integers(num_runs, size=num_runs):
            start, end = self._starts[run], self._starts[run + 1]
            drawn = rng.integers(end - start, size=end - start)
            weights[start:end] += np.bincount(drawn, minlength=end - start)
        return weights

    def _quantile(self, share: float, weights: Floats | None) -> float:
        """The smallest sample that at least this share does not exceed."""
        if weights is None:
            weights = np.ones(len(self._values))
        reached = np.cumsum(weights)
        place = int(np.searchsorted(reached, share * reached[-1] - 1e-9))
        return float(self._values[min(place, len(self._values) - 1)])


def contrast(a: Sequence[Run], b: Sequence[Run], statistic: Statistic, seed: int = 0) -> Contrast:
    """B against A; each side has at least one run, and each run at least one sample.

    A's statistic may be 0: then the ratio is infinite, or 1 where B's is 0 too.
    """
    pools = Pool(a), Pool(b)
    rng = np.random.default_rng(seed)
    ratios = np.array([
        _divide(
            pools[1].compute(statistic, pools[1].resample(rng)),
            pools[0].compute(statistic, pools[0].resample(rng)),
        )
        for _ in range(NUM_RESAMPLES)
    ])
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(ratios, (tail, 1 - tail), method="nearest")
    value_a, value_b = (pool.compute(statistic) for pool in pools)
    by_runs = min(len(a), len(b)) >= LEAST_RUNS
    p_value = _permute_runs(a, b, statistic) if by_runs else rank_sum(_summaries(a), _summaries(b))
    return Contrast(
        value_a,
        value_b,
        _divide(value_b, value_a),
        Interval(float(low), float(high)),
        p_value,
        "runs" if by_runs else "requests",
    )


def rank_sum(a: Floats, b: Floats) -> float:
    """Mann and Whitney's test, two-sided: p by the normal approximation, with ties corrected."""
    num_a, num_b = len(a), len(b)
    both = np.concatenate((a, b))
    _, inverse, counts = np.unique(both, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[inverse]
    u = ranks[:num_a].sum() - num_a * (num_a + 1) / 2
    num = num_a + num_b
    ties = float((counts.astype(np.float64) ** 3 - counts).sum())
    variance = num_a * num_b / 12 * ((num + 1) - ties / (num * max(num - 1, 1)))
    if variance <= 0:
        return 1.0
    z = max(0.0, abs(u - num_a * num_b / 2) - 0.5) / sqrt(variance)
    return erfc(z / sqrt(2))


def permute(a: Floats, b: Floats, seed: int = 0) -> float:
    """Permutation test of a difference of means, two-sided: exact where that is feasible."""
    both = np.concatenate((a, b))
    num_a, total = len(a), float(both.sum())
    seen = abs(a.mean() - b.mean())
    if comb(len(both), num_a) <= MOST_PERMUTATIONS:
        picks = np.array(list(combinations(range(len(both)), num_a)))
    else:
        rng = np.random.default_rng(seed)
        picks = np.array([rng.permutation(len(both))[:num_a] for _ in range(MOST_PERMUTATIONS)])
    sums = both[picks].sum(axis=1)
    gaps = np.abs(sums / num_a - (total - sums) / len(b))
    return float((gaps >= seen - 1e-12 * max(1.0, seen)).mean())


def _permute_runs(a: Sequence[Run], b: Sequence[Run], statistic: Statistic) -> float:
    one, other = (np.array([Pool([run]).compute(statistic) for run in side]) for side in (a, b))
    return permute(one, other)


def _summaries(runs: Sequence[Run]) -> Floats:
    """A number for each cluster: what a test may take for independent."""
    return np.array([cluster.mean() for run in runs for cluster in run.clusters])


def _divide(b: float, a: float) -> float:
    if a:
        return b / a
    return 1.0 if b == 0 else float("inf")
