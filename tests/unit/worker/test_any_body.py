"""Whatever a client sends, it gets an answer or an error of its own: never a 500."""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.protocol.request_fields import ChatFields, CompletionFields
from baton.worker.fields import UnsupportedFields
from tests.unit.worker.scripted_engine import Reply, call, running, saying

if TYPE_CHECKING:
    from collections.abc import Generator

    from baton.worker.worker import Worker

NAMES = sorted({
    *CompletionFields.__struct_fields__,
    *ChatFields.__struct_fields__,
    *UnsupportedFields.__struct_fields__,
})
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
ANYTHING = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["role", "content", "type", "text"]) | st.text(), inner)
    ),
    max_leaves=6,
)
PLAUSIBLE: dict[str, Any] = {
    "model": "demo",
    "prompt": "a",
    "messages": [{"role": "user", "content": "a"}],
}


class AgentContext:
    """One worker and its event loop, for many examples."""

    def __init__(self, runner: asyncio.Runner, stack: AsyncExitStack) -> None:
        self._runner = runner
        self._worker = runner.run(self._open(stack))

    async def _open(self, stack: AsyncExitStack) -> Worker:
        worker, _, _ = await stack.enter_async_context(running(saying("x")))
        return worker

    def post(self, path: str, body: bytes) -> Reply:
        return self._runner.run(call(self._worker, "POST", path, body))


@pytest.fixture(scope="module")
def context() -> Generator[AgentContext]:
    with asyncio.Runner() as runner:
        stack = AsyncExitStack()
        yield AgentContext(runner, stack)
        runner.run(stack.aclose())


@settings(deadline=None)
@given(
    path=st.sampled_from(["/v1/completions", "/v1/chat/completions"]),
    fields=st.dictionaries(st.sampled_from(NAMES), ANYTHING, max_size=5),
)
def test_any_fields_get_an_answer_or_an_explanation(
    context: AgentContext, path: str, fields: dict[str, Any]
) -> None:
    reply = context.post(path, json.dumps(PLAUSIBLE | fields).encode())
    assert reply.status in {200, 400, 403, 404}
    if reply.status != 200:
        assert set(reply.error) == {"message", "type", "param", "code"}
        assert reply.error["message"]
        assert reply.error["code"]


@settings(deadline=None)
@given(body=st.binary(max_size=200))
def test_any_bytes_get_an_explanation(context: AgentContext, body: bytes) -> None:
    reply = context.post("/v1/completions", body)
    assert reply.status == 400
    assert set(reply.error) == {"message", "type", "param", "code"}
