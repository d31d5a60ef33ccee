"""Does telemetry's memory stay flat over a million requests?

    python benchmarks/bench_telemetry_memory.py --json benchmarks/results/telemetry-memory.json
        [--part recorders gateway] [--requests 1000000] [--seconds 150]

`recorders`: the classes by which a gateway and a worker record, in this process, by themselves:
traces with their rings of kept ones, histograms, counters, transfers by peer (300 of them), the
gateway's reports of them, alerts. Heap as `tracemalloc` counts it after a collection, and RSS.

`gateway`: a real `baton gateway` in mode push before scripted workers, asked by a closed loop of 32
connections (whole answers, and some streams) for `--seconds`: RSS by number of requests. With
`--traced` it runs under tracemalloc, too, which takes most of its speed.

`growth_bytes_per_request` is the slope of a line through the second half of the points: 1.0 would
be a megabyte over a million requests.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import random
import tempfile
import time
import tracemalloc
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
from control_gateway import CONCURRENCY, NUM_STREAMS, WHOLE, upstreams
from control_load import run_load, run_streams
from prometheus_client import CollectorRegistry
from run_record import write_record

from baton.auth.credentials import Credentials
from baton.auth.key import ClusterKey
from baton.clock import Instant
from baton.config.sections import AlertsSection, TraceSection
from baton.gateway.alerts.monitor import AlertMonitor
from baton.gateway.alerts.sources import AlertSources
from baton.gateway.kept_traces import KeptTraces
from baton.gateway.metrics import GatewayMetrics
from baton.gateway.options import GatewayOptions, WorkerAddress
from baton.gateway.rank_reports import merge_transfers
from baton.gateway.request_context import RequestContext
from baton.gateway.request_history import RequestHistory
from baton.gateway.request_traces import RequestTraces
from baton.gateway.tail_sampling import TailSampler
from baton.gateway.transfer_feed import TransferFeed
from baton.gateway.transfer_page import TransferPage
from baton.gateway.upstream import Upstream
from baton.gateway.worker_info import read_info
from baton.gateway.workers import Workers
from baton.ids import RequestId, new_epoch
from baton.protocol.worker_http import Role
from baton.router.load import FleetLoad
from baton.telemetry.handoff_metrics import HandoffInstruments, ReceivePaths
from baton.telemetry.links import LinkInstruments
from baton.telemetry.trace import RequestSpan, Stamp, TraceRing
from baton.telemetry.trace_context import begin_span, read_context
from baton.telemetry.transfers import Outcome, TransferTable, TransferTime
from baton.testing.clocks import ManualClock
from baton.testing.fleet import Fleet

if TYPE_CHECKING:
    from collections.abc import Sequence

PARTS: Final = ("recorders", "gateway")
NUM_POINTS: Final = 20
NUM_PEERS: Final = 300
"""More than a table has entries."""
REQUEST_S: Final = 0.002
"""Of the recorders' own clock, between two requests."""
REPORT_EVERY: Final = 10_000
EVALUATE_EVERY: Final = 5000
NUM_EVENTS: Final = 20
PATHS: Final = ReceivePaths(("shared", "tcp"), frozenset({"shared"}), ("push", "pull"))


@dataclass(frozen=True)
class Point:
    """After so many requests. `heap_bytes` None: not traced."""

    num_requests: int
    rss_bytes: int
    heap_bytes: int | None = None


def main() -> None:
    """Run the parts, print and keep their points."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", nargs="+", default=PARTS, choices=PARTS)
    parser.add_argument("--requests", type=int, default=1_000_000, help="of the recorders")
    parser.add_argument("--seconds", type=float, default=150.0, help="of the gateway")
    parser.add_argument("--traced", action="store_true", help="the gateway's heap, too")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found: dict[str, Flatness] = {}
    if "recorders" in options.part:
        found["recorders"] = describe(asyncio.run(record(options.requests)))
    if "gateway" in options.part:
        found["gateway"] = describe(serve(options.seconds, is_traced=options.traced))
    for name, part in found.items():
        show(name, part)
    write_record(options.json, **found)


@dataclass(frozen=True)
class Flatness:
    """The points, and how much a request adds once the rings are full, by kind of memory."""

    points: Sequence[Point]
    growth_bytes_per_request: dict[str, float]


def show(name: str, part: Flatness) -> None:
    """A line for every fifth point, and the growth."""
    print(f"{name}\n  requests      RSS MB  heap MB")
    for point in part.points[:: NUM_POINTS // 5]:
        heap = "" if point.heap_bytes is None else f"{point.heap_bytes / 1e6:8.2f}"
        print(f"{point.num_requests:10} {point.rss_bytes / 1e6:11.1f} {heap}")
    for kind, growth in part.growth_bytes_per_request.items():
        print(f"  {kind}: {growth:+.3f} bytes a request over the second half")


def describe(points: Sequence[Point]) -> Flatness:
    """Fit lines through the second half."""
    later = points[len(points) // 2 :]
    nums = [point.num_requests for point in later]
    growth = {"rss": np.polyfit(nums, [point.rss_bytes for point in later], 1)[0]}
    heaps = [point.heap_bytes for point in later if point.heap_bytes is not None]
    if len(heaps) == len(later):
        growth["heap"] = np.polyfit(nums, heaps, 1)[0]
    return Flatness(points, {name: float(slope) for name, slope in growth.items()})


class Recorders:
    """A gateway's and a decode worker's, without requests' other parts."""

    def __init__(self) -> None:
        self._random = random.Random(7)
        self._clock, trace = ManualClock(), TraceSection()
        key = Credentials.of(ClusterKey(bytes(32)))
        address = WorkerAddress("http://127.0.0.1:1", Role.DECODE)
        of_gateway = GatewayOptions(addresses=(address,), credentials=key, tls="off")
        self._metrics, load = GatewayMetrics(), FleetLoad()
        workers = Workers(of_gateway.addresses, self._metrics)
        upstream = Upstream(of_gateway)
        workers.register(workers.all[0], read_info(make_info()))
        self._records = RequestHistory(trace.ring_size)
        self._feed = TransferFeed(workers, upstream, self._clock)
        self.kept = KeptTraces(
            RequestTraces(workers, upstream, load, self._clock, transfers=self._feed),
            TailSampler(trace.slow_quantile, trace.slow_ttft_s),
            trace.kept_size,
            clock=self._clock,
            metrics=self._metrics.traces,
            export=None,
        )
        self._records.on_add = self.kept.offer
        self._page, self._workers = TransferPage(self._feed, self._clock), workers
        sources = AlertSources(of_gateway, workers, load, self._feed, None, self._metrics.targets)
        self._alerts = AlertMonitor(AlertsSection(), sources, CollectorRegistry(), self._clock)
        registry = CollectorRegistry()
        self._table = TransferTable(new_epoch(), self._clock)
        self._handoffs = HandoffInstruments(registry, PATHS, (), self._table)
        self._links = LinkInstruments(registry, PATHS, self._table)
        self._ring = TraceRing(trace.ring_size)

    async def serve(self, number: int) -> None:
        """Record one request: one in 100 fails, one in 50 is slow, others take 50 to 150 ms."""
        now, name = self._clock.now(), f"request-{number}"
        took_s = self._random.uniform(0.05, 0.15) * (20 if number % 50 == 0 else 1)
        status = 502 if number % 100 == 99 else 200
        self._record_in_gateway(name, now, took_s, status)
        self._record_in_worker(name, now, took_s)
        self._clock.advance(REQUEST_S)
        if number % REPORT_EVERY == 0:
            worker = self._workers.all[0]
            self._feed.reports[worker] = merge_transfers({0: self._table.report()}, ())
            await self._feed.note_reports()
            await self._page.show()
        if number % EVALUATE_EVERY == 0:
            self._alerts.evaluate()
            self._metrics.exposition()

    def _record_in_gateway(self, name: str, now: float, took_s: float, status: int) -> None:
        span = begin_span(read_context(()), is_sampled=False)
        context = RequestContext(
            id=RequestId(name),
            path="/v1/completions",
            received_at=Instant(now),
            deadline=Instant(now + 9.0),
            forwarded_headers=span.headers,
            trace=RequestSpan(
                request_id=name, worker="gateway", epoch="e", role="gateway",
                trace_id=span.trace_id, span_id=span.span_id,
            ),
            metrics=self._metrics.of("m", "push"),
        )  # fmt: skip
        context.trace.stamp(Stamp.RECEIVED, now)
        context.trace.stamp(Stamp.FIRST_TOKEN, now + took_s / 2)
        gaps = context.open_token_gaps()
        for _ in range(16):
            gaps.append(took_s / 32)
            context.metrics.inter_token_latency.observe(took_s / 32)
        context.num_streamed = 17
        context.metrics.time_to_first_token.observe(took_s / 2)
        record = context.finish(status, Instant(now + took_s))
        context.metrics.count(status)
        context.metrics.duration.observe(took_s)
        self._records.add(record)

    def _record_in_worker(self, name: str, now: float, took_s: float) -> None:
        peer = f"prefill-{self._random.randrange(NUM_PEERS)}"
        trace = RequestSpan(request_id=name, worker="d", epoch="e", role="decode", peer=peer)
        self._ring.add(trace)
        trace.transport = trace.expected_transport = "tcp"
        trace.mode, trace.operation, trace.distance = "push", "WRITE", "same_rack"
        trace.num_bytes = 4 << 20
        trace.peer_stamps = {Stamp.FIRST_LAYER_READY: now, Stamp.PREFILL_DONE: now + took_s / 2}
        for stamp in (Stamp.RECEIVED, Stamp.LAST_LAYER_LANDED, Stamp.KV_READY, Stamp.FINISHED):
            trace.stamp(stamp, now + took_s)
        trace.layers_landed = [now + took_s] * 32
        self._handoffs.landed(trace)
        self._handoffs.finished(trace)
        self._links.transferred(TransferTime(peer, "same_rack", "tcp", "pull", 1 << 20, took_s))
        self._links.carried(
            Outcome(peer, "same_rack", "tcp", "pull", 1, 1 << 20, took_s, took_s, refined=True)
        )


def make_info() -> bytes:
    """What a decode worker reports of itself."""
    return json.dumps({
        "worker": "decode-0", "epoch": new_epoch(), "role": "decode", "model": "m",
        "served_model_name": "m", "fingerprint": "f", "max_context_tokens": 4096,
        "handoff_address": "127.0.0.1:1", "layout": {}, "transports": ["tcp"], "version": "0",
    }).encode()  # fmt: skip


async def record(num_requests: int) -> list[Point]:
    """Points of the recorders."""
    recorders, points = Recorders(), []
    fetching = asyncio.create_task(recorders.kept.run())
    every = max(1, num_requests // NUM_POINTS)
    tracemalloc.start()
    for number in range(1, num_requests + 1):
        await recorders.serve(number)
        if number % EVALUATE_EVERY == 0:
            await asyncio.sleep(0)  # kept traces are completed
        if number % every == 0:
            gc.collect()
            heap_bytes, _ = tracemalloc.get_traced_memory()
            points.append(Point(number, read_rss_bytes(os.getpid()), heap_bytes))
    tracemalloc.stop()
    fetching.cancel()
    return points


def serve(for_s: float, *, is_traced: bool) -> list[Point]:
    """Points of a real gateway."""
    cores, points, num_requests = sorted(os.sched_getaffinity(0)), [], 0
    with tempfile.TemporaryDirectory() as place:
        key, folder = os.urandom(32).hex(), Path(place)
        environment = {**os.environ, "BATON_CLUSTER_KEY": key}
        if is_traced:
            environment |= trace_heap(folder)
        with (
            Fleet(folder, environment) as fleet,
            upstreams(cores[-1], key) as (plain, _, _),
        ):
            pair = {"gateway.prefill": plain[2:3], "gateway.decode": plain[3:]}
            gateway = fleet.start_gateway([], [], settings=pair)
            bodies = [json.dumps(WHOLE).encode()]
            streamed = json.dumps({**WHOLE, "stream": True, "max_tokens": NUM_EVENTS}).encode()
            for _ in range(NUM_POINTS):
                load = run_load(gateway.url, bodies, CONCURRENCY, for_s / NUM_POINTS)
                run_streams(gateway.url, streamed, NUM_STREAMS)
                num_requests += len(load.latencies_s) + NUM_STREAMS
                heap_bytes = read_heap_bytes(folder) if is_traced else None
                points.append(Point(num_requests, read_rss_bytes(gateway.pid), heap_bytes))
    return points


def trace_heap(folder: Path) -> dict[str, str]:
    """Environment in which a process traces its heap, and writes its size down each second."""
    (folder / "sitecustomize.py").write_text(
        "import pathlib, threading, time, tracemalloc\n"
        "def run():\n"
        "    while True:\n"
        "        time.sleep(0.5)\n"
        f"        new = pathlib.Path({str(folder / 'heap.new')!r})\n"
        "        new.write_text(str(tracemalloc.get_traced_memory()[0]))\n"
        f"        new.replace({str(folder / 'heap')!r})\n"
        "tracemalloc.start()\n"
        "threading.Thread(target=run, daemon=True).start()\n"
    )
    return {"PYTHONPATH": str(folder)}


def read_heap_bytes(folder: Path) -> int:
    """What the traced process has written last."""
    time.sleep(1.0)
    return int((folder / "heap").read_text())


def read_rss_bytes(pid: int) -> int:
    """Resident memory of a process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text("ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    main()
