"""A streamed answer: bytes → server-sent events → its result. Pure.

An answer is complete if it had a finish reason, then `[DONE]`, and no error in between. Anything
else is a failure, whatever its HTTP status: a stream that is cut looks like a short answer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

import msgspec

from baton.errors import UNDECODABLE, ProtocolError

MAX_EVENT_BYTES: Final = 16 << 20


class EventParser:
    """Splits a stream. Lines end in LF, CR LF or CR; comments and other fields are ignored."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []
        self._num_held = 0

    def feed(self, data: bytes) -> list[bytes]:
        """The data of each event that is complete now.

        Raises:
            ProtocolError: an event is larger than `MAX_EVENT_BYTES`.
        """
        text = self._rest + data
        held = b""
        if text.endswith(b"\r"):  # perhaps half of a CR LF
            text, held = text[:-1], b"\r"
        if b"\r" in text:
            text = text.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        *lines, rest = text.split(b"\n")
        self._rest = rest + held
        events = [event for line in lines if (event := self._take(line)) is not None]
        if self._num_held + len(self._rest) > MAX_EVENT_BYTES:
            raise ProtocolError(f"an event of more than {MAX_EVENT_BYTES >> 20} MiB")
        return events

    def _take(self, line: bytes) -> bytes | None:
        if line:
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
                self._num_held += len(line)
            return None
        if not self._data:
            return None
        event = b"\n".join(self._data)
        self._data, self._num_held = [], 0
        return event


FailureKind = Literal[
    "connect",  # no connection to the server
    "lost",  # the connection ended in the middle
    "refused",  # an HTTP status that is no success
    "error_in_stream",  # an error inside a stream that began well
    "truncated",  # no finish reason, or no [DONE]
    "protocol",  # what came is not OpenAI's API
    "timeout",  # longer than a request may take
]
BAD_FINISHES: Final = frozenset({"error", "abort"})
MAX_MESSAGE_CHARS: Final = 400
NOTHING: Final = frozenset({b"", b"null", b"[]"})


class Failure(msgspec.Struct, frozen=True):
    """Why an answer is not complete."""

    kind: FailureKind
    message: str


class Tokens(msgspec.Struct, frozen=True):
    """Token counts of the server's `usage`. None: it has none."""

    num_prompt: int | None = None
    num_output: int | None = None
    num_cached: int | None = None


class PromptDetails(msgspec.Struct, frozen=True):
    """OpenAI's `prompt_tokens_details`."""

    cached_tokens: int | None = None


class Usage(msgspec.Struct, frozen=True):
    """OpenAI's `usage`."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: PromptDetails | None = None


class Delta(msgspec.Struct, frozen=True):
    """The delta of a chat's chunk."""

    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: msgspec.Raw = msgspec.Raw()

    @property
    def has_token(self) -> bool:
        """Whether it carries generated tokens: the first delta, with the role, has none."""
        has_calls = bytes(self.tool_calls) not in NOTHING
        return bool(self.content or self.reasoning_content or self.reasoning or has_calls)


class Choice(msgspec.Struct, frozen=True):
    """One choice of a chunk."""

    text: str | None = None
    delta: Delta | None = None
    finish_reason: str | None = None


class Chunk(msgspec.Struct, frozen=True):
    """One event."""

    choices: tuple[Choice, ...] = ()
    usage: Usage | None = None
    error: msgspec.Raw = msgspec.Raw()


class ErrorText(msgspec.Struct, frozen=True):
    """OpenAI's error object."""

    message: str = ""
    code: str | int | None = None


_decode: Final = msgspec.json.Decoder(Chunk).decode


@dataclass(slots=True)
class Answer:
    """One answer so far. Times are the caller's, ascending.

    `token_at`: when each chunk with tokens arrived. `ended_at`: when the last chunk of the answer
    arrived.
    """

    token_at: list[float]
    ended_at: float | None = None
    finish_reason: str | None = None
    usage: Usage | None = None
    failure: Failure | None = None
    is_done: bool = False

    def push(self, event: bytes, now: float) -> None:
        """Add one event's data. After a failure events are ignored."""
        if self.failure is not None:
            return
        if event == b"[DONE]":
            self.is_done = True
            return
        try:
            chunk = _decode(event)
        except UNDECODABLE as exc:
            shown = event[:80].decode(errors="replace")
            self.failure = Failure("protocol", f"{exc}: {shown!r}")
            return
        if bytes(chunk.error) not in NOTHING:
            self.failure = Failure("error_in_stream", read_error(event))
            return
        self.usage = chunk.usage or self.usage
        if chunk.choices:
            self._take(chunk.choices[0], now)

    def end(self) -> Failure | None:
        """End the stream; why it failed, or None for a complete answer."""
        if self.failure is None:
            if self.finish_reason in BAD_FINISHES:
                message = f"finish_reason is {self.finish_reason!r}"
                self.failure = Failure("error_in_stream", message)
            elif self.finish_reason is None:
                self.failure = Failure("truncated", "the stream ended without a finish_reason")
            elif not self.is_done:
                self.failure = Failure("truncated", "the stream ended without [DONE]")
            elif not self.token_at:
                self.failure = Failure("protocol", "the answer has no tokens")
        return self.failure

    @property
    def tokens(self) -> Tokens:
        """Token counts of the server."""
        usage = self.usage or Usage()
        details = usage.prompt_tokens_details
        cached = None if details is None else details.cached_tokens
        return Tokens(usage.prompt_tokens, usage.completion_tokens, cached)

    def _take(self, choice: Choice, now: float) -> None:
        """A completion's chunk always has tokens, even without text; a chat's may have none."""
        if choice.delta is None or choice.delta.has_token:
            self.token_at.append(now)
        self.ended_at = now
        self.finish_reason = choice.finish_reason or self.finish_reason


def read_error(body: bytes) -> str:
    """The message of an error body: OpenAI's format, or its first characters."""
    try:
        found = msgspec.json.decode(body, type=_ErrorBody)
    except UNDECODABLE:
        found = _ErrorBody()
    error = found.error.message if isinstance(found.error, ErrorText) else found.error
    if error or found.message:
        return (error or found.message)[:MAX_MESSAGE_CHARS]
    return body[:MAX_MESSAGE_CHARS].decode(errors="replace").strip() or "no reason given"


class _ErrorBody(msgspec.Struct, frozen=True):
    """`{"error": {"message": …}}`, `{"error": "…"}` or `{"message": "…"}`."""

    error: ErrorText | str | None = None
    message: str = ""
