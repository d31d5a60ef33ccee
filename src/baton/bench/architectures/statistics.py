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
    kind, at = _locate(positions, advantages.mean(axis=0))
    rng = np.random.default_rng(seed)
    drawn = [
        _locate(positions, advantages[rng.integers(num_repetitions, size=num_repetitions)].mean(0))
        for _ in range(NUM_RESAMPLES)
    ]
    alike = [place for other, place in drawn if other == kind]
    share = len(alike) / len(drawn) if num_repetitions > 1 else 0.0
    found = [place for place in alike if place is not None]
    if at is None or num_repetitions < 2:  # noqa: PLR2004
        return Crossing(kind, at, None, None, share)
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(found, (tail, 1 - tail)) if found else (at, at)
    return Crossing(kind, at, float(low), float(high), share)


def _locate(positions: Floats, advantages: Floats) -> tuple[Kind, float | None]:
    """The last change of sign, interpolated; a tie is not ahead."""
    ahead = advantages > 0
    changes = np.flatnonzero(ahead[1:] != ahead[:-1])
    if not len(changes):
        return ("ahead", None) if ahead[-1] else ("behind", None)
    i = int(changes[-1])
    step = advantages[i] / (advantages[i] - advantages[i + 1])
    at = float(2 ** (positions[i] + step * (positions[i + 1] - positions[i])))
    return ("ahead_from", at) if ahead[-1] else ("behind_from", at)
