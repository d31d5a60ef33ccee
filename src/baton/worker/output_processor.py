"""One answer: tokens in, pieces of text out. Pure; reads no clock.

tokens ─► detokenizer ─► stop strings ─► released text, with the log-probabilities of every
                                         token whose text begins in it
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, assert_never

from baton.engines.interface import FinishReason
from baton.worker.detokenizer import NUM_CONTEXT_TOKENS, IncrementalDetokenizer
from baton.worker.logprobs import TokenEntry
from baton.worker.stop_strings import Passed, Stopped, StopStrings

if TYPE_CHECKING:
    from baton.engines.interface import NewToken
    from baton.worker.prompts import Generation
    from baton.worker.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class TextChunk:
    """Text that may be shown now; `finish` is set on the last piece."""

    text: str
    entries: tuple[TokenEntry, ...]
    finish: FinishReason | None

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to send."""
        return not self.text and not self.entries and self.finish is None


class OutputProcessor:
    """Builds one answer. `num_tokens` counts what was sampled, an end token included."""

    def __init__(self, generation: Generation, tokenizer: Tokenizer) -> None:
        self._detokenizer = IncrementalDetokenizer(
            tokenizer,
            generation.prompt_ids[-NUM_CONTEXT_TOKENS:].tolist(),
            skip_special_tokens=generation.skip_special_tokens,
        )
        self._stops = StopStrings(generation.stops)
        self._min_tokens = generation.sampling.min_tokens
        self._wants_entries = generation.sampling.num_logprobs is not None
        self._waiting: list[TokenEntry] = []
        self._num_detokenized = 0
        self._num_released = 0
        self.num_tokens = 0
        self.num_cached_tokens = 0

    def push(self, token: NewToken) -> TextChunk:
        """Add a token; after a piece with `finish` no token may follow."""
        self.num_tokens += 1
        self.num_cached_tokens = token.num_cached_tokens
        text = "" if token.hidden else self._detokenize(token)
        if token.finish is not None:
            text += self._detokenizer.finish()
        self._num_detokenized += len(text)
        if self.num_tokens < self._min_tokens:
            return self._release(text, token.finish)
        match self._stops.push(text):
            case Stopped(before):
                return self._stop(before)
            case Passed(passed):
                held = "" if token.finish is None else self._stops.flush()
                return self._release(passed + held, token.finish)
            case other:
                assert_never(other)

    def _detokenize(self, token: NewToken) -> str:
        if self._wants_entries:
            self._waiting.append(TokenEntry(token.token, self._num_detokenized))
        return self._detokenizer.push(token.token.token_id)

    def _stop(self, before: str) -> TextChunk:
        """A stop string was completed: tokens whose text begins in it are not shown."""
        self._num_released += len(before)
        return TextChunk(before, self._shown(), FinishReason.STOP)

    def _release(self, text: str, finish: FinishReason | None) -> TextChunk:
        self._num_released += len(text)
        entries = self._shown() if finish is None else tuple(self._waiting)
        del self._waiting[: len(entries)]
        return TextChunk(text, entries, finish)

    def _shown(self) -> tuple[TokenEntry, ...]:
        return tuple(e for e in self._waiting if e.text_offset < self._num_released)
