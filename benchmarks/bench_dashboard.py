"""What the dashboard costs: the gateway's thread, frames in chromium, memory over a day.

    python benchmarks/bench_dashboard.py --json benchmarks/results/dashboard.json
    python benchmarks/bench_dashboard.py --table docs/observability/dashboard-measured.txt

The page is the real one; the stream is made up (tests/browser/synthetic.py): 200 workers and 500
requests/s. Needs chromium, which draws in software. Under four minutes.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import statistics
import sys
import time
from itertools import pairwise
from pathlib import Path

import msgspec

from baton.auth.credentials import Credentials
from baton.auth.key import ClusterKey
from baton.clock import MachineClock
from baton.gateway.completions import Completions
from baton.gateway.dashboard.series import Series
from baton.gateway.dashboard.snapshot import SnapshotBuilder, SnapshotPages
from baton.gateway.options import GatewayOptions, WorkerAddress
from baton.gateway.process import open_parts
from baton.gateway.request_history import RequestHistory
from baton.gateway.workers import Up
from baton.protocol.worker_http import Role
from baton.router.load import EndedRequest

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.browser.chromium import Page, chromium
from tests.browser.synthetic import START, Fleet, Stream, serve_dashboard
from tests.browser.test_page import DRAWN
from tests.unit.gateway.test_workers import info

RESULTS = Path(__file__).parent / "results" / "dashboard.json"
NUM_WORKERS = 200
RATE = 500
WATCHED_S = 20
DAY_S = 86_400
HOUR_S = 3_600
REPEATS = 50
KEY = Credentials.of(ClusterKey(b"k" * 32))
RECORD = """
window.frames_ = []; window.tasks_ = [0];
new PerformanceObserver((list) => list.getEntries().forEach((e) => tasks_.push(e.duration)))
  .observe({entryTypes: ["longtask"]});
(function next(at) { frames_.push(at); requestAnimationFrame(next); })(performance.now());
"""


class Results(msgspec.Struct, frozen=True, kw_only=True):
    """Times in milliseconds, medians over repeats unless another figure is named."""

    num_workers: int
    requests_per_s: int
    idle_frames_per_s: float
    frames_per_s: float
    frame_p99_ms: float
    frame_longest_ms: float
    task_longest_ms: float
    num_long_tasks: int
    heap_after_hour_bytes: int
    heap_after_day_bytes: int
    nodes_after_hour: int
    nodes_after_day: int
    day_took_s: float
    sample_ms: float
    snapshot_ms: float
    snapshot_bytes: int
    links_bytes: int


async def measure_frames() -> dict[str, float | int]:
    """Frames while ticks arrive each second and the page scrolls, and on an empty page."""
    fleet = Fleet(num_workers=NUM_WORKERS, requests_per_s=RATE)
    async with serve_dashboard(fleet) as (url, _), chromium() as page:
        await page.resize(1920, 1000)
        await page.run(RECORD)
        await asyncio.sleep(3)
        idle = await _frames(page)
        await page.open(url)
        await page.until(DRAWN)
        await asyncio.sleep(5)
        await page.run(RECORD)
        await page.run(
            "setInterval(() => scrollBy(0, performance.now() % 8000 < 4000 ? 4 : -4), 16)"
        )
        await asyncio.sleep(WATCHED_S)
        frames = await _frames(page)
        tasks = await page.run("tasks_")
        assert not page.problems, page.problems
    return {
        "idle_frames_per_s": len(idle) / sum(idle) * 1e3,
        "frames_per_s": len(frames) / sum(frames) * 1e3,
        "frame_p99_ms": statistics.quantiles(frames, n=100)[98],
        "frame_longest_ms": max(frames),
        "task_longest_ms": max(tasks),
        "num_long_tasks": len(tasks) - 1,
    }


async def _frames(page: Page) -> list[float]:
    at = await page.run("frames_")
    return [later - before for before, later in pairwise(at[1:])]


async def measure_day() -> dict[str, float | int]:
    """A day of ticks as fast as the page takes them; memory after an hour and at the end."""
    fleet = Fleet(num_workers=8, num_requests=10)
    began = time.monotonic()
    async with serve_dashboard(fleet, 0.0, HOUR_S) as (url, stream), chromium() as page:
        await page.resize(1280)
        await page.open(url)
        await page.until(DRAWN)
        after_hour = await _memory(page, stream)
        stream.num_ticks = DAY_S
        stream.is_over.clear()
        after_day = await _memory(page, stream)
        assert not page.problems, page.problems
    return {
        "heap_after_hour_bytes": after_hour[0],
        "nodes_after_hour": after_hour[1],
        "heap_after_day_bytes": after_day[0],
        "nodes_after_day": after_day[1],
        "day_took_s": time.monotonic() - began,
    }


async def _memory(page: Page, stream: Stream) -> tuple[int, int]:
    await asyncio.wait_for(stream.is_over.wait(), 200)
    last = int(START) + stream.num_sent - 1
    shown = f"document.querySelector('#request-table').textContent.includes('req-{last}-')"
    await page.until(shown, 60)
    await asyncio.sleep(1)
    heap = await page.heap_bytes()
    nodes = (await page.call("Memory.getDOMCounters"))["nodes"]
    return heap, nodes


async def measure_gateway() -> dict[str, float | int]:
    """A real gateway's snapshot of workers that it knows, and a second's point of 500 answers."""
    addresses = tuple(
        WorkerAddress(f"http://127.0.0.1:{20_000 + i}", Role.BOTH) for i in range(NUM_WORKERS)
    )
    options = GatewayOptions(
        addresses=addresses, credentials=KEY, tls="off", probe_interval_s=3600.0
    )
    async with open_parts(options, MachineClock()) as (app, services):
        await asyncio.sleep(0.5)
        for index, worker in enumerate(services.workers.all):
            known = info(worker=f"worker-{index}", role="both")
            services.workers.change(worker, Up(known))
            services.load.of(known.worker, known.served_model_name)
        await asyncio.sleep(0.1)
        model = next(iter(services.workers.fleet.models))
        pages = app._debug_pages  # noqa: SLF001 - those of the gateway, not others like them
        shown = SnapshotPages(
            pages.workers, pages.queue, pages.links, pages.transfers, pages.alerts
        )
        records = RequestHistory(1024)
        series = Series(services, records, Completions(services, records))
        builder = SnapshotBuilder(shown, services, records, series)
        gc.collect()
        samples, snapshots = [], []
        for _ in range(REPEATS):
            now = services.clock.now()
            for _ in range(RATE):
                services.load.costs(model).note_ended(
                    EndedRequest(now, 800, 200, 100, 0.3, 0.02, 0.01, 0.2)
                )
            began = time.perf_counter()
            point = series.sample()
            samples.append(time.perf_counter() - began)
            began = time.perf_counter()
            body = msgspec.json.encode(builder.tick(point))
            snapshots.append(time.perf_counter() - began)
        links = msgspec.json.encode(await builder.links())
    return {
        "sample_ms": 1e3 * statistics.median(samples),
        "snapshot_ms": 1e3 * statistics.median(snapshots),
        "snapshot_bytes": len(body),
        "links_bytes": len(links),
    }


def print_table(results: Results) -> str:
    """As the page docs/observability/index.md includes it."""
    r = results
    rows = (
        (
            "gateway's thread, each second, no page open: 500 answers ended",
            f"{r.sample_ms:.2f} ms",
        ),
        (
            f"the same with pages open: a snapshot of {r.num_workers} workers",
            f"{r.snapshot_ms:.1f} ms, {r.snapshot_bytes / 1024:.0f} KiB",
        ),
        (
            "frames, while ticks come each second and the page scrolls",
            (
                f"{r.frames_per_s:.1f} a second (an empty page: {r.idle_frames_per_s:.1f}); "
                f"p99 {r.frame_p99_ms:.1f} ms, longest {r.frame_longest_ms:.0f} ms"
            ),
        ),
        (
            f"longest task in {WATCHED_S} s",
            f"{r.task_longest_ms:.0f} ms; {r.num_long_tasks} longer than 50 ms",
        ),
        (
            "JavaScript's heap after an hour, and after a day",
            f"{r.heap_after_hour_bytes / 1e6:.2f} MB, {r.heap_after_day_bytes / 1e6:.2f} MB",
        ),
        ("elements, the same", f"{r.nodes_after_hour:,}, {r.nodes_after_day:,}"),
    )
    head = (
        "Measured on two cores, chromium drawing in software, 1,920 px, "
        f"{r.num_workers} workers and {r.requests_per_s} requests/s "
        "(`python benchmarks/bench_dashboard.py`; a day: 86,400 ticks as fast as the page takes "
        "them):"
    )
    table = [f"| {name} | {value} |" for name, value in rows]
    return "\n".join((head, "", "| what | |", "|---|---|", *table)) + "\n"


async def measure() -> Results:
    """All of it."""
    gateway, frames, day = await measure_gateway(), await measure_frames(), await measure_day()
    return msgspec.convert(
        {"num_workers": NUM_WORKERS, "requests_per_s": RATE, **gateway, **frames, **day}, Results
    )


def main() -> None:
    """Measure, or with `--table` write the table of the last results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, default=RESULTS)
    parser.add_argument("--table", type=Path)
    args = parser.parse_args()
    if args.table:
        results = msgspec.json.decode(args.json.read_bytes(), type=Results)
        args.table.write_text(print_table(results), encoding="utf-8")
        return
    results = asyncio.run(measure())
    args.json.write_bytes(msgspec.json.format(msgspec.json.encode(results)) + b"\n")
    print(print_table(results))


if __name__ == "__main__":
    main()
