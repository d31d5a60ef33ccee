"""An answer whose first tokens another worker has sent: what is left to compute, and to send.

    prompt │ given: prefilled like the prompt │ again: computed a second time │ new: sent
           └──────────── tokens that the client has ──────────────────────────┘

Tokens are computed again only where log-probabilities are wanted, and only those whose text is
held back (a part of a character, the beginning of a stop string): theirs were not sent.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np

from baton.engines.interface import NewToken
from baton.errors import EngineError
from baton.handoff.interface import SampledToken
from baton.ids import RequestId
from baton.worker.output_processor import OutputProcessor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from baton.tokenizer.tokenizer import Tokenizer
    from baton.worker.prompts import Generation

NUM_AT_ONCE: Final = 64
"""Tokens turned into text again before other requests have their turn."""


@dataclass(frozen=True, slots=True)
class KnownTokens:
    """The tokens that the client has of an answer."""

    given: tuple[int, ...] = ()
    again: tuple[int, ...] = ()

    def to_compute(self, generation: Generation) -> Generation:
        """The request as an engine sees it: what is given belongs to the prompt."""
        num = len(self.given)
        if not num:
            return generation
        sampling = generation.sampling
        return replace(
            generation,
            prompt_ids=np.concatenate([generation.prompt_ids, np.array(self.given, np.int32)]),
            sampling=msgspec.structs.replace(
                sampling,
                max_tokens=sampling.max_tokens - num,
                min_tokens=max(0, sampling.min_tokens - num),
                first_index=num,
            ),
        )

    async def restore(self, generation: Generation, tokenizer: Tokenizer) -> OutputProcessor:
        """The answer as it stood when the given tokens had been sent."""
        return await _push_all(self.given, generation, tokenizer)

    async def extended(
        self, ids: Sequence[int], generation: Generation, tokenizer: Tokenizer
    ) -> KnownTokens:
        """With more tokens, which another worker has sent meanwhile."""
        return await _split((*self.given, *self.again, *ids), generation, tokenizer)

    def skip(self, num_seen: int, tokens: Sequence[NewToken]) -> int:
        """How many of the tokens are computed again, after `num_seen` others.

        Raises:
            EngineError: one is another than the client has.
        """
        again = self.again[num_seen : num_seen + len(tokens)]
        if any(token.token.token_id != known for token, known in zip(tokens, again, strict=False)):
            raise EngineError("a token that was computed again is not the one that was sent")
        return len(again)


async def find_known_tokens(generation: Generation, tokenizer: Tokenizer) -> KnownTokens:
    """What the client has of an answer, and what of that must be computed again."""
    if generation.resume is None:
        return KnownTokens()
    ids = tuple(generation.resume.token_ids)
    if generation.resume.is_complete:
        return KnownTokens(ids)
    return await _split(ids, generation, tokenizer)


async def _split(ids: tuple[int, ...], generation: Generation, tokenizer: Tokenizer) -> KnownTokens:
    if generation.sampling.num_logprobs is None:
        return KnownTokens(ids)
    num_waiting = (await _push_all(ids, generation, tokenizer)).num_waiting
    return KnownTokens(ids[: len(ids) - num_waiting], ids[len(ids) - num_waiting :])


async def _push_all(
    ids: tuple[int, ...], generation: Generation, tokenizer: Tokenizer
) -> OutputProcessor:
    answer = OutputProcessor(generation, tokenizer)
    for number, token_id in enumerate(ids):
        if number % NUM_AT_ONCE == NUM_AT_ONCE - 1:
            await asyncio.sleep(0)
        answer.push(NewToken(RequestId(""), SampledToken(token_id), 0))
    return answer
