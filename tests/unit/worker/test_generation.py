"""Both generating endpoints through the whole ASGI application, around a scripted engine."""

from __future__ import annotations

import asyncio
import json
import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from baton.auth.ticket import hash_tenant
from baton.engines.interface import FinishReason, NewToken, PrefillRequest
from baton.errors import ContextLengthError, EngineError, HandoffError, OverloadedError
from baton.handoff.interface import SampledToken
from baton.ids import RequestId
from baton.telemetry.trace import Stamp
from baton.worker.errors import DrainingError
from tests.unit.handoff.orders import make_ticket
from tests.unit.worker.scripted_engine import (
    Client,
    Reply,
    ScriptedEngine,
    call,
    chat,
    complete,
    failing,
    make_scope,
    new_tokens,
    running,
    saying,
    token_ids,
    until,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

TEXT = "She smiled, and said nothing."


def test_a_completion_at_once() -> None:
    async def scenario() -> None:
        async with running(saying(TEXT)) as (worker, engine, clock):
            reply = await complete(worker, max_tokens=50)
        num_tokens = len(token_ids(TEXT))
        assert reply.status == 200
        assert reply.json() == {
            "id": f"cmpl-{reply.headers['x-request-id']}",
            "object": "text_completion",
            "created": int(clock.unix_now()),
            "model": "demo",
            "choices": [{"text": TEXT, "logprobs": None, "finish_reason": "length", "index": 0}],
            "usage": {
                "prompt_tokens": 2,
                "completion_tokens": num_tokens,
                "total_tokens": 2 + num_tokens,
                "prompt_tokens_details": {"cached_tokens": 2},
            },
        }
        assert engine.cancelled == []

    asyncio.run(scenario())


def test_a_chat_at_once() -> None:
    async def scenario() -> None:
        async with running(saying(TEXT, FinishReason.STOP)) as (worker, _, _):
            reply = await chat(worker, logprobs=True)
        (choice,) = reply.json()["choices"]
        assert choice["message"] == {"content": TEXT, "role": "assistant", "refusal": None}
        assert choice["finish_reason"] == "stop"
        assert "".join(one["token"] for one in choice["logprobs"]["content"]) == TEXT

    asyncio.run(scenario())


def test_a_streamed_completion_says_the_same() -> None:
    async def scenario() -> None:
        async with running(saying(TEXT)) as (worker, _, _):
            reply = await complete(worker, stream=True, logprobs=1)
        *events, done = reply.events()
        assert done == "[DONE]"
        assert "".join(event["choices"][0]["text"] for event in events) == TEXT
        assert [e["choices"][0]["finish_reason"] for e in events] == [
            *[None] * (len(events) - 1),
            "length",
        ]
        offsets = [o for e in events for o in e["choices"][0]["logprobs"]["text_offset"]]
        assert offsets == sorted(offsets)
        assert len(offsets) == len(token_ids(TEXT))
        assert len({event["id"] for event in events}) == 1
        assert "usage" not in events[0]

    asyncio.run(scenario())


def test_a_streamed_chat_opens_with_the_role_and_closes_with_usage() -> None:
    async def scenario() -> None:
        async with running(saying(TEXT)) as (worker, _, _):
            reply = await chat(worker, stream=True, stream_options={"include_usage": True})
        first, *middle, usage, done = reply.events()
        assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(e["choices"][0]["delta"]["content"] for e in middle) == TEXT
        assert middle[-1]["choices"][0]["finish_reason"] == "length"
        assert {e["usage"] for e in [first, *middle]} == {None}
        assert usage["choices"] == []
        assert usage["usage"]["completion_tokens"] == len(token_ids(TEXT))
        assert done == "[DONE]"
        assert reply.body.count(b"[DONE]") == 1
        assert reply.headers["content-type"].startswith("text/event-stream")
        assert reply.headers["cache-control"] == "no-cache"
        assert reply.headers["x-accel-buffering"] == "no"

    asyncio.run(scenario())


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_the_engines_work_too(stream: bool) -> None:
    def script(engine: ScriptedEngine, request: Any) -> None:
        tokens = [SampledToken(token) for token in token_ids(TEXT)]
        engine.sink(new_tokens(request.id, tokens, None))

    async def scenario() -> None:
        async with running(script) as (worker, engine, _):
            reply = await complete(worker, stream=stream, stop=["and said"])
            assert engine.cancelled == [engine.requests[0].id]
            trace = await call(worker, "GET", f"/baton/v1/traces/{reply.headers['x-request-id']}")
        num_tokens = len(token_ids(TEXT[: TEXT.index(" nothing")]))
        assert trace.json()["num_output_tokens"] == num_tokens
        if stream:
            choices = [e["choices"][0] for e in reply.events()[:-1]]
        else:
            choices = reply.json()["choices"]
        assert "".join(choice["text"] for choice in choices) == "She smiled, "
        assert choices[-1]["finish_reason"] == "stop"

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("stage", "level"), [("declined", logging.DEBUG), ("transfer", logging.WARNING)]
)
def test_only_a_fault_is_warned_of(
    stage: str, level: int, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        async with running(failing(HandoffError("no KV went over", stage=stage))) as (worker, *_):
            await complete(worker)

    with caplog.at_level(logging.DEBUG, "baton.worker.app"):
        asyncio.run(scenario())
    assert [each.levelno for each in caplog.records if "no KV" in each.message] == [level]


@pytest.mark.parametrize("send", [complete, chat])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (EngineError("it broke"), 500, "engine_failed"),
        (HandoffError("peer lost", stage="transfer"), 502, "handoff_failed"),
        (HandoffError("all is cached", stage="declined"), 502, "handoff_declined"),
        (OverloadedError("no room"), 503, "overloaded"),
    ],
)
def test_a_failure_before_the_first_token_has_a_status(
    send: Callable[..., Coroutine[Any, Any, Reply]],
    stream: bool,
    error: Any,
    status: int,
    code: str,
) -> None:
    async def scenario() -> None:
        async with running(failing(error)) as (worker, _engine, _):
            reply = await send(worker, stream=stream)
            assert worker.engine_client.num_open == 0
        assert reply.status == status
        assert reply.error["code"] == code
        assert reply.error["message"] == str(error)
        assert reply.headers["content-type"] == "application/json"

    asyncio.run(scenario())


def test_a_failure_in_mid_stream_is_an_event_and_then_the_end() -> None:
    async def scenario() -> None:
        async with running(failing(EngineError("it broke"), after="She")) as (worker, _, _):
            reply = await complete(worker, stream=True)
            trace = await call(worker, "GET", f"/baton/v1/traces/{reply.headers['x-request-id']}")
        *_, error, done = reply.events()
        assert reply.status == 200
        assert error["error"]["message"] == "it broke"
        assert error["error"]["code"] == "engine_failed"
        assert done == "[DONE]"
        assert trace.json()["outcome"] == "failed"
        assert trace.json()["num_output_tokens"] == len(token_ids("She"))

    asyncio.run(scenario())


def test_a_failure_after_some_tokens_of_a_whole_answer_has_a_status() -> None:
    async def scenario() -> None:
        async with running(failing(EngineError("it broke"), after="She")) as (worker, _, _):
            assert (await complete(worker)).status == 500

    asyncio.run(scenario())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("spoken", ["", "She"])
def test_a_client_that_leaves_cancels_its_request(stream: bool, spoken: str) -> None:
    def script(engine: ScriptedEngine, request: Any) -> None:
        tokens = [SampledToken(token) for token in token_ids(spoken)]
        engine.sink(new_tokens(request.id, tokens, None))

    async def scenario() -> None:
        async with running(script) as (worker, engine, _):
            reply = Reply()
            body = {"model": "demo", "prompt": "a", "stream": stream}
            task = asyncio.create_task(
                call(
                    worker,
                    "POST",
                    "/v1/completions",
                    body,
                    headers={"x-request-id": "leaver"},
                    reply=reply,
                )
            )
            await until(lambda: engine.requests)
            if stream and spoken:
                await until(lambda: reply.body)
            reply.gone.set()
            await task
            assert engine.cancelled == [engine.requests[0].id]
            assert worker.engine_client.num_open == 0
            trace = await call(worker, "GET", "/baton/v1/traces/leaver")
            assert trace.json()["outcome"] == "cancelled"

    asyncio.run(scenario())


def test_a_client_that_leaves_while_sending_is_no_error() -> None:
    async def scenario() -> None:
        async with running() as (worker, engine, _):
            sent: list[Any] = []

            async def receive() -> Any:
                return {"type": "http.disconnect"}

            async def send(message: Any) -> None:
                sent.append(message)

            scope = make_scope("POST", "/v1/completions", Client())
            await worker.app(scope, receive, send)
            assert sent == []
            assert engine.requests == []

    asyncio.run(scenario())


@pytest.mark.parametrize("stream", [False, True])
def test_a_deadline_ends_a_request_that_hangs(stream: bool) -> None:
    async def scenario() -> None:
        async with running() as (worker, engine, clock):
            body = {"model": "demo", "prompt": "a", "stream": stream}
            headers = {"x-baton-timeout-s": "0.001"}
            reply = await call(worker, "POST", "/v1/completions", body, headers=headers)
            assert engine.cancelled == [engine.requests[0].id]
            assert engine.requests[0].deadline == pytest.approx(clock.now() + 0.001)
        assert reply.status == 504
        assert reply.error["code"] == "deadline_exceeded"

    asyncio.run(scenario())


@pytest.mark.parametrize("timeout", ["0", "-1", "nan", "soon"])
def test_a_timeout_that_makes_no_sense_is_refused(timeout: str) -> None:
    async def scenario() -> None:
        async with running() as (worker, _, _):
            body = {"model": "demo", "prompt": "a"}
            headers = {"x-baton-timeout-s": timeout}
            reply = await call(worker, "POST", "/v1/completions", body, headers=headers)
        assert reply.status == 400

    asyncio.run(scenario())


def test_an_engine_that_refuses_is_never_asked_to_cancel() -> None:
    async def scenario() -> None:
        async with running() as (worker, engine, _):
            engine.refusal = OverloadedError("256 requests are waiting already", retry_after_s=2.5)
            reply = await complete(worker)
            assert (reply.status, reply.headers["retry-after"]) == (503, "3")
            engine.refusal = ContextLengthError("never fits", code="context_length_exceeded")
            assert (await complete(worker)).status == 400
            assert engine.cancelled == []
            assert worker.engine_client.num_open == 0

    asyncio.run(scenario())


def test_two_requests_may_have_one_id() -> None:
    async def scenario() -> None:
        async with running(saying(TEXT)) as (worker, engine, _):
            body, headers = {"model": "demo", "prompt": "a"}, {"x-request-id": "same"}
            replies = await asyncio.gather(
                *(call(worker, "POST", "/v1/completions", body, headers=headers) for _ in range(2))
            )
            assert [reply.json()["choices"][0]["text"] for reply in replies] == [TEXT, TEXT]
            assert [reply.headers["x-request-id"] for reply in replies] == ["same", "same"]
            assert len({request.id for request in engine.requests}) == 2

    asyncio.run(scenario())


@pytest.mark.parametrize("stream", [False, True])
def test_drain_waits_then_fails_what_is_left(stream: bool) -> None:
    async def scenario() -> None:
        async with running() as (worker, engine, _):
            task = asyncio.create_task(complete(worker, stream=stream))
            await until(lambda: engine.requests)
            await worker.drain(0.001)
            reply = await task
            assert (reply.status, reply.error["code"]) == (503, "draining")
            assert engine.cancelled == [engine.requests[0].id]
            late = await complete(worker)
            assert (late.status, late.error["code"]) == (503, "draining")
            assert late.headers["retry-after"] == "1"
            health = await call(worker, "GET", "/health")
            assert (health.status, health.json()["status"]) == (503, "draining")

    asyncio.run(scenario())


def test_drain_lets_open_requests_finish() -> None:
    async def scenario() -> None:
        async with running() as (worker, engine, _):
            task = asyncio.create_task(complete(worker))
            await until(lambda: engine.requests)
            draining = asyncio.create_task(worker.drain(60))
            await until(lambda: worker.engine_client.draining)
            engine.sink([NewToken(engine.requests[0].id, SampledToken(9), 0, FinishReason.LENGTH)])
            assert (await task).status == 200
            await draining

    asyncio.run(scenario())


def test_drain_waits_for_kv_that_is_sent_after_its_request_was_answered() -> None:
    async def scenario() -> None:
        async with running() as (worker, engine, _):
            engine.num_sending = 1
            draining = asyncio.create_task(worker.drain(60))
            await until(lambda: worker.engine_client.draining)
            await asyncio.sleep(0)
            assert not draining.done()
            engine.num_sending = 0
            await draining

    asyncio.run(scenario())


def test_a_draining_worker_hands_over_what_is_moved_away() -> None:
    """While an answer is under way, and nothing but that."""

    async def scenario() -> None:
        async with running() as (worker, engine, _):
            task = asyncio.create_task(complete(worker))
            await until(lambda: engine.requests)
            draining = asyncio.create_task(worker.drain(60))
            await until(lambda: worker.engine_client.draining)
            (answered,) = engine.requests
            prefill = replace(answered, id=RequestId("p"), kind=PrefillRequest(make_ticket()))
            moved = replace(
                prefill, sampling=msgspec.structs.replace(prefill.sampling, first_index=3)
            )
            with (
                pytest.raises(DrainingError),
                worker.engine_client.open(prefill),
            ):
                pytest.fail("a new prompt is taken")
            with worker.engine_client.open(moved):
                engine.sink([NewToken(answered.id, SampledToken(9), 0, FinishReason.LENGTH)])
                assert (await task).status == 200
                assert not draining.done(), "it waits for what is handed over"
            await draining
            with pytest.raises(DrainingError), worker.engine_client.open(moved):
                pytest.fail("nothing is left that could move")

    asyncio.run(scenario())


def test_what_the_engine_is_asked() -> None:
    async def scenario() -> None:
        async with running(saying("a")) as (worker, engine, clock):
            await complete(
                worker,
                cache_salt="tenant-1",
                temperature=0,
                seed=4,
                max_tokens=7,
                min_tokens=2,
                ignore_eos=True,
                stop_token_ids=[8],
                logprobs=2,
            )
            (request,) = engine.requests
        assert request.tenant_salt == hash_tenant("tenant-1")
        assert request.deadline == clock.now() + 600
        assert json.loads(json.dumps(request.sampling.__struct_fields__)) is not None
        sampling = request.sampling
        assert (sampling.temperature, sampling.seed, sampling.max_tokens) == (0.0, 4, 7)
        assert (sampling.min_tokens, sampling.ignore_eos) == (2, True)
        assert (sampling.stop_token_ids, sampling.num_logprobs) == ((8,), 2)
        assert request.trace.stamps[Stamp.RECEIVED] == clock.now()
        assert request.trace.stamps[Stamp.FIRST_TOKEN] == clock.now()
        assert (request.trace.role, request.trace.outcome) == ("colocated", "length")

    asyncio.run(scenario())
