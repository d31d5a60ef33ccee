"""What telemetry of transfers costs, and how exact its quantiles are.

    python benchmarks/bench_telemetry.py [--part record error cpu] [--json FILE] [--rounds 15]

`record`: microseconds for each value of a log histogram, and of ddsketch's for comparison; for a
handoff's and a link's figures, all histograms, counters and the table by peer together.

`error`: relative error of quantiles on 98 % fast and 2 % slow values (100 times slower), the worst
of several seeds, with ddsketch's beside it.

`cpu`: CPU time of a prefill and a decode worker (embedded engine, demo model) for a request, with
and without what is recorded of handoffs and links, in turns. Without: the same workers, in which
these methods do nothing. `recorded_share` is computed: what a request records, by the costs of
`record` on this machine, over its CPU time. The difference of the two pairs of workers is noise
unless their quartiles exclude 0.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from completion_client import get, post
from ddsketch import DDSketch
from prometheus_client import CollectorRegistry
from rich.console import Console
from run_record import write_record

from baton.clock import MachineClock
from baton.ids import new_epoch
from baton.protocol.worker_http import TRANSFERS_PATH
from baton.telemetry.handoff_metrics import HandoffInstruments, ReceivePaths
from baton.telemetry.links import LinkInstruments
from baton.telemetry.log_histogram import LogHistogram
from baton.telemetry.trace import RequestSpan, Stamp
from baton.telemetry.transfer_report import TransferReport
from baton.telemetry.transfers import TransferTable
from baton.testing.fleet import Fleet
from baton.transfer.links.choice import Outcome

if TYPE_CHECKING:
    from collections.abc import Callable

    from baton.testing.fleet import FleetProcess

PARTS = ("record", "error", "cpu")
NUM_VALUES = 100_000
NUM_HANDOFFS = 20_000
NUM_SEEDS = 20
SHARES = (0.5, 0.9, 0.99, 0.999)
REQUESTS_A_ROUND = 10
PATHS = ReceivePaths(("shared", "tcp"), frozenset({"shared"}), ("push", "pull"))
WITHOUT = """
from baton.telemetry import handoff_metrics, links

def nothing(self, *_):
    return None

handoff_metrics.HandoffInstruments.landed = nothing
for name in ("chosen", "carried", "failed", "measured"):
    setattr(links.LinkInstruments, name, nothing)
"""
console = Console(stderr=True)


def main() -> None:
    """Run the parts, print what they found, keep it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", nargs="+", default=PARTS, choices=PARTS)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found: dict[str, object] = {}
    if "record" in options.part:
        found["record_us"] = measure_recording()
    if "error" in options.part:
        found["error"] = measure_error()
    if "cpu" in options.part:
        found["cpu"] = measure_cpu(options.rounds)
    console.print(found)
    write_record(options.json, **found)


def measure_recording() -> dict[str, float]:
    """Microseconds for each value, handoff or link period: the median of five turns."""
    values = draw(np.random.default_rng(0), NUM_VALUES)
    ours, sketch = LogHistogram(), DDSketch(relative_accuracy=0.01)
    registry, table = CollectorRegistry(), TransferTable(new_epoch(), MachineClock())
    handoffs = HandoffInstruments(registry, PATHS, (), table)
    links = LinkInstruments(registry, PATHS, table)
    traces = [landed(took_s) for took_s in values[:NUM_HANDOFFS]]
    outcomes = [
        Outcome("p0", "same_rack", "tcp", "pull", 1, 1 << 20, took_s, took_s, refined=True)
        for took_s in values[:NUM_HANDOFFS]
    ]
    turns: dict[str, list[float]] = {}
    for _ in range(5):
        for name, record, what in (
            ("log_histogram_value", ours.add, values),
            ("ddsketch_value", sketch.add, values),
            ("handoff", handoffs.landed, traces),
            ("link_period", links.carried, outcomes),
        ):
            turns.setdefault(name, []).append(time_each(record, what))
    return {name: statistics.median(times) for name, times in turns.items()}


def time_each(record: Callable[[object], object], values: list) -> float:
    """Microseconds of this thread for each value."""
    begun = time.thread_time()
    for value in values:
        record(value)
    return (time.thread_time() - begun) / len(values) * 1e6


def landed(took_s: float) -> RequestSpan:
    """The trace of a handoff of 4 MiB that took so long."""
    trace = RequestSpan(request_id="r", worker="d0", epoch="e", role="decode", peer="p0")
    trace.transport = trace.expected_transport = "tcp"
    trace.mode, trace.operation, trace.distance = "push", "WRITE", "same_rack"
    trace.num_bytes = 4 << 20
    trace.peer_stamps = {Stamp.FIRST_LAYER_READY: 1.0, Stamp.PREFILL_DONE: 1.0 + took_s / 2}
    trace.stamps = {Stamp.LAST_LAYER_LANDED: 1.0 + took_s}
    return trace


def draw(rng: np.random.Generator, num_values: int) -> list[float]:
    """98 % around 2 ms, 2 % around 200 ms."""
    is_slow = rng.random(num_values) < 0.02
    times = np.exp(rng.normal(np.log(0.002), 0.2, num_values)) * np.where(is_slow, 100.0, 1.0)
    return list(times.tolist())


def measure_error() -> dict[str, dict[str, float]]:
    """The worst relative error of each quantile over `NUM_SEEDS` samples."""
    worst: dict[str, dict[str, float]] = {"log_histogram": {}, "ddsketch": {}}
    for seed in range(NUM_SEEDS):
        values = draw(np.random.default_rng(seed), NUM_VALUES // 4)
        ours, sketch = LogHistogram(), DDSketch(relative_accuracy=0.01)
        for value in values:
            ours.add(value)
            sketch.add(value)
        ordered = sorted(values)
        for share in SHARES:
            exact = ordered[int(share * (len(ordered) - 1))]
            for name, found in (
                ("log_histogram", ours.quantile(share)),
                ("ddsketch", sketch.get_quantile_value(share)),
            ):
                error = abs(found / exact - 1)
                worst[name][f"p{share * 100:g}"] = max(
                    error, worst[name].get(f"p{share * 100:g}", 0)
                )
    return worst


def measure_cpu(num_rounds: int) -> dict[str, object]:
    """Milliseconds of CPU of both workers for a request, and by how much recording adds to it."""
    with tempfile.TemporaryDirectory() as place:
        without = Path(place, "without")
        without.mkdir()
        Path(without, "sitecustomize.py").write_text(WITHOUT, "utf-8")
        environment = dict(os.environ, BATON_CLUSTER_KEY=os.urandom(32).hex())
        silent = dict(environment, PYTHONPATH=str(without))
        with Fleet(Path(place), environment) as fleet, Fleet(without, silent) as quiet_fleet:
            gateways = {"with": fleet, "without": quiet_fleet}
            workers = {name: start_pair(each) for name, each in gateways.items()}
            urls = {
                name: gateways[name]
                .start_gateway([prefill.wait_ready()], [decode.wait_ready()])
                .url
                for name, (prefill, decode) in workers.items()
            }
            for url in urls.values():
                ask(url, REQUESTS_A_ROUND, seed=-1)
            spent: dict[str, list[float]] = {name: [] for name in urls}
            for number in range(num_rounds):
                names = sorted(urls, reverse=bool(number % 2))
                for name in names:
                    before = sum(map(read_cpu_s, workers[name]))
                    ask(urls[name], REQUESTS_A_ROUND, seed=number)
                    used_s = sum(map(read_cpu_s, workers[name])) - before
                    spent[name].append(used_s / REQUESTS_A_ROUND * 1e3)
            num = {name: count_recorded(pair) for name, pair in workers.items()}
    if not num["with"][0] or any(num["without"]):
        raise RuntimeError(f"recording was not switched: {num}")
    num_handoffs, num_periods = num["with"]
    cost_us = measure_recording()
    recorded_us = cost_us["handoff"] + cost_us["link_period"] * num_periods / num_handoffs
    ratios = [a / b - 1 for a, b in zip(spent["with"], spent["without"], strict=True)]
    return {
        "ms_per_request": {name: statistics.median(times) for name, times in spent.items()},
        "link_periods_per_request": num_periods / num_handoffs,
        "recorded_us_per_request": recorded_us,
        "recorded_share": recorded_us / 1e3 / statistics.median(spent["with"]),
        "added_share_median": statistics.median(ratios),
        "added_share_quartiles": statistics.quantiles(ratios, n=4)[::2],
        "num_rounds": num_rounds,
    }


def count_recorded(pair: tuple[FleetProcess, FleetProcess]) -> tuple[int, int]:
    """Handoffs and link periods that both workers report."""
    reports = [
        msgspec.json.decode(get(each.url, TRANSFERS_PATH), type=TransferReport) for each in pair
    ]
    return (
        sum(entry.num for report in reports for entry in report.handoffs),
        sum(entry.num for report in reports for entry in report.links),
    )


def start_pair(fleet: Fleet) -> tuple[FleetProcess, FleetProcess]:
    """A prefill and a decode worker of the demo model, one core each."""
    cores = sorted(os.sched_getaffinity(0))
    settings = {"engine.num_threads": 1}
    return (
        fleet.start_worker("prefill-0", "prefill", settings, cores=cores[:1]),
        fleet.start_worker("decode-0", "decode", settings, cores=cores[-1:]),
    )


def ask(url: str, num_requests: int, seed: int) -> None:
    """Requests one after the other, none of whose prompts was computed before."""
    for number in range(num_requests):
        prompt = f"Round {seed}, letter {number}. " + "She smiled, and said nothing of it. " * 8
        body = {"model": "demo", "prompt": prompt, "max_tokens": 16, "temperature": 0}
        post(url, "/v1/completions", body)


def read_cpu_s(worker: FleetProcess) -> float:
    """CPU time of a process since its start: nanoseconds of all threads."""
    tasks = Path(f"/proc/{worker.pid}/task").iterdir()
    return sum(int(Path(task, "schedstat").read_text("ascii").split()[0]) for task in tasks) / 1e9


if __name__ == "__main__":
    main()
