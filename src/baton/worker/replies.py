"""Answers of the two generating APIs, whole and as server-sent events."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

import msgspec

from baton.worker.fields import parse_chat, parse_completion
from baton.worker.output_processor import (
    ChatLogprobs,
    CompletionLogprobs,
    chat_logprobs,
    completion_logprobs,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from baton.engines.interface import FinishReason
    from baton.protocol.worker_http import ErrorBody
    from baton.worker.output_processor import OutputProcessor, TokenEntry
    from baton.worker.prompts import Generation, PromptReader


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


class ReplyHead(msgspec.Struct, frozen=True):
    """What all parts of one answer share; `created` is Unix seconds."""

    request_id: str
    model: str
    created: int


def count_usage(num_prompt_tokens: int, answer: OutputProcessor) -> Usage:
    """Usage of an answer so far. Of a resumed one, more than the prompt may have been cached."""
    return Usage(
        prompt_tokens=num_prompt_tokens,
        completion_tokens=answer.num_tokens,
        total_tokens=num_prompt_tokens + answer.num_tokens,
        prompt_tokens_details=PromptTokensDetails(min(num_prompt_tokens, answer.num_cached_tokens)),
    )


_encode: Final = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class EventShape:
    """How one API's events differ: id prefix, object, what stands around the text, the opening."""

    id_prefix: str
    object: str
    before_text: bytes
    after_text: bytes
    opening: bytes | None


COMPLETION_EVENTS: Final = EventShape(
    id_prefix="cmpl-",
    object="text_completion",
    before_text=b'"text":',
    after_text=b"",
    opening=None,
)
CHAT_EVENTS: Final = EventShape(
    id_prefix="chatcmpl-",
    object="chat.completion.chunk",
    before_text=b'"delta":{"content":',
    after_text=b"}",
    opening=b'"delta":{"role":"assistant","content":""}',
)


class _EventHead(msgspec.Struct, frozen=True):
    id: str
    object: str
    created: int
    model: str


class EventWriter:
    """Encodes the events of one answer."""

    def __init__(self, shape: EventShape, head: ReplyHead, *, include_usage: bool) -> None:
        fields = _EventHead(
            shape.id_prefix + head.request_id, shape.object, head.created, head.model
        )
        self._head = b"data: " + _encode(fields)[:-1] + b',"choices":['
        self._tail = (b',"usage":null' if include_usage else b"") + b"}\n\n"
        self._before = self._head + b'{"index":0,' + shape.before_text
        self._after = shape.after_text + b',"logprobs":'
        self._opening = shape.opening

    def opening(self) -> bytes:
        """The event before all text, if this API has one."""
        if self._opening is None:
            return b""
        return b"%b{%b,%b}]%b" % (
            self._head,
            b'"index":0,' + self._opening,
            b'"logprobs":null,"finish_reason":null',
            self._tail,
        )

    def text(
        self,
        text: str,
        logprobs: ChatLogprobs | CompletionLogprobs | None,
        finish: FinishReason | None,
    ) -> bytes:
        """The event of one piece of text."""
        return b"%b%b%b%b%b%b}]%b" % (
            self._before,
            _encode(text),
            self._after,
            b"null" if logprobs is None else _encode(logprobs),
            b',"finish_reason":',
            b"null" if finish is None else _encode(finish),
            self._tail,
        )

    def usage(self, usage: Usage) -> bytes:
        """The event after all text, with no choices."""
        return b'%b],"usage":%b}\n\n' % (self._head, _encode(usage))


def token_ids_line(ids: Sequence[int]) -> bytes:
    """A comment before an event: the tokens that it ends. Only for a gateway that asks."""
    return b":%b\n" % ",".join(map(str, ids)).encode()


def error_event(body: ErrorBody) -> bytes:
    """The event of a failure in mid-stream."""
    return b"data: %b\n\n" % _encode(body)


@dataclass(frozen=True, slots=True)
class CompleteAnswer:
    """A finished answer; `entries` None when no log-probabilities were asked for."""

    text: str
    entries: tuple[TokenEntry, ...] | None
    finish: FinishReason
    usage: Usage


class ApiAdapter(Protocol):
    """One of OpenAI's generating APIs."""

    events: EventShape

    async def read(self, body: bytes) -> Generation:
        """Read a request's body.

        Raises:
            InvalidRequestError: gives what, why and what to do.
        """
        ...

    def logprobs(self, entries: Sequence[TokenEntry]) -> ChatLogprobs | CompletionLogprobs:
        """Log-probabilities in this API's shape."""
        ...

    def reply(self, head: ReplyHead, whole: CompleteAnswer) -> ChatReply | CompletionReply:
        """The answer as one object."""
        ...


class CompletionAdapter:
    """`POST /v1/completions`."""

    events = COMPLETION_EVENTS

    def __init__(self, reader: PromptReader) -> None:
        self._reader = reader

    async def read(self, body: bytes) -> Generation:
        """See `ApiAdapter`."""
        return await self._reader.read_completion(
            parse_completion(body, self._reader.max_prompt_tokens)
        )

    def logprobs(self, entries: Sequence[TokenEntry]) -> CompletionLogprobs:
        """See `ApiAdapter`."""
        return completion_logprobs(entries, self._reader.tokenizer)

    def reply(self, head: ReplyHead, whole: CompleteAnswer) -> CompletionReply:
        """See `ApiAdapter`."""
        logprobs = None if whole.entries is None else self.logprobs(whole.entries)
        return CompletionReply(
            id=self.events.id_prefix + head.request_id,
            created=head.created,
            model=head.model,
            choices=(CompletionChoice(whole.text, logprobs, whole.finish),),
            usage=whole.usage,
        )


class ChatAdapter:
    """`POST /v1/chat/completions`."""

    events = CHAT_EVENTS

    def __init__(self, reader: PromptReader) -> None:
        self._reader = reader

    async def read(self, body: bytes) -> Generation:
        """See `ApiAdapter`."""
        return await self._reader.read_chat(parse_chat(body))

    def logprobs(self, entries: Sequence[TokenEntry]) -> ChatLogprobs:
        """See `ApiAdapter`."""
        return chat_logprobs(entries, self._reader.tokenizer)

    def reply(self, head: ReplyHead, whole: CompleteAnswer) -> ChatReply:
        """See `ApiAdapter`."""
        logprobs = None if whole.entries is None else self.logprobs(whole.entries)
        return ChatReply(
            id=self.events.id_prefix + head.request_id,
            created=head.created,
            model=head.model,
            choices=(ChatChoice(ChatReplyMessage(whole.text), logprobs, whole.finish),),
            usage=whole.usage,
        )
