"""Mode pool between vLLM servers: the two share a store, and nobody dials anybody."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest

from baton.auth.credentials import Credentials
from baton.auth.key import ClusterKey
from baton.auth.ticket import seal
from tests.e2e_vllm.client import ask_all, ask_one, make_prompts, read_metric, wait_until
from tests.e2e_vllm.cluster import KEY
from tests.e2e_vllm.tickets import Handoff, Server, make_ticket, read_prefill_result, read_tokens

if TYPE_CHECKING:
    from tests.e2e_vllm.cluster import VllmCluster

pytestmark = pytest.mark.vllm

STORE_BLOCK = 64
NOWHERE = "127.0.0.1:1"


def assert_counted(prefill: Server, decode: Server) -> None:
    """Both have counted what went through the store, and what was held for it."""
    (put, *_), (taken, *_) = prefill.info["control_urls"], decode.info["control_urls"]
    shared = {"tier": "shared"}
    for url, name, labels in (
        (put, "baton_pool_entries_total", {"role": "prefill", "result": "stored"}),
        (put, "baton_store_puts_total", {"result": "stored", **shared}),
        (put, "baton_handoff_held_block_seconds_total", {"mode": "pool"}),
        (taken, "baton_pool_entries_total", {"role": "decode", "result": "loaded"}),
        (taken, "baton_store_leases_total", {"result": "hit", **shared}),
    ):
        wait_until(lambda c=(url, name), labels=labels: read_metric(*c, **labels) > 0, 20.0)
    used = {read_metric(url, "baton_store_used_bytes", **shared) for url in (put, taken)}
    assert len(used) == 1
    assert used != {0.0}


def pooled(prefill: Server, decode: Server, prompt: list[int]) -> Handoff:
    """A ticket by which neither could reach the other."""
    refs = [
        msgspec.structs.replace(each.ref, address=NOWHERE, rank_addresses=())
        for each in (prefill, decode)
    ]
    ticket = msgspec.structs.replace(make_ticket(*refs), mode="pool")
    return Handoff(
        prefill, decode, prompt, ticket, seal(ticket, Credentials.of(ClusterKey.from_hex(KEY)))
    )


@pytest.mark.parametrize("first", ["prefill", "decode"])
def test_the_same_tokens_through_the_store(cluster: VllmCluster, first: str) -> None:
    prefill, decode = Server.of(cluster.prefill), Server.of(cluster.decode)
    seed = {"prefill": 31, "decode": 32}[first]
    prompts = make_prompts(3, seed=seed, shortest=20, longest=900)
    expected = ask_all(cluster.oracle, prompts)
    for prompt, oracle in zip(prompts, expected, strict=True):
        handoff = pooled(prefill, decode, prompt)
        if first == "prefill":
            assert read_prefill_result(handoff.ask_prefill().result())["status"] == "offered"
            answer = handoff.ask_decode().result()
        else:
            asked = handoff.ask_decode()  # it waits for what is not there yet
            assert read_prefill_result(handoff.ask_prefill().result())["status"] == "offered"
            answer = asked.result()
        assert read_tokens(answer) == oracle
        trace = handoff.read_decode_trace()
        assert (trace.mode, trace.fallbacks) == ("pool", [])
        assert trace.num_received_tokens == len(prompt)
    assert_counted(prefill, decode)


def test_what_another_prompt_left_lands_in_part(cluster: VllmCluster) -> None:
    prefill, decode = Server.of(cluster.prefill), Server.of(cluster.decode)
    stem, end = make_prompts(2, seed=33, shortest=300, longest=400)
    known = pooled(prefill, decode, stem)
    assert read_prefill_result(known.ask_prefill().result())["status"] == "offered"
    prompt = [*stem[: 3 * STORE_BLOCK + 5], *end]
    oracle = ask_one(cluster.oracle, prompt)
    handoff = pooled(prefill, decode, prompt)
    asked = handoff.ask_decode()
    decode.give_up(handoff.ticket, "nobody prefills this")
    assert read_tokens(asked.result()) == oracle
    assert handoff.read_decode_trace().num_received_tokens == 3 * STORE_BLOCK


def test_another_tenant_finds_nothing(cluster: VllmCluster) -> None:
    prefill, decode = Server.of(cluster.prefill), Server.of(cluster.decode)
    (prompt,) = make_prompts(1, seed=34, shortest=300, longest=300)
    known = pooled(prefill, decode, prompt)
    assert read_prefill_result(known.ask_prefill().result())["status"] == "offered"
    handoff = pooled(prefill, decode, prompt)
    # Salt and ticket do not agree: the ticket's part of the store is not this tenant's.
    answer = handoff.ask_decode(cache_salt="a tenant").result()
    assert read_tokens(answer) == ask_one(cluster.oracle, prompt)
    assert decode.find_trace(handoff.ticket.request_id) is None
