"""Computes a step's tokens: the model over its pages, then sampling."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from blake3 import blake3

from baton.engines.interface import PrefillRequest, SamplingParams
from baton.engines.transformers.attention import Span, Step
from baton.engines.transformers.pages import KVPages, PagedCache
from baton.engines.transformers.sequence import LayerLateError
from baton.handoff.interface import HandoffPort, SampledToken, TokenLogprob
from baton.telemetry.trace import Stamp

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from baton.clock import Clock
    from baton.engines.transformers.scheduler import Work
    from baton.engines.transformers.shape import ModelShape


MAX_LANDING_WAIT_S: Final = 1.0
"""A step waits so long for layers that land; requests that come meanwhile wait for the step."""


@dataclass(frozen=True, slots=True)
class Draw:
    """What one token is drawn with: number `index` of its answer, `banned` ids left out."""

    params: SamplingParams
    seed: int
    index: int
    banned: tuple[int, ...]


def sample(logits: torch.Tensor, draws: Sequence[Draw]) -> list[SampledToken]:
    """One token for each row of `logits`, `[len(draws), vocabulary]`.

    Reported log-probabilities are those of the model: before temperature, bans and cuts.
    """
    logits = logits.float()
    allowed = logits
    if any(draw.banned for draw in draws):
        allowed = logits.clone()
        for row, draw in enumerate(draws):
            allowed[row, list(draw.banned)] = float("-inf")
    chosen: list[int] = allowed.argmax(dim=-1).tolist()
    for row, draw in enumerate(draws):
        if draw.params.temperature > 0:
            chosen[row] = _sample_row(allowed[row], draw)
    return [
        _describe(logits[row], token, draw.params.num_logprobs)
        for row, (token, draw) in enumerate(zip(chosen, draws, strict=True))
    ]


def draw_noise(seed: int, index: int, vocabulary: int) -> NDArray[np.float64]:
    """One Gumbel variate for each token: by the arguments alone, the same on every machine."""
    key = int.from_bytes(
        blake3(struct.pack("<Qq", seed % 2**64, index)).digest(length=16), "little"
    )
    # The raw stream: numpy never changes it; its floating-point draws it may.
    uniform = ((np.random.Philox(key=key).random_raw(vocabulary) >> 11) + 0.5) * 2.0**-53
    return -np.log(-np.log(uniform))  # type: ignore[no-any-return]


def _sample_row(logits: torch.Tensor, draw: Draw) -> int:
    """The Gumbel maximum of what temperature, top-k and top-p leave (Gumbel 1954).

    Not the inverse of the cumulative distribution: one changed logit moves every boundary behind
    it, and rounding (1e-5, as from another batch) gave another token in 1 of 800 draws out of
    4,096. Here only two tokens that draw level can change places.
    """
    params = draw.params
    # Differences to the likeliest: however low the temperature, that one stays 0.
    noisy = (logits.double() - logits.max()) / params.temperature
    num_kept = min(params.top_k or len(logits), len(logits))
    if num_kept < len(logits) or params.top_p < 1:
        # Sorted by a stable order: equal logits keep the order of their ids on every worker.
        ordered, ids = noisy.sort(descending=True, stable=True)
        probabilities = ordered[:num_kept].softmax(dim=-1)
        before = probabilities.cumsum(dim=-1) - probabilities
        num_kept = max(int((before < params.top_p).sum()), 1)
        noisy[ids[num_kept:]] = float("-inf")
    noise = draw_noise(draw.seed, draw.index, len(logits))
    noisy += torch.from_numpy(noise).to(noisy.device)
    return int(noisy.argmax())


def _describe(logits: torch.Tensor, token: int, num_logprobs: int | None) -> SampledToken:
    if num_logprobs is None:
        return SampledToken(token)
    logprobs = logits.log_softmax(dim=-1)
    values, ids = logprobs.topk(min(num_logprobs, len(logprobs)))
    top = zip(ids.tolist(), values.tolist(), strict=True)
    return SampledToken(
        token, float(logprobs[token]), tuple(TokenLogprob(int(i), float(p)) for i, p in top)
    )


class PagedModel:
    """A transformers model over pages. Owned by the engine's thread."""

    def __init__(self, model: Any, shape: ModelShape, pages: KVPages, block_size: int) -> None:  # noqa: ANN401
        self._model, self._windows, self._block_size = model, shape.windows, block_size
        self._cache = PagedCache(pages)

    def run(
        self,
        spans: Sequence[Span],
        on_layer: Callable[[int], None],
        before_layer: Callable[[int], None] | None = None,
    ) -> torch.Tensor:
        """Compute the spans' tokens, filling their pages. For the callbacks see `PagedCache`.

        Returns:
            Logits `[spans that need them, vocabulary]`, in the spans' order.
        """
        step = Step(spans, self._block_size, self._model.device)
        self._cache.begin_step(step, on_layer, before_layer)
        with torch.inference_mode():
            output = self._model(
                input_ids=step.input_ids,
                position_ids=step.position_ids,
                past_key_values=self._cache,
                use_cache=True,
                logits_to_keep=step.logits_rows,
                paged_step=step,
                layer_windows=self._windows,
            )
        self._cache.finish_step()
        logits: torch.Tensor = output.logits[0]
        return logits


class ModelRunner:
    """Runs steps, and reports each ready layer to the handoff. Engine's thread only."""

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

        Raises whatever the model raises; then some layers of the step may be in place. So they may
        where a layer that lands is late.

        Raises:
            LayerLateError: of a work with `Sequence.landing` a layer has not landed in time.
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

        began = self._clock.now()
        landing = [work.sequence.landing for work in step if work.sequence.landing is not None]

        def before_layer(layer: int) -> None:
            for layers in landing:
                left_s = began + MAX_LANDING_WAIT_S - self._clock.now()
                if not layers.wait(layer, max(0.0, left_s)):
                    raise LayerLateError(f"layer {layer} has not landed")

        self._stamp(prefills, Stamp.PREFILL_STARTED)
        self._stamp([work for work in step if not work.is_prefill], Stamp.DECODE_SCHEDULED)
        spans = [_make_span(work) for work in step]
        logits = self._model.run(spans, on_layer, before_layer if landing else None)
        tokens = iter(sample(logits, [self._make_draw(work) for work in step if work.samples]))
        sampled = [next(tokens) if work.samples else None for work in step]
        if prefills:
            ended = self._clock.now()
            for work in prefills:
                work.sequence.request.trace.note_chunk(began, ended, work.num_tokens)
        return sampled

    def _make_draw(self, work: Work) -> Draw:
        sequence = work.sequence
        return Draw(
            sequence.request.sampling,
            sequence.seed,
            sequence.request.sampling.first_index + sequence.num_output_tokens,
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
