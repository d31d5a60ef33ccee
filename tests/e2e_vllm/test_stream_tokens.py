"""A vLLM server names its streams' tokens, and goes on from given ones: the same answer."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from baton.gateway.stream_record import RecordBudget, StreamRecord
from tests.e2e_vllm.client import open_session, read_metric, wait_idle
from tests.e2e_vllm.cluster import MODEL
from tests.stream_answers import StreamedAnswer

if TYPE_CHECKING:
    import aiohttp

    from baton.testing.fleet import FleetProcess
    from tests.e2e_vllm.cluster import VllmCluster

pytestmark = pytest.mark.vllm

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
NUM_TOKENS = 40
GREEDY = {
    "model": MODEL,
    "temperature": 0,
    "max_tokens": NUM_TOKENS,
    "ignore_eos": True,
    "stream": True,
    "stream_options": {"include_usage": True, "continuous_usage_stats": True},
}
PROMPT = {"prompt": list(range(300, 340))}
MESSAGES = {"messages": [{"role": "user", "content": "What are you?"}]}
TOOL = {"name": "get", "parameters": {}}
TOOLS = {"tools": [{"type": "function", "function": TOOL}]}
CHOICE = {"tool_choice": {"type": "function", "function": {"name": "get"}}}
STRICT = {"tools": [{"type": "function", "function": TOOL | {"strict": True}}]}
GOES_ON: dict[str, tuple[str, dict[str, Any]]] = {
    "completion": (COMPLETIONS, PROMPT),
    "chat": (CHAT, MESSAGES),
    "chat with tools": (CHAT, MESSAGES | TOOLS),
    "repetition penalty": (COMPLETIONS, PROMPT | {"repetition_penalty": 1.3}),
    "bias": (COMPLETIONS, PROMPT | {"logit_bias": {"400": 5.0}, "min_tokens": 30}),
    "unseeded top 1": (COMPLETIONS, PROMPT | {"temperature": 1, "top_k": 1}),
    "seeded but greedy": (COMPLETIONS, PROMPT | {"seed": 4}),
    "grammar": (COMPLETIONS, PROMPT | {"structured_outputs": {"regex": "[a-z]{400}"}}),
    "schema": (CHAT, MESSAGES | {"response_format": {"type": "json_object"}}),
    "forced call": (CHAT, MESSAGES | TOOLS | CHOICE),
    "strict tools": (CHAT, MESSAGES | STRICT),
}
RUNS_AGAIN: dict[str, dict[str, Any]] = {
    "presence penalty": {"presence_penalty": 0.5},
    "frequency penalty": {"frequency_penalty": 0.5},
    "log-probabilities": {"logprobs": 1},
    "seed": {"temperature": 1, "seed": 4},
    "bad words": {"bad_words": ["the"]},
    "several": {"n": 2, "temperature": 1, "top_k": 1},
}


async def stream(
    session: aiohttp.ClientSession, server: FleetProcess, path: str, body: dict[str, Any]
) -> tuple[list[int] | None, StreamedAnswer]:
    """The tokens that its comments name, None without any, and the answer as a client has it.

    All tokens are named but those of the last output.
    """
    headers = {"x-baton-token-ids": "1"}
    async with session.post(server.url + path, json=GREEDY | body, headers=headers) as response:
        assert response.status == 200, await response.text()
        has_ids = response.headers.get("x-baton-token-ids") == "1"
        record = StreamRecord(RecordBudget(1 << 20), 1 << 20)
        record.begin(has_ids=has_ids)
        events = record.take(await response.read())
    ids = record.read_token_ids() if has_ids else None
    if ids is not None:
        assert count_before_the_last(events) <= len(ids) < NUM_TOKENS
    return ids, StreamedAnswer().read_all(events)


def count_before_the_last(events: bytes) -> int:
    """How many tokens came before the event that ends the answer."""
    data = (event.removeprefix(b"data: ") for event in events.split(b"\n\n"))
    chunks = [json.loads(each) for each in data if each.startswith(b"{")]
    *before, last = (chunk for chunk in chunks if chunk["choices"])
    assert last["choices"][0]["finish_reason"] is not None
    return max(chunk["usage"]["completion_tokens"] for chunk in before)


async def stream_in_pieces(
    session: aiohttp.ClientSession, server: FleetProcess, path: str, body: dict[str, Any]
) -> tuple[list[int], StreamedAnswer]:
    """The same of a stream of which half the tokens, or more, are named: on a busy machine many
    may come in its last event.
    """
    for _ in range(10):
        ids, whole = await stream(session, server, path, body)
        assert ids is not None
        if len(ids) >= NUM_TOKENS // 2:
            return ids, whole
    raise AssertionError(f"{len(ids)} of {NUM_TOKENS} tokens are named, again and again")


def count_generated(server: FleetProcess) -> float:
    wait_idle(server)
    return read_metric(server.url, "vllm:generation_tokens_total")


def test_an_answer_goes_on_from_its_tokens(cluster: VllmCluster) -> None:
    """All at once: a step of several answers takes what a step of one takes."""
    server = cluster.decode

    async def check(
        session: aiohttp.ClientSession, name: str, ids: list[int], whole: StreamedAnswer, num: int
    ) -> None:
        path, body = GOES_ON[name]
        given = body | {"kv_transfer_params": {"baton_resume": {"token_ids": ids[:num]}}}
        again, answer = await stream(session, server, path, given)
        assert again is not None, name
        num_both = min(len(ids), len(again))
        assert again[:num_both] == ids[:num_both], name
        assert num_both >= num, name
        assert comparable(answer) == comparable(whole), name

    async def main() -> None:
        async with open_session() as session:
            whole = await asyncio.gather(
                *(stream_in_pieces(session, server, *GOES_ON[name]) for name in GOES_ON)
            )
            for nums in ([NUM_TOKENS // 2] * len(whole), [len(ids) for ids, _ in whole]):
                before = count_generated(server)
                given = zip(GOES_ON, whole, nums, strict=True)
                await asyncio.gather(*(check(session, name, *w, num) for name, w, num in given))
                # None of them can be generated with less.
                generated = count_generated(server) - before
                assert generated == sum(NUM_TOKENS - num for num in nums)

    asyncio.run(main())


def test_a_stop_string_may_begin_in_given_tokens(cluster: VllmCluster) -> None:
    async def main() -> None:
        async with open_session() as session:
            ids, whole = await stream(session, cluster.decode, COMPLETIONS, PROMPT)
            assert ids is not None
            middle = len(whole.text) // 2
            stop = {"stop": whole.text[middle : middle + 12]}
            ids, stopped = await stream(session, cluster.decode, COMPLETIONS, PROMPT | stop)
            assert ids is not None
            assert stopped.finishes == ["stop"]
            given = PROMPT | stop | {"kv_transfer_params": {"baton_resume": {"token_ids": ids}}}
            again, answer = await stream(session, cluster.decode, COMPLETIONS, given)
            assert again is not None
            assert again[: len(ids)] == ids
            assert comparable(answer) == comparable(stopped)

    asyncio.run(main())


def test_what_depends_on_the_answer_alone_names_no_tokens(cluster: VllmCluster) -> None:
    async def check(session: aiohttp.ClientSession, changes: dict[str, Any]) -> None:
        body = PROMPT | changes
        given = body | {"kv_transfer_params": {"baton_resume": {"token_ids": [5, 6]}}}
        ids, whole = await stream(session, cluster.decode, COMPLETIONS, body)
        assert ids is None, changes
        ids, answer = await stream(session, cluster.decode, COMPLETIONS, given)
        assert ids is None, changes
        # Of several answers, pieces come in any order.
        assert sorted(answer.text) == sorted(whole.text), changes

    async def main() -> None:
        async with open_session() as session, asyncio.TaskGroup() as group:
            for changes in RUNS_AGAIN.values():
                group.create_task(check(session, changes))

    asyncio.run(main())


def test_tokens_that_cannot_be_the_answers_are_left_out(cluster: VllmCluster) -> None:
    wrong: list[list[object]] = [[1 << 30], ["x"], list(range(300, 300 + NUM_TOKENS))]

    async def main() -> None:
        async with open_session() as session:
            _, whole = await stream(session, cluster.decode, COMPLETIONS, PROMPT)
            resumes = [{"baton_resume": {"token_ids": token_ids}} for token_ids in wrong]
            bodies = [PROMPT | {"kv_transfer_params": resume} for resume in resumes]
            streams = (stream(session, cluster.decode, COMPLETIONS, body) for body in bodies)
            for _, answer in await asyncio.gather(*streams):
                assert comparable(answer) == comparable(whole)

    asyncio.run(main())


def comparable(answer: StreamedAnswer) -> StreamedAnswer:
    usages = [{n: v for n, v in u.items() if n.endswith("tion_tokens")} for u in answer.usages]
    return replace(answer, ids=set(), num_events=0, usages=usages)  # outputs may be merged
