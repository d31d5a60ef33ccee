"""Synthetic traffic of one link, and the best detector that its distribution allows.

Sizes of 16 KiB to 4 MiB, times around `latency + bytes / bandwidth`:

    lognormal   independent, deviation 0.3 of the logarithm
    heavy       independent, Student's t with 3 degrees of freedom: far more outliers
    alike       each resembles the one before: correlation 0.5, deviation 0.3
    stalls      lognormal, and 1 of 100 takes ten times as long
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, log, sqrt
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    Transfers = list[tuple[int, float]]
    Noise = Callable[[np.random.Generator, int], NDArray[np.float64]]

SIZES = np.array([1 << power for power in (14, 16, 18, 20, 22)])
LATENCY_S, BYTE_S = 100e-6, 1 / 2e9
DEVIATION, CORRELATION = 0.3, 0.5


def lognormal(rng: np.random.Generator, num: int) -> NDArray[np.float64]:
    """Independent logarithms."""
    return rng.normal(0, DEVIATION, num)


def heavy(rng: np.random.Generator, num: int) -> NDArray[np.float64]:
    """Many outliers."""
    return 0.2 * rng.standard_t(3, num)


def alike(rng: np.random.Generator, num: int) -> NDArray[np.float64]:
    """A first-order autoregression."""
    shocks = rng.normal(0, DEVIATION * sqrt(1 - CORRELATION**2), num).tolist()
    value, values = 0.0, []
    for shock in shocks:
        value = CORRELATION * value + shock
        values.append(value)
    return np.array(values)


def stalls(rng: np.random.Generator, num: int) -> NDArray[np.float64]:
    """Some transfers are stopped on their way."""
    return lognormal(rng, num) + np.log(10) * (rng.random(num) < 0.01)


KINDS: dict[str, Noise] = {
    "lognormal": lognormal,
    "heavy": heavy,
    "alike": alike,
    "stalls": stalls,
}


def expected_s(num_bytes: int | NDArray[np.int64]) -> float | NDArray[np.float64]:
    """What a transfer of this size takes, but for noise."""
    return LATENCY_S + num_bytes * BYTE_S


def make_transfers(noise: Noise, rng: np.random.Generator, num: int) -> Transfers:
    """`(bytes, seconds)` of a link that does not change."""
    sizes = rng.choice(SIZES, num)
    seconds = expected_s(sizes) * np.exp(noise(rng, num))
    return list(zip(sizes.tolist(), seconds.tolist(), strict=True))


@dataclass
class OptimalTest:
    """Page's cumulative sum with everything known: no test has a shorter worst mean delay.

    (Lorden 1971, Moustakides 1986, for a given mean time between false alarms.) It knows the link's
    true times, their deviation and correlation, and the ratio `factor` that it looks for, and it
    looks for no other. Its threshold is Siegmund's for `num_between` transfers between alarms.
    """

    factor: float
    correlation: float
    num_between: float

    def __post_init__(self) -> None:
        shift = log(self.factor) * (1 - self.correlation)
        deviation = DEVIATION * sqrt(1 - self.correlation**2)
        self._shift, self._weight = shift, shift / deviation**2
        self._information = (shift / deviation) ** 2 / 2
        """Of one transfer: the mean of its likelihood ratio's logarithm."""
        low, high = 0.0, 100.0
        for _ in range(60):
            middle = (low + high) / 2
            is_less = (exp(middle) - middle - 1) / self._information < self.num_between
            low, high = (middle, high) if is_less else (low, middle)
        self._excess = high
        self._threshold = high - 1.166 * shift / deviation
        self._sum = self._previous = 0.0

    @property
    def mean_delay(self) -> float:
        """Siegmund's approximation, from a sum of 0 on, of a shift that comes gradually."""
        return (exp(-self._excess) + self._excess - 1) / self._information

    def observe(self, num_bytes: int, seconds: float) -> bool:
        """Whether this transfer raises its alarm; it begins again then."""
        residual = log(seconds / float(expected_s(num_bytes)))
        news = residual - self.correlation * self._previous
        self._previous = residual
        self._sum = max(0.0, self._sum + self._weight * (news - self._shift / 2))
        if self._sum < self._threshold:
            return False
        self._sum = 0.0
        return True
