"""Log-probabilities of an answer's tokens, in the shapes of OpenAI's two APIs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import msgspec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from baton.handoff.interface import SampledToken
    from baton.worker.tokenizer import Tokenizer

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
