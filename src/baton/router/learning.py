"""A cost as a line, learned from what was seen: `seconds = factor * (fixed + each * size)`.

Least squares over observations whose weight falls by `FORGETTING` with each newer one, and a first
guess that counts as `GUESS_WEIGHT` observations at the sizes 0 and `guess_size`. Neither
coefficient is ever negative. Workers of one model share the line: each sees few sizes, and what it
did not see would be extrapolated differently for two that are the same. What is a worker's own is
its factor, the geometric mean of seen over predicted; the workers' mean factor is 1.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import exp, log
from typing import TYPE_CHECKING, Final, TypeVar

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

_Size = TypeVar("_Size", "float", "NDArray[np.float64]")
FORGETTING: Final = 0.97
"""About the last 33 observations count."""
GUESS_WEIGHT: Final = 0.5
ERROR_SHARE: Final = 0.1
"""What the newest error counts in `error`, and the newest ratio in `factor`."""
LEAST_SPREAD: Final = 0.02
"""Of sizes: the square of their deviation as a share of the mean square."""
PULL: Final = 0.02
"""By how much of itself a factor's logarithm shrinks with each observation: where one worker alone
is seen, the line is to explain it."""
MOST_FACTOR: Final = 10.0


@dataclass(slots=True)
class LearnedLine:
    """What workers share. `guess`: fixed seconds, and for each unit of size, before any was seen.

    `num_workers` have been seen, whose factors' logarithms are `sum_of_logs`. Owner: one thread.
    """

    guess: tuple[float, float]
    guess_size: float
    fixed: float = field(init=False)
    each: float = field(init=False)
    num_workers: int = 0
    sum_of_logs: float = 0.0
    _sums: list[float] = field(default_factory=lambda: [0.0] * 5)

    def __post_init__(self) -> None:
        self.fixed, self.each = self.guess

    def guess_again(self, guess: tuple[float, float]) -> None:
        """Another guess is at hand; it counts for nothing once something was seen."""
        if not self._sums[0]:
            self.guess = self.fixed, self.each = guess

    @property
    def mean_log(self) -> float:
        """Of the workers' factors."""
        return self.sum_of_logs / max(1, self.num_workers)

    def predict(self, size: _Size) -> _Size:
        """Seconds for so much."""
        return self.fixed + self.each * size

    def factors(self, logs: NDArray[np.float64]) -> NDArray[np.float64]:
        """Of workers, by `WorkerCost.log` of each, NaN before anything was seen of it."""
        found = np.exp(np.where(np.isnan(logs), 0.0, logs - self.mean_log))
        bounded: NDArray[np.float64] = np.minimum(np.maximum(found, 1 / MOST_FACTOR), MOST_FACTOR)
        return bounded

    def observe(self, size: float, seconds: float) -> None:
        """So much took so long, by the measure of a worker of factor 1."""
        if not self._sums[0]:
            for at in (0.0, self.guess_size):
                self._add(at, self.fixed + self.each * at, GUESS_WEIGHT / 2)
        self._sums = [value * FORGETTING for value in self._sums]
        self._add(size, seconds, 1.0)
        self._fit()

    def _add(self, size: float, seconds: float, weight: float) -> None:
        parts = (1.0, size, seconds, size * size, size * seconds)
        self._sums = [value + weight * part for value, part in zip(self._sums, parts, strict=True)]

    def _fit(self) -> None:
        weight, size, seconds, squares, products = self._sums
        spread = weight * squares - size * size
        if spread <= LEAST_SPREAD * weight * squares:
            # All of about one size: what is fixed cannot be separated from what each unit costs.
            scale = (seconds / weight) / max(self.predict(size / weight), 1e-9)
            self.fixed, self.each = self.fixed * scale, self.each * scale
            return
        each = max(0.0, (weight * products - size * seconds) / spread)
        fixed = (seconds - each * size) / weight
        if fixed < 0.0:
            fixed, each = 0.0, products / squares if squares else 0.0
        self.fixed, self.each = fixed, each


@dataclass(slots=True)
class WorkerCost:
    """One worker's cost, on a line that it shares with others.

    `num_seen` are its observations, `log` is its factor's logarithm, not yet relative to the
    others'; `error` is the mean, over the latest, of the difference to what
    was predicted, as a share of the larger of the two. Owner: one thread.
    """

    line: LearnedLine
    num_seen: int = 0
    error: float = 0.0
    log: float = 0.0

    @property
    def factor(self) -> float:
        """How much slower than the mean it is; 1 before anything was seen."""
        if not self.num_seen:
            return 1.0
        factor = exp(self.log - self.line.mean_log)
        return min(MOST_FACTOR, max(1 / MOST_FACTOR, factor))

    def predict(self, size: float) -> float:
        """Seconds for so much."""
        return self.factor * self.line.predict(size)

    def observe(self, size: float, seconds: float) -> None:
        """So much took so long."""
        seconds, line = max(seconds, 1e-6), self.line
        predicted = max(self.predict(size), 1e-6)
        error = abs(predicted - seconds) / max(predicted, seconds)
        self.error += max(ERROR_SHARE, 1 / (self.num_seen + 1)) * (error - self.error)
        if not self.num_seen:  # it joins at the mean
            self.log = line.mean_log
            line.num_workers += 1
            line.sum_of_logs += self.log
        self.num_seen += 1
        line.observe(size, seconds / self.factor)
        beyond = log(seconds / max(self.predict(size), 1e-6))
        change = ERROR_SHARE * beyond - PULL * log(self.factor)
        self.log += change
        line.sum_of_logs += change
