"""Which tokens the events of a stream name, and what vLLM is given to go on from tokens."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from baton.engines.vllm.stream_tokens import CURRENT, TokenIdsMiddleware

if TYPE_CHECKING:
    from starlette.types import Message, Receive, Scope, Send

ASKED = [(b"x-baton-token-ids", b"1")]
EVENT = b'data: {"choices":[]}\n\n'


def serve(headers: list[tuple[bytes, bytes]], steps: list[Any], given: Any = ()) -> list[Message]:
    """The messages of a stream; of its steps, lists are tokens, bytes are bodies."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        stream = CURRENT.get()
        if stream is not None:
            stream.begin(given)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for step in steps:
            if isinstance(step, bytes):
                await send({"type": "http.response.body", "body": step, "more_body": True})
            elif stream is not None:
                stream.add(step)

    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "headers": headers}
    asyncio.run(TokenIdsMiddleware(app)(scope, None, send))  # type: ignore[arg-type]
    assert CURRENT.get() is None
    return sent


def test_an_event_names_the_tokens_since_the_one_before() -> None:
    start, *bodies = serve(ASKED, [EVENT, [5], [6], EVENT, EVENT, [7], b": ping\n\n", EVENT])
    assert start["headers"] == ASKED
    assert [body["body"] for body in bodies] == [
        EVENT,
        b":5,6\n" + EVENT,
        EVENT,
        b": ping\n\n",
        b":7\n" + EVENT,
    ]
    assert all(body["more_body"] for body in bodies)


@pytest.mark.parametrize("headers", [[], [(b"x-baton-token-ids", b"0")]])
def test_who_does_not_ask_gets_none(headers: list[tuple[bytes, bytes]]) -> None:
    start, body = serve(headers, [[5], EVENT])
    assert start["headers"] == []
    assert body["body"] == EVENT


def test_a_stream_that_cannot_go_on_names_none() -> None:
    start, body = serve(ASKED, [[5], EVENT], given=None)
    assert start["headers"] == []
    assert body["body"] == EVENT


def test_of_several_answers_in_one_stream_none_is_named() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        stream = CURRENT.get()
        assert stream is not None
        stream.begin((1, 2))
        assert stream.is_reported
        stream.begin((1, 2))
        stream.add([3])
        assert (stream.is_reported, stream.given, stream.take_comment()) == (False, (), b"")

    asyncio.run(TokenIdsMiddleware(app)({"type": "http", "headers": ASKED}, None, None))  # type: ignore[arg-type]
