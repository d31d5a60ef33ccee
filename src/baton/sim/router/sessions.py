"""What is asked of simulated workers: prompts by runs of tokens, of which equal keys are equal."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

TOKEN_BITS: Final = 17
_MIX: Final = np.uint64(0x9E37_79B9_7F4A_7C15)


@dataclass(frozen=True, slots=True)
class TokenRun:
    """Tokens of a prompt, or of an answer. Runs of equal keys begin with equal tokens."""

    key: str
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Turn:
    """One request. `answer_key` names the run that its answer is, where a later prompt has it."""

    prompt: tuple[TokenRun, ...]
    num_answer_tokens: int
    answer_key: str | None = None

    @property
    def num_prompt_tokens(self) -> int:
        """Of all runs."""
        return sum(run.num_tokens for run in self.prompt)

    @property
    def num_tokens(self) -> int:
        """Of prompt and answer: what its worker must have room for."""
        return self.num_prompt_tokens + self.num_answer_tokens


@dataclass(frozen=True, slots=True)
class Session:
    """Turns in sequence: each is asked `pause_s` after the answer to the one before.

    `arrival_s`: when the first is asked; None: when a client is free.
    """

    turns: tuple[Turn, ...]
    arrival_s: float | None = None
    pause_s: float = 0.0


class TokenWriter:
    """Generates the tokens of runs. The same seed, the same tokens."""

    def __init__(self, seed: int) -> None:
        self._seed = seed.to_bytes(8, "little", signed=True)

    def write(self, runs: Sequence[TokenRun]) -> NDArray[np.int32]:
        """Token ids `[num_tokens]`."""
        return np.concatenate([self._draw(run) for run in runs])

    def _draw(self, run: TokenRun) -> NDArray[np.int32]:
        digest = hashlib.blake2b(run.key.encode(), key=self._seed, digest_size=8).digest()
        first = np.uint64(int.from_bytes(digest, "little"))
        mixed = (np.arange(run.num_tokens, dtype=np.uint64) + first) * _MIX
        return (mixed >> np.uint64(64 - TOKEN_BITS)).astype(np.int32)
