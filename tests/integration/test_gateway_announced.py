"""A gateway that has its workers from their announcements alone."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from baton.protocol.worker_http import Role
from tests.free_ports import find_free_port
from tests.integration.announcing import life
from tests.integration.gateway_cluster import PROMPT, Cluster, run, until_true
from tests.integration.scripted_worker import ScriptedWorker, never_answer, say_abc

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable


def is_ready(cluster: Cluster) -> Callable[[], Awaitable[bool]]:
    async def ready() -> bool:
        async with cluster.client.get(f"{cluster.url}/ready") as answer:
            return answer.status == 200

    return ready


def test_workers_that_announce_themselves_are_used_until_they_end() -> None:
    port = find_free_port()
    at = f"https://127.0.0.1:{port}"

    async def scenario(cluster: Cluster) -> None:
        ready = is_ready(cluster)
        assert not await ready()
        worker = ScriptedWorker("w", "both", say_abc)
        async with worker.running():
            async with life("w", worker.url, at, role=Role.BOTH, lease_s=30.0):
                await until_true(ready)
                async with cluster.post(PROMPT) as answer:
                    assert answer.status == 200
                assert await cluster.metric('baton_gateway_members{source="announced"}') == 1

            async def is_forgotten() -> bool:
                return await cluster.metric('baton_gateway_members{source="announced"}') == 0

            await until_true(is_forgotten)
            assert not await ready(), "it has taken leave"

    options = {"members": ("announced",), "announce_port": port, "wait": False}
    run(scenario, prefills=0, decodes=0, **options)


HEARTBEATS = 'baton_gateway_heartbeats_total{result="taken"}'


def test_a_worker_whose_heartbeats_are_lost_but_that_answers_is_not_suspected() -> None:
    port = find_free_port()
    at = f"https://127.0.0.1:{port}"

    async def scenario(cluster: Cluster) -> None:
        worker = ScriptedWorker("w", "both", say_abc)
        async with worker.running(), life("w", worker.url, at, lease_s=30.0) as alive:
            await until_true(is_ready(cluster))

            async def has_sent() -> bool:
                return await cluster.metric(HEARTBEATS) > 0

            await until_true(has_sent)
            alive.stop()  # its HTTP server goes on
            await asyncio.sleep(0.2)  # until the last one is read
            before, states = await cluster.metric(HEARTBEATS), set[str]()
            for _ in range(15):
                status, listed = await cluster.get_json("/debug/workers")
                assert status == 200
                states.add(listed["workers"][0]["health"])
                await asyncio.sleep(0.1)
            assert await cluster.metric(HEARTBEATS) == before, "they are lost"
            assert states == {"healthy"}
            assert await cluster.metric("baton_gateway_silent_workers_total") == 0

    options = {"members": ("announced",), "announce_port": port, "wait": False}
    run(scenario, prefills=0, decodes=0, silent_after_s=2.0, **options)


def test_requests_at_a_worker_whose_lease_has_lapsed_are_given_up_at_once() -> None:
    port = find_free_port()
    at = f"https://127.0.0.1:{port}"

    async def scenario(cluster: Cluster) -> None:
        worker = ScriptedWorker("w", "both", never_answer)
        async with worker.running(), life("w", worker.url, at, lease_s=1.0) as alive:
            worker.epoch = alive.epoch
            await until_true(is_ready(cluster))
            asking = asyncio.create_task(cluster.post(PROMPT).__aenter__())

            async def is_asked() -> bool:
                return bool(worker.visits)

            await until_true(is_asked)
            alive.stop()
            async with asyncio.timeout(5):  # a request may take 600 s
                answer = await asking
            assert answer.status in {502, 503}
            assert await cluster.metric('baton_gateway_ended_leases_total{cause="lapsed"}') == 1
            answer.close()

    options = {"members": ("announced",), "announce_port": port, "wait": False}
    run(scenario, prefills=0, decodes=0, silent_after_s=60.0, **options)
