"""What is kept is bounded, whatever workers and traffic do."""

from __future__ import annotations

import asyncio

from prometheus_client import CollectorRegistry

from baton.gateway.kept_traces import MOST_PENDING, NUM_FETCHING, KeptTraces
from baton.gateway.request_history import RequestRecord
from baton.gateway.tail_sampling import KeptKind, TailSampler
from baton.gateway.trace_metrics import TraceMetrics
from baton.protocol.request_traces import RequestTrace
from baton.telemetry.trace import RequestSpan
from baton.testing.clocks import ManualClock

CAPACITY = 8


class Fetcher:
    """In place of workers: answers once `release` is set."""

    def __init__(self) -> None:
        self.release = asyncio.Event()
        self.num_waiting = self.most_waiting = 0

    async def merge(self, record: RequestRecord, kept: str | None = None) -> RequestTrace:
        self.num_waiting += 1
        self.most_waiting = max(self.most_waiting, self.num_waiting)
        await self.release.wait()
        self.num_waiting -= 1
        return RequestTrace(
            id=record.trace.request_id, status=record.status, placement=(), summary=None,
            gateway=record.trace, decode=None, prefill=None, missing=(), kept=kept,
        )  # fmt: skip


def failed(request_id: str) -> RequestRecord:
    span = RequestSpan(request_id=request_id, worker="g", epoch="e", role="gateway", outcome="lost")
    return RequestRecord(span, None, 502, ended_at=-10.0)


async def scenario() -> None:
    fetcher, metrics = Fetcher(), TraceMetrics(CollectorRegistry())
    kept = KeptTraces(
        fetcher,  # type: ignore[arg-type]
        TailSampler(0.99, None),
        CAPACITY,
        clock=ManualClock(),
        metrics=metrics,
        export=None,
    )
    running = asyncio.create_task(kept.run())
    await asyncio.sleep(0)
    for number in range(3 * MOST_PENDING):
        kept.offer(failed(f"r{number}"))
        if number % 64 == 0:
            await asyncio.sleep(0)
    assert fetcher.most_waiting == NUM_FETCHING, "workers are not asked for all at once"
    lost = metrics.lost["workers"]._value.get()
    assert lost == 2 * MOST_PENDING - NUM_FETCHING
    listed = [each.trace.request_id for each in kept.latest_first(KeptKind.FAILED)]
    assert listed == [f"r{3 * MOST_PENDING - 1 - at}" for at in range(CAPACITY)]
    fetcher.release.set()
    async with asyncio.timeout(60):
        while kept._pending.qsize():
            await asyncio.sleep(0)
    assert len(kept._merged) <= CAPACITY
    assert kept.find_record("r0") is None
    assert kept.find("r0") is None, "what was forgotten meanwhile is not kept for its workers' sake"

    again = failed("twice")
    kept.offer(again)
    kept.offer(latest := failed("twice"))
    async with asyncio.timeout(60):
        while kept.find("twice") is None:
            await asyncio.sleep(0)
    found = kept.find("twice")
    assert found is not None
    assert found.gateway is latest.trace
    assert found.kept == "lost"
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


def test_a_storm_of_failures_fills_the_rings_and_no_more() -> None:
    asyncio.run(scenario())
