"""A cost as a line, learned from what was seen: `seconds = factor * (fixed + each * size)`.

That of prompts is bent: attention makes a token cost more for each token before it.

Least squares over observations whose weight falls by `FORGETTING` with each newer one. The line
goes through their mean; its slope is what they show as far as that is certain, and else what a
first guess has, scaled to the mean: of prompts that are all short, noise would decide what a long
one costs. Neither coefficient is ever negative. Workers of one model share the line: each sees few
sizes, and what it did not see would be extrapolated differently for two that are the same.

What is a worker's own is its factor: the mean logarithm of seen over predicted, relative to the
workers' mean, as far as it exceeds what noise explains. A worker that is not seen while others are
comes back to factor 1: one that was slow for a moment would otherwise never get another request
that could show it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import exp, inf, log, sqrt
from typing import TYPE_CHECKING, Final, TypeVar

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

_Size = TypeVar("_Size", "float", "NDArray[np.float64]")
FORGETTING: Final = 0.97
"""About the last 33 observations count."""
FIRST_NOISE: Final = 0.5
"""Of the first observation, as a share of it: the square of its deviation from the line."""
SLOPE_SPREAD: Final = 0.5
"""The deviation of a guessed slope, as a share of the steepest one (nothing is fixed)."""
MOST_BEYOND: Final = 4.0
"""What an observation counts at most, over what was predicted, or under it."""
LEAST_SEEN: Final = 8
"""Observations of a line before that."""
ERROR_SHARE: Final = 0.1
"""What the newest error counts in `error`, and the newest ratio in a factor."""
FIRST_SPREAD: Final = 0.25
"""Of the logarithms of ratios, before any was seen: the square of their deviation."""
DOUBT: Final = 4.0
"""How many times the square of its standard error a factor's squared logarithm must be."""
UNSEEN_TURNS: Final = 16.0
"""After so many times what would be its turn, 1/e is left of the logarithm of a factor."""
MOST_FACTOR: Final = 10.0
NOTHING_SEEN: Final = (0.0, inf, 0.0)
"""The evidence of a factor of 1."""
BEND_EVERY: Final = LEAST_SEEN
"""Observations: it changes slowly, and each request is observed."""
BEND_DOUBT: Final = 2.0
"""Standard errors from which another bend is believed."""
LEAST_APART: Final = 1e-3
"""The variance of tokens, and of pairs of tokens, over their mean square; and the part of either
that the other does not explain."""
MOST_BEND: Final = 0.01
"""A model so small that a hundred tokens before it double what a token takes."""
_TINY: Final = 1e-9
_MOST: Final = log(MOST_FACTOR)


@dataclass(slots=True)
class LearnedLine:
    """What workers share. `guess`: fixed seconds, and for each unit of size, before any was seen.

    `num_seen` observations of `num_workers`, the means of whose logarithms are `sum_of_logs` in
    all. `bend` is for `PromptLine`. Owner: one thread.
    """

    guess: tuple[float, float]
    fixed: float = field(init=False)
    each: float = field(init=False)
    num_seen: int = 0
    num_workers: int = 0
    sum_of_logs: float = 0.0
    bend: float = 0.0
    _sums: list[float] = field(default_factory=lambda: [0.0] * 6)

    def __post_init__(self) -> None:
        self.fixed, self.each = self.guess

    def guess_again(self, guess: tuple[float, float]) -> None:
        """Another guess is at hand; it counts for nothing once something was seen."""
        if not self.num_seen:
            self.guess = self.fixed, self.each = guess

    @property
    def mean_log(self) -> float:
        """Of the workers' ratios."""
        return self.sum_of_logs / max(1, self.num_workers)

    def work(self, size: _Size, before: _Size | float = 0.0) -> _Size:
        """So much behind so much, in units that have nothing before them."""
        return size if not self.bend else size + self.bend * size * (before + 0.5 * size)

    def predict(self, size: _Size, before: _Size | float = 0.0) -> _Size:
        """Seconds for so much, behind so much."""
        if self.bend:
            size = self.work(size, before)
        return self.fixed + self.each * size

    def factors(self, evidence: NDArray[np.float64]) -> NDArray[np.float64]:
        """Of workers `[num_workers]`, by the `WorkerCost.evidence` of each `[3, num_workers]`.

        The result may be changed in place. Of most workers the factor is 1: no more is computed.
        """
        own = evidence[0] - self.mean_log
        factors = np.ones(len(own))
        is_shown = own * own > evidence[1]
        if is_shown.any():
            own, (_, doubts, seen_at) = own[is_shown], evidence[:, is_shown]
            own -= doubts / own
            own *= np.exp((seen_at - self.num_seen) / (UNSEEN_TURNS * max(1, self.num_workers)))
            factors[is_shown] = np.exp(np.minimum(np.maximum(own, -_MOST), _MOST))
        return factors

    def observe(self, size: float, seconds: float, before: float = 0.0) -> None:
        """So much took so long, by the measure of a worker of factor 1."""
        self._count(size, seconds, before)
        self._fit(self._sums)

    def _count(self, size: float, seconds: float, before: float) -> float:
        """Into the sums, as far as it is believed."""
        if self.num_seen >= LEAST_SEEN:
            usual = self.predict(size, before)
            seconds = min(MOST_BEYOND * usual, max(usual / MOST_BEYOND, seconds))
        squared = seconds * seconds
        if not self.num_seen:
            self._sums[5] = FIRST_NOISE * squared
        self.num_seen += 1
        # Each request is observed: no loops.
        weight, sizes, times, squares, products, noise = self._sums
        self._sums = [
            weight * FORGETTING + 1.0,
            sizes * FORGETTING + size,
            times * FORGETTING + seconds,
            squares * FORGETTING + size * size,
            products * FORGETTING + size * seconds,
            noise * FORGETTING + squared,
        ]
        return seconds

    def _fit(self, sums: Sequence[float]) -> None:
        weight, size, seconds, squares, products, variance = sums
        size, seconds, squares = size / weight, seconds / weight, squares / weight
        products, variance = products / weight, variance / weight
        fixed, each = self.guess
        usual = fixed + each * size
        each *= seconds / usual if usual else 0.0
        spread, together = squares - size * size, products - size * seconds
        # More never takes less: where that is seen, it comes from something else.
        if spread > _TINY * squares and together > 0.0:
            shown = together / spread
            unexplained = variance - seconds * seconds - shown * together
            uncertain = max(unexplained, _TINY * seconds * seconds) / (weight * spread)
            guessed = SLOPE_SPREAD * seconds / size
            each += (shown - each) / (1.0 + uncertain / (guessed * guessed))
        fixed = seconds - each * size
        if fixed < 0.0:
            fixed, each = 0.0, products / squares
        self.fixed, self.each = fixed, each


@dataclass(slots=True)
class PromptLine(LearnedLine):
    """Seconds of a prompt: `fixed + each * size * (1 + bend * (before + size / 2))`.

    `size` tokens are computed behind `before` others. `bend` is what a token before it adds to a
    token, as a share of what it takes by itself: attention's part, which is seen where prompts
    differ in length. It is what least squares of all three coefficients show, once that is more
    than noise explains, and stays while prompts are alike.
    """

    _bent: list[float] = field(default_factory=lambda: [0.0] * 4)

    def observe(self, size: float, seconds: float, before: float = 0.0) -> None:
        """So many tokens behind so many others took so long, by a worker of factor 1."""
        seconds = self._count(size, seconds, before)
        pairs = size * (before + 0.5 * size)
        pair_sum, pair_squares, with_size, with_seconds = self._bent
        self._bent = pair_sum, pair_squares, with_size, with_seconds = [
            pair_sum * FORGETTING + pairs,
            pair_squares * FORGETTING + pairs * pairs,
            with_size * FORGETTING + pairs * size,
            with_seconds * FORGETTING + pairs * seconds,
        ]
        if self.num_seen % BEND_EVERY == 0:
            self._find_bend()
        # The sums of a line, with work in place of size.
        weight, sizes, times, squares, products, noise = self._sums
        bend = self.bend
        self._fit((
            weight,
            sizes + bend * pair_sum,
            times,
            squares + bend * (2.0 * with_size + bend * pair_squares),
            products + bend * with_seconds,
            noise,
        ))

    def _find_bend(self) -> None:
        """Least squares with sizes and pairs of tokens, around their means.

        Nothing is found where prompts are too much alike to separate the two.
        """
        weight = self._sums[0]
        _, sizes, times, squares, products, noise = (each / weight for each in self._sums)
        pairs, pair_squares, with_size, with_seconds = (each / weight for each in self._bent)
        of_size, of_pairs = squares - sizes * sizes, pair_squares - pairs * pairs
        if of_size <= LEAST_APART * squares or of_pairs <= LEAST_APART * pair_squares:
            return
        both = with_size - sizes * pairs
        size_s, pair_s = products - sizes * times, with_seconds - pairs * times
        alone = of_size * of_pairs - both * both
        if alone <= LEAST_APART * of_size * of_pairs:
            return
        each = (size_s * of_pairs - pair_s * both) / alone
        more = (pair_s * of_size - size_s * both) / alone
        squared = times * times
        unexplained = max(noise - squared - each * size_s - more * pair_s, _TINY * squared)
        doubt = BEND_DOUBT * sqrt(unexplained * of_size / alone / weight)
        known = self.bend * max(self.each, 0.0)
        if abs(more - known) <= doubt:
            return
        if more <= 0.0:
            self.bend = 0.0
        else:
            self.bend = MOST_BEND if each * MOST_BEND <= more else more / each


_LATEST_SHARE: Final = ERROR_SHARE / (2.0 - ERROR_SHARE)
"""The variance of a mean over the latest, as a share of that of one."""


@dataclass(slots=True)
class WorkerCost:
    """One worker's cost, on a line that it shares with others.

    `num_seen` are its observations, the last when the line had had `seen_at`; `log` is the mean
    logarithm of seen over predicted by the line alone, and `doubt` the square of what noise may
    have added to it. `error` is the mean, over the latest, of the difference to what was predicted,
    as a share of the larger of the two. Owner: one thread.
    """

    line: LearnedLine
    num_seen: int = 0
    seen_at: int = 0
    error: float = 0.0
    log: float = 0.0
    doubt: float = DOUBT * FIRST_SPREAD
    _spread: float = FIRST_SPREAD
    _has_left: bool = False

    @property
    def evidence(self) -> tuple[float, float, float]:
        """What `LearnedLine.factors` needs of it."""
        return (self.log, self.doubt, self.seen_at) if self.num_seen else NOTHING_SEEN

    @property
    def factor(self) -> float:
        """How much slower than the mean it is; 1 before anything was seen."""
        if not self.num_seen:
            return 1.0
        line = self.line
        own = self.log - line.sum_of_logs / line.num_workers  # each request asks: no further calls
        if own * own <= self.doubt:
            return 1.0
        own -= self.doubt / own
        unseen = (line.num_seen - self.seen_at) / line.num_workers
        own *= exp(-unseen / UNSEEN_TURNS)
        return exp(min(_MOST, max(-_MOST, own)))

    def predict(self, size: float, before: float = 0.0) -> float:
        """Seconds for so much; `before`: see the line."""
        line = self.line
        if line.bend:
            size += line.bend * size * (before + 0.5 * size)
        return self.factor * (line.fixed + line.each * size)  # as above: no further calls

    def observe(self, size: float, seconds: float, before: float = 0.0) -> None:
        """So much took so long. Of a worker that has left it counts for nothing."""
        if self._has_left:
            return
        seconds, line = max(seconds, 1e-6), self.line
        factor = self.factor
        predicted = max(factor * line.predict(size, before), 1e-6)
        error = abs(predicted - seconds) / max(predicted, seconds)
        share = max(ERROR_SHARE, 1 / (self.num_seen + 1))
        self.error += share * (error - self.error)
        line.observe(size, seconds / factor, before)
        beyond = log(seconds / max(line.predict(size, before), 1e-6))
        beyond = min(_MOST, max(-_MOST, beyond))
        if not self.num_seen:
            line.num_workers += 1
            change = beyond
        else:
            change = share * (beyond - self.log)
            self._spread += share * ((beyond - self.log) ** 2 - self._spread)
        self.log += change
        line.sum_of_logs += change
        self.num_seen += 1
        self.doubt = DOUBT * self._spread * max(_LATEST_SHARE, 1.0 / self.num_seen)
        self.seen_at = line.num_seen

    def leave(self) -> None:
        """Its worker is gone, and counts no more in the mean of the line's workers."""
        line, self._has_left = self.line, True
        if self.num_seen:
            line.num_workers -= 1
            line.sum_of_logs = line.sum_of_logs - self.log if line.num_workers else 0.0
            self.num_seen, self.log = 0, 0.0
