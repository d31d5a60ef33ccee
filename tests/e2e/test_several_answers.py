"""Several answers to one request, from real workers: the same tokens as one request for each."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.e2e.client import TLS, read_trace
from tests.lazy_modules import openai

if TYPE_CHECKING:
    import ssl
    from collections.abc import Iterator

    from tests.e2e.conftest import WorkerCluster

NUM_TOKENS = 10
BLOCK_SIZE = 24
"""The larger of the two decode workers'."""
STORE_BLOCK_SIZE = 64


def make_prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng([14, seed]).integers(300, 4000, length).tolist()


@pytest.fixture(scope="module", name="alone")
def alone_fixture(cluster: WorkerCluster) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{cluster.colocated.url}/v1", api_key="none") as client:
        yield client


def ask_alone(alone: openai.OpenAI, prompt: object, **options: object) -> str:
    answer = alone.completions.create(
        model="demo", prompt=prompt, max_tokens=NUM_TOKENS, **{"temperature": 0, **options}
    )
    return answer.choices[0].text


def ask(
    url: str, prompt: object, *, stream: bool, **options: object
) -> tuple[list[str], openai.types.CompletionUsage, str]:
    """The texts by index, the usage, and the request's id."""
    fields = {"model": "demo", "prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0}
    fields |= options
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        if not stream:
            whole = client.completions.create(**fields)
            assert [c.index for c in whole.choices] == list(range(len(whole.choices)))
            return [c.text for c in whole.choices], whole.usage, whole._request_id
        texts: dict[int, str] = {}
        include = {"stream_options": {"include_usage": True}}
        chunks = client.completions.create(stream=True, **fields, **include)
        request_id = chunks.response.headers["x-request-id"]
        *parts, last = list(chunks)
        assert last.choices == []
        assert {c.id for c in (*parts, last)} == {f"cmpl-{request_id}"}
        for choice in (choice for part in parts for choice in part.choices):
            texts[choice.index] = texts.get(choice.index, "") + choice.text
        return [texts[i] for i in range(len(texts))], last.usage, request_id


@pytest.mark.parametrize(
    ("way", "stream"),
    [("shared_gateway", False), ("tcp_gateway", True), ("pulling_gateway", False)],
)
def test_n_answers_are_those_of_one_request_and_share_one_handoff(
    cluster: WorkerCluster, alone: openai.OpenAI, way: str, stream: bool
) -> None:
    url = getattr(cluster, way).url
    prompt = make_prompt(len(way), 500)
    wanted = ask_alone(alone, prompt)
    salted = {"extra_body": {"cache_salt": "ours"}}
    texts, usage, request_id = ask(url, prompt, stream=stream, n=3, **salted)
    assert texts == [wanted] * 3
    assert (usage.prompt_tokens, usage.completion_tokens) == (500, 3 * NUM_TOKENS)
    assert usage.total_tokens == 500 + 3 * NUM_TOKENS
    assert usage.prompt_tokens_details.cached_tokens == 0
    lead = read_trace(url, request_id)
    assert lead["num_received_tokens"] > 0
    assert lead["fallbacks"] == []
    for index in range(3):
        trace = read_trace(url, f"{request_id}-{index}")
        assert trace["num_received_tokens"] == 0
        assert trace["num_cached_tokens"] >= 500 - BLOCK_SIZE


def test_n_answers_are_written_to_the_store_and_read_from_it_once(
    cluster: WorkerCluster, alone: openai.OpenAI
) -> None:
    prompt = make_prompt(40, 500)
    before = count_pool_entries(cluster)
    texts, _, request_id = ask(cluster.pool_gateway.url, prompt, stream=False, n=3)
    assert texts == [ask_alone(alone, prompt)] * 3
    lead = read_trace(cluster.pool_gateway.url, request_id)
    assert (lead["mode"], lead["fallbacks"]) == ("pool", [])
    assert lead["num_received_tokens"] == 500
    num_entries = -(-500 // STORE_BLOCK_SIZE)
    stored, loaded = (
        after - was for after, was in zip(count_pool_entries(cluster), before, strict=True)
    )
    assert (stored, loaded) == (num_entries, num_entries)


def count_pool_entries(cluster: WorkerCluster) -> tuple[float, float]:
    """Entries of handoffs that the prefill worker stored, and that the decode worker loaded."""
    return (
        read_sample(
            cluster.prefill.url, 'baton_pool_entries_total{result="stored",role="prefill"}'
        ),
        read_sample(cluster.decode.url, 'baton_pool_entries_total{result="loaded",role="decode"}'),
    )


def read_sample(url: str, name: str) -> float:
    with urllib.request.urlopen(f"{url}/metrics", timeout=30, context=TLS) as reply:
        lines = reply.read().decode().splitlines()
    return next(float(line.split()[-1]) for line in lines if line.startswith(name))


def test_seeded_answers_differ_and_each_can_be_asked_for_again(
    cluster: WorkerCluster, alone: openai.OpenAI
) -> None:
    prompt = make_prompt(10, 200)
    warm = {"temperature": 1.5, "seed": 5}
    texts, _, _ = ask(cluster.tcp_gateway.url, prompt, stream=False, n=3, **warm)
    assert len(set(texts)) == 3
    assert texts == [
        ask_alone(alone, prompt, temperature=1.5, seed=5 + index) for index in range(3)
    ]


@pytest.mark.parametrize(("way", "stream"), [("tcp_gateway", False), ("early_gateway", True)])
def test_a_list_of_prompts_is_answered_as_one_request_for_each(
    cluster: WorkerCluster, alone: openai.OpenAI, way: str, stream: bool
) -> None:
    prompts = [make_prompt(20 + i, length) for i, length in enumerate((30, 90, 300))]
    url = getattr(cluster, way).url
    texts, usage, _ = ask(url, prompts, stream=stream)
    assert texts == [ask_alone(alone, prompt) for prompt in prompts]
    assert (usage.prompt_tokens, usage.completion_tokens) == (420, 3 * NUM_TOKENS)
    words = ["It was a truth", "Elizabeth looked"]
    texts, _, _ = ask(url, words, stream=stream, n=2)
    assert texts == [ask_alone(alone, prompt) for prompt in words for _ in range(2)]


def test_a_chat_has_several_answers_too(cluster: WorkerCluster) -> None:
    messages = [{"role": "user", "content": "Tell me of the ball. " * 20}]
    options = {"model": "demo", "messages": messages, "temperature": 0, "max_tokens": 8}
    with openai.OpenAI(base_url=f"{cluster.shared_gateway.url}/v1", api_key="none") as client:
        whole = client.chat.completions.create(**options, n=2, logprobs=True)
        parts = list(client.chat.completions.create(**options, n=2, stream=True))
    first, second = (choice.message.content for choice in whole.choices)
    assert first == second
    assert [len(choice.logprobs.content) for choice in whole.choices] == [8, 8]
    for index in range(2):
        mine = [c for part in parts for c in part.choices if c.index == index]
        assert mine[0].delta.role == "assistant"
        assert "".join(c.delta.content or "" for c in mine) == first


def test_a_client_that_leaves_leaves_nothing_behind(cluster: WorkerCluster) -> None:
    async def leave() -> None:
        async with openai.AsyncOpenAI(
            base_url=f"{cluster.tcp_gateway.url}/v1", api_key="none"
        ) as client:
            stream = await client.completions.create(
                model="demo", prompt=make_prompt(30, 100), n=4, max_tokens=7000, stream=True,
                extra_body={"ignore_eos": True},
            )  # fmt: skip
            await anext(aiter(stream))
            await stream.close()

        for worker in (cluster.tcp_prefill, cluster.tcp_decode):
            async with asyncio.timeout(30):
                while not await asyncio.to_thread(is_idle, worker.url, cluster.tcp_client):
                    await asyncio.sleep(0.05)

    asyncio.run(leave())


def is_idle(url: str, context: ssl.SSLContext) -> bool:
    with urllib.request.urlopen(f"{url}/health", context=context) as response:
        load = json.load(response)["load"]
    return (load["num_waiting"], load["num_free_blocks"]) == (0, load["num_blocks"])
