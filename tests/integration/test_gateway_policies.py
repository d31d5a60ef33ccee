"""Policies at a gateway: what it has given its workers, what it learns, and what it predicts."""

from __future__ import annotations

import asyncio

import pytest

from baton.models import DEMO_MODEL_PATH
from baton.tokenizer.digest import digest_tokenizer
from baton.tokenizer.tokenizer import load_tokenizer
from tests.integration.gateway_cluster import PROMPT, STREAM, Cluster, run, until, until_true
from tests.integration.scripted_worker import (
    ScriptedWorker,
    Visit,
    prefill_at_once,
    say_abc,
    start_and_wait,
)


def boths(*scripts):
    """Workers of both roles."""
    return [ScriptedWorker(f"worker-{n}", "both", script) for n, script in enumerate(scripts)]


async def given(cluster: Cluster) -> dict[str, dict]:
    _, body = await cluster.get_json("/debug/workers")
    return {worker["worker"]: worker["given"] for worker in body["workers"]}


async def ask(cluster: Cluster, body=STREAM, **headers) -> None:
    async with cluster.post(body, **headers) as response:
        assert response.status == 200
        await response.read()


async def say_twenty(visit: Visit) -> None:
    """First token after 0.2 s, the others 0.02 s apart."""
    await asyncio.sleep(0.2)
    await visit.start_stream()
    for _ in range(20):
        await visit.token("a")
        await asyncio.sleep(0.02)
    await visit.done()


@pytest.mark.parametrize("policy", ["least_loaded", "cost"])
def test_a_worker_that_is_busy_gets_no_more_than_the_others(policy):
    async def scenario(cluster: Cluster):
        busy, idle = cluster.decodes
        waiting = asyncio.create_task(ask(cluster))
        await until(lambda: busy.visits)
        for _ in range(5):
            await ask(cluster)
        assert (len(busy.visits), len(idle.visits)) == (1, 5)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)

        async def all_given_back() -> bool:
            parts = (await given(cluster)).values()
            return all(part["num_prefills"] == part["num_decodes"] == 0 for part in parts)

        await until_true(all_given_back)

    run(scenario, prefills=0, decodes=boths(start_and_wait, say_abc), policy=policy)


def test_costs_are_learned_and_shown():
    async def scenario(cluster: Cluster):
        for _ in range(12):
            await ask(cluster)
        (part,) = (await given(cluster)).values()
        assert part["prefill"]["num_seen"] == 12
        prefill_s = part["prefill"]["fixed_s"] + part["prefill"]["each_s"]
        assert 0.15 < prefill_s < 0.4
        assert part["step"]["num_seen"] == 12
        assert 0.015 < part["step"]["fixed_s"] + part["step"]["each_s"] < 0.05
        for cost in ("prefill", "step"):
            line = f'baton_router_cost_error_ratio{{cost="{cost}",model="demo",worker="worker-0"}}'
            assert 0 <= await cluster.metric(line) < 0.5
        assert await cluster.metric("baton_router_requests{") == 0

    run(scenario, prefills=0, decodes=boths(say_twenty), policy="cost")


def test_a_placement_is_explained():
    async def scenario(cluster: Cluster):
        await ask(cluster, **{"x-request-id": "why"})
        _, body = await cluster.get_json("/debug/requests/why")
        chosen, other = body["placement"]
        assert chosen.startswith("chosen: worker-0: cost ")
        assert "TTFT" in chosen
        assert "TPOT" in chosen
        assert other.startswith("rather than worker-")
        assert "→ worker-" in other
        assert "handoff" in other

    run(scenario, prefills=0, decodes=boths(say_abc, say_abc), policy="cost")


def test_a_failed_attempt_is_given_back_and_another_worker_answers():
    async def fail(visit: Visit) -> None:
        await visit.fail(500, "broken")

    async def scenario(cluster: Cluster):
        for _ in range(3):
            await ask(cluster)
            await ask(cluster, PROMPT)
        parts = (await given(cluster)).values()
        assert all(part["num_prefills"] == part["num_decodes"] == 0 for part in parts)
        assert len(cluster.decodes[1].visits) == 6

    run(scenario, prefills=0, decodes=boths(fail, say_abc), policy="least_loaded")


def test_workers_with_the_gateways_tokenizer_get_the_prompts_token_ids():
    """Both workers of a handoff; not where one of them has another tokenizer."""
    text = "hello, what is a handoff?"
    ids = load_tokenizer(DEMO_MODEL_PATH).encode(text, add_special_tokens=True).tolist()
    same = {"model": str(DEMO_MODEL_PATH), "tokenizer": digest_tokenizer(DEMO_MODEL_PATH)}
    prefill = ScriptedWorker("prefill-0", "prefill", prefill_at_once, **same)
    decode = ScriptedWorker("decode-0", "decode", say_abc, **same)

    async def scenario(cluster: Cluster):
        for tokenizer, expected in (("another", None), (same["tokenizer"], ids)):
            decode.extra_info = same | {"tokenizer": tokenizer}
            decode.epoch = tokenizer.ljust(32, "0")[:32]  # another life

            async def is_known(epoch: str = decode.epoch) -> bool:
                _, body = await cluster.get_json("/debug/workers")
                return epoch in {worker["epoch"] for worker in body["workers"]}

            await until_true(is_known)
            await ask(cluster, STREAM | {"prompt": text})
            for worker in (prefill, decode):
                sent = worker.visits[-1].body
                assert sent["prompt"] == text
                assert sent["kv_transfer_params"].get("baton_prompt") == expected

    run(scenario, prefills=[prefill], decodes=[decode], policy="prefix", mode="push")
