"""Statistics of two samples and of repetitions: ratios, intervals, tests, crossovers. Pure, seeded.

Tests and Student's t are SciPy's, imported where they are used: a load generator needs none.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from math import exp, sqrt
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, assert_never

import numpy as np

from baton.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    Floats: TypeAlias = NDArray[np.float64]

CONFIDENCE: Final = 0.95
TAIL: Final = (1 - CONFIDENCE) / 2
NUM_RATIO_RESAMPLES: Final = 1000
NUM_CROSSING_RESAMPLES: Final = 2000
MOST_PERMUTATIONS: Final = 20_000
LEAST_RUNS: Final = 4
"""Of each side, for a test between runs: with 4 and 4 its smallest p is 0.029."""

Statistic = Literal["mean", "p50", "p99"]
Kind: TypeAlias = Literal["ahead", "behind", "ahead_from", "behind_from"]
KINDS: Final[tuple[Kind, ...]] = ("ahead", "behind", "ahead_from", "behind_from")


@dataclass(frozen=True, slots=True)
class Interval:
    """A 95 % interval."""

    low: float
    high: float

    def holds(self, value: float) -> bool:
        """Whether a value is in it."""
        return self.low <= value <= self.high


@dataclass(frozen=True, slots=True)
class Run:
    """One run's samples: `clusters[i]` are those of one request (or slice of time).

    Samples of one request are not independent (its gaps between tokens), nor are requests of one
    run. So resampling draws runs, then clusters in them.
    """

    clusters: tuple[Floats, ...]

    @property
    def num_clusters(self) -> int:
        """Requests, or slices, with samples."""
        return len(self.clusters)


@dataclass(frozen=True, slots=True)
class Contrast:
    """B against A. `p_value`: of a difference this large, or larger, by chance."""

    a: float
    b: float
    ratio: float
    interval: Interval
    p_value: float
    test: Literal["runs", "requests"]


@dataclass(frozen=True, slots=True)
class Mean:
    """A mean with its 95 % interval; a single value has no interval."""

    value: float
    low: float | None
    high: float | None


@dataclass(frozen=True, slots=True)
class Crossing:
    """Where the sign of an advantage changes for the last time.

    `share` of the resamplings end like the data; `low` and `high` bound the place in 95 % of those.
    """

    kind: Kind
    at: float | None
    low: float | None
    high: float | None
    share: float


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
        """The statistic; `weights[i]` is how often cluster i was drawn (None: each once)."""
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
        """The smallest sample that at least this share does not exceed.

        The samples are sorted already, which `np.quantile` would do for every resampling.
        """
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
    ratios = [
        _divide(
            pools[1].compute(statistic, pools[1].resample(rng)),
            pools[0].compute(statistic, pools[0].resample(rng)),
        )
        for _ in range(NUM_RATIO_RESAMPLES)
    ]
    low, high = np.quantile(ratios, (TAIL, 1 - TAIL), method="nearest")
    value_a, value_b = (pool.compute(statistic) for pool in pools)
    runs = [np.array([Pool([run]).compute(statistic) for run in side]) for side in (a, b)]
    by_runs = min(len(a), len(b)) >= LEAST_RUNS
    if by_runs:
        p_value = permute(*runs)
    else:  # both: runs may differ by more than their requests show, and are few
        p_value = max(rank_sum(_summaries(a), _summaries(b)), student(*runs))
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
    p_value = float(load_library("scipy.stats").mannwhitneyu(a, b, method="asymptotic").pvalue)
    return 1.0 if np.isnan(p_value) else p_value  # all values are equal


def student(a: Floats, b: Floats) -> float:
    """Student's test of a difference of means, two-sided: p, if both sides' noise is normal, equal.

    0 with one value each, of which nothing is known but the difference.
    """
    freedom = len(a) + len(b) - 2
    if not freedom:
        return 0.0
    variance = (a.var() * len(a) + b.var() * len(b)) / freedom
    gap = abs(float(a.mean() - b.mean()))
    if not variance:
        return float(not gap)
    error = sqrt(variance * (1 / len(a) + 1 / len(b)))
    return 2 * float(load_library("scipy.special").stdtr(freedom, -gap / error))


def permute(a: Floats, b: Floats) -> float:
    """Permutation test of a difference of means, two-sided: exact where that is feasible."""
    found = load_library("scipy.stats").permutation_test(
        (a, b),
        lambda x, y, axis: abs(x.mean(axis=axis) - y.mean(axis=axis)),
        vectorized=True,
        n_resamples=MOST_PERMUTATIONS,
        alternative="greater",
        rng=np.random.default_rng(0),
    )
    return float(found.pvalue)


def mean_of(values: Sequence[float]) -> Mean:
    """Mean and Student's interval of at least one value."""
    mean = float(np.mean(values))
    if len(values) < 2:  # noqa: PLR2004 - one value has no spread
        return Mean(mean, None, None)
    student = float(load_library("scipy.special").stdtrit(len(values) - 1, 1 - TAIL))
    half = student * float(np.std(values, ddof=1)) / sqrt(len(values))
    return Mean(mean, mean - half, mean + half)


def ratio_of(pairs: Sequence[tuple[float, float]]) -> Mean | None:
    """Mean ratio of the second to the first, of pairs: geometric, with Student's interval.

    Two configurations of one repetition are a pair: same prompts, same minutes. None where a pair
    has no positive ratio.
    """
    if not pairs or any(a <= 0 or b <= 0 for a, b in pairs):
        return None
    found = mean_of([float(np.log(b / a)) for a, b in pairs])
    low, high = (None if each is None else exp(each) for each in (found.low, found.high))
    return Mean(exp(found.value), low, high)


def find_crossing(loads: Sequence[float], advantages: Floats) -> Crossing | None:
    """Where along the loads a configuration gets ahead (advantage above 0), or falls behind.

    `loads` rise and are positive; `advantages[repetition][load]` are log ratios. Repetitions are
    resampled whole. None with fewer than two loads, or without a repetition.
    """
    num_repetitions, num_loads = advantages.shape
    if num_loads < 2 or num_repetitions < 1:  # noqa: PLR2004 - a crossing lies between two
        return None
    positions = np.log2(np.asarray(loads, dtype=np.float64))
    rng = np.random.default_rng(0)
    picks = rng.integers(num_repetitions, size=(NUM_CROSSING_RESAMPLES, num_repetitions))
    (kind,), (place,) = _locate(positions, advantages.mean(axis=0, keepdims=True))
    kinds, places = _locate(positions, advantages[picks].mean(axis=1))
    alike = kinds == kind
    share = float(alike.mean()) if num_repetitions > 1 else 0.0
    at = None if np.isnan(place) else float(place)
    if at is None or not share:
        return Crossing(KINDS[kind], at, None, None, share)
    low, high = np.quantile(places[alike], (TAIL, 1 - TAIL))
    return Crossing(KINDS[kind], at, float(low), float(high), share)


def _locate(positions: Floats, curves: Floats) -> tuple[NDArray[np.int64], Floats]:
    """The kind of each curve, and its last change of sign, interpolated (NaN: it has none).

    A tie is not ahead. Kinds are indices of `KINDS`.
    """
    ahead = curves > 0
    changes = ahead[:, 1:] != ahead[:, :-1]
    num_steps = changes.shape[1]
    last = num_steps - 1 - np.argmax(changes[:, ::-1], axis=1)
    has_one = changes.any(axis=1)
    rows = np.arange(len(curves))
    before, after = curves[rows, last], curves[rows, last + 1]
    gap = np.where(has_one, before - after, 1.0)
    at = 2 ** (positions[last] + before / gap * (positions[last + 1] - positions[last]))
    kinds = np.where(has_one, 2, 0) + np.where(ahead[:, -1], 0, 1)
    return kinds, np.where(has_one, at, np.nan)


def _summaries(runs: Sequence[Run]) -> Floats:
    """One number of each cluster: these are independent."""
    return np.array([cluster.mean() for run in runs for cluster in run.clusters])


def _divide(b: float, a: float) -> float:
    if a:
        return b / a
    return 1.0 if b == 0 else float("inf")


def require_statistics() -> None:
    """Fail before anything is measured, rather than after it.

    Raises:
        ConfigError: SciPy is not installed.
    """
    load_library("scipy.special")


def load_library(name: str) -> Any:  # noqa: ANN401 - an optional library
    """A part of SciPy.

    Raises:
        ConfigError: SciPy is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError as exc:
        raise ConfigError(
            "this needs SciPy: pip install 'baton-kv[bench]', or pip install scipy"
        ) from exc
