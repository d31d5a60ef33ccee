"""A step's work through the model: sequences in, sampled tokens out."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from baton.engines.interface import PrefillRequest
from baton.engines.transformers.sampling import Draw, sample
from baton.engines.transformers.step import Span
from baton.telemetry.trace import Stamp

if TYPE_CHECKING:
    from collections.abc import Sequence

    from baton.clock import Clock
    from baton.engines.transformers.forward import PagedModel
    from baton.engines.transformers.scheduler import Work
    from baton.handoff.interface import HandoffPort, SampledToken


class ModelRunner:
    """Runs steps, and tells the handoff of each layer that is ready. Engine's thread only."""

    def __init__(
        self,
        model: PagedModel,
        handoff: HandoffPort,
        clock: Clock,
        eos_token_ids: tuple[int, ...],
    ) -> None:
        self._model, self._handoff, self._clock = model, handoff, clock
        self._eos_token_ids = eos_token_ids

    def compute(self, step: Sequence[Work]) -> list[SampledToken | None]:
        """For each work, the token that follows it; None where more of its prompt is to come.

        Raises whatever the model raises; then some layers of the step may be in place.
        """
        prefills = [work for work in step if work.is_prefill]
        sends = [
            (work.sequence.kind.ticket.id, work.stop)
            for work in step
            if isinstance(work.sequence.kind, PrefillRequest)
        ]

        def on_layer(layer: int) -> None:
            if layer == 0:
                self._stamp(prefills, Stamp.FIRST_LAYER_READY)
            if sends:
                self._handoff.layer_ready(sends, layer)

        self._stamp(prefills, Stamp.PREFILL_STARTED)
        self._stamp([work for work in step if not work.is_prefill], Stamp.DECODE_SCHEDULED)
        logits = self._model.run([_make_span(work) for work in step], on_layer)
        tokens = iter(sample(logits, [self._make_draw(work) for work in step if work.samples]))
        return [next(tokens) if work.samples else None for work in step]

    def _make_draw(self, work: Work) -> Draw:
        sequence = work.sequence
        return Draw(
            sequence.request.sampling,
            sequence.seed,
            sequence.num_output_tokens,
            sequence.banned_tokens(self._eos_token_ids),
        )

    def _stamp(self, step: Sequence[Work], name: Stamp) -> None:
        now = self._clock.now()
        for work in step:
            work.sequence.request.trace.stamp(name, now)


def _make_span(work: Work) -> Span:
    sequence = work.sequence
    return Span(
        token_ids=sequence.token_ids(sequence.num_computed, work.stop).astype(np.int64),
        start=sequence.num_computed,
        blocks=np.array(sequence.blocks, dtype=np.int64),
        needs_logits=work.samples,
    )
