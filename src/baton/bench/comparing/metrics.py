"""Reports → samples of each metric."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

import numpy as np

from baton.bench.comparing.statistics import Run, Statistic

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from baton.bench.load.record import Record
    from baton.bench.load.report import Report

NUM_SLICES: Final = 20
"""Of a single run's time, for its rate: the rate's spread within the run."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One line of a comparison. `scale` turns its samples into `unit`."""

    name: str
    statistic: Statistic
    unit: str
    scale: float
    better: Literal["lower", "higher"]
    collect: Callable[[Sequence[Report]], list[Run]]


def _of_requests(read: Callable[[Record], Iterable[float | None]]) -> Callable[..., list[Run]]:
    def collect(reports: Sequence[Report]) -> list[Run]:
        runs = []
        for report in reports:
            found = [
                np.array([each for each in read(record) if each is not None], dtype=np.float64)
                for record in report.records
                if record.phase == "measured" and record.is_complete
            ]
            runs.append(Run(tuple(each for each in found if len(each))))
        return [run for run in runs if run.clusters]

    return collect


def collect_rates(reports: Sequence[Report]) -> list[Run]:
    """Output tokens a second: of each run, or of slices of the only one."""
    if len(reports) > 1:
        return [
            Run((np.array([report.figures.output_tokens_per_s]),))
            for report in reports
            if report.figures.num_complete
        ]
    return [run for report in reports if (run := _slices(report)) is not None]


def _slices(report: Report) -> Run | None:
    window_s = report.figures.window_s
    counts = np.zeros(NUM_SLICES)
    for record in report.records:
        if record.phase != "measured" or record.failure is not None or not record.token_s:
            continue
        per_chunk = record.num_output_tokens / len(record.token_s)
        places = (np.array(record.token_s) / window_s * NUM_SLICES).astype(int)
        inside = places[(places >= 0) & (places <= NUM_SLICES)]
        np.add.at(counts, np.minimum(inside, NUM_SLICES - 1), per_chunk)
    if not counts.any():
        return None
    rates = counts / (window_s / NUM_SLICES)
    return Run(tuple(rates[i : i + 1] for i in range(NUM_SLICES)))


_ttft = _of_requests(lambda record: (record.ttft_s,))
_tpot = _of_requests(lambda record: (record.tpot_s,))
_itl = _of_requests(lambda record: record.itl_s)
_e2e = _of_requests(lambda record: (record.e2e_s,))

METRICS: Final = (
    Metric("TTFT mean", "mean", "ms", 1e3, "lower", _ttft),
    Metric("TTFT p50", "p50", "ms", 1e3, "lower", _ttft),
    Metric("TTFT p99", "p99", "ms", 1e3, "lower", _ttft),
    Metric("TPOT mean", "mean", "ms", 1e3, "lower", _tpot),
    Metric("TPOT p99", "p99", "ms", 1e3, "lower", _tpot),
    Metric("ITL p50", "p50", "ms", 1e3, "lower", _itl),
    Metric("ITL p99", "p99", "ms", 1e3, "lower", _itl),
    Metric("E2E mean", "mean", "ms", 1e3, "lower", _e2e),
    Metric("output", "mean", "tokens/s", 1.0, "higher", collect_rates),
)
