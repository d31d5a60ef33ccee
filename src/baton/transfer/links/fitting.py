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
_DEAF_FROM: Final = 0.05
"""Relative errors above this count linearly, not squared."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One probe: what was moved, and how long it took."""

    shape: TransferShape
    seconds: float


def fit(samples: Sequence[Sample], prior: LinkModel) -> LinkModel:
    """The model that explains the probes best, in relative error.

    Reweighted so that a probe which was disturbed (the machine did something else) hardly counts.
    What the probes cannot tell apart (all of one shape) is taken from the prior. Without samples,
    the prior.
    """
    if not samples:
        return prior
    features = np.array([[1, s.shape.num_descriptors, s.shape.num_bytes] for s in samples], float)
    seconds = np.maximum(np.array([sample.seconds for sample in samples]), MIN_LATENCY_S)
    before = np.array([prior.latency_s, prior.descriptor_s, prior.byte_s])
    # In units of the prior's numbers and relative to what was seen: well-conditioned, and a small
    # probe counts as much as a large one.
    rows = features * before / seconds[:, None]
    weights = np.ones(len(rows))
    found = np.ones(3)
    for _ in range(_NUM_ROUNDS):
        found = _solve(rows, weights)
        errors = np.abs(rows @ found - 1)
        weights = _DEAF_FROM / np.maximum(errors, _DEAF_FROM)
    latency, descriptor, byte = np.maximum(found * before, _FLOORS).tolist()
    return LinkModel(latency, descriptor, byte, num_probes=len(samples))


def _solve(rows: NDArray[np.float64], weights: NDArray[np.float64]) -> NDArray[np.float64]:
    """Weighted least squares for `rows @ x = 1`, `x >= 0`: the best of all sets of free numbers.

    A trace of "x is 1" (the prior) decides where the rows do not.
    """
    scale = np.sqrt(weights)[:, None]
    pull = 1e-4 * np.eye(3)
    matrix = np.concatenate((rows * scale, pull))
    wanted = np.concatenate((scale[:, 0], np.diag(pull)))
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
