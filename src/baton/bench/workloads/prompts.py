"""Segments → prompts of token ids or words; equal seeds give equal prompts."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from baton.bench.workloads.requests import Segment, Segments

FIRST_TOKEN_ID: Final = 256
END_TOKEN_ID: Final = 2048
"""Ids `[256, 2048)` are ordinary text in nearly every vocabulary: special tokens are before or far
after them."""

_TEXT: Final = (
    "time year people way day man thing woman life child world school state family student group "
    "country problem hand part place case week company system program question work government "
    "number night point home water room mother area money story fact month lot right study book "
    "eye job word business issue side kind head house service friend father power hour game line "
    "end member law car city name team minute idea body back parent face level office door health "
    "person art war history party result change morning reason research moment air teacher"
)
WORDS: Final = tuple(_TEXT.split())


@dataclass(frozen=True, slots=True)
class TokenIds:
    """The range of token ids in prompts: `[first, end)`."""

    first: int = FIRST_TOKEN_ID
    end: int = END_TOKEN_ID


@dataclass(frozen=True, slots=True)
class Calibration:
    """How a server's tokenizer counts words: `overhead_tokens + tokens_per_word * num_words`."""

    tokens_per_word: float
    overhead_tokens: float


@dataclass(frozen=True, slots=True)
class PromptWriter:
    """Generates prompts. Immutable; the seed is any text."""

    seed: str

    def write_ids(self, prompt: Segments, ids: TokenIds) -> list[int]:
        """As many token ids as the prompt has tokens."""
        drawn = [self._draw(part, part.num_tokens, ids.end - ids.first) for part in prompt.parts]
        tokens: list[int] = (np.concatenate(drawn) + ids.first).tolist()
        return tokens

    def write_words(self, prompt: Segments, calibration: Calibration) -> str:
        """Words that make about this many tokens, the server's own tokens included."""
        missing = calibration.overhead_tokens
        words: list[str] = []
        for part in prompt.parts:
            num_tokens = max(0.0, part.num_tokens - missing)
            missing = max(0.0, missing - part.num_tokens)
            num_words = max(1, round(num_tokens / calibration.tokens_per_word))
            words += [WORDS[i] for i in self._draw(part, num_words, len(WORDS))]
        return " ".join(words)

    def _draw(self, part: Segment, num_draws: int, num_choices: int) -> NDArray[np.int64]:
        name = hashlib.blake2b(f"{self.seed}\0{part.key}".encode(), digest_size=16).digest()
        rng = np.random.default_rng(int.from_bytes(name, "big"))
        return rng.integers(num_choices, size=num_draws)


def calibrate(num_words: tuple[int, int], num_tokens: tuple[int, int]) -> Calibration | None:
    """The line through two measured prompts; None where it does not rise."""
    slope = (num_tokens[1] - num_tokens[0]) / (num_words[1] - num_words[0])
    if slope <= 0:
        return None
    return Calibration(slope, max(0.0, num_tokens[0] - slope * num_words[0]))
