"""What Prometheus reads of a gateway with many workers."""

from __future__ import annotations

import asyncio

from baton.gateway.metrics import GatewayMetrics, HealthCollector
from baton.gateway.options import WorkerAddress
from baton.gateway.workers import Workers
from baton.protocol.worker_http import Role


def test_streams_go_on_between_the_families_of_the_same_text() -> None:
    metrics = GatewayMetrics()
    addresses = (WorkerAddress("http://10.0.0.5:1", Role.DECODE),)
    metrics.registry.register(HealthCollector(Workers(addresses, metrics)))
    metrics.preregister("m")
    turns = 0

    async def scenario() -> bytes:
        async def stream() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        other = asyncio.create_task(stream())
        text = await metrics.exposition_in_parts()
        other.cancel()
        return text

    text = asyncio.run(scenario())
    assert text == metrics.exposition()
    assert turns >= sum(1 for _ in metrics.registry.collect()) > 20
