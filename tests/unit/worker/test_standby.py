"""A standby request: ready when its KV is there, fed in order, and the same stream as any other."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest

from baton.engines.interface import FinishReason, RequestFailed, TokensComputed
from baton.errors import EngineError
from baton.handoff.interface import SampledToken
from baton.worker import standby as standby_module
from tests.unit.worker import scripted_engine
from tests.unit.worker.scripted_engine import (
    Reply,
    ScriptedEngine,
    call,
    new_tokens,
    running,
    token_ids,
    until,
)

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from baton.engines.interface import GenerationRequest
    from baton.worker.worker import Worker

TEXT = "Hi 😀🎉 é ok."
IDS = token_ids(TEXT)
ID = "ab" * 16
HEADERS = {"x-baton-token-ids": "1", "x-baton-created": "1", "x-request-id": "same"}


def following(engine: ScriptedEngine, request: GenerationRequest) -> None:
    """Reports as computed what it gets; then says the rest: token number i has log-probability -i.

    Where it is no standby it says the whole text.
    """
    known = request.prompt_ids.tolist()[-request.sampling.first_index or len(request.prompt_ids) :]

    def say_rest() -> None:
        tokens = [SampledToken(IDS[i], -float(i)) for i in range(len(known), len(IDS))]
        for update in new_tokens(request.id, tokens, FinishReason.LENGTH):
            engine.sink([update])

    def on_extend(ids: tuple[int, ...], generates: bool) -> None:
        known.extend(ids)
        assert known == IDS[: len(known)]
        if generates:
            say_rest()
        else:
            num_prompt = len(request.prompt_ids) - request.sampling.first_index
            engine.sink([TokensComputed(request.id, num_prompt + len(known))])

    engine.on_extend = on_extend
    if request.is_standby:
        engine.sink([TokensComputed(request.id, len(request.prompt_ids))])
    else:
        say_rest()


def silent(engine: ScriptedEngine, request: GenerationRequest) -> None:
    """Never has its KV."""


async def ask(worker: Worker, resume: object = None, **fields: Any) -> Reply:
    return await call(worker, "POST", "/v1/completions", make_body(resume, fields), headers=HEADERS)


def make_body(resume: object, fields: dict[str, Any]) -> dict[str, Any]:
    params = {} if resume is None else {"kv_transfer_params": {"baton_resume": resume}}
    body = {"model": "demo", "prompt": "a", "stream": True, "max_tokens": len(IDS), **fields}
    return {**body, **params}


async def feed(worker: Worker, start: int, ids: list[int], **fields: Any) -> Reply:
    body = {"start": start, "token_ids": ids, **fields}
    return await call(worker, "POST", f"/baton/v1/standbys/{ID}/tokens", body)


@asynccontextmanager
async def standing_by(
    worker: Worker, ids: list[int], **fields: Any
) -> AsyncGenerator[tuple[asyncio.Task[None], Reply]]:
    """A standby request with these tokens, ready."""
    reply = Reply()
    body = make_body({"token_ids": ids, "standby": ID}, fields)
    answering = asyncio.create_task(
        call(worker, "POST", "/v1/completions", body, headers=HEADERS, reply=reply)
    )
    await until(lambda: reply.status is not None or answering.done())
    try:
        yield answering, reply
    finally:
        reply.gone.set()
        await asyncio.gather(answering, return_exceptions=True)


@pytest.mark.parametrize("stop", [[], ["Hix", "i y", "😀!"]])
@pytest.mark.parametrize("logprobs", [0, None])
def test_its_stream_begins_behind_any_event(stop: list[str], logprobs: int | None) -> None:
    """Fed once while another worker generates, and once more with the last event before the cut."""

    async def scenario() -> None:
        fields = {"stop": stop, "logprobs": logprobs, "stream_options": {"include_usage": True}}
        async with running(following) as (worker, _, _):
            whole = (await ask(worker, **fields)).body.split(b"\n\n")
            *events, _, _, _ = whole
            ends = [0]
            for event in events:
                line = event.partition(b"\n")[0].removeprefix(b":")
                ends.append(ends[-1] + line.count(b",") + 1)
            for first in range(len(events) - 2):
                known, end, cut = ends[first : first + 3]
                async with standing_by(worker, IDS[:known], **fields) as (task, reply):
                    assert (reply.status, reply.body) == (200, b"")
                    assert reply.headers["x-baton-prompt-tokens"] == "2"
                    assert (await feed(worker, known, IDS[known:end])).status == 204
                    assert reply.body == b""
                    assert (await feed(worker, end, IDS[end:cut], generates=True)).status == 204
                    await task
                    assert strip(reply.body) == strip(b"\n\n".join(whole[first + 2 :]))

    asyncio.run(scenario())


def strip(body: bytes) -> bytes:
    """Without what caches had, which differs."""
    return body.replace(b'"cached_tokens":3', b'"cached_tokens":0')


def test_there_must_be_a_token_to_compute() -> None:
    """Their log-probabilities were not sent: the gateway asks anew, and they are computed."""

    async def scenario() -> None:
        async with running(following) as (worker, engine, _):
            (other,) = token_ids("Z")
            async with standing_by(worker, IDS[:2], logprobs=0, stop=["Z!"]):
                reply = await feed(worker, 2, [other], generates=True)
                assert (reply.status, reply.error["code"]) == (409, "no_standby")
                assert engine.extended == []

    asyncio.run(scenario())


def test_tokens_that_do_not_follow_are_refused_and_change_nothing() -> None:
    async def scenario() -> None:
        async with running(following) as (worker, engine, _):
            assert (await feed(worker, 0, IDS[:1])).error["code"] == "no_standby"
            async with standing_by(worker, IDS[:2]) as (task, reply):
                for start, ids in ((1, IDS[2:3]), (3, IDS[2:3]), (2, [*IDS, 1, 2])):
                    assert (await feed(worker, start, ids)).status == 409
                assert (await feed(worker, 2, [])).status == 400
                assert (await feed(worker, -1, IDS[:1])).status == 400
                assert engine.extended == []
                assert (await feed(worker, 2, IDS[2:4], generates=True)).status == 204
                await task
                assert reply.body.endswith(b"data: [DONE]\n\n")
            assert (await feed(worker, 4, IDS[4:5])).status == 409

    asyncio.run(scenario())


def test_two_requests_do_not_wait_as_one() -> None:
    async def scenario() -> None:
        async with running(following) as (worker, engine, _), standing_by(worker, IDS[:2]):
            reply = await ask(worker, {"token_ids": IDS[:2], "standby": ID})
            assert reply.status == 400
            assert engine.cancelled == [engine.requests[1].id]

    asyncio.run(scenario())


@pytest.mark.parametrize("bad", [{"standby": "x"}, {"standby": ID.upper()}])
def test_a_malformed_id_is_refused(bad: dict[str, Any]) -> None:
    async def scenario() -> None:
        async with running(following) as (worker, engine, _):
            assert (await ask(worker, {"token_ids": IDS[:2], **bad})).status == 400
            assert not engine.requests

    asyncio.run(scenario())


def test_without_kv_it_is_not_ready_and_a_failure_has_its_status() -> None:
    async def scenario() -> None:
        async with running(silent) as (worker, engine, _):
            reply = Reply()
            body = make_body({"token_ids": IDS[:2], "standby": ID}, {})
            task = asyncio.create_task(
                call(worker, "POST", "/v1/completions", body, headers=HEADERS, reply=reply)
            )
            await until(lambda: engine.requests)
            assert reply.status is None
            feeding = asyncio.create_task(feed(worker, 2, IDS[2:3]))
            await asyncio.sleep(0)
            engine.sink([RequestFailed(engine.requests[0].id, EngineError("no more"))])
            await task
            assert (reply.status, reply.error["code"]) == (500, "engine_failed")
            assert (await feeding).error["code"] == "no_standby"

    asyncio.run(scenario())


def test_it_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standby_module, "NEXT_TOKENS_TIMEOUT_S", 0.05)

    async def scenario() -> None:
        async with (
            running(following) as (worker, engine, _),
            standing_by(worker, IDS[:2]) as (task, reply),
        ):
            await task
            error, done = reply.events()
            assert error["error"]["code"] == "deadline_exceeded"
            assert done == "[DONE]"
            assert engine.cancelled == [engine.requests[0].id]

    asyncio.run(scenario())


def test_a_gateway_that_leaves_ends_it() -> None:
    async def scenario() -> None:
        async with running(following) as (worker, engine, _):
            async with standing_by(worker, IDS[:2]) as (_, reply):
                reply.gone.set()
                await until(lambda: engine.cancelled)
            assert (await feed(worker, 2, IDS[2:3])).status == 409

    asyncio.run(scenario())


def test_only_a_gateway_feeds_it_where_connections_prove_what_they_are() -> None:
    async def scenario() -> None:
        async with running(following, is_tls=True) as (worker, engine, _):
            reply = await feed(worker, 2, IDS[2:3])
            assert (reply.status, reply.error["code"]) == (403, "invalid_ticket")
            assert not engine.extended

    asyncio.run(scenario())


def test_an_engine_without_standby_requests_is_asked_for_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class PlainEngine(ScriptedEngine):
        extend = None  # type: ignore[assignment]

    monkeypatch.setattr(scripted_engine, "ScriptedEngine", PlainEngine)

    async def scenario() -> None:
        async with running(following) as (worker, engine, _):
            info = await call(worker, "GET", "/baton/v1/info")
            assert info.json()["has_standby"] is False
            assert (await ask(worker, {"token_ids": IDS[:2], "standby": ID})).status == 400
            assert not engine.requests

    asyncio.run(scenario())
