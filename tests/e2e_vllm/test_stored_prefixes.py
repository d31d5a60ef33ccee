"""What one server computed another loads: across restarts, block sizes and engines; and faults."""

from __future__ import annotations

import json
import time
import urllib.request
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from baton.engines.lookup_cost import LOAD_TIMEOUT_S
from tests.chaos.store_failpoints import StorePoint
from tests.e2e_vllm.ahead import file_store, start_stored
from tests.e2e_vllm.client import (
    LOGPROB_TOLERANCE,
    TIMEOUT_S,
    TLS,
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
    wait_until,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from baton.testing.fleet import FleetProcess
    from tests.e2e_vllm.client import Answer
    from tests.e2e_vllm.cluster import ClusterFactory, VllmCluster

pytestmark = pytest.mark.vllm

ENTRY_TOKENS = 64
NUM_PARTS = 2
EMBEDDED_BLOCK = 24
OF_EMBEDDED = {"return_tokens_as_token_ids": None}
"""Of what tests ask, the field that vLLM alone serves."""
SOON_S = 20.0
NUM_STREAMED = 300


@pytest.fixture(scope="module")
def stored(cluster_factory: ClusterFactory) -> Iterator[tuple[FleetProcess, FleetProcess]]:
    first, second = cluster_factory.take("stored", start_stored)
    yield first, second
    cluster_factory.end(first, second)


@pytest.fixture(name="embedded", scope="module")
def embedded_fixture(cluster_factory: ClusterFactory) -> Iterator[FleetProcess]:
    store = {"store.num_parts": NUM_PARTS, **file_store(cluster_factory)}
    server = cluster_factory.start_transformers(
        "stored-embedded", "both", store, block_size=EMBEDDED_BLOCK
    )
    server.wait_ready()
    yield server
    cluster_factory.end(server)


@pytest.fixture(name="folder")
def folder_fixture(cluster_factory: ClusterFactory) -> Path:
    return cluster_factory.run_directory / "kv"


def find_entries(folder: Path) -> set[Path]:
    return {path for path in folder.rglob("*") if len(path.name) == 64 and path.is_file()}


def count_full(num_tokens: int) -> int:
    return num_tokens // ENTRY_TOKENS * ENTRY_TOKENS


def wait_until_kept(folder: Path, before: set[Path], lengths: list[int]) -> set[Path]:
    """All full entries of so many tokens each; returns them."""
    num_expected = sum(NUM_PARTS * count_full(length) // ENTRY_TOKENS for length in lengths)
    wait_until(
        lambda: len(find_entries(folder) - before) == num_expected,
        SOON_S,
        lambda: (len(find_entries(folder) - before), num_expected),
    )
    return find_entries(folder) - before


def count_computed(prompt: list[int], answer: Answer) -> int:
    """Tokens with KV once an answer is complete: all but its last."""
    return len(prompt) + len(answer.tokens) - 1


def count_embedded(prompt: list[int], answer: Answer) -> int:
    """The same for the embedded worker, which keeps full blocks of its own."""
    return count_computed(prompt, answer) // EMBEDDED_BLOCK * EMBEDDED_BLOCK


def check_answers(answers: Sequence[Answer], expected: Sequence[Answer]) -> None:
    """As `check_same`, for an engine that does not name tokens by their ids."""
    for answer, oracle in zip(answers, expected, strict=True):
        assert answer.text == oracle.text
        assert answer.logprobs == pytest.approx(oracle.logprobs, abs=LOGPROB_TOLERANCE)


def read_counts(server: FleetProcess, name: str, **labels: str) -> float:
    (url,) = read_info(server)["control_urls"]
    return read_metric(url, name, **labels)


def count_store_loads(server: FleetProcess) -> int:
    """Requests that have waited for the store to load something, also in vain."""
    (url,) = read_info(server)["control_urls"]
    count: int = json.loads(get_text(f"{url}/health"))["load"]["store_loads"]["num_loads"]
    return count


def read_loaded(server: FleetProcess) -> tuple[float, float]:
    """How many prompts' beginnings were loaded, and of how many tokens."""
    return (
        read_counts(server, "baton_prefix_loads_total", result="loaded"),
        read_counts(server, "baton_prefix_loaded_tokens_total"),
    )


def open_stream(gateway: FleetProcess, prompt: list[int], num_tokens: int) -> Any:
    body = {**make_body(prompt, max_tokens=num_tokens), "stream": True}
    request = urllib.request.Request(
        f"{gateway.url}/v1/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    return urllib.request.urlopen(request, timeout=TIMEOUT_S, context=TLS)


def test_a_prompt_goes_to_a_server_that_can_load_it(
    cluster: VllmCluster,
    cluster_factory: ClusterFactory,
    stored: tuple[FleetProcess, FleetProcess],
    folder: Path,
) -> None:
    """One of two servers has computed it, and is busy with an answer: the other one loads it."""
    (prompt,) = make_prompts(1, seed=60, shortest=1000, longest=1000)
    expected = ask_one(cluster.oracle, prompt)
    before = find_entries(folder)
    changes = {"router.policy": "prefix", "router.options.prefix.tokens_per_answer": 4000}
    gateway = cluster_factory.start_gateway([], stored, **changes)
    first = ask_one(gateway, prompt)
    busy = read_request(gateway, first.request_id)["gateway"]["peer"]
    (idle,) = {server.name for server in stored} - {busy}
    num_entries = count_computed(prompt, expected) // ENTRY_TOKENS
    reported = "baton_router_stored_blocks"
    wait_until(lambda: read_metric(gateway.url, reported) == num_entries, SOON_S, gateway.tail)

    with open_stream(gateway, prompt, NUM_STREAMED) as stream:  # to where it is cached
        assert b"data: " in stream.readline()
        _, explained = post(f"{gateway.url}/debug/route", make_body(prompt))
        answer = ask_one(gateway, prompt)
        stream.read()
    num_stored = count_full(len(prompt))
    assert set(explained["stored_tokens"].values()) == {num_stored}
    trace = read_request(gateway, answer.request_id)
    assert trace["gateway"]["peer"] == idle, "the other one was not busy for long enough"
    assert any(f"can load {num_stored}" in line for line in trace["placement"])
    check_same([first, answer], [expected, expected])
    assert answer.num_cached == num_stored

    def has_learned() -> bool:
        seen = {worker["worker"]: worker["given"]["load"] for worker in read_workers(gateway)}
        return seen[idle]["num_seen"] == 1 and seen[busy]["num_seen"] == 0

    wait_until(has_learned, SOON_S, gateway.tail)
    wait_until_kept(folder, before, [len(prompt) + NUM_STREAMED - 1])
    cluster_factory.end(gateway)


def read_workers(gateway: FleetProcess) -> Any:
    return json.loads(get_text(f"{gateway.url}/debug/workers"))["workers"]


def test_what_a_server_computed_is_loaded_after_its_end(
    cluster: VllmCluster,
    cluster_factory: ClusterFactory,
    stored: tuple[FleetProcess, FleetProcess],
    embedded: FleetProcess,
    folder: Path,
) -> None:
    first, second = stored
    num_before = read_loaded(second)
    prompts = make_prompts(3, seed=61, shortest=150, longest=600)
    expected = ask_all(cluster.oracle, prompts)
    before = find_entries(folder)
    check_same(ask_all(first, prompts), expected)
    lengths = [count_computed(*each) for each in zip(prompts, expected, strict=True)]
    wait_until_kept(folder, before, lengths)
    cluster_factory.end(first)
    full = [count_full(len(prompt)) for prompt in prompts]
    whole_blocks = [num_tokens - num_tokens % EMBEDDED_BLOCK for num_tokens in full]
    for server, num_loaded in ((second, full), (embedded, whole_blocks)):
        answers = ask_all(server, prompts, **(OF_EMBEDDED if server is embedded else {}))
        check_answers(answers, expected)
        assert [answer.num_cached for answer in answers] == num_loaded
    loaded = np.subtract(read_loaded(second), num_before)
    assert loaded.tolist() == [len(prompts), sum(full)]


def test_what_another_engine_computed_is_loaded(
    cluster: VllmCluster,
    stored: tuple[FleetProcess, FleetProcess],
    embedded: FleetProcess,
    folder: Path,
) -> None:
    """Its answers, too: the next turn of a conversation finds them. Other tenants do not."""
    _, second = stored
    prompts = make_prompts(2, seed=62, shortest=300, longest=500)
    expected = ask_all(cluster.oracle, prompts)
    before = find_entries(folder)
    check_answers(ask_all(embedded, prompts, **OF_EMBEDDED), expected)
    lengths = [count_embedded(*each) for each in zip(prompts, expected, strict=True)]
    wait_until_kept(folder, before, lengths)
    stranger = ask_all(second, prompts[:1], cache_salt="another")
    check_same(stranger, expected[:1])
    assert stranger[0].num_cached == 0
    turns = [
        [*prompt, *read_ids(answer), 7, 8] for prompt, answer in zip(prompts, expected, strict=True)
    ]
    answers = ask_all(second, turns)
    check_same(answers, ask_all(cluster.oracle, turns))
    assert [each.num_cached for each in answers] == [count_full(length) for length in lengths]


def test_damaged_entries_are_computed(
    cluster: VllmCluster,
    stored: tuple[FleetProcess, FleetProcess],
    embedded: FleetProcess,
    folder: Path,
) -> None:
    _, second = stored
    (prompt,) = make_prompts(1, seed=63, shortest=500, longest=500)
    expected = ask_one(cluster.oracle, prompt)
    before = find_entries(folder)
    check_answers([ask_one(embedded, prompt, **OF_EMBEDDED)], [expected])
    entries = wait_until_kept(folder, before, [count_embedded(prompt, expected)])
    for path in sorted(entries)[::3]:
        body = bytearray(path.read_bytes())
        body[-1] ^= 1
        path.write_bytes(body)
    answer = ask_one(second, prompt)
    check_same([answer], [expected])
    assert read_counts(second, "baton_store_damaged_total") > 0


def test_a_store_that_hangs_costs_one_request_its_time(
    cluster: VllmCluster,
    cluster_factory: ClusterFactory,
    stored: tuple[FleetProcess, FleetProcess],
    embedded: FleetProcess,
    folder: Path,
) -> None:
    _, second = stored
    prompts = make_prompts(3, seed=64, shortest=300, longest=400)
    expected = ask_all(cluster.oracle, prompts)
    before = find_entries(folder)
    check_answers(ask_all(embedded, prompts, **OF_EMBEDDED), expected)
    lengths = [count_embedded(*each) for each in zip(prompts, expected, strict=True)]
    wait_until_kept(folder, before, lengths)
    point = StorePoint(cluster_factory.run_directory / "point")
    point.arm("read")
    num_before = count_store_loads(second)
    began = time.monotonic()
    for prompt, oracle in zip(prompts[:2], expected[:2], strict=True):
        check_same([ask_one(second, prompt)], [oracle])
        assert point.is_held
    assert time.monotonic() - began > LOAD_TIMEOUT_S
    assert count_store_loads(second) == num_before + 1, "only the first one has waited"
    unused = read_counts(second, "baton_prefix_loads_total", result="unused")
    point.release()
    wait_until(
        lambda: read_counts(second, "baton_prefix_loads_total", result="unused") == unused + 1,
        SOON_S,
    )
    answer = ask_one(second, prompts[2])
    check_same([answer], expected[2:])
    assert answer.num_cached == count_full(len(prompts[2]))


def read_ids(answer: Answer) -> list[int]:
    return [int(token.removeprefix("token_id:")) for token in answer.tokens]
