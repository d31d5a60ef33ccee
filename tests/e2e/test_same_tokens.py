"""The oracle: the same greedy tokens, in float32, with Baton and from one colocated worker."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from tests.e2e.client import TLS, Answer, ask_all, make_prompts, read_trace, stream

if TYPE_CHECKING:
    from tests.e2e.conftest import WorkerCluster

NUM_PROMPTS = 18


@pytest.fixture(scope="module", name="prompts")
def prompts_fixture() -> list[list[int]]:
    return make_prompts(NUM_PROMPTS, seed=1)


@pytest.fixture(scope="module", name="expected")
def expected_fixture(cluster: WorkerCluster, prompts: list[list[int]]) -> list[Answer]:
    return ask_all(cluster.colocated.url, prompts)


def count_received(
    cluster: WorkerCluster, transport: str, answers: list[Answer]
) -> tuple[int, int]:
    """Tokens received by handoff over `transport`, and answers without any."""
    received = without = 0
    for answer in answers:
        trace = read_trace(cluster.gateway(transport).url, answer.request_id)
        assert trace["transport"] in {None, transport}
        received += trace["num_received_tokens"]
        without += not trace["num_received_tokens"]
    return received, without


@pytest.mark.parametrize("transport", ["shared", "tcp"])
def test_many_prompts_sixteen_at_a_time(
    cluster: WorkerCluster, prompts: list[list[int]], expected: list[Answer], transport: str
) -> None:
    assert {len(p) for p in prompts} >= {1, 4000}
    if transport == "tcp":  # the bytes do not depend on the transport: every third one
        prompts, expected = prompts[::3], expected[::3]
    answers = ask_all(cluster.gateway(transport).url, prompts)
    assert answers == expected
    for answer, oracle in zip(answers, expected, strict=True):
        assert answer.logprobs == pytest.approx(oracle.logprobs, abs=2e-3)
    received, without = count_received(cluster, transport, answers)
    # Only prompts shorter than a block, or found in the decode worker's cache, are not handed over.
    assert without <= sum(len(p) <= 24 for p in prompts)
    assert received > 0.9 * sum(len(p) for p in prompts)


def test_pulled_prompts(cluster: WorkerCluster) -> None:
    prompts = make_prompts(8, seed=3, longest=1000)
    expected = ask_all(cluster.colocated.url, prompts)
    answers = ask_all(cluster.pulling_gateway.url, prompts)
    assert answers == expected
    traces = [read_trace(cluster.pulling_gateway.url, answer.request_id) for answer in answers]
    assert {trace["mode"] for trace in traces} == {"pull"}
    received = sum(trace["num_received_tokens"] for trace in traces)
    assert received > 0.9 * sum(len(p) for p in prompts)


STREAMS: list[dict[str, object]] = [
    {"logprobs": 2},
    {"temperature": 0.9, "seed": 11, "stream_options": {"include_usage": True}},
    {"temperature": 0.9, "seed": 12, "logprobs": 0, "max_tokens": 1},
    {"logprobs": 0, "stream": False},
]


@pytest.mark.parametrize("body", STREAMS)
def test_a_stream_whose_first_token_came_early_is_the_same_byte_for_byte(
    cluster: WorkerCluster, body: dict[str, object]
) -> None:
    number = STREAMS.index(body)
    prompt = make_prompts(3, seed=40 + number, longest=900)[2]
    asked = {
        "prompt": prompt,
        "max_tokens": 12,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        **body,
    }
    expected = stream(cluster.colocated.url, asked, "oracle")
    got = stream(cluster.early_gateway.url, asked, f"early-{number}")
    assert round_logprobs(got) == round_logprobs(expected)
    trace = read_trace(cluster.early_gateway.url, f"early-{number}")
    assert trace["num_received_tokens"] == len(prompt)


def round_logprobs(events: str) -> str:
    """Other shapes of a batch, other rounding: the third digit is the same."""
    return re.sub(r"-?[0-9]+[.][0-9e-]+", lambda found: f"{float(found[0]):.2f}", events)


@pytest.mark.parametrize("transport", ["shared", "tcp"])
def test_prefix_hits_on_either_side(cluster: WorkerCluster, transport: str) -> None:
    gateway = cluster.gateway(transport).url
    prefill, decode, tls = (
        (cluster.prefill, cluster.decode, TLS) if transport == "shared"
        else (cluster.tcp_prefill, cluster.tcp_decode, cluster.tcp_client)
    )  # fmt: skip
    stems = make_prompts(8, seed=7, longest=900)[-4:]
    prompts = [stem + [1000 + i] * (5 + 40 * i) for i, stem in enumerate(stems)]
    expected = ask_all(cluster.colocated.url, prompts)
    assert ask_all(
        prefill.url, stems[:2], tls=tls
    )  # now the prefill workers' cache has two of the stems
    assert ask_all(decode.url, stems[1:3], tls=tls)  # and the decode worker's two
    answers = ask_all(gateway, prompts)
    assert answers == expected
    on_prefill_only, on_both, on_decode_only, nowhere = (
        read_trace(gateway, answer.request_id) for answer in answers
    )
    assert on_prefill_only["num_received_tokens"] == len(prompts[0])
    assert on_prefill_only["num_cached_tokens"] == 0
    assert answers[0].num_cached > 0, "its prefill worker's"
    assert nowhere["num_received_tokens"] == len(prompts[3])
    for trace, prompt in ((on_both, prompts[1]), (on_decode_only, prompts[2])):
        cached = trace["num_cached_tokens"]
        assert cached > 0, "the decode worker's own cache was not used"
        assert trace["num_received_tokens"] in {0, len(prompt) - cached}  # only the rest is sent
    again = ask_all(gateway, prompts)
    assert again == expected
    assert all(answer.num_cached for answer in again)
