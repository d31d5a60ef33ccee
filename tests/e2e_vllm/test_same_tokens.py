"""The oracle: the same greedy tokens, in float32, with Baton and from one vLLM server alone."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from tests.e2e_vllm.client import (
    ask_all,
    ask_one,
    check_same,
    get_text,
    make_body,
    make_prompts,
    post,
    read_info,
    read_metric,
    read_request,
    read_summary,
)
from tests.e2e_vllm.cluster import BLOCK_SIZE, CHUNK_TOKENS, KV_BYTES_PER_TOKEN, NUM_LAYERS
from tests.e2e_vllm.telemetry_checks import (
    check_commands,
    check_stages,
    find_pair,
    read_transfers,
)
from tests.e2e_vllm.tickets import Handoff, Server, read_prefill_result, read_tokens
from tests.lazy_modules import openai

if TYPE_CHECKING:
    from pathlib import Path

    from tests.e2e_vllm.client import Answer
    from tests.e2e_vllm.cluster import ClusterFactory, VllmCluster

pytestmark = pytest.mark.vllm

NUM_PROMPTS = 20


def count_blocks(num_tokens: int) -> int:
    return -(-num_tokens // BLOCK_SIZE)


def check_handed_over(cluster: VllmCluster, prompt: list[int], answer: Answer) -> None:
    """All of a prompt's KV was moved, over the transport that was expected, and verified."""
    request = read_request(cluster.gateway, answer.request_id)
    summary = request["summary"]
    assert summary["num_received_tokens"] == len(prompt)
    assert summary["num_cached_tokens"] == 0
    assert summary["transport"] == summary["expected_transport"] == "shared"
    assert (summary["distance"], summary["operation"]) == ("same_host", "READ")
    assert summary["fallbacks"] == []
    assert request["prefill"]["outcome"] == "prefilled"
    # The decode worker reads pages, and counts each one when its digest was right.
    num_blocks = count_blocks(len(prompt))
    assert request["decode"]["num_pages"] == NUM_LAYERS * num_blocks
    assert request["decode"]["num_bytes"] == num_blocks * BLOCK_SIZE * KV_BYTES_PER_TOKEN


def test_a_prompt_that_is_asked_for_many_times_at_once(cluster: VllmCluster) -> None:
    """vLLM computes it once; the others use its blocks in the same step, before they are filled."""
    for seed in (100, 101):
        ahead, prompt = (
            make_prompts(1, seed=seed + n, shortest=n, longest=n)[0] for n in (600, 150)
        )
        expected = ask_one(cluster.oracle, prompt)
        answers = ask_all(cluster.gateway, [ahead, *[prompt] * 5])[1:]
        check_same(answers, [expected] * 5)
        prefills = [read_request(cluster.gateway, a.request_id)["prefill"] for a in answers]
        assert sorted(each["num_cached_tokens"] for each in prefills) == [0, *[128] * 4]


def test_twenty_prompts_one_and_eight_at_a_time(
    cluster: VllmCluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = make_prompts(NUM_PROMPTS, seed=1, shortest=50, longest=1000)
    assert {len(p) for p in prompts} >= {50, 1000}
    expected = ask_all(cluster.oracle, prompts)
    for server in (cluster.prefill, cluster.decode):  # behind TLS: no ticket needs a signature
        assert read_info(server)["takes_unsigned_tickets"]
    received = read_metric(cluster.decode.url, "vllm:baton_handoffs_total", side="received")
    alone = ask_all(cluster.gateway, prompts[::4], at_once=1)
    others = [prompt for i, prompt in enumerate(prompts) if i % 4]
    together = ask_all(cluster.gateway, others, at_once=8)
    check_same(alone, expected[::4])
    check_same(together, [answer for i, answer in enumerate(expected) if i % 4])
    for prompt, answer in zip([*prompts[::4], *others], [*alone, *together], strict=True):
        check_handed_over(cluster, prompt, answer)
    now = read_metric(cluster.decode.url, "vllm:baton_handoffs_total", side="received")
    assert now - received == NUM_PROMPTS
    assert read_metric(cluster.decode.url, "vllm:baton_transport_mismatches_total") == 0
    check_transfers(cluster)
    check_stages(cluster.gateway, alone[-1], NUM_LAYERS)
    check_commands(cluster.gateway, alone[-1], tmp_path, capsys)


def check_transfers(cluster: VllmCluster) -> None:
    """The gateway shows what the handoffs and the decode worker's reads took; nothing grows."""

    def has_all(page: dict[str, Any]) -> bool:
        return any(pair["total"]["num"] >= NUM_PROMPTS for pair in page["handoffs"])

    page = read_transfers(cluster.gateway, has_all)
    way = {"transport": "shared", "operation": "READ", "distance": "same_host"}
    pair = find_pair(page["handoffs"], prefill="prefill", decode="decode", mode="push", **way)
    for figure in ("transfer_s", "s_per_mib", "bytes_per_s"):
        assert pair["total"][figure]["p99"] > 0
    link = find_pair(page["links"], worker="decode", peer="prefill", **way)
    assert link["total"]["num_bytes"] > 0
    assert link["num_rank_pairs"] == 1
    assert link["drift"]["state"] in {"learning", "steady", "drifted"}
    (control_url,) = read_info(cluster.decode)["control_urls"]
    samples = [line for line in get_text(f"{control_url}/metrics").splitlines() if line[0] != "#"]
    landed = sum(
        float(line.rpartition(" ")[2])
        for line in samples
        if line.startswith("baton_handoff_transfer_seconds_count{")
    )
    assert landed >= NUM_PROMPTS
    assert len(samples) < 2000


def test_pulled_prompts(cluster: VllmCluster, cluster_factory: ClusterFactory) -> None:
    changes = {"gateway.mode": "pull"}
    gateway = cluster_factory.start_gateway([cluster.prefill], [cluster.decode], **changes)
    prompts = make_prompts(5, seed=12, shortest=50, longest=1000)
    expected = ask_all(cluster.oracle, prompts)
    answers = ask_all(gateway, prompts, at_once=4)
    check_same(answers, expected)
    pulling = replace(cluster, gateway=gateway)
    for prompt, answer in zip(prompts, answers, strict=True):
        assert read_summary(gateway, answer.request_id)["mode"] == "pull"
        check_handed_over(pulling, prompt, answer)
        check_stages(gateway, answer, NUM_LAYERS)
    cluster_factory.end(gateway)


def test_pooled_prompts(cluster: VllmCluster, cluster_factory: ClusterFactory) -> None:
    gateway = cluster_factory.start_gateway(
        [cluster.prefill], [cluster.decode], **{"gateway.mode": "pool"}
    )
    prompts = make_prompts(5, seed=13, shortest=50, longest=1000)
    expected = ask_all(cluster.oracle, prompts)
    answers = ask_all(gateway, prompts, at_once=4)
    check_same(answers, expected)
    for prompt, answer in zip(prompts, answers, strict=True):
        summary = read_summary(gateway, answer.request_id)
        assert (summary["mode"], summary["fallbacks"]) == ("pool", [])
        assert summary["num_received_tokens"] == len(prompt)
    cluster_factory.end(gateway)


def test_sampled_answers_are_those_of_the_oracle(cluster: VllmCluster) -> None:
    (prompt,) = make_prompts(1, seed=2, shortest=150, longest=150)
    sampling = {"temperature": 0.9, "top_p": 0.95}
    expected = [ask_one(cluster.oracle, prompt, **sampling, seed=seed) for seed in range(2)]
    answers = [
        ask_one(cluster.gateway, [*prompt], **sampling, seed=seed, cache_salt=str(seed))
        for seed in range(2)
    ]
    check_same(answers, expected)
    assert len(set(answers)) > 1
    for answer in answers:
        check_handed_over(cluster, prompt, answer)


def test_a_seed_gives_one_answer_in_however_many_steps_its_prompt_is_computed(
    cluster: VllmCluster,
) -> None:
    """A part of a prompt with a seed would end vLLM's engine on CPUs (`cpu_seeds`)."""
    num_tokens = 2 * CHUNK_TOKENS + 90
    (prompt,) = make_prompts(1, seed=5, shortest=num_tokens, longest=num_tokens)
    body = {"temperature": 0.9, "top_p": 0.95, "seed": 11, "cache_salt": "seeded"}
    in_three_steps = ask_one(cluster.decode, prompt, **body)
    in_one_step = ask_one(cluster.decode, prompt, **body)  # behind what is cached
    handed_over = ask_one(cluster.gateway, prompt, **body | {"cache_salt": "seeded again"})
    check_same([in_one_step, handed_over], [in_three_steps] * 2)
    check_handed_over(cluster, prompt, handed_over)
    assert ask_one(cluster.decode, prompt, **body | {"seed": 12}) != in_three_steps


def test_prefix_hits_on_either_side_and_only_the_rest_is_sent(cluster: VllmCluster) -> None:
    stems = make_prompts(4, seed=3, shortest=300, longest=600)
    prompts = [[*stem, *[1000 + i] * (40 + 70 * i)] for i, stem in enumerate(stems)]
    # Shorter answers are complete before a busy prefill server's own, which says what it had.
    longer = {"max_tokens": 32}
    expected = ask_all(cluster.oracle, prompts, **longer)
    ask_all(cluster.prefill, stems[:2])
    ask_all(cluster.decode, stems[1:3])
    answers = ask_all(cluster.gateway, prompts, **longer)
    check_same(answers, expected)
    requests = [read_request(cluster.gateway, answer.request_id) for answer in answers]
    for i, (request, prompt, stem) in enumerate(zip(requests, prompts, stems, strict=True)):
        cached = len(stem) // BLOCK_SIZE * BLOCK_SIZE
        on_prefill, on_decode = (cached if i in held else 0 for held in ({0, 1}, {1, 2}))
        summary = request["summary"]
        assert summary["fallbacks"] == []
        assert request["prefill"]["num_cached_tokens"] == on_prefill
        assert summary["num_cached_tokens"] == on_decode
        assert answers[i].num_cached == on_prefill
        assert summary["num_received_tokens"] == len(prompt) - on_decode
        num_blocks = count_blocks(len(prompt)) - on_decode // BLOCK_SIZE
        assert summary["num_bytes"] == num_blocks * BLOCK_SIZE * KV_BYTES_PER_TOKEN
    again = ask_all(cluster.gateway, prompts, **longer)
    check_same(again, expected)
    assert all(answer.num_cached for answer in again)


def test_a_prefix_that_another_server_has_is_loaded_and_the_rest_computed(
    cluster: VllmCluster,
) -> None:
    prompts = make_prompts(4, seed=11, shortest=400, longest=600)
    expected = ask_all(cluster.oracle, prompts)
    prefill, decode = Server.of(cluster.prefill), Server.of(cluster.decode)
    # Of whole blocks, of others, of a prompt of which decode has some, of a whole prompt.
    numbers = [320, 333, 320, len(prompts[3])]
    ask_all(cluster.prefill, [prompt[:320] for prompt in prompts])
    ask_one(cluster.decode, prompts[2][:128])
    for i, (prompt, num) in enumerate(zip(prompts, numbers, strict=True)):
        handoff = Handoff.make(prefill, decode, prompt, num_prefix_tokens=num)
        sent, answered = handoff.ask_prefill(), handoff.ask_decode()
        status, answer = sent.result()
        assert read_prefill_result((status, answer)) == {"status": "offered"}
        assert answer["usage"]["prompt_tokens"] == num  # no more of it was computed there
        check_same([read_tokens(answered.result())], [expected[i]])
        trace, cached = handoff.read_decode_trace(), 128 if i == 2 else 0
        assert trace.fallbacks == []
        assert (trace.num_cached_tokens, trace.num_received_tokens) == (cached, num - cached)


MESSAGES = [
    {"role": "system", "content": "You tell stories."},
    {"role": "user", "content": "Continue: It was a truth universally acknowledged, " * 6},
]


def test_chat_is_what_the_oracle_says_and_was_handed_over(cluster: VllmCluster) -> None:
    def ask(url: str) -> openai.types.chat.ChatCompletion:
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client:
            return client.chat.completions.create(
                model="demo", messages=MESSAGES, temperature=0, max_tokens=24, logprobs=True,
                top_logprobs=2,
            )  # fmt: skip

    ours, oracle = ask(cluster.gateway.url), ask(cluster.oracle.url)
    assert ours.choices[0].message.content == oracle.choices[0].message.content
    assert ours.choices[0].finish_reason == oracle.choices[0].finish_reason
    assert ours.usage.completion_tokens == oracle.usage.completion_tokens
    mine, theirs = ours.choices[0].logprobs.content, oracle.choices[0].logprobs.content
    assert [t.token for t in mine] == [t.token for t in theirs]
    assert [t.logprob for t in mine] == pytest.approx([t.logprob for t in theirs], abs=2e-3)
    assert not hasattr(ours, "kv_transfer_params") or ours.kv_transfer_params is None
    summary = read_summary(cluster.gateway, ours._request_id)
    assert summary["num_received_tokens"] == ours.usage.prompt_tokens


def test_a_chat_stream_adds_up_to_the_whole_answer(cluster: VllmCluster) -> None:
    with openai.OpenAI(base_url=f"{cluster.gateway.url}/v1", api_key="none") as client:
        whole = client.chat.completions.create(
            model="demo", messages=MESSAGES, temperature=0, max_tokens=20
        )
        stream = client.chat.completions.create(
            model="demo", messages=MESSAGES, temperature=0, max_tokens=20, stream=True,
            stream_options={"include_usage": True}, extra_body={"cache_salt": "stream"},
        )  # fmt: skip
        chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 20


def test_several_answers_to_one_prompt(cluster: VllmCluster) -> None:
    prompt = make_prompts(1, seed=4, shortest=200, longest=200)[0]
    body = make_body(prompt, n=2, temperature=0.8, seed=5)
    ours, oracle = (
        post(f"{server.url}/v1/completions", body) for server in (cluster.gateway, cluster.oracle)
    )
    assert ours[0] == oracle[0] == 200
    tokens = [[choice["logprobs"]["tokens"] for choice in one[1]["choices"]] for one in
              (ours, oracle)]  # fmt: skip
    assert tokens[0] == tokens[1]
    assert tokens[0][0] != tokens[0][1]


def test_the_probe_says_who_a_server_is(cluster: VllmCluster) -> None:
    for server, role in ((cluster.prefill, "prefill"), (cluster.decode, "decode")):
        info = read_info(server)
        assert (info["worker"], info["role"], info["protocol"]) == (role, role, "vllm")
        assert info["engine"].startswith("vllm ")
        assert (info["model"], info["served_model_name"]) == (str(cluster.model), "demo")
        (control,) = info["control_urls"]
        assert json.loads(get_text(f"{control}/baton/v1/info"))["epoch"] == info["epoch"]
    first, second = read_info(cluster.prefill), read_info(cluster.decode)
    assert first["fingerprint"] == second["fingerprint"]
    assert first["epoch"] != second["epoch"]
