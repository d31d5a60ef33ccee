"""When workers are probed first, and that those that are gone are not."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import cast

import pytest

from baton.auth.credentials import Credentials
from baton.auth.key import ClusterKey
from baton.clock import MachineClock
from baton.gateway import health_monitor
from baton.gateway.errors import WorkerUnreachableError
from baton.gateway.health_monitor import HealthMonitor
from baton.gateway.metrics import GatewayMetrics
from baton.gateway.options import GatewayOptions, WorkerAddress
from baton.gateway.upstream import Upstream
from baton.gateway.workers import NUM_AT_ONCE, Workers
from baton.ids import WorkerId, new_epoch
from baton.protocol.worker_http import Role, WorkerInfo

INTERVAL_S = 0.2


def addresses(num: int) -> tuple[WorkerAddress, ...]:
    return tuple(WorkerAddress(f"https://10.0.0.{n}:1", Role.DECODE) for n in range(1, num + 1))


@pytest.mark.parametrize("num", [NUM_AT_ONCE, 100])
def test_many_new_workers_are_not_probed_at_once(num: int, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[float] = []

    async def probe(self: health_monitor.Prober) -> None:
        begun.append(asyncio.get_running_loop().time())

    async def main() -> None:
        monkeypatch.setattr(health_monitor.Prober, "probe", probe)
        listed = addresses(num)
        options = GatewayOptions(
            addresses=listed,
            credentials=Credentials.of(ClusterKey(b"k" * 32)),
            probe_interval_s=INTERVAL_S,
        )
        workers = Workers(listed, GatewayMetrics())
        monitor = HealthMonitor(workers, Upstream(options), options, MachineClock())
        began = asyncio.get_running_loop().time()
        monitor.update()
        monitor.update()  # changes nothing
        await asyncio.sleep(0.9 * INTERVAL_S)
        first = [at - began for at in begun]
        assert len(first) <= num, "each once"
        quarters = Counter(int(4 * at / INTERVAL_S) for at in first)
        if num > NUM_AT_ONCE:
            assert len(first) > num // 2
            assert max(quarters.values()) <= num // 2
        else:
            assert quarters == {0: num}
        workers.remove(workers.all)
        monitor.update()
        await asyncio.sleep(0)
        begun.clear()
        await asyncio.sleep(1.5 * INTERVAL_S)
        assert not begun
        await monitor.stop()

    asyncio.run(main())


INFO = WorkerInfo(
    worker=WorkerId("decode-1"),
    epoch=new_epoch(),
    role=Role.DECODE,
    served_model_name="demo",
    fingerprint="f",
    max_context_tokens=4096,
    handoff_address="10.0.0.1:2",
    transports=("tcp",),
    version="0",
)


class FailingUpstream:
    """Raises what it is given, whatever is asked."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def num_reads(self, url: object) -> int:
        return 0

    async def get(self, url: object, timeout_s: float) -> tuple[int, bytes]:
        raise self.error


def test_a_worker_that_comes_back_with_another_key_is_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It was down before, for another reason, which is logged first."""
    upstream = FailingUpstream(WorkerUnreachableError("refused", is_refused=True))

    async def main() -> str:
        listed = addresses(1)
        options = GatewayOptions(addresses=listed, credentials=Credentials.generate())
        workers = Workers(listed, GatewayMetrics())
        (worker,) = workers.all
        workers.register(worker, INFO)
        prober = health_monitor.Prober(
            worker, workers, cast("Upstream", upstream), options, clock=MachineClock()
        )
        await prober.probe()
        assert "decode-1 is down: refused" in caplog.text
        upstream.error = WorkerUnreachableError("another key", is_untrusted=True)
        await prober.probe()
        await prober.probe()
        return worker.standing

    assert asyncio.run(main()) == "rejected"
    named = "the worker at https://10.0.0.1:1 (decode-1) is not used: another key"
    assert [each.getMessage() for each in caplog.records].count(named) == 1
