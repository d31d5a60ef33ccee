"""The official `openai` Python client against the gateway, as an application would use it."""

from __future__ import annotations

import asyncio
import urllib.request
from typing import TYPE_CHECKING

import pytest

from tests.e2e.client import read_trace
from tests.lazy_modules import openai

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.e2e.conftest import WorkerCluster

MESSAGES = [
    {"role": "system", "content": "You tell stories."},
    {"role": "user", "content": "Continue: It was a truth universally acknowledged, that a single"},
]

MULTIPLEXED = "baton_gateway_multiplexed_streams_total"


@pytest.fixture(scope="module", name="client")
def client_fixture(cluster: WorkerCluster) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{cluster.shared_gateway.url}/v1", api_key="none") as client:
        yield client


@pytest.fixture(scope="module", name="alone")
def alone_fixture(cluster: WorkerCluster) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{cluster.colocated.url}/v1", api_key="none") as client:
        yield client


def test_the_model_is_listed(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["demo"]


def test_chat_is_what_one_worker_says_and_was_handed_over(
    client: openai.OpenAI, alone: openai.OpenAI, cluster: WorkerCluster
) -> None:
    def ask(who: openai.OpenAI) -> openai.types.chat.ChatCompletion:
        return who.chat.completions.create(
            model="demo", messages=MESSAGES, temperature=0, max_tokens=30,
            logprobs=True, top_logprobs=3,
        )  # fmt: skip

    ours, oracle = ask(client), ask(alone)
    assert ours.choices[0].message.content == oracle.choices[0].message.content
    assert ours.choices[0].finish_reason == oracle.choices[0].finish_reason
    assert ours.usage.completion_tokens == oracle.usage.completion_tokens
    mine, theirs = ours.choices[0].logprobs.content, oracle.choices[0].logprobs.content
    assert [t.token for t in mine] == [t.token for t in theirs]
    assert [t.logprob for t in mine] == pytest.approx([t.logprob for t in theirs], abs=1e-4)
    assert [len(t.top_logprobs) for t in mine] == [3] * len(mine)
    trace = read_trace(cluster.shared_gateway.url, ours._request_id)
    assert trace["num_received_tokens"] > 0
    assert trace["transport"] == trace["expected_transport"] == "shared"
    assert (trace["distance"], trace["operation"]) == ("same_host", "WRITE")


def test_a_chat_stream_adds_up_to_the_whole_answer(
    client: openai.OpenAI, cluster: WorkerCluster
) -> None:
    whole = client.chat.completions.create(
        model="demo", messages=MESSAGES, temperature=0, max_tokens=25
    )
    for _ in range(2):  # the worker sends the second one with others, if not the first
        stream = client.chat.completions.create(
            model="demo", messages=MESSAGES, temperature=0, max_tokens=25, stream=True,
            stream_options={"include_usage": True},
        )  # fmt: skip
        check_adds_up(list(stream), whole)
    with urllib.request.urlopen(f"{cluster.shared_gateway.url}/metrics", timeout=30) as reply:
        lines = reply.read().decode().splitlines()
    (counted,) = (each for each in lines if each.startswith(f"{MULTIPLEXED} "))
    assert float(counted.split()[1]) > 0


def check_adds_up(
    chunks: list[openai.types.chat.ChatCompletionChunk], whole: openai.types.chat.ChatCompletion
) -> None:
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] is not None
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_completions_seeded_sampling_is_the_same_here_and_there(
    client: openai.OpenAI, alone: openai.OpenAI
) -> None:
    def ask(who: openai.OpenAI, seed: int) -> str:
        answer = who.completions.create(
            model="demo", prompt="Elizabeth looked at him and " * 8, max_tokens=20,
            temperature=0.9, top_p=0.95, seed=seed,
        )  # fmt: skip
        return answer.choices[0].text

    answers = [ask(client, seed) for seed in range(3)]
    assert answers == [ask(alone, seed) for seed in range(3)]
    assert answers[-1] == ask(client, 2)
    assert len(set(answers)) > 1


@pytest.mark.parametrize("max_tokens", [1, 2])
def test_answers_that_end_with_the_token_that_prefill_sampled(
    client: openai.OpenAI, alone: openai.OpenAI, max_tokens: int
) -> None:
    def ask(who: openai.OpenAI) -> tuple[str, str, int]:
        answer = who.completions.create(
            model="demo", prompt="She was not a little pleased " * 5, max_tokens=max_tokens,
            temperature=0,
        )  # fmt: skip
        choice = answer.choices[0]
        return choice.text, choice.finish_reason, answer.usage.completion_tokens

    assert ask(client) == ask(alone)
    assert ask(client)[1:] == ("length", max_tokens)


def test_a_stop_string_ends_the_answer(client: openai.OpenAI) -> None:
    prompt = "He was a very good sort of man " * 4
    free = client.completions.create(model="demo", prompt=prompt, max_tokens=24, temperature=0)
    text = free.choices[0].text
    stop = text[len(text) // 2 : len(text) // 2 + 4]
    answer = client.completions.create(
        model="demo", prompt=prompt, max_tokens=24, temperature=0, stop=[stop]
    )
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].text == text.partition(stop)[0]


def test_many_async_clients_at_once(cluster: WorkerCluster) -> None:
    async def run() -> list[str]:
        async with openai.AsyncOpenAI(
            base_url=f"{cluster.tcp_gateway.url}/v1", api_key="none"
        ) as client:

            async def one(i: int) -> str:
                stream = await client.chat.completions.create(
                    model="demo", messages=[{"role": "user", "content": f"Chapter {i} " * 9}],
                    temperature=0, max_tokens=12, stream=True,
                )  # fmt: skip
                return "".join([c.choices[0].delta.content or "" async for c in stream])

            return await asyncio.gather(*(one(i) for i in range(16)))

    answers = asyncio.run(run())
    assert len(answers) == 16
    assert all(answers)


@pytest.mark.parametrize(
    ("change", "kind", "says"),
    [
        ({"model": "gpt-9"}, "NotFoundError", "demo"),
        ({"max_tokens": -1}, "BadRequestError", "max_tokens"),
        ({"temperature": 3.5}, "BadRequestError", "temperature"),
        ({"best_of": 3}, "BadRequestError", "best_of"),
        ({"presence_penalty": 1}, "BadRequestError", "vllm"),
        ({"prompt": [5] * 9000}, "BadRequestError", "8192"),
        ({"prompt": {"no": "prompt"}}, "BadRequestError", "prompt"),
        ({"top_p": "high"}, "BadRequestError", "top_p"),
    ],
)
def test_bad_requests_say_what_is_wrong(
    client: openai.OpenAI, change: dict[str, object], kind: str, says: str
) -> None:
    request = {"model": "demo", "prompt": "hello", "max_tokens": 5} | change
    with pytest.raises(getattr(openai, kind)) as caught:
        client.completions.create(**request)
    assert says in caught.value.message
    assert caught.value.body["type"]


def test_after_bad_requests_nothing_is_held(client: openai.OpenAI, cluster: WorkerCluster) -> None:
    answer = client.completions.create(model="demo", prompt="and so " * 20, max_tokens=3)
    assert answer.choices[0].text
    trace = read_trace(cluster.shared_gateway.url, answer._request_id)
    assert trace["fallbacks"] == []
