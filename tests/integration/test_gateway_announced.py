"""A gateway that has its workers from their announcements alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from baton.protocol.worker_http import Role
from tests.integration.announcing import free_port, life
from tests.integration.gateway_cluster import PROMPT, Cluster, run, until_true
from tests.integration.scripted_worker import ScriptedWorker, say_abc

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable


def is_ready(cluster: Cluster) -> Callable[[], Awaitable[bool]]:
    async def ready() -> bool:
        async with cluster.client.get(f"{cluster.url}/ready") as answer:
            return answer.status == 200

    return ready


def test_workers_that_announce_themselves_are_used_until_they_end() -> None:
    port = free_port()
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
