"""How often does the drift detector alarm without cause, and how soon with one?

    python benchmarks/bench_drift.py --json benchmarks/results/drift.json      (about 3 minutes)

Synthetic traffic of one link: sizes of 16 KiB to 4 MiB, times around `latency + bytes / bandwidth`,

    lognormal   independent, deviation 0.3 of the logarithm
    heavy       independent, Student's t with 3 degrees of freedom: far more outliers
    alike       each resembles the one before: correlation 0.5, deviation 0.3
    stalls      lognormal, and 1 of 100 takes ten times as long

Recorded traffic: `tcp` and `shared` between two processes of this machine, sizes in turns, each
transfer timed. It is replayed as it came, with the work of others on this machine in it; and in
shuffled blocks of 24 transfers, ten times: what changes slowly is then spread over all, so that the
link is the same all the time.

*False*: drifts of stationary traffic for each 100,000 transfers. *Delay*: transfers from a slowdown
by 1.3 or 2 (of all times) to the drift, median of the seeds, and the share found within 200.
*Alerts* of recorded traffic: drifts that last as long as `BatonLinkDrift` waits, by the sum of the
transfers' times. The sweep shows the same for other thresholds (`evidence`) and lengths of the
reference.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console
from rich.table import Table
from run_record import write_record

from baton.clock import Instant, MachineClock
from baton.gateway.alerts.rules import TIMINGS
from baton.protocol.alerts import AlertName
from baton.rig.backend import BackendSpec
from baton.rig.nodes import LocalNodes
from baton.rig.pages import PAGE_BYTES, Workload
from baton.rig.pair import NodePair, SampleBudget
from baton.telemetry.drift import DEFAULTS, DriftDetector, DriftOptions, DriftState

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    Transfers = list[tuple[int, float]]
    Noise = Callable[[np.random.Generator, int], NDArray[np.float64]]

SIZES = np.array([1 << power for power in (14, 16, 18, 20, 22)])
LATENCY_S, BYTE_S = 100e-6, 1 / 2e9
NUM_STEADY = 100_000
MOST_DELAY = 200
FACTORS = (1.3, 2.0)
EVIDENCE = (8.0, 12.0, 16.0, 20.0)
REFERENCES = (128, 256, 512)
NOW = Instant(0.0)
RECORDED_SIZES = (64 << 10, 256 << 10, 1 << 20)
BLOCK = 24


@dataclass(frozen=True)
class Result:
    """One kind of traffic under one set of parameters."""

    traffic: str
    evidence: float
    num_reference: int
    num_transfers: int
    num_false: int
    false_per_100k: float
    delay_30_percent: float | None
    found_30_percent: float
    delay_double: float | None
    found_double: float
    num_alerts: int | None = None


def lognormal(rng: np.random.Generator, num: int) -> NDArray[np.float64]:
    """Independent logarithms."""
    return rng.normal(0, 0.3, num)


def heavy(rng: np.random.Generator, num: int) -> NDArray[np.float64]:
    """Many outliers."""
    return 0.2 * rng.standard_t(3, num)


def alike(rng: np.random.Generator, num: int) -> NDArray[np.float64]:
    """A first-order autoregression."""
    shocks = rng.normal(0, 0.3 * np.sqrt(1 - 0.5**2), num).tolist()
    value, values = 0.0, []
    for shock in shocks:
        value = 0.5 * value + shock
        values.append(value)
    return np.array(values)


def stalls(rng: np.random.Generator, num: int) -> NDArray[np.float64]:
    """Some transfers are stopped on their way."""
    return lognormal(rng, num) + np.log(10) * (rng.random(num) < 0.01)


KINDS: dict[str, Noise] = {
    "lognormal": lognormal,
    "heavy": heavy,
    "alike": alike,
    "stalls": stalls,
}


def make_transfers(noise: Noise, rng: np.random.Generator, num: int) -> Transfers:
    """`(bytes, seconds)` of a link that does not change."""
    sizes = rng.choice(SIZES, num)
    seconds = (LATENCY_S + sizes * BYTE_S) * np.exp(noise(rng, num))
    return list(zip(sizes.tolist(), seconds.tolist(), strict=True))


def count_drifts(transfers: Transfers, chosen: DriftOptions) -> int:
    """Of stationary traffic: all of them are false."""
    detector = DriftDetector(NOW, chosen)
    observe = detector.observe
    for size, seconds in transfers:
        observe(size, seconds, NOW)
    return detector.num_drifts


def count_alerts(transfers: Transfers, chosen: DriftOptions) -> int:
    """Drifts that last for as long as the gateway waits."""
    detector, now, is_counted, num = DriftDetector(NOW, chosen), 0.0, False, 0
    for size, seconds in transfers:
        now += seconds
        if detector.observe(size, seconds, Instant(now)) is not DriftState.DRIFTED:
            is_counted = False
        elif not is_counted and now - detector.since >= TIMINGS[AlertName.LINK_DRIFT].for_s:
            is_counted, num = True, num + 1
    return num


def find_delay(transfers: Transfers, chosen: DriftOptions, factor: float) -> int | None:
    """Transfers until the drift, of a link that is slower after `len(transfers) - MOST_DELAY`."""
    detector = DriftDetector(NOW, chosen)
    num_before = len(transfers) - MOST_DELAY
    for number, (size, seconds) in enumerate(transfers):
        is_slow = number >= num_before
        state = detector.observe(size, seconds * factor if is_slow else seconds, NOW)
        if is_slow and state is DriftState.DRIFTED:
            return number - num_before + 1
    return None


def summarize(
    traffic: str,
    chosen: DriftOptions,
    steady: Sequence[Transfers],
    before_shift: Sequence[Transfers],
) -> Result:
    """False drifts of `steady`, delays of `before_shift`."""
    num_false = sum(count_drifts(each, chosen) for each in steady)
    num = sum(len(each) for each in steady)
    delays: list[float | None] = []
    shares: list[float] = []
    for factor in FACTORS:
        found = [find_delay(each, chosen, factor) for each in before_shift]
        known = [MOST_DELAY + 1 if each is None else each for each in found]
        middle = statistics.median(known) if known else None
        delays.append(None if middle is not None and middle > MOST_DELAY else middle)
        shares.append(sum(each is not None for each in found) / max(1, len(found)))
    return Result(
        traffic,
        chosen.evidence,
        chosen.num_reference,
        num,
        num_false,
        100_000 * num_false / max(1, num),
        delays[0],
        shares[0],
        delays[1],
        shares[1],
    )


def measure_synthetic(kind: str, chosen: DriftOptions, num_seeds: int) -> Result:
    """`num_seeds` runs of 100,000 transfers, and as many slowdowns of each size."""
    noise = KINDS[kind]
    num = chosen.num_reference + NUM_STEADY
    steady = (
        make_transfers(noise, np.random.default_rng([seed, 1]), num) for seed in range(num_seeds)
    )
    before = [
        make_transfers(
            noise, np.random.default_rng([seed, 2]), chosen.num_reference + 500 + MOST_DELAY
        )
        for seed in range(8 * num_seeds)
    ]
    num_false = num_all = 0
    for each in steady:
        num_false += count_drifts(each, chosen)
        num_all += NUM_STEADY
    found = summarize(kind, chosen, (), before)
    return Result(
        kind,
        chosen.evidence,
        chosen.num_reference,
        num_all,
        num_false,
        100_000 * num_false / num_all,
        found.delay_30_percent,
        found.found_30_percent,
        found.delay_double,
        found.found_double,
    )


def record(kind: str, seconds: float) -> Transfers:
    """Real transfers between two processes, sizes in turns."""
    workloads = [Workload("message", size) for size in RECORDED_SIZES]
    num_pages = 2 * max(RECORDED_SIZES) // PAGE_BYTES
    budget = SampleBudget(budget_s=0.02, min_samples=8, max_samples=8)
    transfers: Transfers = []
    clock = MachineClock()
    with NodePair(BackendSpec("transport", kind, {}), num_pages, LocalNodes(clock)) as pair:
        for workload in workloads:
            pair.verify(workload, "push")
        began = clock.now()
        while clock.now() - began < seconds:
            rounds = [pair.measure(each, "push", budget).samples_s for each in workloads]
            for times in zip(*rounds, strict=False):
                transfers += zip(RECORDED_SIZES, times, strict=True)
    return transfers


def measure_recorded(kind: str, transfers: Transfers, chosen: DriftOptions) -> list[Result]:
    """As it came, and in shuffled blocks."""
    length = chosen.num_reference + 200 + MOST_DELAY
    starts = range(0, max(1, len(transfers) - length), max(1, len(transfers) // 60))
    before = [transfers[at : at + length] for at in starts]
    blocks = [transfers[at : at + BLOCK] for at in range(0, len(transfers), BLOCK)]
    shuffled = []
    for seed in range(10):
        random.Random(seed).shuffle(blocks)
        shuffled.append([each for block in blocks for each in block])
    as_it_came = summarize(f"recorded {kind}", chosen, [transfers], before)
    return [
        replace(as_it_came, num_alerts=count_alerts(transfers, chosen)),
        summarize(f"recorded {kind}, shuffled", chosen, shuffled, ()),
    ]


def measure_cost() -> float:
    """Processor microseconds for a transfer; the quickest of some runs."""
    transfers = make_transfers(lognormal, np.random.default_rng(0), 100_000)
    taken = []
    for _ in range(5):
        detector = DriftDetector(NOW)
        began = time.thread_time()
        for size, seconds in transfers:
            detector.observe(size, seconds, NOW)
        taken.append(time.thread_time() - began)
    return min(taken) / len(transfers) * 1e6


def show(title: str, results: Sequence[Result]) -> None:
    """One row for each."""
    table = Table(title=title)
    columns = (
        "traffic", "evidence", "reference", "transfers", "false", "false / 100,000",
        "delay +30 %", "found", "delay x2", "found", "alerts",
    )  # fmt: skip
    for column in columns:
        table.add_column(column)
    for each in results:
        delays = [
            "-" if delay is None else f"{delay:.0f}"
            for delay in (each.delay_30_percent, each.delay_double)
        ]
        table.add_row(
            each.traffic, f"{each.evidence:g}", str(each.num_reference), f"{each.num_transfers:,}",
            str(each.num_false), f"{each.false_per_100k:.2f}", delays[0],
            f"{each.found_30_percent:.0%}", delays[1], f"{each.found_double:.0%}",
            "" if each.num_alerts is None else str(each.num_alerts),
        )  # fmt: skip
    Console(width=140).print(table)


def print_rows(results: Sequence[Result]) -> None:
    """The rows of the table in docs/observability/alerts.md."""
    for each in results:
        found = [
            "-" if delay is None else f"{delay:.0f} ({share:.0%})"
            for delay, share in (
                (each.delay_30_percent, each.found_30_percent),
                (each.delay_double, each.found_double),
            )
        ]
        alerts = "-" if each.num_alerts is None else str(each.num_alerts)
        print(
            f"| {each.traffic} | {each.num_transfers:,} | {each.false_per_100k:.2f} | {alerts} | "
            f"{found[0]} | {found[1]} |"
        )


def main() -> None:
    """All of it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=20, help="of 100,000 transfers, by traffic")
    parser.add_argument("--sweep-seeds", type=int, default=3)
    parser.add_argument("--record", type=float, default=15.0, help="seconds of each transport")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    chosen = [measure_synthetic(kind, DEFAULTS, options.seeds) for kind in KINDS]
    show("the parameters that are used", chosen)
    recorded: list[Result] = []
    for transport in ("shared", "tcp") if options.record else ():
        transfers = record(transport, options.record)
        print(f"{transport}: {len(transfers)} transfers recorded", file=sys.stderr)
        recorded += measure_recorded(transport, transfers, DEFAULTS)
    show("recorded traffic", recorded)
    sweep = [
        measure_synthetic(
            kind, DriftOptions(evidence=evidence, num_reference=num), options.sweep_seeds
        )
        for kind in (KINDS if options.sweep_seeds else ())
        for num in REFERENCES
        for evidence in EVIDENCE
    ]
    show("sweep", sweep)
    cost_us = measure_cost()
    print_rows([*chosen, *recorded])
    print(f"{cost_us:.2f} us of processor time for a transfer")
    write_record(
        options.json, chosen=chosen, recorded=recorded, sweep=sweep, us_per_transfer=cost_us
    )


if __name__ == "__main__":
    main()
