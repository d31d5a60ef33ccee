"""The two generating APIs: how each reads its body, and how each says an answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from baton.worker.logprobs import (
    ChatLogprobs,
    CompletionLogprobs,
    chat_logprobs,
    completion_logprobs,
)
from baton.worker.replies import (
    ChatChoice,
    ChatReply,
    ChatReplyMessage,
    CompletionChoice,
    CompletionReply,
)
from baton.worker.streaming import CHAT_EVENTS, COMPLETION_EVENTS
from baton.worker.validation import parse_chat, parse_completion

if TYPE_CHECKING:
    from collections.abc import Sequence

    from baton.engines.interface import FinishReason
    from baton.worker.logprobs import TokenEntry
    from baton.worker.prompts import Generation, PromptReader
    from baton.worker.replies import ReplyHead, Usage
    from baton.worker.streaming import EventShape


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
            InvalidRequestError: says what, why and what to do.
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
        return await self._reader.read_completion(parse_completion(body))

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
