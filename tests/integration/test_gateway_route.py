"""`/debug/route` at a gateway: what would be chosen is shown, and nothing is placed."""

from __future__ import annotations

import asyncio
import json

import pytest

from baton.cli.main import run as run_command
from baton.gateway.targets import Targets
from tests.integration.gateway_cluster import PROMPT, STREAM, Cluster, run, until
from tests.integration.scripted_worker import ScriptedWorker, say_abc, start_and_wait

ROUTE = "/debug/route"


def boths(*scripts):
    return [ScriptedWorker(f"worker-{n}", "both", script) for n, script in enumerate(scripts)]


async def explain(cluster: Cluster, body=PROMPT, status=200, **headers) -> dict:
    async with cluster.post(body, ROUTE, **headers) as response:
        assert response.status == status, await response.text()
        return await response.json()


async def ask(cluster: Cluster, body=PROMPT, **headers) -> None:
    async with cluster.post(body, **headers) as response:
        assert response.status == 200
        await response.read()


@pytest.mark.parametrize("policy", ["round_robin", "least_loaded", "random", "prefix", "cost"])
def test_who_is_chosen_is_who_serves_the_request(policy):
    async def scenario(cluster: Cluster):
        for _ in range(6):
            before = [len(worker.visits) for worker in cluster.decodes]
            explained = [await explain(cluster) for _ in range(3)]
            assert explained[0]["policy"] == policy
            assert {each["decode"] for each in explained} == {explained[0]["decode"]}
            assert [len(worker.visits) for worker in cluster.decodes] == before
            await ask(cluster, STREAM)
            (served,) = [
                worker.name
                for worker, num in zip(cluster.decodes, before, strict=True)
                if len(worker.visits) > num
            ]
            assert served == explained[0]["decode"]
            chosen = [each for each in explained[0]["candidates"] if each["is_chosen"]]
            assert [each["decode"] for each in chosen] == [served]

    run(scenario, prefills=0, decodes=boths(say_abc, say_abc, say_abc), policy=policy)


def test_targets_of_headers_and_of_the_model_count_as_they_do_for_a_request():
    """Each answer misses those of 0.01 ms: what is beyond them counts ten times."""

    def cost_in(line: str) -> float:
        return float(line.partition("cost ")[2].partition(",")[0])

    async def scenario(cluster: Cluster):
        costs = []
        for headers in ({"x-baton-itl-ms": "1000"}, {"x-baton-tpot-ms": "0.01"}):
            explained = await explain(cluster, **headers)
            (best,) = [each for each in explained["candidates"] if each["is_chosen"]]
            assert best["figures"]["itl_s"] > 0
            costs.append(best["figures"]["cost"])
            request_id = {"x-request-id": f"asked-{len(costs)}"}
            await ask(cluster, STREAM, **headers, **request_id)
            _, asked = await cluster.get_json(f"/debug/requests/asked-{len(costs)}")
            assert cost_in(asked["placement"][0]) == pytest.approx(costs[-1], rel=0.2)
        explained = await explain(cluster, **{"x-baton-tpot-ms": "0.01", "x-baton-ttft-ms": "0.01"})
        costs.append(cost_in(explained["why"][0]))
        assert costs[0] < 2 < 1000 < costs[1] < costs[2]
        assert cost_in((await explain(cluster))["why"][0]) > 1000, "the model's target"
        await explain(cluster, status=400, **{"x-baton-itl-ms": "soon"})

    targets = {"*": Targets(itl_s=1e-5)}
    run(scenario, prefills=0, decodes=boths(say_abc), policy="cost", targets=targets)


def test_nothing_of_it_is_left_in_what_workers_are_given():
    async def scenario(cluster: Cluster):
        busy, _ = cluster.decodes
        waiting = asyncio.create_task(ask(cluster, {**STREAM, "prompt": "a" * 400_000}))
        await until(lambda: busy.visits)
        _, before = await cluster.get_json("/debug/workers")
        for _ in range(3):
            explained = await explain(cluster)
        _, after = await cluster.get_json("/debug/workers")
        counts = [
            [(w["worker"], w["given"] and (w["given"]["num_prefills"], w["given"]["num_decodes"]))
             for w in page["workers"]]
            for page in (before, after)
        ]  # fmt: skip
        assert counts[0] == counts[1]
        assert [each["figures"]["queue_s"] > 0 for each in explained["candidates"]].count(True) == 2
        _, requests = await cluster.get_json("/debug/requests")
        assert requests["requests"] == []
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)

    run(scenario, prefills=0, decodes=boths(start_and_wait, say_abc), policy="cost")


def test_prefill_and_decode_workers_are_listed_by_part():
    async def scenario(cluster: Cluster):
        explained = await explain(cluster)
        assert [(each["part"], each["is_chosen"]) for each in explained["candidates"]] == [
            ("decode", True),
            ("decode", False),
            ("prefill", True),
        ]
        assert (explained["prefill"], explained["mode"]) == ("prefill-0", "push")
        assert explained["num_answers"] == 1
        assert not explained["is_tokenized"]
        assert explained["why"]

    run(scenario, prefills=1, decodes=2)


def test_what_a_completion_would_be_refused_for_is_refused():
    async def scenario(cluster: Cluster):
        refused = await explain(cluster, {**PROMPT, "model": "other"}, 404)
        assert "'other' is not served here" in refused["error"]["message"]
        await explain(cluster, {"model": PROMPT["model"], "prompt": "a", "n": 0}, 400)
        await explain(cluster, [1], 400)
        status, refused = await cluster.get_json(ROUTE)
        assert (status, refused["error"]["code"]) == (405, "method_not_allowed")
        refused = await explain(cluster, PROMPT, 403, origin="http://pages.example")
        assert refused["error"]["code"] == "forbidden"
        refused = await explain(cluster, {**PROMPT, "prompt": "a" * 5000}, 413)
        assert "more than 4096 bytes" in refused["error"]["message"]
        explained = await explain(cluster, {**PROMPT, "n": 3})
        assert explained["num_answers"] == 3

    run(scenario, decodes=1, prefills=0, max_body_bytes=4096)


def test_a_gateway_with_a_management_port_explains_there_alone():
    async def scenario(cluster: Cluster):
        await explain(cluster, PROMPT, 404)

    run(scenario, decodes=1, prefills=0, wait=False, management_port=0)


def test_the_command_prints_it(capsys, tmp_path):
    body = tmp_path / "body.json"
    body.write_text(json.dumps(PROMPT))

    async def scenario(cluster: Cluster):
        async def command(*arguments) -> str:
            code = await asyncio.to_thread(
                run_command, ["route", "explain", *arguments, "--gateway", cluster.url]
            )
            return f"{code}: " + "".join(capsys.readouterr())

        out = await command(str(body))
        assert out.startswith("0: ")
        assert "worker-0 → worker-1" in out
        assert "chosen: worker-0" in out
        assert json.loads((await command(str(body), "--json"))[3:])["decode"] == "worker-0"
        assert "ITL" not in out
        assert "ITL" in await command(str(body), "--itl-ms", "50")
        assert "x-baton-itl-ms must be milliseconds" in await command(str(body), "--itl-ms", "0")
        await ask(cluster, STREAM, **{"x-request-id": "seen"})
        out = await command("--request-id", "seen")
        assert out.startswith("0: seen: worker-0, colocated, ok")
        assert "chosen: worker-0" in out
        assert "no request 'unseen' is remembered" in await command("--request-id", "unseen")
        body.write_text(json.dumps({**PROMPT, "model": "other"}))
        assert "1: baton: " in (out := await command(str(body)))
        assert "the model 'other' is not served here; served: 'demo'" in out

    run(scenario, prefills=0, decodes=boths(say_abc, say_abc), policy="cost")
