"""An answer as server-sent events. What is constant in a request's events is encoded once.

data: {head}"choices":[{"index":0,│"text":"…"│,"logprobs":…,"finish_reason":…}]{tail}
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import msgspec

if TYPE_CHECKING:
    from baton.engines.interface import FinishReason
    from baton.worker.error_responses import ErrorBody
    from baton.worker.logprobs import ChatLogprobs, CompletionLogprobs
    from baton.worker.replies import ReplyHead, Usage

DONE: Final = b"data: [DONE]\n\n"
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


def error_event(body: ErrorBody) -> bytes:
    """The event of a failure in mid-stream."""
    return b"data: %b\n\n" % _encode(body)
