from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.errors import OverloadedError
from baton.gateway.asgi import ALWAYS_READ_BYTES, BodyBudget, BodyLimit, read_body
from baton.gateway.errors import BodyTooLargeError, ClientLeftError


def read(messages, max_bytes: int, context_bytes: int = 0) -> bytes:
    async def receive():
        return messages.pop(0)

    limit = BodyLimit(max_bytes, lambda: context_bytes)
    with BodyBudget(2 * ALWAYS_READ_BYTES).hold() as held:
        return asyncio.run(read_body(receive, limit, held))


def in_parts(parts: list[bytes]):
    last = len(parts) - 1
    return [
        {"type": "http.request", "body": part, "more_body": i < last}
        for i, part in enumerate(parts)
    ]


@given(st.lists(st.binary(max_size=5), min_size=1, max_size=5))
def test_a_body_that_fits_is_read_whole(parts):
    body = b"".join(parts)
    assert read(in_parts(parts), len(body)) == body


@given(st.lists(st.binary(min_size=1, max_size=5), min_size=1, max_size=5))
def test_one_byte_too_many_is_refused(parts):
    with pytest.raises(BodyTooLargeError):
        read(in_parts(parts), sum(map(len, parts)) - 1)


@pytest.mark.parametrize("more", [0, 1, 1000])
def test_long_ones_are_read_where_a_model_has_the_context(more):
    body = bytes(ALWAYS_READ_BYTES + more)
    if more == 0:
        assert read(in_parts([body]), 1 << 30) == body
    else:
        assert read(in_parts([body[:-1], body[-1:]]), 1 << 30, len(body)) == body
        with pytest.raises(BodyTooLargeError, match="no model here has the context"):
            read(in_parts([body[:-1], body[-1:]]), 1 << 30, len(body) - 1)


def test_a_client_that_leaves_is_noticed():
    first = {"type": "http.request", "body": b"{", "more_body": True}
    with pytest.raises(ClientLeftError):
        read([first, {"type": "http.disconnect"}], 100)


def test_bodies_share_a_budget_and_give_it_back():
    budget = BodyBudget(10)
    with budget.hold() as one:
        one.take(6)
        with budget.hold() as other:
            other.take(4)
            with pytest.raises(OverloadedError):
                other.take(1)
        assert budget.num_bytes == 6
        with budget.hold() as other:
            other.take(4)
    assert budget.num_bytes == 0
