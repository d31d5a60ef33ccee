"""Policies at a gateway: what it has given its workers, what it learns, and what it predicts."""

from __future__ import annotations

import asyncio
import shutil

import pytest

from baton.ids import new_epoch
from baton.models import DEMO_MODEL_PATH
from baton.ops.gateway_pages import Gateway
from baton.planner.measured_rates import read_rates
from baton.router.learning import LearnedLine, PromptLine, WorkerCost
from baton.router.topology import Distance
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


@pytest.fixture
def _nothing_is_learned(monkeypatch):
    """On a busy machine an answer takes long, and its worker would count as slow."""
    for cost in (LearnedLine, PromptLine, WorkerCost):
        monkeypatch.setattr(cost, "observe", lambda *_, **__: None)


@pytest.mark.usefixtures("_nothing_is_learned")
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
        for _ in range(8):
            await ask(cluster)
        (part,) = (await given(cluster)).values()
        assert part["prefill"]["num_seen"] == 8
        prefill_s = part["prefill"]["fixed_s"] + part["prefill"]["each_s"]
        assert 0.15 < prefill_s < 5.0  # a busy machine sleeps longer than it is told
        assert part["step"]["num_seen"] == 8
        assert 0.015 < part["step"]["fixed_s"] + part["step"]["each_s"] < 1.0
        for cost in ("prefill", "step"):
            line = f'baton_router_cost_error_ratio{{cost="{cost}",model="demo",worker="worker-0"}}'
            assert 0 <= await cluster.metric(line) < 0.5
        assert await cluster.metric("baton_router_requests{") == 0

    run(scenario, prefills=0, decodes=boths(say_twenty), policy="cost")


async def answer_in_50_ms(visit: Visit) -> None:
    await visit.start_stream()
    await visit.token("a")
    await asyncio.sleep(0.05)
    await visit.token("a")
    await visit.done()


def test_workers_of_both_roles_have_costs_by_default_and_closed_loops_are_seen():
    async def client(cluster: Cluster) -> None:
        for _ in range(20):
            await ask(cluster)

    async def scenario(cluster: Cluster):
        async with cluster.post(PROMPT, "/debug/route") as response:
            assert (await response.json())["policy"] == "cost"
        await ask(cluster)
        assert await cluster.metric('baton_router_closed_loops{model="demo"}') == 0
        await asyncio.gather(*(client(cluster) for _ in range(4)))
        assert await cluster.metric('baton_router_closed_loops{model="demo"}') == 1

    run(scenario, prefills=0, decodes=boths(answer_in_50_ms, answer_in_50_ms))


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
        await ask(cluster, STREAM | {"prompt": ids})
        for worker in (prefill, decode):
            sent = worker.visits[-1].body
            assert sent["prompt"] == ids
            assert "baton_prompt" not in sent["kv_transfer_params"], "it has them already"

    run(scenario, prefills=[prefill], decodes=[decode], policy="prefix", mode="push")


def test_a_prompt_goes_to_no_worker_without_room_for_it():
    """Where none has room, a worker answers so."""
    model = {"model": str(DEMO_MODEL_PATH)}
    small = ScriptedWorker("small", "both", say_abc, **model, max_context_tokens=256)
    large = ScriptedWorker("large", "both", say_abc, **model)

    async def scenario(cluster: Cluster):
        for num_tokens in (255, 256):
            small.visits.clear()
            large.visits.clear()
            for first in range(4):
                await ask(cluster, STREAM | {"prompt": [first + 5] * num_tokens})
            assert (len(small.visits), len(large.visits)) == (
                (2, 2) if num_tokens < 256 else (0, 4)
            )
        async with cluster.post(PROMPT | {"prompt": [5] * 256}, "/debug/route") as response:
            explained = await response.json()
        why_not = {each["decode"]: each["why_not"] for each in explained["candidates"]}
        assert why_not == {"large": None, "small": "has room for 256 tokens"}

    run(scenario, prefills=0, decodes=[small, large], policy="prefix")


def test_a_model_that_comes_back_with_another_tokenizer_is_tokenized_by_that(tmp_path):
    """Before, a worker comes up whose tokenizer cannot be read here."""
    other = tmp_path / "other"
    shutil.copytree(DEMO_MODEL_PATH, other)
    (other / "chat_template.jinja").write_text("{{ messages[0].content }}")
    folders = DEMO_MODEL_PATH, other
    worker = ScriptedWorker("worker-0", "both", say_abc, model="/nowhere", tokenizer="another")
    text = "hello, what is a handoff?"
    ids = load_tokenizer(DEMO_MODEL_PATH).encode(text, add_special_tokens=True).tolist()

    async def scenario(cluster: Cluster):
        async def is_sent() -> bool:
            await ask(cluster, STREAM | {"prompt": text})
            sent = worker.visits[-1].body.get("kv_transfer_params") or {}
            return sent.get("baton_prompt") == ids

        assert not await is_sent()
        _, body = await cluster.get_json("/debug/workers")
        assert "no worker on this machine" in body["not_tokenized"]["demo"]
        for folder in folders:
            worker.extra_info = {"model": str(folder), "tokenizer": digest_tokenizer(folder)}
            worker.epoch = new_epoch()
            await until_true(is_sent)

    run(scenario, prefills=0, decodes=[worker], policy="prefix")


def test_what_a_worker_without_events_is_expected_to_have_ends_with_its_life():
    same = {"model": str(DEMO_MODEL_PATH), "tokenizer": digest_tokenizer(DEMO_MODEL_PATH)}
    worker = ScriptedWorker("worker-0", "both", say_abc, **same)
    body = STREAM | {"prompt": [7] * 50}

    async def scenario(cluster: Cluster):
        async def cached() -> int:
            async with cluster.post(body, "/debug/route") as response:
                return (await response.json())["cached_tokens"].get("worker-0", 0)

        async def is_expected() -> bool:
            await ask(cluster, body)
            return await cached() == 48

        async def is_forgotten() -> bool:
            return await cached() == 0

        await until_true(is_expected)
        worker.epoch = new_epoch()
        await until_true(is_forgotten)

    run(scenario, prefills=0, decodes=[worker], policy="prefix")


def link(peer: str, direction: str, byte_s: float, **changed: object) -> dict[str, object]:
    known = {"transport": "tcp", "latency_s": 1e-4, "num_probes": 9, "num_transfers": 1}
    return {"peer": peer, "direction": direction, "byte_s": byte_s, **known, **changed}


def racks(num_workers: int = 4) -> list[ScriptedWorker]:
    """Two racks of two hosts."""
    return [
        ScriptedWorker(f"worker-{n}", "both", say_abc, topology=f"z/rack-{n // 2}/host-{n}")
        for n in range(num_workers)
    ]


async def read_links(cluster: Cluster) -> dict[str, dict]:
    _, body = await cluster.get_json("/debug/links")
    (model,) = body["models"]
    return {
        "links": {(each["from"], each["to"]): each["bytes_per_s"] for each in model["links"]},
        "sources": {line["distance"]: line["source"] for line in model["handoffs"]},
    }


def test_links_that_workers_measured_are_the_first_guess_of_a_handoffs_cost():
    workers = racks()
    workers[0].links = [
        link("worker-1", "push", 1e-9),
        link("worker-2", "pull", 1e-7),
        link("unknown", "push", 1.0),
        link("worker-0", "push", 1.0),
    ]

    async def scenario(cluster: Cluster):
        async def are_known() -> bool:
            return bool((await read_links(cluster))["links"])

        await until_true(are_known)
        gateway = Gateway.at(cluster.url, "--gateway")
        rates = await asyncio.to_thread(read_rates, gateway)
        assert rates == {
            Distance.SAME_RACK: pytest.approx(1.0),
            Distance.SAME_ZONE: pytest.approx(0.01),
        }
        seen = await read_links(cluster)
        assert seen["links"] == {
            ("worker-0", "worker-1"): pytest.approx(1e9),
            ("worker-2", "worker-0"): pytest.approx(1e7),
        }
        assert seen["sources"] == {
            "same_device": "default",
            "same_host": "default",
            "same_rack": "measured",
            "same_zone": "measured",
            "cross_zone": "default",
        }
        await ask(cluster, **{"x-request-id": "why"})
        _, body = await cluster.get_json("/debug/requests/why")
        assert any("(same_rack, measured)" in line for line in body["placement"])
        _, body = await cluster.get_json("/debug/workers")
        assert body["workers"][3]["topology"] == "z/rack-1/host-3"

    run(scenario, prefills=0, decodes=workers, policy="cost")


@pytest.mark.parametrize(
    "links",
    [
        [link("worker-1", "push", 0.0)],
        [link("worker-1", "push", 1e-9, latency_s=-1)],
        [link("worker-1", "sideways", 1e-9)],
        [link("worker-1", "push", 1e-9)] * 1025,
    ],
)
def test_links_that_make_no_sense_change_nothing(links):
    workers = racks(2)
    workers[0].links = links
    workers[1].links = [link("worker-0", "push", 1e-9)]

    async def scenario(cluster: Cluster):
        async def are_known() -> bool:
            return bool((await read_links(cluster))["links"])

        await until_true(are_known)
        assert list((await read_links(cluster))["links"]) == [("worker-1", "worker-0")]
        await ask(cluster)

    run(scenario, prefills=0, decodes=workers, policy="cost")


def test_a_worker_whose_topology_is_garbage_is_not_used():
    workers = [ScriptedWorker("worker-0", "both", say_abc, topology="a/b/c/d/e")]
    workers.append(ScriptedWorker("worker-1", "both", say_abc))

    async def scenario(cluster: Cluster):
        async def is_refused() -> bool:
            _, body = await cluster.get_json("/debug/workers")
            return "topology" in (body["workers"][0]["reason"] or "")

        async def is_answered() -> bool:
            async with cluster.post(STREAM) as response:
                return response.status == 200

        await until_true(is_refused)
        await until_true(is_answered)

    run(scenario, prefills=0, decodes=workers, policy="cost", wait=False)
