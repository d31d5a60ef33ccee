"""What telemetry of transfers costs, and how exact its quantiles are.

    python benchmarks/bench_telemetry.py [--part record error] [--json FILE]

`record`: microseconds for each value of a log histogram, and of ddsketch's for comparison; for a
handoff's and a link's figures, all histograms, counters and the table by peer together.

`error`: relative error of quantiles on 98 % fast and 2 % slow values (100 times slower), the worst
of several seeds, with ddsketch's beside it.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from ddsketch import DDSketch
from prometheus_client import CollectorRegistry
from rich.console import Console
from run_record import write_record

from baton.clock import MachineClock
from baton.ids import new_epoch
from baton.telemetry.handoff_metrics import HandoffInstruments, ReceivePaths
from baton.telemetry.links import LinkInstruments
from baton.telemetry.log_histogram import LogHistogram
from baton.telemetry.trace import RequestSpan, Stamp
from baton.telemetry.transfers import Outcome, TransferTable

if TYPE_CHECKING:
    from collections.abc import Callable


PARTS = ("record", "error")
NUM_VALUES = 100_000
NUM_HANDOFFS = 20_000
NUM_SEEDS = 20
SHARES = (0.5, 0.9, 0.99, 0.999)
PATHS = ReceivePaths(("shared", "tcp"), frozenset({"shared"}), ("push", "pull"))
console = Console(stderr=True)


def main() -> None:
    """Run the parts, print what they found, keep it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", nargs="+", default=PARTS, choices=PARTS)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found: dict[str, object] = {}
    if "record" in options.part:
        found["record_us"] = measure_recording()
    if "error" in options.part:
        found["error"] = measure_error()
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
                ("log_histogram", ours.counts().quantile(share)),
                ("ddsketch", sketch.get_quantile_value(share)),
            ):
                error = abs(found / exact - 1)
                worst[name][f"p{share * 100:g}"] = max(
                    error, worst[name].get(f"p{share * 100:g}", 0)
                )
    return worst


if __name__ == "__main__":
    main()
