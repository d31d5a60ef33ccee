"""Decode servers that differ from their prefill server: block size, transport, engine, drafts."""

from __future__ import annotations

import json
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from tests.cpu import needs_fp8
from tests.e2e_vllm.ahead import (
    start_fp8_pair,
    start_other_rope,
    start_speculating,
    start_transformers,
    start_two_ranks,
)
from tests.e2e_vllm.client import (
    ask_all,
    ask_one,
    check_same,
    get_text,
    make_prompts,
    read_info,
    read_metric,
    read_request,
    read_summary,
    wait_until,
)
from tests.e2e_vllm.cluster import KV_BYTES_PER_TOKEN, NUM_LAYERS
from tests.e2e_vllm.telemetry_checks import read_transfers, wait_for_mismatch

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from baton.testing.fleet import FleetProcess
    from tests.e2e_vllm.client import Answer
    from tests.e2e_vllm.cluster import ClusterFactory, VllmCluster

pytestmark = pytest.mark.vllm

NUM_PROMPTS = 4
ALONE = slice(0, None, 2)
"""Of these prompts, those that are asked one at a time, too."""
STORE_BLOCK = 64
SEEDS = {"ngram": 21, "draft": 22, "fp8": 23, "transformers": 24, "tp": 25, "rope": 26}


def make_varied(seed: int) -> list[list[int]]:
    """Prompts whose second half repeats a phrase, so that a draft can be right."""
    prompts = make_prompts(NUM_PROMPTS, seed=seed, shortest=50, longest=700)
    return [[*p[: len(p) // 2], *(p[:7] * len(p))][: len(p)] for p in prompts]


def check_through(
    gateway: FleetProcess,
    prompts: list[list[int]],
    expected: Sequence[Answer],
    transports: tuple[str, ...] = ("shared", "tcp"),
) -> None:
    """Some one at a time, then all at once under another salt: the same tokens, all handed over.

    Of several transports the cheapest is used, by a measurement on a busy machine.
    """
    for some, how in (
        (ALONE, {"at_once": 1}),
        (slice(None), {"at_once": 8, "cache_salt": "together"}),
    ):
        answers = ask_all(gateway, prompts[some], **how)
        check_same(answers, expected[some])
        for prompt, answer in zip(prompts[some], answers, strict=True):
            summary = read_summary(gateway, answer.request_id)
            assert summary["fallbacks"] == []
            assert summary["num_received_tokens"] == len(prompt)
            assert summary["transport"] == summary["expected_transport"]
            assert summary["transport"] in transports
            assert summary["num_bytes"] > 0


@pytest.fixture(scope="module")
def speculating(
    cluster_factory: ClusterFactory, cluster: VllmCluster
) -> Iterator[dict[str, FleetProcess]]:
    """Decode servers that guess ahead."""
    ngram, draft = cluster_factory.take("speculating", start_speculating)
    yield {"ngram": ngram, "draft": draft}
    cluster_factory.end(ngram, draft)


@pytest.mark.parametrize("name", ["ngram", "draft"])
def test_speculative_decoding(
    cluster_factory: ClusterFactory,
    cluster: VllmCluster,
    speculating: dict[str, FleetProcess],
    name: str,
) -> None:
    """`ngram` has blocks of another size besides, and another transport."""
    server = speculating[name]
    prompts = make_varied(SEEDS[name])
    expected = ask_all(cluster.oracle, prompts)
    # Of few words some come again, so that a guess is right and another wrong.
    few_words = {"allowed_token_ids": [500, 501, 502], "max_tokens": 30, "cache_salt": "few"}
    monotonous = ask_all(cluster.oracle, prompts[ALONE], **few_words)
    with standing_gateway(cluster_factory, cluster.prefill, server) as gateway:
        check_through(
            gateway, prompts, expected, ("tcp",) if name == "ngram" else ("shared", "tcp")
        )
        check_same(ask_all(gateway, prompts[ALONE], **few_words), monotonous)
        if name == "ngram":  # it shares memory with the other, and was given TCP alone
            ends = {"from": "prefill", "to": "ngram"}
            wait_for_mismatch(gateway, expected="shared", used="tcp", **ends)
    # The draft model lacks the KV that was handed over; of what is computed here it is right.
    check_same([ask_one(server, prompts[0], cache_salt="alone")], expected[:1])
    drafted = read_metric(server.url, "vllm:spec_decode_num_draft_tokens_total")
    accepted = read_metric(server.url, "vllm:spec_decode_num_accepted_tokens_total")
    assert 0 < accepted < drafted


@contextmanager
def standing_gateway(
    cluster_factory: ClusterFactory, prefill: FleetProcess, decode: FleetProcess
) -> Iterator[FleetProcess]:
    gateway = cluster_factory.start_gateway([prefill], [decode])
    yield gateway
    cluster_factory.end(gateway)


@pytest.fixture(scope="module")
def fp8_pair(cluster_factory: ClusterFactory) -> Iterator[tuple[FleetProcess, FleetProcess]]:
    """Started as a user of vLLM starts it; native pages over sockets."""
    prefill, decode = cluster_factory.take("fp8_pair", start_fp8_pair)
    yield prefill, decode
    cluster_factory.end(prefill, decode)


@needs_fp8
def test_fp8_kv_of_servers_that_vllm_started(
    cluster_factory: ClusterFactory, fp8_pair: tuple[FleetProcess, FleetProcess]
) -> None:
    """The oracle is the prefill server, asked without Baton and under another salt."""
    prefill, decode = fp8_pair
    prompts = make_varied(SEEDS["fp8"])
    expected = ask_all(prefill, prompts, cache_salt="oracle")
    with standing_gateway(cluster_factory, prefill, decode) as gateway:
        check_through(gateway, prompts, expected, ("tcp",))
    assert read_info(decode)["layout"]["dtype"] != "float32"


@pytest.fixture(scope="module")
def other_rope(cluster_factory: ClusterFactory, cluster: VllmCluster) -> Iterator[FleetProcess]:
    (server,) = cluster_factory.take("other_rope", start_other_rope)
    yield server
    cluster_factory.end(server)


def test_kv_of_the_same_files_with_other_positions_is_not_taken(
    cluster_factory: ClusterFactory, cluster: VllmCluster, other_rope: FleetProcess
) -> None:
    prompts = make_varied(SEEDS["rope"])
    expected = ask_all(other_rope, prompts, cache_salt="oracle")
    usual = ask_all(cluster.oracle, prompts)
    assert any(a != b for a, b in zip(expected, usual, strict=True))
    with standing_gateway(cluster_factory, cluster.prefill, other_rope) as gateway:
        answers = ask_all(gateway, prompts)
        check_same(answers, expected)
        for answer in answers:
            placed = read_request(gateway, answer.request_id)
            assert placed["summary"] is None, "it was handed over"
            assert "different fingerprints" in " ".join(placed["placement"])


@pytest.fixture(scope="module")
def transformers(cluster_factory: ClusterFactory) -> Iterator[FleetProcess]:
    (worker,) = cluster_factory.take("transformers", start_transformers)
    yield worker
    cluster_factory.end(worker)


@pytest.mark.parametrize("sender", ["vllm", "transformers"])
def test_handoffs_between_engines(
    cluster_factory: ClusterFactory, cluster: VllmCluster, transformers: FleetProcess, sender: str
) -> None:
    """Blocks are of another size there, and pages of another arrangement."""
    prompts = make_varied(SEEDS["transformers"])
    plain_names = {"return_tokens_as_token_ids": None}  # the other engine has names for tokens only
    expected = ask_all(cluster.oracle, prompts, **plain_names)
    pair = (cluster.prefill, transformers) if sender == "vllm" else (transformers, cluster.decode)
    with standing_gateway(cluster_factory, *pair) as gateway:
        answers = ask_all(gateway, prompts, **plain_names)
        for prompt, answer, oracle in zip(prompts, answers, expected, strict=True):
            assert answer.text == oracle.text
            assert answer.logprobs == pytest.approx(oracle.logprobs, abs=2e-3)
            summary = read_summary(gateway, answer.request_id)
            assert summary["fallbacks"] == []
            assert summary["num_received_tokens"] == len(prompt)
            # Which one was cheapest is measured, and so may vary; that it was used may not.
            assert summary["transport"] == summary["expected_transport"]


@pytest.fixture(scope="module")
def two_ranks(cluster_factory: ClusterFactory) -> Iterator[FleetProcess]:
    (server,) = cluster_factory.take("two_ranks", start_two_ranks)
    yield server
    cluster_factory.end(server)


def count_kept(server: FleetProcess) -> list[float]:
    """Entries that each rank has put into the store, or found there."""
    name = "baton_prefix_entries_total"
    return [
        sum(read_metric(url, name, result=result) for result in ("stored", "present"))
        for url in read_info(server)["control_urls"]
    ]


def test_two_ranks_load_what_they_have_computed(
    cluster: VllmCluster, two_ranks: FleetProcess
) -> None:
    """Each its own heads; the server's own cache is off."""
    prompts = make_prompts(1, seed=65, shortest=600, longest=600)
    expected = ask_all(cluster.oracle, prompts)
    before = count_kept(two_ranks)
    check_same(ask_all(two_ranks, prompts), expected)
    lengths = [len(p) + len(a.tokens) - 1 for p, a in zip(prompts, expected, strict=True)]
    kept = [num + sum(length // STORE_BLOCK for length in lengths) for num in before]
    wait_until(lambda: count_kept(two_ranks) == kept, 20.0, lambda: (count_kept(two_ranks), kept))
    answers = ask_all(two_ranks, prompts)
    check_same(answers, expected)
    full = [len(prompt) // STORE_BLOCK * STORE_BLOCK for prompt in prompts]
    assert [answer.num_cached for answer in answers] == full


@pytest.mark.parametrize("wide", ["decode", "prefill"])
def test_other_tensor_parallel_degrees(
    cluster_factory: ClusterFactory, cluster: VllmCluster, two_ranks: FleetProcess, wide: str
) -> None:
    assert len(read_info(two_ranks)["control_urls"]) == 2
    prompts = make_varied(SEEDS["tp"] + len(wide))
    expected = ask_all(cluster.oracle, prompts)
    pair = (cluster.prefill, two_ranks) if wide == "decode" else (two_ranks, cluster.decode)
    with standing_gateway(cluster_factory, *pair) as gateway:
        check_through(gateway, prompts, expected)
        check_ranks(gateway, pair[0], pair[1])


def check_ranks(gateway: FleetProcess, prefill: FleetProcess, decode: FleetProcess) -> None:
    """The gateway shows the server of two ranks as one: a link of two pairs, and all bytes."""
    prompts = make_varied(0)
    num_bytes = sum(count_kv_bytes(prompt) for prompt in [*prompts, *prompts[ALONE]])
    ends = {"prefill": prefill.name, "decode": decode.name}

    def has_all(page: dict[str, Any]) -> bool:
        pairs = [pair for pair in page["handoffs"] if ends.items() <= pair.items()]
        return sum(pair["total"]["num_bytes"] for pair in pairs) >= num_bytes

    page = read_transfers(gateway, has_all)
    pairs = [pair for pair in page["handoffs"] if ends.items() <= pair.items()]
    assert max(pair["total"]["num"] for pair in pairs) <= 2 * NUM_PROMPTS
    assert not [link for link in page["links"] if "/" in link["peer"]]
    links = [
        link
        for link in page["links"]
        if (link["worker"], link["peer"]) == (decode.name, prefill.name)
    ]
    # Each rank has chosen by its own measurements.
    assert sum(link["num_rank_pairs"] for link in links) >= 2
    for listed in json.loads(get_text(f"{gateway.url}/debug/requests"))["requests"]:
        request = read_request(gateway, listed["id"])
        assert request["missing"] == []
        for role, server in (("prefill", prefill), ("decode", decode)):
            assert request[role]["worker"] == server.name
        received = request["decode"]
        assert received["num_bytes"] >= received["num_received_tokens"] * KV_BYTES_PER_TOKEN
        assert len(request["layers"]) == NUM_LAYERS


def count_kv_bytes(prompt: list[int]) -> int:
    return len(prompt) * KV_BYTES_PER_TOKEN
