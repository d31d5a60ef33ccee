"""Choosing tokens: the same token from the same logits on every worker.

Token number `i` of an answer depends on `(seed, i)` and its logits alone, so that the prefill
worker samples exactly the first token that the decode worker would have sampled.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch
from blake3 import blake3

from baton.handoff.interface import SampledToken, TokenLogprob

if TYPE_CHECKING:
    from collections.abc import Sequence

    from baton.engines.interface import SamplingParams

_UNIT: Final = 2.0**-53


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


def compute_uniform(seed: int, index: int) -> float:
    """A number in [0, 1) that depends on its arguments alone, on every machine."""
    digest = blake3(struct.pack("<Qq", seed % 2**64, index)).digest(length=8)
    return float(int.from_bytes(digest, "little") >> 11) * _UNIT


def _sample_row(logits: torch.Tensor, draw: Draw) -> int:
    """Invert the cumulative distribution of what temperature, top-k and top-p leave."""
    params = draw.params
    num_kept = min(params.top_k or len(logits), len(logits))
    scaled = logits.double() / params.temperature
    if num_kept == len(logits) and params.top_p >= 1:
        ids, probabilities = None, scaled.softmax(dim=-1)
    else:
        # Sorted by a stable order: equal logits keep the order of their ids on every worker.
        ordered, ids = scaled.sort(descending=True, stable=True)
        probabilities = ordered[:num_kept].softmax(dim=-1)
        before = probabilities.cumsum(dim=-1) - probabilities
        probabilities = probabilities * (before < max(params.top_p, _UNIT))
    cumulative = probabilities.cumsum(dim=-1)
    target = compute_uniform(draw.seed, draw.index) * cumulative[-1]
    place = int(torch.searchsorted(cumulative, target, right=True))
    # Rounding can put the target on the total itself: then the last likely token is meant.
    place = min(place, int(probabilities.nonzero()[-1]))
    return place if ids is None else int(ids[place])


def _describe(logits: torch.Tensor, token: int, num_logprobs: int | None) -> SampledToken:
    if num_logprobs is None:
        return SampledToken(token)
    logprobs = logits.log_softmax(dim=-1)
    values, ids = logprobs.topk(min(num_logprobs, len(logprobs)))
    top = zip(ids.tolist(), values.tolist(), strict=True)
    return SampledToken(
        token, float(logprobs[token]), tuple(TokenLogprob(int(i), float(p)) for i, p in top)
    )
