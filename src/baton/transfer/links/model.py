"""Three numbers that predict what a transfer costs."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from baton.transfer.links.shape import TransferShape

MIN_LATENCY_S: Final = 1e-7
MIN_DESCRIPTOR_S: Final = 1e-10
MIN_BYTE_S: Final = 1e-13
"""10 TB/s: faster than any memory. The model stays positive, so it stays strictly monotone."""

LEARNING_RATE: Final = 0.1
FIRST_LEARNING_RATE: Final = 0.6
MAX_STEP: Final = math.log(2.0)
"""One transfer, however late it was, at most doubles what is expected of the next."""


@dataclass(frozen=True, slots=True)
class LinkModel:
    """`latency_s + descriptors * descriptor_s + bytes * byte_s`, for one direction of one link.

    Each number is above zero. `num_probes` and `num_transfers` say what it rests on: with neither
    it is a prior.
    """

    latency_s: float
    descriptor_s: float
    byte_s: float
    num_probes: int = 0
    num_transfers: int = 0

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
        return (
            self.latency_s
            + shape.num_descriptors * self.descriptor_s
            + shape.num_bytes * self.byte_s
        )

    def refine(self, shape: TransferShape, seconds: float) -> LinkModel:
        """The model after one more transfer: exponentially weighted, in the logarithm.

        Each number moves by the share that it has in the prediction, so a small transfer teaches
        latency and a large one bandwidth. An outlier moves no more than a doubling would.
        """
        predicted = self.predict(shape)
        error = math.log(max(seconds, MIN_LATENCY_S) / predicted)
        error = min(MAX_STEP, max(-MAX_STEP, error))
        shares = (
            self.latency_s / predicted,
            shape.num_descriptors * self.descriptor_s / predicted,
            shape.num_bytes * self.byte_s / predicted,
        )
        step = self._learning_rate() * error / sum(share * share for share in shares)
        latency, descriptor, byte = (math.exp(step * share) for share in shares)
        return replace(
            self,
            latency_s=max(MIN_LATENCY_S, self.latency_s * latency),
            descriptor_s=max(MIN_DESCRIPTOR_S, self.descriptor_s * descriptor),
            byte_s=max(MIN_BYTE_S, self.byte_s * byte),
            num_transfers=self.num_transfers + 1,
        )

    def _learning_rate(self) -> float:
        """A guess gives way at once, a measurement slowly."""
        known = self.num_probes + self.num_transfers
        return max(LEARNING_RATE, FIRST_LEARNING_RATE / (1 + known / 4))
