"""A transfer's shape, and the three numbers of a link that predict its cost.

Three numbers fit no link everywhere: probes run on memory that caches hold, requests do not. Where
they are off depends on the shape. So a link that was *measured* is corrected for similar shapes
alone; if an error at 2 KiB pages moved the three numbers, the link would look slow at every other
shape too, while links that carry nothing kept theirs. A *default* (not measured) is moved as a
whole.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING, Final, TypeAlias

import msgspec
import numpy as np

from baton.record import Record

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from baton.kv.copies import PageCopies
    from baton.transfer.interface import Capabilities, PageArray

SizeClass: TypeAlias = tuple[int, int]


class TransferShape(Record, frozen=True):
    """How much is moved, and in how many pieces that are adjacent on both sides."""

    num_bytes: int
    num_descriptors: int

    @property
    def size_class(self) -> SizeClass:
        """Shapes alike: powers of two of the bytes, and of the bytes of a descriptor."""
        per_descriptor = self.num_bytes // max(1, self.num_descriptors)
        return self.num_bytes.bit_length(), per_descriptor.bit_length()


def measure_shape(
    copies: PageCopies, source: Sequence[PageArray], target: Sequence[PageArray]
) -> TransferShape:
    """The shape of copies between two regions; whole pages that follow one another count as one."""
    if not 0 <= copies.layer < min(len(source), len(target)):
        return TransferShape(copies.num_bytes, copies.num_pages)  # the transport will refuse it
    src_bytes, dst_bytes = source[copies.layer].page_bytes, target[copies.layer].page_bytes
    num_descriptors = 0
    for group in copies.groups:
        if group.moves_whole_pages(src_bytes, dst_bytes):
            num_descriptors += group.num_runs
        else:
            num_descriptors += len(group.src_pages) * len(group.spans)
    return TransferShape(copies.num_bytes, num_descriptors * copies.num_layers)


MIN_LATENCY_S: Final = 1e-7
MIN_DESCRIPTOR_S: Final = 1e-10
MIN_BYTE_S: Final = 1e-13
"""10 TB/s: faster than any memory. The model stays positive, so it stays strictly monotone."""

LEARNING_RATE: Final = 0.1
FIRST_LEARNING_RATE: Final = 0.6
MAX_STEP: Final = math.log(2.0)
"""One transfer, however late it was, at most doubles what is expected of the next of a guess."""
NUM_REMEMBERED: Final = 11
ENOUGH_TRANSFERS: Final = 5
MAX_LOG_RATIO: Final = math.log(1e6)


class Correction(Record, frozen=True):
    """What the last transfers of one size class took, against what the probes predict of them.

    `recent` are logarithms of the ratio. Their median is what counts: it is deaf to transfers that
    waited for something else, and a mean is not, nor is what one learns from step by step.
    """

    recent: tuple[float, ...] = ()

    @property
    def log_ratio(self) -> float:
        """By how much the probes are off for such shapes; little, as long as little is known."""
        return self.trust * statistics.median(self.recent) if self.recent else 0.0

    @property
    def trust(self) -> float:
        """0 where nothing is known, 1 from `ENOUGH_TRANSFERS` on."""
        num = len(self.recent)
        return min(1.0, 0.5 + 0.5 * (num - 1) / (ENOUGH_TRANSFERS - 1)) if num else 0.0

    def updated(self, error: float) -> Correction:
        """After one more, which took `exp(error)` times what the probes predict."""
        error = min(MAX_LOG_RATIO, max(-MAX_LOG_RATIO, error))
        return Correction((*self.recent, error)[-NUM_REMEMBERED:])


NO_CORRECTION: Final = Correction()


class LinkModel(Record, frozen=True):
    """`latency_s + descriptors * descriptor_s + bytes * byte_s`, for one direction of one link.

    Each number is above zero. `num_probes` and `num_transfers` count what it rests on: with neither
    it is a prior. `corrections` are those of size classes that were transferred.
    """

    latency_s: float
    descriptor_s: float
    byte_s: float
    num_probes: int = 0
    num_transfers: int = 0
    corrections: Mapping[SizeClass, Correction] = {}

    @property
    def is_measured(self) -> bool:
        """Whether anything was measured, by a probe or a transfer."""
        return self.num_probes + self.num_transfers > 0

    @property
    def bandwidth(self) -> float:
        """Bytes a second, for large adjacent transfers."""
        return 1.0 / self.byte_s

    def predict(self, shape: TransferShape) -> float:
        """Seconds from the submission to the completion of one transfer of this shape."""
        learnt = self.correction(shape.size_class)
        return self.predict_uncorrected(shape) * math.exp(learnt.log_ratio)

    def refine(
        self, shape: TransferShape, seconds: float, alike: TransferShape | None = None
    ) -> LinkModel:
        """The model after one more transfer.

        Where several went at once, `shape` is their sum, and `alike` what most of it was like.

        Of a measured link, the correction of its size class. Of a guess, each number moves by the
        share that it has in the prediction, so a small transfer teaches latency and a large one
        bandwidth; there an outlier moves no more than a doubling would.
        """
        kind = (alike or shape).size_class
        predicted = self.predict_uncorrected(shape)
        error = math.log(max(seconds, MIN_LATENCY_S) / predicted)
        if self.num_probes:
            corrections = {**self.corrections, kind: self.correction(kind).updated(error)}
            return msgspec.structs.replace(
                self, corrections=corrections, num_transfers=self.num_transfers + 1
            )
        return self._move_all(shape, predicted, min(MAX_STEP, max(-MAX_STEP, error)))

    def correction(self, kind: SizeClass) -> Correction:
        """What was learnt of shapes of this class."""
        return self.corrections.get(kind, NO_CORRECTION)

    def predict_uncorrected(self, shape: TransferShape) -> float:
        """By the three numbers alone."""
        return (
            self.latency_s
            + shape.num_descriptors * self.descriptor_s
            + shape.num_bytes * self.byte_s
        )

    def _move_all(self, shape: TransferShape, predicted: float, error: float) -> LinkModel:
        latency_share = self.latency_s / predicted
        descriptor_share = shape.num_descriptors * self.descriptor_s / predicted
        byte_share = shape.num_bytes * self.byte_s / predicted
        step = _learning_rate(self.num_transfers) * error
        step /= latency_share**2 + descriptor_share**2 + byte_share**2
        return msgspec.structs.replace(
            self,
            latency_s=max(MIN_LATENCY_S, self.latency_s * math.exp(step * latency_share)),
            descriptor_s=max(
                MIN_DESCRIPTOR_S, self.descriptor_s * math.exp(step * descriptor_share)
            ),
            byte_s=max(MIN_BYTE_S, self.byte_s * math.exp(step * byte_share)),
            num_transfers=self.num_transfers + 1,
        )


def _learning_rate(num_transfers: int) -> float:
    """What rests on little gives way at once, what rests on many transfers slowly."""
    return max(LEARNING_RATE, FIRST_LEARNING_RATE / (1 + num_transfers / 4))


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
    What the probes cannot separate (all of one shape) is taken from the prior. Without samples,
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


SAME_HOST: Final = LinkModel(latency_s=30e-6, descriptor_s=0.3e-6, byte_s=1 / 8e9)
NETWORK: Final = LinkModel(latency_s=150e-6, descriptor_s=0.6e-6, byte_s=1 / 2e9)


def default_link_model(capabilities: Capabilities) -> LinkModel:
    """By what the transport is known to be; equal defaults leave the choice to the listed order."""
    return SAME_HOST if capabilities.same_host_only else NETWORK
