"""The model of a link from probes: least squares, without negative costs, deaf to outliers."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING, Final

import numpy as np

from baton.transfer.links.model import MIN_BYTE_S, MIN_DESCRIPTOR_S, MIN_LATENCY_S, LinkModel

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from baton.transfer.links.shape import TransferShape

_FLOORS: Final = np.array([MIN_LATENCY_S, MIN_DESCRIPTOR_S, MIN_BYTE_S])
_NUM_ROUNDS: Final = 12
_OUTLIER_FROM: Final = 0.05
"""Relative errors above this count linearly, not squared."""
_MAX_RATIO: Final = 100.0
_MAX_RATE_GAIN: Final = 4.0
"""A link's bandwidth is at most so many times the best rate of any probe.

Where only small probes were made, and those were disturbed, the rest would be extrapolation: to a
bandwidth without limit, and to large transfers over the wrong link.
"""


@dataclass(frozen=True, slots=True)
class Sample:
    """One probe: what was moved, and how long it took."""

    shape: TransferShape
    seconds: float


def fit(samples: Sequence[Sample], prior: LinkModel) -> LinkModel:
    """The model that explains the quickest probe of each shape best, in relative error.

    A machine that does something else makes a probe slower, never quicker. Where every probe of a
    shape was disturbed, reweighting sees to it that they hardly count.
    What the probes cannot tell apart (all of one shape) is taken from the prior. Without samples,
    the prior.
    """
    if not samples:
        return prior
    quickest = _find_quickest(samples)
    features = np.array([[1, s.num_descriptors, s.num_bytes] for s in quickest], float)
    seconds = np.maximum(np.array(list(quickest.values())), MIN_LATENCY_S)
    before = np.array([prior.latency_s, prior.descriptor_s, prior.byte_s])
    # In units of the prior's numbers and relative to what was seen: well-conditioned, and a small
    # probe counts as much as a large one.
    rows = features * before / seconds[:, None]
    scales = weights = np.ones(len(rows))
    found = np.ones(3)
    for _ in range(_NUM_ROUNDS):
        found = _solve(rows * scales[:, None], scales, weights)
        ratios = rows @ found
        # Half of what was seen is as wrong as double: else the fit would rather be too low.
        scales = 1 / np.sqrt(np.clip(ratios, 1 / _MAX_RATIO, _MAX_RATIO))
        weights = _OUTLIER_FROM / np.maximum(np.abs(ratios - 1) * scales, _OUTLIER_FROM)
    latency, descriptor, byte = np.maximum(found * before, _FLOORS).tolist()
    best_rate = max(shape.num_bytes / taken_s for shape, taken_s in quickest.items())
    byte = max(byte, 1 / (_MAX_RATE_GAIN * best_rate))
    return LinkModel(latency, descriptor, byte, num_probes=len(samples))


def _find_quickest(samples: Sequence[Sample]) -> dict[TransferShape, float]:
    quickest: dict[TransferShape, float] = {}
    for sample in samples:
        known = quickest.get(sample.shape, sample.seconds)
        quickest[sample.shape] = min(known, sample.seconds)
    return quickest


def _solve(
    rows: NDArray[np.float64], targets: NDArray[np.float64], weights: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Weighted least squares for `rows @ x = targets`, `x >= 0`: the best of all free sets.

    A trace of "x is 1" (the prior) decides where the rows do not.
    """
    scale = np.sqrt(weights)
    pull = 1e-4 * np.eye(3)
    matrix = np.concatenate((rows * scale[:, None], pull))
    wanted = np.concatenate((targets * scale, np.diag(pull)))
    best, best_error = np.ones(3), np.inf
    for size in (3, 2, 1):
        for free in combinations(range(3), size):
            columns = matrix[:, free]
            x = np.zeros(3)
            x[list(free)] = np.linalg.lstsq(columns, wanted, rcond=None)[0]
            error = float(np.square(matrix @ x - wanted).sum())
            if (x >= 0).all() and error < best_error:
                best, best_error = x, error
    return best
