"""How the gateway finds Baton inside vLLM servers, and notices when one begins another life."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

import pytest

from tests.integration.gateway_cluster import PROMPT, Cluster, run, until, until_true, until_up
from tests.integration.scripted_vllm import ScriptedVllm, offer, say_abc_as_vllm
from tests.integration.scripted_worker import ScriptedWorker, never_answer, say_abc, token

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable


def vllm_decode(name: str = "vllm-d", **setup) -> ScriptedVllm:
    return ScriptedVllm(name, "decode", say_abc_as_vllm, **setup)


def vllm_prefill(name: str = "vllm-p", **setup) -> ScriptedVllm:
    return ScriptedVllm(name, "prefill", offer, **setup)


def run_alone(
    server: ScriptedWorker, scenario: Callable[[Cluster, ScriptedVllm], Awaitable[None]], **setup
) -> None:
    """Run a scenario against a gateway with this one decode server."""

    async def with_server(cluster: Cluster) -> None:
        await scenario(cluster, server)

    run(with_server, prefills=0, decodes=[server], **setup)


async def why_not_ready(cluster: Cluster) -> str:
    status, body = await cluster.get_json("/ready")
    assert status == 503, body
    return body["error"]["message"]


async def until_told(cluster: Cluster, *words: str) -> None:
    """Wait until the gateway says that it is not ready, in these words."""

    async def told() -> bool:
        status, body = await cluster.get_json("/ready")
        return status == 503 and all(word in body["error"]["message"] for word in words)

    await until_true(told)


def test_a_vllm_server_tells_who_it_is_once():
    async def scenario(cluster: Cluster, server: ScriptedVllm):
        assert await cluster.get_json("/ready") == (200, {"status": "ready"})
        _, models = await cluster.get_json("/v1/models")
        assert [(m["id"], m["max_model_len"]) for m in models["data"]] == [("demo", 4096)]
        control = server.controls[0]
        await until(lambda: control.num_info_reads >= 3)  # asked again now and then, for free
        assert server.num_discoveries == 1

    run_alone(vllm_decode(), scenario, probe_interval_s=0.01)


def test_a_server_without_our_connector_is_told_of_the_flag_and_not_asked_again():
    server = vllm_decode()
    server.has_connector = False

    async def scenario(cluster: Cluster, server: ScriptedVllm):
        await until_told(cluster, "BatonConnector", '"kv_role": "kv_consumer"')
        await asyncio.sleep(0.3)
        assert server.num_discoveries == 1

        server.health_status = 500  # it is started again, with the flag
        await until_told(cluster, "/health answered 500")
        server.has_connector, server.health_status = True, 200
        await until_up(cluster, 1)
        assert server.num_discoveries == 2

    run_alone(server, scenario, wait=False, probe_interval_s=0.02)


def test_a_server_with_an_api_key_is_used_if_the_key_is_the_clusters():
    server = vllm_decode()
    server.api_key = token()

    async def scenario(cluster: Cluster, server: ScriptedVllm):
        async with cluster.post(PROMPT) as response:
            assert response.status == 200

    run_alone(server, scenario)


def test_a_server_with_an_api_key_is_refused_with_a_reason():
    server = vllm_decode()
    server.api_key = "another"

    async def scenario(cluster: Cluster, server: ScriptedVllm):
        await until_told(cluster, "without --api-key")
        assert server.num_discoveries == 0

    run_alone(server, scenario, wait=False)


def test_a_server_with_another_clusters_key_is_refused():
    server = vllm_decode()
    server.controls[0].key_is_right = False

    async def scenario(cluster: Cluster, server: ScriptedVllm):
        await until_told(cluster, "give both processes the same BATON_CLUSTER_KEY")
        await asyncio.sleep(0.2)
        assert server.num_discoveries == 1

    run_alone(server, scenario, wait=False, probe_interval_s=0.02)


def test_a_server_that_names_a_foreign_control_host_is_not_believed():
    server = vllm_decode(control_urls=["http://10.1.2.3:80"])

    async def scenario(cluster: Cluster, server: ScriptedVllm):
        await until_told(cluster, "http://10.1.2.3:80", "handoff_host")
        assert server.num_discoveries == 1

    run_alone(server, scenario, wait=False, probe_interval_s=0.02)


def test_a_control_address_that_is_not_believed_is_sent_nothing():
    server = vllm_decode()
    server.extra_info["control_urls"] = [f"{server.controls[0].url}/elsewhere"]

    async def scenario(cluster: Cluster, server: ScriptedVllm):
        await until_told(cluster, "is not https://host:port")
        await asyncio.sleep(0.1)
        assert server.controls[0].num_requests == 0
        assert server.num_discoveries == 1

    run_alone(server, scenario, wait=False, probe_interval_s=0.02)


def test_a_producer_in_the_place_of_a_decode_server_is_told_of_kv_role():
    server = ScriptedVllm("vllm-p", "prefill", offer)
    server.listed_as = "decode"

    async def scenario(cluster: Cluster, server: ScriptedVllm):
        await until_told(cluster, "--prefill", '"kv_role": "kv_consumer"')
        await asyncio.sleep(0.2)
        assert server.num_discoveries == 1  # what it is, is known: its control server confirms it

    run_alone(server, scenario, wait=False, probe_interval_s=0.02)


@pytest.mark.parametrize(
    "info",
    [
        {"protocol": "baton"},
        {"control_urls": []},
        {"control_urls": ["http://127.0.0.1:1", "http://127.0.0.1:2"]},
        {"rank_addresses": ["127.0.0.1:1", "127.0.0.1:2"]},
        {"epoch": "short"},
        {"kv_events": {"topic": "t"}},
    ],
)
def test_an_answer_to_the_probe_that_makes_no_sense_is_not_believed(info):
    async def scenario(cluster: Cluster, server: ScriptedVllm):
        await until(lambda: server.num_discoveries)

        async def is_judged() -> bool:
            return "not asked yet" not in await why_not_ready(cluster)

        await until_true(is_judged)

    run_alone(vllm_decode(**info), scenario, wait=False)


def test_something_else_at_the_address_is_not_used():
    async def teapot(visit):
        await visit.answer(418, {})

    class Teapot(ScriptedWorker):
        async def __call__(self, scope, receive, send):
            status = 200 if scope["path"] == "/health" else 404
            await send({"type": "http.response.start", "status": status, "headers": []})
            await send({"type": "http.response.body", "body": b""})

    async def scenario(cluster: Cluster, server: ScriptedWorker):
        await until_told(cluster, "is this a Baton worker, or a vLLM server?")

    run_alone(Teapot("t", "decode", teapot), scenario, wait=False)


def test_a_restarted_server_is_another_life(caplog):
    caplog.set_level(logging.WARNING)

    async def scenario(cluster: Cluster):
        server = cluster.decodes[0]
        await cluster.post(PROMPT)
        old = server.visits[-1].ticket.decode
        server.begin_another_life()
        await until(lambda: server.num_discoveries == 2)  # its control server says another epoch
        await until(lambda: "has started again" in caplog.text)
        await cluster.post(PROMPT)
        new = server.visits[-1].ticket.decode
        assert (new.epoch, new.worker) == (server.epoch, server.name)
        assert (old.epoch, old.worker) != (new.epoch, new.worker)

    run(scenario, decodes=[vllm_decode()], probe_interval_s=0.02)


def test_a_control_port_that_another_server_took_does_not_introduce_it():
    """Ports are taken again after a restart: another server's answer must not be believed here."""
    mine, other = vllm_decode("mine"), vllm_decode("other")

    async def scenario(cluster: Cluster):
        mine.controls, taken = other.controls, mine.controls[0]
        taken.owner = other  # what was my control server says that it is the other's
        await until(lambda: mine.num_discoveries == 2)
        await until_up(cluster, 3)
        for _ in range(2):
            async with cluster.post(PROMPT) as response:
                assert response.status == 200
        assert {v.ticket.decode.worker for v in mine.visits} == {"mine"}
        assert {v.ticket.decode.worker for v in other.visits} == {"other"}

    run(scenario, decodes=[mine, other], probe_interval_s=0.02)


def test_without_its_control_server_a_server_is_asked_by_completion():
    async def scenario(cluster: Cluster, server: ScriptedVllm):
        server.controls[0].kill()
        began = asyncio.get_running_loop().time()
        await until(lambda: server.num_discoveries == 3)
        num_probes = (asyncio.get_running_loop().time() - began) / 0.02
        assert num_probes > 10  # not with each probe
        assert await cluster.metric("baton_gateway_worker_up{") == 1

    run_alone(vllm_decode(), scenario, probe_interval_s=0.02)


def test_a_server_that_was_away_in_the_same_life_costs_no_token():
    async def scenario(cluster: Cluster, server: ScriptedVllm):
        server.health_status = 500
        await until_told(cluster, "/health answered 500")
        server.health_status = 200
        await until_up(cluster, 1)
        assert server.num_discoveries == 1

    run_alone(vllm_decode(), scenario, probe_interval_s=0.02)


def test_a_server_whose_engine_died_is_down_and_not_draining():
    async def scenario(cluster: Cluster, server: ScriptedVllm):
        server.health_status = 503
        await until_told(cluster, "its engine died")

    run_alone(vllm_decode(), scenario, probe_interval_s=0.02)


def test_a_server_that_baton_started_drains():
    async def scenario(cluster: Cluster, server: ScriptedVllm):
        server.is_draining = True
        await until_told(cluster, "vllm-d: draining")
        server.is_draining = False
        await until_up(cluster, 1)
        assert server.num_discoveries == 1

    run_alone(vllm_decode(), scenario, probe_interval_s=0.02)


def test_a_slow_first_token_is_waited_for():
    class Slow(ScriptedVllm):
        async def _answer(self, visit, body, receive):
            await asyncio.sleep(0.3)
            await super()._answer(visit, body, receive)

    async def scenario(cluster: Cluster, server: ScriptedVllm):
        assert server.num_discoveries == 1

    run_alone(Slow("slow", "decode", say_abc_as_vllm), scenario, probe_timeout_s=0.1)


def test_after_a_failed_handoff_the_decode_server_is_asked_whether_it_began_anew():
    async def no_grant_came(visit):
        await visit.fail(502, "handoff_failed")

    async def scenario(cluster: Cluster):
        prefill, decode = cluster.prefills[0], cluster.decodes[0]
        prefill.script = no_grant_came
        decode.script = never_answer
        decode.begin_another_life()
        request = asyncio.create_task(cluster.post(PROMPT).__aenter__())
        await until(lambda: decode.num_discoveries == 2, within_s=10)
        request.cancel()

    # the tenth probe, which would ask it anyway, is 15 s away
    run(scenario, decodes=[vllm_decode()], probe_interval_s=1.5)


def test_a_baton_worker_may_come_back_where_vllm_was():
    class Changing(ScriptedVllm):
        is_vllm = True

        async def __call__(self, scope, receive, send):
            if self.is_vllm:
                await super().__call__(scope, receive, send)
            else:
                await ScriptedWorker.__call__(self, scope, receive, send)

        def info(self):
            return super().info() if self.is_vllm else ScriptedWorker.info(self)

    server = Changing("changing", "decode", say_abc)

    async def scenario(cluster: Cluster, server: Changing):
        server.controls[0].kill()
        server.is_vllm = False
        await until(lambda: server.num_info_reads >= 2)
        assert await cluster.metric("baton_gateway_worker_up{") == 1
        async with cluster.post(PROMPT) as response:
            assert response.status == 200

    run_alone(server, scenario, probe_interval_s=0.02)
