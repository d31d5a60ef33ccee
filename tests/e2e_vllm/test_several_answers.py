"""Several answers from vLLM servers, and fields that only vLLM serves, through the gateway."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from tests.e2e_vllm.client import ask_all, make_body, make_prompts, post, read_metric, read_request
from tests.lazy_modules import openai

if TYPE_CHECKING:
    from tests.e2e_vllm.cluster import VllmCluster

pytestmark = pytest.mark.vllm

SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["visit", "letter"]}},
    "required": ["kind"],
    "additionalProperties": False,
}


def read_received(cluster: VllmCluster) -> float:
    return read_metric(cluster.decode.url, "vllm:baton_handoffs_total", side="received")


@pytest.mark.parametrize("stream", [False, True])
def test_n_answers_share_one_handoff(cluster: VllmCluster, stream: bool) -> None:
    (prompt,) = make_prompts(1, seed=140 + stream, shortest=500, longest=500)
    (wanted,) = ask_all(cluster.oracle, [prompt])
    received = read_received(cluster)
    body = make_body(prompt, n=2) | {"extra_body": {}}
    extra = {name: body.pop(name) for name in ("return_tokens_as_token_ids", "ignore_eos")}
    body |= {"extra_body": extra, "stream": stream}
    with openai.OpenAI(base_url=f"{cluster.gateway.url}/v1", api_key="none") as client:
        if stream:
            chunks = client.completions.create(**body, stream_options={"include_usage": True})
            request_id = chunks.response.headers["x-request-id"]
            *parts, last = list(chunks)
            usage = last.usage
            choices = [choice for part in parts for choice in part.choices]
        else:
            whole = client.completions.create(**body)
            request_id, usage, choices = whole._request_id, whole.usage, whole.choices
    for index in range(2):
        mine = [choice for choice in choices if choice.index == index]
        assert tuple(t for choice in mine for t in choice.logprobs.tokens) == wanted.tokens
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(prompt), 2 * len(wanted.tokens))
    assert read_received(cluster) == received + 1
    assert read_request(cluster.gateway, request_id)["summary"]["fallbacks"] == []


def test_a_list_of_prompts_is_a_handoff_for_each(cluster: VllmCluster) -> None:
    prompts = make_prompts(3, seed=142, shortest=50, longest=400)
    expected = ask_all(cluster.oracle, prompts)
    received = read_received(cluster)
    status, answer = post(f"{cluster.gateway.url}/v1/completions", make_body(prompts))
    assert status == 200
    tokens = [tuple(choice["logprobs"]["tokens"]) for choice in answer["choices"]]
    assert tokens == [one.tokens for one in expected]
    assert answer["usage"]["prompt_tokens"] == sum(map(len, prompts))
    assert read_received(cluster) == received + 3


def test_a_response_format_holds_for_every_answer(cluster: VllmCluster) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "kind", "schema": SCHEMA}}
    body = {
        "model": "demo", "prompt": "It was a truth universally acknowledged " * 20, "n": 2,
        "max_tokens": 60, "temperature": 1, "seed": 3, "response_format": schema,
    }  # fmt: skip
    received = read_received(cluster)
    status, answer = post(f"{cluster.gateway.url}/v1/completions", body)
    assert status == 200, answer
    kinds = [json.loads(choice["text"])["kind"] for choice in answer["choices"]]
    assert len(kinds) == 2
    assert set(kinds) <= {"visit", "letter"}
    assert read_received(cluster) == received + 1


def test_tools_reach_vllm_which_answers_for_itself(cluster: VllmCluster) -> None:
    body = {
        "model": "demo", "messages": [{"role": "user", "content": "Which of the two?"}], "n": 2,
        "tools": [{"type": "function", "function": {"name": "choose", "parameters": SCHEMA}}],
        "max_tokens": 8,
    }  # fmt: skip
    url = f"{cluster.gateway.url}/v1/chat/completions"
    for choice in ("none", "auto"):
        status, answer = post(url, body | {"tool_choice": choice})
        assert (status, len(answer["choices"])) == (200, 2)
    status, answer = post(url, body | {"tool_choice": "nobody"})
    assert status == 400
    assert answer["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_is_called(cluster: VllmCluster, stream: bool) -> None:
    """Which one is named, so that a random model calls it; the arguments follow its schema."""
    function = {"name": "choose", "parameters": SCHEMA, "strict": True}
    tool = {"type": "function", "function": function}
    received = read_received(cluster)
    with openai.OpenAI(base_url=f"{cluster.gateway.url}/v1", api_key="none") as client:
        answer = client.chat.completions.create(
            model="demo", max_tokens=400, temperature=1, seed=5, stream=stream, tools=[tool],
            messages=[{"role": "user", "content": "Which of the two is it to be? " * 20}],
            tool_choice={"type": "function", "function": {"name": "choose"}},
        )  # fmt: skip
        if stream:
            deltas = [choice.delta for chunk in answer for choice in chunk.choices]
            calls = [call.function for delta in deltas for call in delta.tool_calls or ()]
            (name,) = {call.name for call in calls if call.name}
            arguments = "".join(call.arguments or "" for call in calls)
        else:
            assert answer.choices[0].message.tool_calls, answer
            (call,) = answer.choices[0].message.tool_calls
            name, arguments = call.function.name, call.function.arguments
    assert name == "choose"
    assert json.loads(arguments)["kind"] in {"visit", "letter"}
    assert read_received(cluster) == received + 1
