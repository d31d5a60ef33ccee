"""Drift of one link: transfers take longer, for their size, than the same link took at first.

    LEARNING ── `num_reference` transfers ──► STEADY ── slower, confirmed ──► DRIFTED
        ▲                                     │  ▲                            │  │
        │                                     │  └──────── as before ─────────┘  │
        └───────── faster, confirmed ─────────┘                                  │
        ▲                                                                        │
        └───────────────── drifted for `accept_after_s` ─────────────────────────┘

The reference does not follow the link, unlike the link model by which transports are chosen: it is
learned once, of each size from its first transfers. A transfer's *residual* is the logarithm of its
time over the reference's for its size. Two shifts are looked for, `SMALL` and `LARGE`. For each,
two tests must agree:

- Page-Hinkley (a cumulative sum): the sum of residuals, each less half of the shift, held at 0 or
  above. It alarms at a threshold that grows with the residuals' variance. The variance is that of
  sums, so that transfers that resemble the one before do not count as independent evidence. A
  residual counts at most `CLIP` deviations: a stalled transfer is one slow transfer, however long
  it stalled.
- The latest residuals: median and lower quartile both exceed the reference's. Other work on the
  machine makes some transfers slower; a slower link makes all of them slower.

Hysteresis: a drift ends when the sum is back at 0, or when the median of `NUM_LATER` transfers no
longer shows it: where slow transfers are more frequent than in the reference, the sum stays above 0
though most are as they were. A drift that ends within `short_drift_s` is a variation of the link
that its reference did not contain: each one doubles the thresholds, up to `MAX_CAUTION` times.
Examples: a program that takes the core for some milliseconds makes the next 10 to 15 transfers
slower, because they find caches cold; another host's traffic takes part of a link for a second.

A link that became faster is not reported, but its reference is learned again: by the old one, a
slowdown would stay unseen until it exceeded it.
"""

from __future__ import annotations

from collections import deque
from enum import StrEnum
from math import exp, log, sqrt
from typing import TYPE_CHECKING, Final

import numpy as np

from baton.record import MutableRecord, Record

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from baton.clock import Instant


class DriftState(StrEnum):
    """What is known of a link's times."""

    LEARNING = "learning"
    STEADY = "steady"
    DRIFTED = "drifted"


class DriftOptions(Record, frozen=True):
    """`evidence`: the threshold of the sums, in units of a likelihood's logarithm.

    `short_drift_s`: a drift that ends earlier counts as the link's noise. `num_calm`: transfers
    without one, after which the thresholds are halved again.
    """

    num_reference: int = 512
    evidence: float = 10.0
    short_drift_s: float = 10.0
    num_calm: int = 100_000
    accept_after_s: float = 86_400.0


class Shift(Record, frozen=True):
    """A slowdown that is looked for: all of it logarithms of ratios.

    Of the latest `num_recent` residuals the median must be at least `min_median`, the lower
    quartile `min_quartile` over the reference's.
    """

    size: float
    num_recent: int
    min_median: float
    min_quartile: float


DEFAULTS: Final = DriftOptions()
SMALL: Final = Shift(log(1.3), 32, log(1.15), log(1.1))
LARGE: Final = Shift(log(2.0), 16, log(1.4), log(1.2))
NUM_LATER: Final = 64
CLIP: Final = 3.0
MIN_SPREAD: Final = 0.3
"""Of residuals. Links whose reference varies less do not always do so: a drift of 1.3 is looked for
in some 30 transfers, however little they vary."""
MAX_CAUTION: Final = 256
"""Times that the thresholds can be what the reference's variance calls for. The limit matters
seldom: a lasting shift as large as the short drifts is found in about twice the time they took."""
NUM_OF_CLASS: Final = 16
"""Transfers of a size class that the reference has not seen, before they are tested."""
FEW_OF_CLASS: Final = 64
MOST_OF_CLASS: Final = 512
"""Transfers of a size class, beyond which its level is fixed. Before, each one moves it, as one of
at least `FEW_OF_CLASS`: a level that rests on few transfers is wrong by more than the test allows,
once most have that size."""
ALLOWANCE: Final = log(1.5)
"""Of larger sizes than the reference has seen: so much longer they may take for each byte. They are
not learned first: on a link that becomes slower transfers wait for each other, and go together."""
BATCHES: Final = (32, 128)
"""Transfers of a batch. Correlation over fewer transfers is seen in the variance of their means."""
MAX_CORRELATION: Final = 0.95
_TO_DEVIATION: Final = 1.4826
"""From the median absolute deviation to the standard deviation of a normal distribution."""
_HALF_BYTES: Final = (0, *(1 << power for power in range(8, 27)))
MIN_SECONDS: Final = 1e-9
_SMALL_ALLOWANCE: Final = SMALL.size / 2
_LARGE_ALLOWANCE: Final = LARGE.size / 2


class Reference(MutableRecord):
    """Seconds that a transfer took when the link was new.

    `exp(level[class]) * (bytes + half_bytes)`: `half_bytes` is the size whose transfer takes twice
    as long as an empty one; a class has sizes of the same power of two, and rests on `counts`
    transfers. `lower_quartile` is of the residuals, `spread` their standard deviation without
    outliers, `variance` that of their sums for each transfer. `largest_class` is the largest one
    that was in the reference.
    """

    half_bytes: int
    levels: dict[int, float]
    counts: dict[int, int]
    lower_quartile: float
    spread: float
    variance: float
    largest_class: int

    def residual(self, num_bytes: int, seconds: float) -> float | None:
        """The logarithm of observed over reference time; None for a size class not learned."""
        level = self.levels.get(num_bytes.bit_length())
        if level is None:
            if num_bytes.bit_length() < self.largest_class:
                return None
            level = self._extrapolate(num_bytes.bit_length())
        return log(max(seconds, MIN_SECONDS) / (num_bytes + self.half_bytes + 1)) - level

    def refine_class(self, num_bytes: int, residual: float) -> None:
        """One more transfer of a class that rests on few."""
        size_class = num_bytes.bit_length()
        count = self.counts[size_class]
        if count < MOST_OF_CLASS:
            self.counts[size_class] = count + 1
            self.levels[size_class] += residual / max(FEW_OF_CLASS, count + 1)

    def learn_class(self, sizes: Sequence[int], seconds: Sequence[float]) -> None:
        """Transfers of one class that was not in the reference."""
        scaled = _scale(np.array(sizes), np.array(seconds), self.half_bytes)
        self.levels[sizes[0].bit_length()] = float(np.median(scaled))
        self.counts[sizes[0].bit_length()] = len(sizes)

    def _extrapolate(self, size_class: int) -> float:
        """A level for a class of larger sizes than those of the reference."""
        level = self.levels[size_class] = self.levels[self.largest_class] + ALLOWANCE
        self.counts[size_class] = 0
        return level


def _scale(
    sizes: NDArray[np.int64], seconds: NDArray[np.float64], half_bytes: int
) -> NDArray[np.float64]:
    """Logarithms of seconds per byte, `[num]`."""
    scaled: NDArray[np.float64] = np.log(
        np.maximum(seconds, MIN_SECONDS) / (sizes + half_bytes + 1)
    )
    return scaled


def learn_reference(samples: Sequence[tuple[int, float]]) -> Reference:
    """From `(bytes, seconds)` of a link's first transfers, in their order."""
    sizes = np.array([size for size, _ in samples], dtype=np.int64)
    seconds = np.array([taken_s for _, taken_s in samples])
    half_bytes = min(_HALF_BYTES, key=lambda each: _disagreement(_scale(sizes, seconds, each)))
    scaled = _scale(sizes, seconds, half_bytes)
    overall = float(np.median(scaled))
    classes = np.array([size.bit_length() for size, _ in samples])
    levels: dict[int, float] = {}
    counts: dict[int, int] = {}
    for each in np.unique(classes):
        of_class = scaled[classes == each]
        counts[int(each)] = len(of_class)
        # What rests on few transfers is drawn towards what all of them show.
        trust = len(of_class) / (len(of_class) + NUM_OF_CLASS)
        levels[int(each)] = overall + trust * (float(np.median(of_class)) - overall)
    residuals = scaled - np.array([levels[int(each)] for each in classes])
    spread = max(MIN_SPREAD, _TO_DEVIATION * float(np.median(np.abs(residuals))))
    clipped = np.clip(residuals, -CLIP * spread, CLIP * spread)
    # The sums add clipped residuals: their mean over the reference must be 0.
    center = float(clipped.mean())
    levels = {each: level + center for each, level in levels.items()}
    residuals, clipped = residuals - center, clipped - center
    return Reference(
        half_bytes,
        levels,
        counts,
        float(np.quantile(residuals, 0.25)),
        spread,
        max(MIN_SPREAD**2, _long_run_variance(clipped)),
        max(levels),
    )


def _disagreement(scaled: NDArray[np.float64]) -> float:
    return float(np.abs(scaled - np.median(scaled)).mean())


def _long_run_variance(residuals: NDArray[np.float64]) -> float:
    """Of the residuals' sums, for each residual.

    As for a first-order autoregression, which few transfers determine well; more where the sums of
    batches vary more than chance explains.
    """
    variance = float(residuals.var())
    if variance == 0.0:
        return 0.0
    product = float((residuals[1:] * residuals[:-1]).mean())
    correlation = min(MAX_CORRELATION, max(0.0, product / variance))
    of_batches = [_least_variance_of_sums(residuals, length) for length in BATCHES]
    return max(variance * (1 + correlation) / (1 - correlation), *of_batches)


def _least_variance_of_sums(residuals: NDArray[np.float64], length: int) -> float:
    """The limit that the variance of sums of `length` exceeds with a confidence of 95 %."""
    num_batches = len(residuals) // length
    if num_batches < 2:  # noqa: PLR2004 - one batch has no variance
        return 0.0
    batches = residuals[: num_batches * length].reshape(num_batches, length)
    # The chi-square quantile of num_batches - 1 degrees of freedom (Wilson and Hilferty).
    term = 2 / (9 * (num_batches - 1))
    by_chance = (1 - term + 1.645 * sqrt(term)) ** 3
    return float(batches.mean(axis=1).var(ddof=1)) * length / by_chance


class DriftDetector:
    """Of one link: worker, peer, transport and operation. Owner: the thread that observes.

    `since` is when it came into its state, `num_drifts` how often that was `DRIFTED`.
    """

    def __init__(self, now: Instant, options: DriftOptions = DEFAULTS) -> None:
        self._options = options
        self.num_drifts = 0
        self._caution, self._num_calm = 1, 0
        self._learn_again(now)

    def _learn_again(self, now: Instant) -> None:
        """Forget the reference: the next transfers are a new one."""
        self.state, self.since = DriftState.LEARNING, now
        self.reference: Reference | None = None
        self._samples: list[tuple[int, float]] = []
        self._new_classes: dict[int, list[tuple[int, float]]] = {}
        self._recent: deque[float] = deque(maxlen=SMALL.num_recent)
        self._slower = self._much_slower = self._faster = 0.0
        self._limit = self._threshold = self._much_slower_threshold = 0.0
        self._later: list[float] = []

    @property
    def ratio(self) -> float | None:
        """Median of the latest transfers' times over the reference's; None while it is learned."""
        if self.reference is None or len(self._recent) < LARGE.num_recent:
            return None
        return exp(sorted(list(self._recent)[-LARGE.num_recent :])[LARGE.num_recent // 2])

    def observe(self, num_bytes: int, seconds: float, now: Instant) -> DriftState:
        """A transfer of so many bytes took so long: the state now."""
        reference = self.reference
        if reference is None:
            return self._learn(num_bytes, seconds, now)
        residual = reference.residual(num_bytes, seconds)
        if residual is None:
            self._learn_class(reference, num_bytes, seconds)
            return self.state
        self._recent.append(residual)
        limit = self._limit
        counted = limit if residual > limit else max(residual, -limit)
        slower = self._slower + counted - _SMALL_ALLOWANCE
        much_slower = self._much_slower + counted - _LARGE_ALLOWANCE
        faster = self._faster - counted - _SMALL_ALLOWANCE
        threshold, much_slower_threshold = self._threshold, self._much_slower_threshold
        self._slower = slower if 0.0 < slower < threshold else max(0.0, min(slower, threshold))
        self._much_slower = 0.0 if much_slower < 0.0 else min(much_slower, much_slower_threshold)
        self._faster = faster if 0.0 < faster < threshold else max(0.0, min(faster, threshold))
        if self.state is DriftState.DRIFTED:
            self._look_for_end(now)
            return self.state
        reference.refine_class(num_bytes, counted)
        self._num_calm += 1
        if (slower >= threshold and self._is_confirmed(SMALL, +1)) or (
            much_slower >= much_slower_threshold and self._is_confirmed(LARGE, +1)
        ):
            self.state, self.since = DriftState.DRIFTED, now
            self.num_drifts += 1
            self._slower = threshold
        elif faster >= threshold and self._is_confirmed(SMALL, -1):
            self._learn_again(now)
        elif self._num_calm >= self._options.num_calm:
            self._set_caution(max(1, self._caution // 2))
        return self.state

    def _learn(self, num_bytes: int, seconds: float, now: Instant) -> DriftState:
        self._samples.append((num_bytes, seconds))
        if len(self._samples) >= self._options.num_reference:
            reference = self.reference = learn_reference(self._samples)
            self._samples = []
            self._limit = CLIP * reference.spread
            self._set_caution(self._caution)
            self.state, self.since = DriftState.STEADY, now
        return self.state

    def _set_caution(self, caution: int) -> None:
        """Thresholds are `caution` times what the reference's variance calls for."""
        self._caution, self._num_calm = caution, 0
        if self.reference is not None:
            evidence = caution * self._options.evidence * self.reference.variance
            self._threshold = evidence / SMALL.size
            self._much_slower_threshold = evidence / LARGE.size

    def _learn_class(self, reference: Reference, num_bytes: int, seconds: float) -> None:
        seen = self._new_classes.setdefault(num_bytes.bit_length(), [])
        seen.append((num_bytes, seconds))
        if len(seen) >= NUM_OF_CLASS:
            reference.learn_class([size for size, _ in seen], [taken_s for _, taken_s in seen])
            del self._new_classes[num_bytes.bit_length()]

    def _look_for_end(self, now: Instant) -> None:
        self._later.append(self._recent[-1])
        is_over = False
        if len(self._later) == NUM_LATER:
            is_over = sorted(self._later)[NUM_LATER // 2] < SMALL.min_median
            self._later.clear()
        if self._slower <= 0.0 or is_over:
            if now - self.since < self._options.short_drift_s:
                self._set_caution(min(MAX_CAUTION, 2 * self._caution))
            self.state, self.since = DriftState.STEADY, now
            self._slower = self._much_slower = 0.0
            self._later.clear()
        elif now - self.since >= self._options.accept_after_s:
            self._learn_again(now)

    def _is_confirmed(self, shift: Shift, sign: int) -> bool:
        """Whether the latest transfers show it: slower (+1) or faster (-1)."""
        if len(self._recent) < shift.num_recent or self.reference is None:
            return False
        ordered = sorted(list(self._recent)[-shift.num_recent :])
        quartile = ordered[shift.num_recent // 4] - self.reference.lower_quartile
        return (
            sign * ordered[shift.num_recent // 2] >= shift.min_median
            and sign * quartile >= shift.min_quartile
        )
