"""How often does the drift detector alarm without cause, and how soon with one?

    python benchmarks/bench_drift.py --json benchmarks/results/drift.json      (under 4 minutes)

Synthetic traffic of one link: `drift_traffic.py`. Recorded traffic: `tcp` and `shared` between two
processes of this machine, each transfer timed, and with it how fast the machine was
(`record_link.py`). It is replayed as it came; *steady machine*: without the stretches of 50
transfers in which copies of as many bytes took 15 % longer than mostly, or the two processes waited
for a core for 5 % of the time; and those in shuffled blocks of 24 transfers, ten times.

*Drifts* and *alerts* of traffic whose link does not change are without cause; an alert is a drift
that lasts as long as `BatonLinkDrift` waits. *Delay*: at points of the same traffic, the detector
as it is then sees the next transfers slowed by 1.3 or 2: how many until the drift, median of the
points, and the share found within 200. *Least possible*: the same of a test that knows the
distribution and the slowdown that it looks for, and has 1 false alarm in 100,000 transfers; for
Gaussian traffic.

*Slow stretches* of recorded traffic: 50 transfers whose median is 30 % over that of all. A detector
that finds +30 % within 50 transfers finds them.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from drift_traffic import CORRELATION, KINDS, OptimalTest, lognormal, make_transfers
from record_link import Recording, Stretches, find_stretches, record
from rich.console import Console
from rich.table import Table
from run_record import write_record

from baton.clock import Instant
from baton.gateway.alerts.rules import TIMINGS
from baton.protocol.alerts import AlertName
from baton.telemetry.drift import DEFAULTS, DriftDetector, DriftOptions, DriftState

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from drift_traffic import Transfers

NUM_STEADY = 100_000
NUM_POINTS = 10
"""Slowdowns of each factor for each 100,000 transfers."""
NUM_POINTS_RECORDED = 200
NUM_SHUFFLED = 10
MIN_OF_RATE = 10_000
RECORD_SHARES = {"shared": 1 / 3, "tcp": 1.0}
"""Of the time: a transfer over `tcp` takes longer."""
MOST_DELAY = 200
FACTORS = (1.3, 2.0)
EVIDENCE = (6.0, 8.0, 10.0, 12.0, 16.0)
BLOCK = 24
FOR_S = TIMINGS[AlertName.LINK_DRIFT].for_s
GAUSSIAN = {"lognormal": 0.0, "alike": CORRELATION}


@dataclass(frozen=True)
class Delay:
    """Of slowdowns by `factor`: median transfers until found, None if more than `MOST_DELAY`."""

    factor: float
    num_slowdowns: int
    median: float | None
    found: float


@dataclass(frozen=True)
class Result:
    """One kind of traffic under one set of parameters."""

    traffic: str
    evidence: float
    num_transfers: int
    num_drifts: int
    num_alerts: int
    delays: list[Delay]
    least_delays: list[Delay]


@dataclass
class Counts:
    """What runs over the same kind of traffic found, in sum."""

    num_transfers: int = 0
    num_drifts: int = 0
    num_alerts: int = 0
    delays: dict[float, list[int | None]] = field(default_factory=lambda: {f: [] for f in FACTORS})
    least: dict[float, list[int | None]] = field(default_factory=lambda: {f: [] for f in FACTORS})

    def result(self, traffic: str, drift_options: DriftOptions) -> Result:
        """The figures."""
        return Result(
            traffic,
            drift_options.evidence,
            self.num_transfers,
            self.num_drifts,
            self.num_alerts,
            [summarize(factor, found) for factor, found in self.delays.items()],
            [summarize(factor, found) for factor, found in self.least.items() if found],
        )


def summarize(factor: float, found: Sequence[int | None]) -> Delay:
    """Those that were not found took longer than all others."""
    if not found:
        return Delay(factor, 0, None, 0.0)
    median = statistics.median([MOST_DELAY + 1 if each is None else each for each in found])
    share = sum(each is not None for each in found) / len(found)
    return Delay(factor, len(found), None if median > MOST_DELAY else median, share)


def play(
    counts: Counts,
    transfers: Transfers,
    instants: Iterable[float],
    drift_options: DriftOptions,
    every: int,
) -> None:
    """Count drifts and alerts of a link that does not change; try slowdowns at points `every`."""
    detector = DriftDetector(Instant(0.0), drift_options)
    is_counted = False
    last_point = len(transfers) - MOST_DELAY
    for number, ((size, seconds), now) in enumerate(zip(transfers, instants, strict=True)):
        state = detector.observe(size, seconds, Instant(now))
        if state is not DriftState.DRIFTED:
            is_counted = False
        elif not is_counted and now - detector.since >= FOR_S:
            is_counted = True
            counts.num_alerts += 1
        if every and number % every == every - 1 and number < last_point:
            if state is not DriftState.STEADY:
                continue
            later = transfers[number + 1 : number + 1 + MOST_DELAY]
            for factor, delays in counts.delays.items():
                delays.append(find_delay(detector, later, factor, now))
    counts.num_drifts += detector.num_drifts
    counts.num_transfers += len(transfers) - drift_options.num_reference


def find_delay(
    detector: DriftDetector, transfers: Transfers, factor: float, now: float
) -> int | None:
    """Transfers until a copy of the detector finds this slowdown."""
    detector = deepcopy(detector)
    for number, (size, seconds) in enumerate(transfers, 1):
        now += seconds * factor
        if detector.observe(size, seconds * factor, Instant(now)) is DriftState.DRIFTED:
            return number
    return None


def play_optimal(counts: Counts, transfers: Transfers, correlation: float, every: int) -> None:
    """The same slowdowns for the best test that the distribution allows."""
    for factor, delays in counts.least.items():
        test = OptimalTest(factor, correlation, NUM_STEADY)
        for number, (size, seconds) in enumerate(transfers[:-MOST_DELAY]):
            test.observe(size, seconds)
            if number % every != every - 1:
                continue
            copy = deepcopy(test)
            later = transfers[number + 1 : number + 1 + MOST_DELAY]
            alarms = (
                after
                for after, (size_after, seconds_after) in enumerate(later, 1)
                if copy.observe(size_after, seconds_after * factor)
            )
            delays.append(next(alarms, None))


def measure_synthetic(
    kind: str, drift_options: DriftOptions, num_seeds: int, *, with_optimal: bool = False
) -> Result:
    """`num_seeds` links of 100,000 transfers after their reference."""
    counts = Counts()
    for seed in range(num_seeds):
        rng = np.random.default_rng([seed, 1])
        transfers = make_transfers(KINDS[kind], rng, drift_options.num_reference + NUM_STEADY)
        instants = accumulate(seconds for _, seconds in transfers)
        every = NUM_STEADY // NUM_POINTS
        play(counts, transfers, instants, drift_options, every)
        if with_optimal and kind in GAUSSIAN:
            play_optimal(counts, transfers, GAUSSIAN[kind], every)
    return counts.result(kind, drift_options)


def measure_recorded(
    transport: str, recording: Recording, drift_options: DriftOptions
) -> list[Result]:
    """As it came, without the stretches in which the machine was slower, and those shuffled."""
    mean_s = (recording.began_s[-1] - recording.began_s[0]) / len(recording.began_s)
    steady = recording.only_on_steady_machine().transfers
    results = []
    for name, transfers in (("", recording.transfers), (", steady machine", steady)):
        counts = Counts()
        play_at_pace(counts, transfers, mean_s, drift_options, NUM_POINTS_RECORDED)
        results.append(counts.result(f"recorded `{transport}`{name}", drift_options))
    shuffled = Counts()
    blocks = [steady[at : at + BLOCK] for at in range(0, len(steady), BLOCK)]
    for seed in range(NUM_SHUFFLED):
        random.Random(seed).shuffle(blocks)
        mixed = [each for block in blocks for each in block]
        play_at_pace(shuffled, mixed, mean_s, drift_options, NUM_POINTS_RECORDED // NUM_SHUFFLED)
    return [
        *results,
        shuffled.result(f"recorded `{transport}`, steady machine, shuffled", drift_options),
    ]


def play_at_pace(
    counts: Counts,
    transfers: Transfers,
    pace_s: float,
    drift_options: DriftOptions,
    num_points: int,
) -> None:
    """One transfer each `pace_s`; nothing if there are too few for a reference."""
    if len(transfers) > drift_options.num_reference + MOST_DELAY:
        instants = (number * pace_s for number in range(len(transfers)))
        play(counts, transfers, instants, drift_options, max(1, len(transfers) // num_points))


def find_recording(transport: str, seconds: float, folder: Path | None) -> Recording:
    """The one that is kept in `folder`; if there is none, a new one, which is kept there."""
    path = None if folder is None else Path(folder, f"{transport}.npz")
    if path is not None and path.exists():
        return Recording.load(path)
    recording = record(transport, seconds)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        recording.save(path)
    return recording


def measure_cost() -> float:
    """Processor microseconds for a transfer; the quickest of some runs."""
    transfers = make_transfers(lognormal, np.random.default_rng(0), 100_000)
    taken = []
    for _ in range(5):
        detector = DriftDetector(Instant(0.0))
        began = time.thread_time()
        for size, seconds in transfers:
            detector.observe(size, seconds, Instant(0.0))
        taken.append(time.thread_time() - began)
    return min(taken) / len(transfers) * 1e6


def show(title: str, results: Sequence[Result]) -> None:
    """One row for each."""
    table = Table(title=title)
    columns = (
        "traffic", "evidence", "transfers", "drifts", "for each 100,000", "alerts",
        "delay +30 %", "least", "delay x2", "least",
    )  # fmt: skip
    for column in columns:
        table.add_column(column)
    for each in results:
        small, large = each.delays
        least = [*each.least_delays, None, None]
        table.add_row(
            each.traffic, f"{each.evidence:g}", f"{each.num_transfers:,}", str(each.num_drifts),
            name_rate(each), str(each.num_alerts),
            name_delay(small), name_delay(least[0]), name_delay(large), name_delay(least[1]),
        )  # fmt: skip
    Console(width=140).print(table)


def name_rate(result: Result) -> str:
    """Drifts for each 100,000 transfers."""
    if result.num_transfers < MIN_OF_RATE:
        return "too few"
    return f"{100_000 * result.num_drifts / result.num_transfers:.2f}"


def name_delay(delay: Delay | None) -> str:
    """Median and share found."""
    if delay is None or not delay.num_slowdowns:
        return "-"
    median = f"> {MOST_DELAY}" if delay.median is None else f"{delay.median:.0f}"
    return f"{median} ({delay.found:.0%})"


def print_rows(results: Sequence[Result], stretches: dict[str, Stretches]) -> None:
    """The rows of the tables in docs/observability/alerts.md."""
    for each in results:
        small, large = each.delays
        least = [
            f" (least possible: {delay.median:.0f})" if delay.median is not None else ""
            for delay in each.least_delays
        ] or ["", ""]
        print(
            f"| {each.traffic} | {each.num_transfers:,} | {name_rate(each)} | {each.num_alerts} "
            f"| {name_delay(small)}{least[0]} | {name_delay(large)}{least[1]} |"
        )
    for transport, found in stretches.items():
        print(
            f"| `{transport}` | {found.num_stretches:,} | {found.num_slow} "
            f"| {found.num_machine_slow:,} | {found.num_both} | {found.copy_correlation:.2f} "
            f"| {found.correlation:.2f} | {found.first_ratio:.2f} |"
        )


def main() -> None:
    """All of it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=20, help="of 100,000 transfers, by traffic")
    parser.add_argument("--sweep-seeds", type=int, default=4)
    parser.add_argument("--record", type=float, default=75.0, help="seconds (`shared`: a third)")
    parser.add_argument("--recordings", type=Path, help="a folder: use what is kept there")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    recorded: list[Result] = []
    stretches: dict[str, Stretches] = {}
    for transport, share in RECORD_SHARES.items() if options.record else ():
        recording = find_recording(transport, share * options.record, options.recordings)
        stretches[transport] = find_stretches(recording)
        print(f"{transport}: {stretches[transport]}", file=sys.stderr)
        recorded += measure_recorded(transport, recording, DEFAULTS)
    chosen = [measure_synthetic(kind, DEFAULTS, options.seeds, with_optimal=True) for kind in KINDS]
    show("the parameters that are used", [*chosen, *recorded])
    sweep = [
        measure_synthetic(kind, DriftOptions(evidence=evidence), options.sweep_seeds)
        for kind in (KINDS if options.sweep_seeds else ())
        for evidence in EVIDENCE
    ]
    show("sweep", sweep)
    cost_us = measure_cost()
    bounds = {
        f"{kind} x{factor:g}": OptimalTest(factor, correlation, NUM_STEADY).mean_delay
        for kind, correlation in GAUSSIAN.items()
        for factor in FACTORS
    }
    print(f"least worst mean delay, by theory: {bounds}")
    print_rows([*chosen, *recorded], stretches)
    print(f"{cost_us:.2f} us of processor time for a transfer")
    write_record(
        options.json,
        chosen=chosen,
        recorded=recorded,
        stretches=stretches,
        least_worst_mean_delays=bounds,
        sweep=sweep,
        us_per_transfer=cost_us,
    )


if __name__ == "__main__":
    main()
