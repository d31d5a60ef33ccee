"""An answer that goes on: what the engine is asked, and what is sent, wherever it was cut."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from baton.engines.interface import FinishReason
from baton.handoff.interface import SampledToken
from tests.unit.worker.scripted_engine import (
    Reply,
    ScriptedEngine,
    call,
    new_tokens,
    running,
    token_ids,
)

if TYPE_CHECKING:
    from baton.engines.interface import GenerationRequest
    from baton.worker.worker import Worker

TEXT = "Hi 😀🎉 é ok."
IDS = token_ids(TEXT)
HEADERS = {"x-baton-token-ids": "1", "x-baton-created": "1", "x-request-id": "same"}


def going_on(engine: ScriptedEngine, request: GenerationRequest) -> None:
    """Says what follows the tokens that were given; number i has the log-probability -i."""
    first = request.sampling.first_index
    tokens = [SampledToken(IDS[i], -float(i)) for i in range(first, len(IDS))]
    assert request.prompt_ids[len(request.prompt_ids) - first :].tolist() == IDS[:first]
    assert request.sampling.max_tokens == len(IDS) - first
    for update in new_tokens(request.id, tokens, FinishReason.LENGTH):
        engine.sink([update])


async def ask(worker: Worker, resume: object = None, **fields: Any) -> Reply:
    params = {} if resume is None else {"kv_transfer_params": {"baton_resume": resume}}
    body = {"model": "demo", "prompt": "a", "stream": True, "max_tokens": len(IDS), **fields}
    return await call(worker, "POST", "/v1/completions", {**body, **params}, headers=HEADERS)


@pytest.mark.parametrize("stop", [[], ["Hix", "i y", "😀!"]])
@pytest.mark.parametrize("logprobs", [0, None])
def test_it_goes_on_after_any_event(stop: list[str], logprobs: int | None) -> None:
    """Characters of several tokens, and text that could begin a stop string, are held back."""

    async def scenario() -> None:
        fields = {"stop": stop, "logprobs": logprobs, "stream_options": {"include_usage": True}}
        async with running(going_on) as (worker, engine, _):
            whole = (await ask(worker, **fields)).body.split(b"\n\n")
            *events, _, _, _ = whole
            ids: list[int] = []
            num_computed_again = 0
            for number, event in enumerate(events, 1):
                line = event.partition(b"\n")[0].removeprefix(b":")
                ids += [int(token) for token in line.split(b",")]
                is_complete = number == len(events)
                resume = {"token_ids": ids, "is_complete": is_complete}
                num_asked = len(engine.requests)
                rest = await ask(worker, resume, **fields)
                assert rest.status == 200
                assert without_caches(rest.body) == without_caches(b"\n\n".join(whole[number:]))
                assert len(engine.requests) == num_asked + (not is_complete)
                if not is_complete:
                    num_computed_again += len(ids) - engine.requests[-1].sampling.first_index
            assert ids == IDS
            assert bool(num_computed_again) == (logprobs is not None and bool(stop))

    asyncio.run(scenario())


def without_caches(body: bytes) -> bytes:
    """What a cache had differs: where nothing is computed, none was asked."""
    return body.replace(b'"cached_tokens":2', b'"cached_tokens":0')


def test_a_token_that_comes_out_otherwise_is_an_error() -> None:
    async def scenario() -> None:
        async with running(going_on) as (worker, _, _):
            (other,) = token_ids("Z")  # held back, as it could begin the stop string
            reply = await ask(worker, {"token_ids": [other]}, logprobs=0, stop=["Z!"])
            assert (reply.status, reply.error["code"]) == (500, "engine_failed")

    asyncio.run(scenario())


def test_only_a_gateway_asks_for_it_where_connections_prove_what_they_are() -> None:
    async def scenario() -> None:
        async with running(going_on, is_tls=True) as (worker, engine, _):
            reply = await ask(worker, {"token_ids": IDS[:2]})
            assert (reply.status, reply.error["code"]) == (403, "invalid_ticket")
            assert not engine.requests

    asyncio.run(scenario())


@pytest.mark.parametrize(("own", "seen"), [(None, 77), (5, 5)])
def test_a_gateways_seed_is_for_requests_that_have_none(own: int | None, seen: int) -> None:
    async def scenario() -> None:
        async with running(going_on) as (worker, engine, _):
            headers = {"x-baton-seed": "77"}
            body = {"model": "demo", "prompt": "a", "max_tokens": len(IDS), "seed": own}
            await call(worker, "POST", "/v1/completions", body, headers=headers)
            assert engine.requests[0].sampling.seed == seen

    asyncio.run(scenario())
