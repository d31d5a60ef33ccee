"""Which tokens the events of a stream name, and what vLLM is given to go on from tokens."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from baton.engines.vllm.stream_tokens import CURRENT, TokenIdsMiddleware

if TYPE_CHECKING:
    from starlette.types import Message, Receive, Scope, Send

ASKED = [(b"x-baton-token-ids", b"1")]
GOES_ON = [*ASKED, (b"x-baton-prompt-tokens", b"9")]
EVENT = b'data: {"choices":[]}\n\n'
NAME = object()


def serve(
    headers: list[tuple[bytes, bytes]], steps: list[Any], given: Any = (), *, num_answers: int = 1
) -> list[Message]:
    """The messages of a stream; of its steps, lists are outputs' tokens, bytes are bodies.

    `NAME` names tokens that have no event.

    An answer that cannot go on (`given` None) is sampled with the client's seed.
    """

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        stream = CURRENT.get()
        for _ in range(num_answers):
            if stream is not None:
                stream.begin(given, 9)
                if given is None:
                    stream.use_seed()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for step in steps:
            if isinstance(step, bytes):
                await send({"type": "http.response.body", "body": step, "more_body": True})
            elif stream is not None and step is NAME:
                await stream.name_pending()
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
    assert start["headers"] == GOES_ON
    assert [body["body"] for body in bodies] == [
        EVENT,
        b":5,6\n" + EVENT,
        EVENT,
        b": ping\n\n",
        b":7\n" + EVENT,
    ]
    assert all(body["more_body"] for body in bodies)


def test_tokens_that_were_one_output_are_named_so() -> None:
    _, *bodies = serve(ASKED, [[5, 6], [], [7], EVENT, [8], EVENT])
    assert [body["body"] for body in bodies] == [b":5, 6,7\n" + EVENT, b":8\n" + EVENT]


@pytest.mark.parametrize("next_part", [EVENT, b": ping\n\n"])
def test_tokens_without_an_event_are_named_in_a_comment_that_goes_on(next_part: bytes) -> None:
    """A gateway that knows whole comments alone waits for its end, and reads it as one."""
    steps = [EVENT, [5], [6], NAME, b"", [7, 8], [9], NAME, next_part, [10], EVENT]
    _, *bodies = serve(ASKED, steps)
    parts = [b":5,", b"", b"6,7, 8,", b"9\n" + next_part, b":10\n" + EVENT]
    assert [body["body"] for body in bodies] == [EVENT, *parts]
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


SEEDED = [*ASKED, (b"x-baton-seed", b"77")]


@pytest.mark.parametrize(
    ("headers", "given", "num_answers", "answered"),
    [
        (SEEDED, None, 1, [SEEDED[1]]),
        (SEEDED, None, 2, []),  # answers to the same prompt would be the same
        (SEEDED, (), 1, GOES_ON),  # it goes on from its tokens
        (ASKED, None, 1, []),
        ([*ASKED, (b"x-baton-seed", b"-7")], None, 1, []),
        ([*ASKED, (b"x-baton-seed", b"9" * 20)], None, 1, []),
    ],
)
def test_a_stream_that_is_sampled_with_the_gateways_seed_has_it(
    headers: list[tuple[bytes, bytes]],
    given: Any,
    num_answers: int,
    answered: list[tuple[bytes, bytes]],
) -> None:
    start, body = serve(headers, [EVENT], given, num_answers=num_answers)
    assert start["headers"] == answered
    assert body["body"] == EVENT


def test_of_several_answers_in_one_stream_none_is_named() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        stream = CURRENT.get()
        assert stream is not None
        stream.begin((1, 2), 9)
        assert stream.is_reported
        stream.begin((1, 2), 9)
        stream.add([3])
        assert (stream.is_reported, stream.given, stream.take_comment()) == (False, (), b"")

    asyncio.run(TokenIdsMiddleware(app)({"type": "http", "headers": ASKED}, None, None))  # type: ignore[arg-type]
