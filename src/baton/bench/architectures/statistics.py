"""Repetitions → means, ratios and crossovers, with their intervals. Pure, seeded.

What repeats is a repetition: servers started anew, prompts of its own. Two arms of one repetition
are a pair, for they met the same prompts within the same minutes.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, sqrt
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    Floats: TypeAlias = NDArray[np.float64]

NUM_RESAMPLES: Final = 2000
CONFIDENCE: Final = 0.95
STUDENT_975: Final = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
)  # fmt: skip
"""Student's t at 97.5 %, for 1, 2, … degrees of freedom: a bootstrap of five is too narrow."""

Kind: TypeAlias = Literal["ahead", "behind", "ahead_from", "behind_from"]
KINDS: Final[tuple[Kind, ...]] = ("ahead", "behind", "ahead_from", "behind_from")


@dataclass(frozen=True, slots=True)
class Mean:
    """A mean with its 95 % interval; bounds are None for one value alone."""

    value: float
    low: float | None
    high: float | None


@dataclass(frozen=True, slots=True)
class Crossing:
    """Where the sign of an advantage changes for the last time, and how sure that is."""

    kind: Kind
    at: float | None
    low: float | None
    high: float | None
    share: float


def student_975(num_freedoms: int) -> float:
    """Student's t at 97.5 %."""
    if num_freedoms <= len(STUDENT_975):
        return STUDENT_975[num_freedoms - 1]
    return 1.96 + 2.5 / num_freedoms


def mean_of(values: Sequence[float]) -> Mean:
    """Of at least one value: mean and Student's interval."""
    array = np.asarray(values, dtype=np.float64)
    mean = float(array.mean())
    if len(array) < 2:  # noqa: PLR2004 - one value has no spread
        return Mean(mean, None, None)
    half = student_975(len(array) - 1) * float(array.std(ddof=1)) / sqrt(len(array))
    return Mean(mean, mean - half, mean + half)


def ratio_of(pairs: Sequence[tuple[float, float]]) -> Mean | None:
    """Mean ratio of the second to the first, of pairs: geometric, with Student's interval.

    None where a pair has no positive ratio: then there is nothing to average.
    """
    if not pairs or any(a <= 0 or b <= 0 for a, b in pairs):
        return None
    found = mean_of([float(np.log(b / a)) for a, b in pairs])
    bounds = [None if each is None else exp(each) for each in (found.low, found.high)]
    return Mean(exp(found.value), bounds[0], bounds[1])


def find_crossing(loads: Sequence[float], advantages: Floats, seed: int = 0) -> Crossing | None:
    """Where along the loads an arm gets ahead (advantage above 0), or falls behind.

    `loads` rise and are positive; `advantages[repetition][load]` are log ratios. Repetitions are
    resampled whole. None with fewer than two loads, or none with a repetition.
    """
    num_repetitions, num_loads = advantages.shape
    if num_loads < 2 or num_repetitions < 1:  # noqa: PLR2004 - a crossing lies between two
        return None
    positions = np.log2(np.asarray(loads, dtype=np.float64))
    rng = np.random.default_rng(seed)
    picks = rng.integers(num_repetitions, size=(NUM_RESAMPLES, num_repetitions))
    (kind,), (place,) = _locate(positions, advantages.mean(axis=0, keepdims=True))
    kinds, places = _locate(positions, advantages[picks].mean(axis=1))
    alike = kinds == kind
    share = float(alike.mean()) if num_repetitions > 1 else 0.0
    at = None if np.isnan(place) else float(place)
    if at is None or not share:
        return Crossing(KINDS[kind], at, None, None, share)
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(places[alike], (tail, 1 - tail))
    return Crossing(KINDS[kind], at, float(low), float(high), share)


def _locate(positions: Floats, curves: Floats) -> tuple[NDArray[np.int64], Floats]:
    """Of each curve its kind, and its last change of sign, interpolated (NaN: it has none).

    A tie is not ahead. Kinds are places in `KINDS`.
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
