"""Three numbers that predict what a transfer costs, and what transfers taught beyond them.

Three numbers fit no link everywhere: probes run on memory that caches hold, requests do not. Where
they are off, it is by what the shape is. So what a link was *measured* to cost is corrected for
shapes like the transfer's alone; if a misfit at 2 KiB pages moved the three numbers, the link would
be mistaken for a slow one at every other shape too, while links that carry nothing kept theirs.
A *guess* (a prior) is moved as a whole.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

    from baton.transfer.links.shape import SizeClass, TransferShape

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


@dataclass(frozen=True, slots=True)
class Correction:
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


@dataclass(frozen=True, slots=True)
class LinkModel:
    """`latency_s + descriptors * descriptor_s + bytes * byte_s`, for one direction of one link.

    Each number is above zero. `num_probes` and `num_transfers` say what it rests on: with neither
    it is a prior. `corrections` are those of size classes that were transferred.
    """

    latency_s: float
    descriptor_s: float
    byte_s: float
    num_probes: int = 0
    num_transfers: int = 0
    corrections: Mapping[SizeClass, Correction] = field(default_factory=dict)

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
            return replace(self, corrections=corrections, num_transfers=self.num_transfers + 1)
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
        return replace(
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
