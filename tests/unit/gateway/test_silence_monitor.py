"""What missing heartbeats do to a worker, and to its requests."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from baton.auth.credentials import Credentials
from baton.auth.key import ClusterKey
from baton.clock import Instant, MachineClock
from baton.gateway.errors import WorkerLostError
from baton.gateway.health_monitor import HealthMonitor
from baton.gateway.members.heartbeat_table import HeartbeatTable
from baton.gateway.metrics import GatewayMetrics
from baton.gateway.options import GatewayOptions, WorkerAddress
from baton.gateway.silence_monitor import SilenceMonitor
from baton.gateway.upstream import Upstream
from baton.gateway.workers import Workers
from baton.ids import Epoch, WorkerId
from baton.protocol.heartbeats import HeartbeatGrant, make_heartbeat
from baton.protocol.worker_http import Role
from baton.router.health import HealthState
from tests.unit.gateway.test_workers import info

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from baton.gateway.workers import Worker

EPOCH = Epoch("e" * 32)


@dataclass
class Gateway:
    """Two decode workers; `beat` is a heartbeat of one, `look` a sweep."""

    workers: Workers
    table: HeartbeatTable
    monitor: SilenceMonitor
    metrics: GatewayMetrics
    grants: list[HeartbeatGrant]
    sequence: int = 0

    def beat(self, number: int, now: float) -> None:
        self.sequence += 1
        datagram = make_heartbeat(self.grants[number], self.sequence)
        assert self.table.take(datagram, Instant(now)) == "taken"

    def look(self, now: float) -> None:
        self.monitor.look(self.table, Instant(now))

    def states(self) -> list[HealthState]:
        return [worker.health.state for worker in self.workers.all]


def run(scenario: Callable[[Gateway], Awaitable[None]], num_workers: int = 2) -> None:
    async def main() -> None:
        urls = [f"https://10.0.0.{n}:1" for n in range(1, num_workers + 1)]
        addresses = tuple(WorkerAddress(url, Role.DECODE) for url in urls)
        credentials = Credentials.of(ClusterKey(b"k" * 32))
        options = GatewayOptions(addresses=addresses, credentials=credentials)
        metrics = GatewayMetrics()
        workers = Workers(addresses, metrics)
        upstream = Upstream(options)
        services: Any = SimpleNamespace(
            workers=workers,
            upstream=upstream,
            health_monitor=HealthMonitor(workers, upstream, options, MachineClock()),
            metrics=metrics,
            options=options,
        )
        table = HeartbeatTable(b"s" * 32)
        grants = []
        for worker in workers.all:
            name = WorkerId(str(worker.url))
            workers.register(worker, info(worker=name))
            grants.append(table.grant(name, EPOCH, worker.url, b"certificate"))
        gateway = Gateway(workers, table, SilenceMonitor(services), metrics, grants)
        for number in range(num_workers):
            gateway.beat(number, 100.0)
        await scenario(gateway)

    asyncio.run(main())


async def wait_at(worker: Worker) -> None:
    with worker.cancel_scope():
        await asyncio.Event().wait()


def test_a_silent_worker_gets_nothing_new_then_its_requests_go_on_elsewhere() -> None:
    async def scenario(gateway: Gateway) -> None:
        silent, other = gateway.workers.all
        waiting = asyncio.create_task(wait_at(silent))
        await asyncio.sleep(0)
        for tick in range(1, 28):
            gateway.beat(1, 100 + tick / 10)
            gateway.look(100 + tick / 10)
            expected = HealthState.SUSPECTED if tick >= 14 else HealthState.HEALTHY
            assert gateway.states() == [expected, HealthState.HEALTHY]
            assert silent.is_available is (tick < 14)
            await asyncio.sleep(0)
            assert not waiting.done()
        gateway.beat(1, 102.8)
        gateway.look(102.8)
        with pytest.raises(WorkerLostError, match=r"nothing was received from it for 2\.8 s"):
            await waiting
        assert other.is_available
        gateway.beat(0, 103.0)
        gateway.beat(1, 103.0)
        gateway.look(103.0)
        assert gateway.states() == [HealthState.HEALTHY] * 2

    run(scenario)


@pytest.mark.parametrize("num_workers", [1, 2])
def test_where_all_are_silent_none_is_given_up(num_workers: int) -> None:
    """As the gateway's own network is away: only the end of a lease gives requests up."""

    async def scenario(gateway: Gateway) -> None:
        waiting = asyncio.create_task(wait_at(gateway.workers.all[0]))
        await asyncio.sleep(0)
        for tick in range(1, 90):
            gateway.look(100 + tick / 10)
        await asyncio.sleep(0)
        assert gateway.states() == [HealthState.SUSPECTED] * num_workers
        assert gateway.workers.fleet.can_decode, "better one of them than none"
        assert not waiting.done()
        url = gateway.workers.all[0].url
        gateway.monitor.lost(url, Epoch("f" * 32), "its lease has lapsed")
        await asyncio.sleep(0)
        assert not waiting.done(), "that was another epoch"
        gateway.monitor.lost(url, EPOCH, "its lease has lapsed")
        with pytest.raises(WorkerLostError, match="lapsed"):
            await waiting

    run(scenario, num_workers)


def test_the_end_of_a_lease_ends_the_suspicion() -> None:
    async def scenario(gateway: Gateway) -> None:
        gateway.look(102.0)
        assert gateway.states() == [HealthState.SUSPECTED] * 2
        for heartbeats in tuple(gateway.table):
            gateway.table.forget(heartbeats.worker)
        gateway.look(102.1)
        assert gateway.states() == [HealthState.HEALTHY] * 2

    run(scenario)
