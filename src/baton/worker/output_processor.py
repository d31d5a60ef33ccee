"""Tokens to text: detokenizer, stop strings, log-probabilities."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, assert_never

import msgspec

from baton.engines.interface import FinishReason, NewToken

if TYPE_CHECKING:
    from collections.abc import Sequence

    from baton.handoff.interface import SampledToken
    from baton.tokenizer.tokenizer import Tokenizer
    from baton.worker.prompts import Generation

REPLACEMENT: Final = "\ufffd"
NUM_CONTEXT_TOKENS: Final = 5
MAX_PENDING_TOKENS: Final = 8
"""A character has at most 4 bytes, so more pending tokens than this can only be garbage."""


class IncrementalDetokenizer:
    """One answer's tokens → text. The prompt's last tokens give the first token its context."""

    def __init__(
        self, tokenizer: Tokenizer, prompt_tail: Sequence[int], *, skip_special_tokens: bool
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special_tokens
        self._window = list(prompt_tail[-NUM_CONTEXT_TOKENS:])
        self._split = len(self._window)
        self._settled_text = self._decode(self._window)

    def push(self, token_id: int) -> str:
        """Add a token; the text that is now certain, possibly none."""
        self._window.append(token_id)
        text = self._decode(self._window)
        if text.endswith(REPLACEMENT) and len(self._window) - self._split < MAX_PENDING_TOKENS:
            return ""
        return self._settle(text)

    def finish(self) -> str:
        """The text of what is still pending: no more tokens will complete it."""
        return self._settle(self._decode(self._window))

    def _settle(self, text: str) -> str:
        new = text[len(self._settled_text) :]
        if text.endswith(REPLACEMENT):
            # Cut here: a later token must not change what has been emitted.
            self._window.clear()
        else:
            del self._window[: self._split]
        self._split = len(self._window)
        self._settled_text = self._decode(self._window)
        return new

    def _decode(self, tokens: Sequence[int]) -> str:
        if not tokens:
            return ""
        return self._tokenizer.decode(tokens, skip_special_tokens=self._skip_special)


@dataclass(frozen=True, slots=True)
class Passed:
    """Text that is certainly not part of a stop string; the rest is held back."""

    text: str


@dataclass(frozen=True, slots=True)
class Stopped:
    """A stop string was completed; `text` is what stands before it."""

    text: str


class StopStrings:
    """Watches one answer's text for stop strings; none at all lets everything pass."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""

    def push(self, text: str) -> Passed | Stopped:
        """Add text; what may be emitted of all that was held back so far."""
        if not self._stops:
            return Passed(text)
        buffer = self._held + text
        start = self._first_completed(buffer)
        if start is not None:
            self._held = ""
            return Stopped(buffer[:start])
        cut = len(buffer) - self._num_suspect(buffer)
        self._held = buffer[cut:]
        return Passed(buffer[:cut])

    def flush(self) -> str:
        """What is held back, when nothing more will come or stops do not count yet."""
        held, self._held = self._held, ""
        return held

    def _first_completed(self, buffer: str) -> int | None:
        found = [(at + len(stop), at) for stop in self._stops if (at := buffer.find(stop)) >= 0]
        return min(found)[1] if found else None

    def _num_suspect(self, buffer: str) -> int:
        """Length of the longest end of `buffer` that begins some stop string."""
        longest = 0
        for stop in self._stops:
            for length in range(min(len(stop) - 1, len(buffer)), longest, -1):
                if buffer.endswith(stop[:length]):
                    longest = length
                    break
        return longest


LOWEST: Final = -9999.0
"""JSON has no minus infinity: OpenAI's stand-in for a token that cannot be sampled."""


class TopLogprob(msgspec.Struct, frozen=True):
    """A token that could have been sampled."""

    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(msgspec.Struct, frozen=True):
    """A token of a chat's answer."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True):
    """`choices[0].logprobs` of a chat completion."""

    content: list[ChatTokenLogprob]
    refusal: None = None


class CompletionLogprobs(msgspec.Struct, frozen=True):
    """`choices[0].logprobs` of a completion: parallel lists, as OpenAI defined them."""

    text_offset: list[int]
    token_logprobs: list[float]
    tokens: list[str]
    top_logprobs: list[dict[str, float]]


@dataclass(frozen=True, slots=True)
class TokenEntry:
    """One sampled token, and where its text begins in the answer (characters)."""

    token: SampledToken
    text_offset: int


def chat_logprobs(entries: Sequence[TokenEntry], tokenizer: Tokenizer) -> ChatLogprobs:
    """Entries in the shape of the chat API."""
    return ChatLogprobs([_chat_token(entry.token, tokenizer) for entry in entries])


def completion_logprobs(entries: Sequence[TokenEntry], tokenizer: Tokenizer) -> CompletionLogprobs:
    """Entries in the shape of the completions API; the sampled token is always among the top."""
    return CompletionLogprobs(
        text_offset=[entry.text_offset for entry in entries],
        token_logprobs=[_finite(entry.token.logprob) for entry in entries],
        tokens=[_spell(entry.token.token_id, tokenizer) for entry in entries],
        top_logprobs=[_completion_top(entry.token, tokenizer) for entry in entries],
    )


def _chat_token(token: SampledToken, tokenizer: Tokenizer) -> ChatTokenLogprob:
    raw = tokenizer.token_bytes(token.token_id)
    return ChatTokenLogprob(
        token=raw.decode(errors="replace"),
        logprob=_finite(token.logprob),
        bytes=list(raw),
        top_logprobs=[_top(top.token_id, top.logprob, tokenizer) for top in token.top],
    )


def _top(token_id: int, logprob: float, tokenizer: Tokenizer) -> TopLogprob:
    raw = tokenizer.token_bytes(token_id)
    return TopLogprob(raw.decode(errors="replace"), _finite(logprob), list(raw))


def _completion_top(token: SampledToken, tokenizer: Tokenizer) -> dict[str, float]:
    top = {_spell(one.token_id, tokenizer): _finite(one.logprob) for one in token.top}
    top.setdefault(_spell(token.token_id, tokenizer), _finite(token.logprob))
    return top


def _spell(token_id: int, tokenizer: Tokenizer) -> str:
    """A token as text; a part of a character as OpenAI writes it: `bytes:` and hex escapes."""
    raw = tokenizer.token_bytes(token_id)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def _finite(logprob: float | None) -> float:
    return LOWEST if logprob is None else max(logprob, LOWEST)


@dataclass(frozen=True, slots=True)
class TextChunk:
    """Text that may be shown once this token is there; `finish` is set on the last piece."""

    token_id: int
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
            return self._release(token, text)
        match self._stops.push(text):
            case Stopped(before):
                return self._stop(token, before)
            case Passed(passed):
                held = "" if token.finish is None else self._stops.flush()
                return self._release(token, passed + held)
            case other:
                assert_never(other)

    @property
    def num_waiting(self) -> int:
        """Tokens whose log-probabilities wait for their text."""
        return len(self._waiting)

    def _detokenize(self, token: NewToken) -> str:
        if self._wants_entries:
            self._waiting.append(TokenEntry(token.token, self._num_detokenized))
        return self._detokenizer.push(token.token.token_id)

    def _stop(self, token: NewToken, before: str) -> TextChunk:
        """A stop string was completed: tokens whose text begins in it are not shown."""
        self._num_released += len(before)
        return TextChunk(token.token.token_id, before, self._shown(), FinishReason.STOP)

    def _release(self, token: NewToken, text: str) -> TextChunk:
        self._num_released += len(text)
        entries = self._shown() if token.finish is None else tuple(self._waiting)
        del self._waiting[: len(entries)]
        return TextChunk(token.token.token_id, text, entries, token.finish)

    def _shown(self) -> tuple[TokenEntry, ...]:
        return tuple(e for e in self._waiting if e.text_offset < self._num_released)
