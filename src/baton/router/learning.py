"""A cost as a line, learned from what was seen: `seconds = fixed + each * size`.

Least squares over observations whose weight falls by `FORGETTING` with each newer one, and a first
guess that counts as `GUESS_WEIGHT` observations at the sizes 0 and `guess_size`. Neither
coefficient is ever negative.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

FORGETTING: Final = 0.97
"""About the last 33 observations count."""
GUESS_WEIGHT: Final = 0.5
ERROR_SHARE: Final = 0.1
"""What the newest error counts in `error`."""


@dataclass(slots=True)
class LearnedLine:
    """`guess`: fixed seconds, and seconds for each unit of size, before anything was seen.

    `num_seen` are observations; `error` is the mean, over the latest, of the difference to what was
    predicted, as a share of the larger of the two. Owner: one thread.
    """

    guess: tuple[float, float]
    guess_size: float
    num_seen: int = 0
    error: float = 0.0
    fixed: float = field(init=False)
    each: float = field(init=False)
    _sums: list[float] = field(init=False)

    def __post_init__(self) -> None:
        self.fixed, self.each = self.guess
        self._sums = [0.0] * 5
        for size in (0.0, self.guess_size):
            self._add(size, self.fixed + self.each * size, GUESS_WEIGHT / 2)

    def predict(self, size: float) -> float:
        """Seconds for so much."""
        return self.fixed + self.each * size

    def observe(self, size: float, seconds: float) -> None:
        """So much took so long."""
        seconds = max(seconds, 1e-6)
        predicted = self.predict(size)
        error = abs(predicted - seconds) / max(predicted, seconds)
        share = max(ERROR_SHARE, 1 / (self.num_seen + 1))
        self.error += share * (error - self.error)
        self.num_seen += 1
        self._sums = [value * FORGETTING for value in self._sums]
        self._add(size, seconds, 1.0)
        self._fit()

    def _add(self, size: float, seconds: float, weight: float) -> None:
        parts = (1.0, size, seconds, size * size, size * seconds)
        self._sums = [value + weight * part for value, part in zip(self._sums, parts, strict=True)]

    def _fit(self) -> None:
        weight, size, seconds, squares, products = self._sums
        spread = weight * squares - size * size
        # All of one size: what each unit costs cannot be separated from what is fixed.
        each = (
            self.each
            if spread < 1e-9 * max(1.0, weight * squares)
            else ((weight * products - size * seconds) / spread)
        )
        each = max(0.0, each)
        fixed = (seconds - each * size) / weight
        if fixed < 0.0:
            fixed, each = 0.0, products / squares if squares else 0.0
        self.fixed, self.each = fixed, each
