"""LoRA adapters: handed over, kept and found by what they are, whatever they are called."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from tests.e2e_vllm.ahead import start_adapted
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
    wait_until,
)
from tests.e2e_vllm.cluster import BLOCK_SIZE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from baton.testing.fleet import FleetProcess
    from tests.e2e_vllm.cluster import ClusterFactory

pytestmark = pytest.mark.vllm

ENTRY_TOKENS = 64
MODELS = ("demo", "sql", "law")
"""The same on both servers."""
SOON_S = 20.0


@pytest.fixture(name="pair", scope="module")
def pair_fixture(
    cluster_factory: ClusterFactory, adapted: tuple[FleetProcess, FleetProcess]
) -> Iterator[tuple[FleetProcess, FleetProcess]]:
    yield adapted
    cluster_factory.end(*adapted)


@pytest.fixture(scope="module")
def adapted(cluster_factory: ClusterFactory) -> tuple[FleetProcess, ...]:
    """See `start_adapted`."""
    return cluster_factory.take("adapted", start_adapted)


@pytest.fixture(name="gateway", scope="module")
def gateway_fixture(
    cluster_factory: ClusterFactory, pair: tuple[FleetProcess, FleetProcess]
) -> Iterator[FleetProcess]:
    prefill, decode = pair
    gateway = cluster_factory.start_gateway([prefill], [decode], **{"router.policy": "prefix"})
    yield gateway
    cluster_factory.end(gateway)


def read_loaded(server: FleetProcess) -> float:
    """Tokens that were loaded from the store."""
    (url,) = read_info(server)["control_urls"]
    return read_metric(url, "baton_prefix_loaded_tokens_total")


def read_stored(server: FleetProcess) -> float:
    (url,) = read_info(server)["control_urls"]
    return read_metric(url, "baton_store_puts_total", result="stored")


def explain(gateway: FleetProcess, prompt: list[int], model: str) -> dict:
    status, found = post(f"{gateway.url}/debug/route", make_body(prompt, model=model))
    assert status == 200, found
    return found


def test_adapters_are_models_that_one_can_ask_for(gateway: FleetProcess) -> None:
    listed = json.loads(get_text(f"{gateway.url}/v1/models"))["data"]
    parents = {model["id"]: model.get("parent") for model in listed}
    assert parents == {"demo": None} | dict.fromkeys(("sql", "law", "mixed", "solo"), "demo")
    status, error = post(f"{gateway.url}/v1/completions", make_body([300] * 40, model="none"))
    assert (status, "'sql'" in error["error"]["message"]) == (404, True)


def test_the_same_tokens_through_two_servers(
    pair: tuple[FleetProcess, FleetProcess], gateway: FleetProcess
) -> None:
    (prompt,) = make_prompts(1, seed=71, shortest=300, longest=300)
    alone = [ask_one(pair[0], prompt, model=model) for model in MODELS]
    assert len({answer.tokens for answer in alone}) == len(MODELS)
    answers = [ask_one(gateway, prompt, model=model) for model in MODELS]
    check_same(answers, alone)
    for answer in answers:
        request = read_request(gateway, answer.request_id)
        assert read_summary(gateway, answer.request_id)["mode"] == "push"
        assert request["decode"]["num_received_tokens"] == len(prompt)


def test_one_name_for_other_weights_is_not_handed_over(
    pair: tuple[FleetProcess, FleetProcess], gateway: FleetProcess
) -> None:
    (prompt,) = make_prompts(1, seed=72, shortest=300, longest=300)
    expected = ask_one(pair[0], prompt, model="law")
    answer = ask_one(gateway, prompt, model="mixed")
    check_same([answer], [expected])
    request = read_request(gateway, answer.request_id)
    assert not request["decode"]["num_received_tokens"]
    assert "adapter" in str(request["decode"]["fallbacks"])


def test_a_server_without_an_adapter_has_no_part_in_it(
    pair: tuple[FleetProcess, FleetProcess], gateway: FleetProcess
) -> None:
    (prompt,) = make_prompts(1, seed=73, shortest=300, longest=300)
    expected = ask_one(pair[0], prompt, model="sql")
    answer = ask_one(gateway, prompt, model="solo")
    check_same([answer], [expected])
    assert read_request(gateway, answer.request_id)["gateway"]["mode"] == "colocated"
    found = explain(gateway, prompt, "solo")
    (why_not,) = [each["why_not"] for each in found["candidates"] if each["prefill"] == "lora-p"]
    assert why_not == "has no adapter 'solo'"


def test_what_is_cached_of_an_adapter_is_found_for_it_alone(
    pair: tuple[FleetProcess, FleetProcess], gateway: FleetProcess
) -> None:
    (prompt,) = make_prompts(1, seed=74, shortest=300, longest=300)
    ask_one(pair[0], prompt, model="sql")
    num_cached = len(prompt) // BLOCK_SIZE * BLOCK_SIZE

    def predict(model: str) -> int | None:
        return explain(gateway, prompt, model)["cached_tokens"].get("lora-p")

    wait_until(lambda: predict("sql") == num_cached, SOON_S, lambda: predict("sql"))
    assert ask_one(pair[0], prompt, model="sql").num_cached == num_cached
    assert {predict(model) for model in ("demo", "law", "mixed")} == {None}


def test_the_store_keeps_adapters_apart(pair: tuple[FleetProcess, FleetProcess]) -> None:
    prefill, decode = pair
    prompts = make_prompts(2, seed=75, shortest=200, longest=300)
    num_entries = sum(len(prompt) // ENTRY_TOKENS for prompt in prompts)
    num_stored, num_loaded = read_stored(prefill), read_loaded(decode)
    expected = ask_all(prefill, prompts, model="sql")
    wait_until(lambda: read_stored(prefill) >= num_stored + num_entries, SOON_S)
    for model in ("demo", "law"):
        answers = ask_all(decode, prompts, model=model)
        assert not set(answers) & set(expected)
    assert read_loaded(decode) == num_loaded
    check_same(ask_all(decode, prompts, model="solo"), expected)
    assert read_loaded(decode) > num_loaded
