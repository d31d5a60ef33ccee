"""LoRA adapters of vLLM servers, as the gateway serves them."""

from __future__ import annotations

import asyncio

from tests.integration.gateway_cluster import PROMPT, Cluster, run, until_true
from tests.integration.scripted_vllm import ScriptedVllm, offer, say_abc_as_vllm

SQL = {**PROMPT, "model": "sql"}


def servers(role: str, *adapters: tuple[str, ...]) -> list[ScriptedVllm]:
    made = []
    for number, names in enumerate(adapters):
        script = offer if role == "prefill" else say_abc_as_vllm
        server = ScriptedVllm(f"{role}-{number}", role, script)
        server.adapters = names
        made.append(server)
    return made


async def ask(cluster: Cluster, body=SQL) -> tuple[int, dict]:
    async with cluster.post(body) as response:
        return response.status, await response.json()


async def list_models(cluster: Cluster) -> dict[str, str | None]:
    _, models = await cluster.get_json("/v1/models")
    return {model["id"]: model.get("parent") for model in models["data"]}


def num_visits(servers: list[ScriptedVllm]) -> list[int]:
    return [len(server.visits) for server in servers]


def test_only_servers_that_have_an_adapter_are_asked_for_it():
    async def scenario(cluster: Cluster):
        for _ in range(4):
            status, _ = await ask(cluster)
            assert status == 200
        assert num_visits(cluster.prefills) == [0, 4]
        assert num_visits(cluster.decodes) == [4, 0]
        models = {visit.body["model"] for visit in cluster.decodes[0].visits}
        assert models == {"sql"}, "what the client has named"

    run(
        scenario, prefills=servers("prefill", (), ("sql",)), decodes=servers("decode", ("sql",), ())
    )


def test_adapters_are_listed_and_others_are_not_served():
    async def scenario(cluster: Cluster):
        assert await list_models(cluster) == {"demo": None, "law": "demo", "sql": "demo"}
        status, model = await cluster.get_json("/v1/models/sql")
        assert (status, model["parent"], model["max_model_len"]) == (200, "demo", 4096)
        # Answers come from decode servers alone.
        for name in ("none", "of-prefill"):
            status, error = await ask(cluster, {**PROMPT, "model": name})
            assert status == 404
            assert "'demo', 'law', 'sql'" in error["error"]["message"]

    run(
        scenario,
        prefills=servers("prefill", ("sql", "of-prefill")),
        decodes=servers("decode", ("sql",), ("sql", "law")),
    )


def test_where_no_prefill_server_has_it_decode_computes_and_the_reason_is_named():
    async def scenario(cluster: Cluster):
        async with cluster.post(SQL, **{"x-request-id": "r"}) as response:
            assert response.status == 200
        assert num_visits(cluster.prefills) == [0]
        _, shown = await cluster.get_json("/debug/requests/r")
        assert "prefill-0 has no adapter 'sql'" in str(shown)
        async with cluster.post(SQL, "/debug/route") as response:
            found = await response.json()
        why_not = {
            each["prefill"] or each["decode"]: each["why_not"] for each in found["candidates"]
        }
        assert why_not == {
            "decode-0": None,
            "decode-1": "has no adapter 'sql'",
            "prefill-0": "has no adapter 'sql'",
        }

    run(scenario, prefills=servers("prefill", ()), decodes=servers("decode", ("sql",), ()))


def test_adapters_that_are_loaded_and_unloaded_later_are_noticed():
    async def scenario(cluster: Cluster):
        (server,) = cluster.decodes
        assert (await ask(cluster))[0] == 404
        server.adapters = ("sql",)

        async def is_served() -> bool:
            return (await ask(cluster))[0] == 200

        await until_true(is_served)
        server.adapters = ()

        async def is_gone() -> bool:
            return await list_models(cluster) == {"demo": None}

        await until_true(is_gone)
        assert (await ask(cluster))[0] == 404

    run(scenario, prefills=0, decodes=servers("decode", ()), probe_interval_s=0.01)


def test_who_waits_for_an_adapter_that_is_gone_keeps_nobody_else_waiting():
    """Its field needs a vLLM server, of which none has the adapter when the only one is back."""
    with_field = {**SQL, "response_format": {"type": "json_object"}}

    async def scenario(cluster: Cluster):
        (server,) = cluster.decodes
        server.health_status = 500

        async def is_down() -> bool:
            return await cluster.metric("baton_gateway_worker_up{") == 0

        def are_waiting(num: int):
            async def condition() -> bool:
                return await cluster.metric("baton_gateway_waiting_requests") == num

            return condition

        await until_true(is_down)
        for_adapter = asyncio.create_task(ask(cluster, with_field))
        await until_true(are_waiting(1))
        other = asyncio.create_task(ask(cluster, PROMPT))
        await until_true(are_waiting(2))
        server.adapters, server.health_status = (), 200
        assert (await other)[0] == 200
        status, error = await for_adapter
        assert (status, error["error"]["code"]) == (503, "no_worker")

    run(
        scenario, prefills=0, decodes=servers("decode", ("sql",)), probe_interval_s=0.05,
        wait_for_worker_s=3.0,
    )  # fmt: skip
