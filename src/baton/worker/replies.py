"""OpenAI's whole answers, as schemas."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from baton.handoff.interface import SampledToken
from baton.worker.logprobs import ChatLogprobs, CompletionLogprobs

if TYPE_CHECKING:
    from baton.worker.output_processor import OutputProcessor


class PromptTokensDetails(msgspec.Struct, frozen=True):
    """Where prompt tokens came from."""

    cached_tokens: int


class Usage(msgspec.Struct, frozen=True):
    """Tokens of one request; an end token counts as a completion token."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class CompletionChoice(msgspec.Struct, frozen=True):
    """The one choice of a completion."""

    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str
    index: int = 0


class CompletionReply(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of `POST /v1/completions`."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: tuple[CompletionChoice]
    usage: Usage


class ChatReplyMessage(msgspec.Struct, frozen=True):
    """The assistant's message."""

    content: str
    role: str = "assistant"
    refusal: None = None


class ChatChoice(msgspec.Struct, frozen=True):
    """The one choice of a chat completion."""

    message: ChatReplyMessage
    logprobs: ChatLogprobs | None
    finish_reason: str
    index: int = 0


class ChatReply(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of `POST /v1/chat/completions`."""

    id: str
    object: str = "chat.completion"
    created: int
    model: str
    choices: tuple[ChatChoice]
    usage: Usage


class PrefillReply(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of a prefill leg: the KV and the first token are with the decode worker."""

    object: str = "baton.prefill"
    request_id: str
    prompt_tokens: int
    cached_tokens: int


class FirstToken(msgspec.Struct, frozen=True):
    """The first token of an answer, and the events with which its stream begins."""

    token: SampledToken
    events: str


class EarlyPrefillReply(PrefillReply, frozen=True, kw_only=True):
    """The answer of a prefill leg that says its first token early. None: it ends the answer."""

    first: FirstToken | None


class ReplyHead(msgspec.Struct, frozen=True):
    """What all parts of one answer share; `created` is Unix seconds."""

    request_id: str
    model: str
    created: int


def count_usage(num_prompt_tokens: int, answer: OutputProcessor) -> Usage:
    """Usage of an answer so far."""
    return Usage(
        prompt_tokens=num_prompt_tokens,
        completion_tokens=answer.num_tokens,
        total_tokens=num_prompt_tokens + answer.num_tokens,
        prompt_tokens_details=PromptTokensDetails(answer.num_cached_tokens),
    )
