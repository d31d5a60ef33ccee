"""`baton bench compare`: two sets of reports → for each metric a ratio, its interval, a verdict.

First comes what was not the same. Pure, but for the reading of files.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

import msgspec
import numpy as np

from baton.bench.load.job import SCHEMA as REPORT_SCHEMA
from baton.bench.load.job import Report
from baton.bench.statistics import LEAST_RUNS, Contrast, Run, Statistic, contrast
from baton.errors import UNDECODABLE, ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from baton.bench.load.records import Record

NUM_SLICES: Final = 20
"""Slices of a run's time, for the spread of its rate where there are few runs."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One line of a comparison. `scale` turns its samples into `unit`.

    `collect` takes one side's reports, and the number of runs of the side that has fewer.
    """

    name: str
    statistic: Statistic
    unit: str
    scale: float
    better: Literal["lower", "higher"]
    collect: Callable[[Sequence[Report], int], list[Run]]


def _of_requests(
    read: Callable[[Record], Iterable[float | None]],
) -> Callable[[Sequence[Report], int], list[Run]]:
    def collect(reports: Sequence[Report], least_runs: int) -> list[Run]:
        del least_runs
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


def collect_rates(reports: Sequence[Report], least_runs: int) -> list[Run]:
    """Output tokens per second: of each run; with few runs, of slices of each.

    A run without tokens counts like the others; where all are, there is nothing.
    """
    if not any(report.figures.output_tokens_per_s for report in reports):
        return []
    if least_runs < LEAST_RUNS:  # one number a run is too little for the test between requests
        return [_slices(report) for report in reports]
    return [Run((np.array([report.figures.output_tokens_per_s]),)) for report in reports]


def _slices(report: Report) -> Run:
    window_s = report.figures.window_s
    counts = np.zeros(NUM_SLICES)
    for record in report.records:
        if record.phase != "measured" or record.failure is not None or not record.token_s:
            continue
        per_chunk = record.num_output_tokens / len(record.token_s)
        times = np.array(record.token_s)
        times = times[(times >= 0) & (times <= window_s)]
        places = (times / window_s * NUM_SLICES).astype(int)
        np.add.at(counts, np.minimum(places, NUM_SLICES - 1), per_chunk)
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


ASKED: Final = ("workload.name", "workload.description", "load.description", "server.endpoint")
"""Where these differ, the two sides answered different requests."""
IGNORED: Final = ("manifest.started_at", "manifest.load_after", "manifest.machine.load")
MOST_LOAD: Final = 0.5


class Difference(msgspec.Struct, frozen=True):
    """A field that differs; `is_asked`: the two sides answered different requests."""

    field: str
    a: str
    b: str
    is_asked: bool


def find_differences(a: Sequence[Report], b: Sequence[Report]) -> tuple[Difference, ...]:
    """All differences; values of several runs are joined. Those of the requests come first."""
    one, other = _gather(a), _gather(b)
    found = [
        Difference(name, one.get(name, "-"), other.get(name, "-"), name in ASKED)
        for name in sorted({*one, *other})
        if one.get(name) != other.get(name) and name not in IGNORED
    ]
    return tuple(sorted(found, key=lambda each: not each.is_asked))


def find_cautions(reports: Sequence[Report], side: str) -> Iterator[str]:
    """What makes a side's figures doubtful."""
    for report in reports:
        name = f"{side} ({report.manifest.started_at})"
        if report.is_partial:
            yield f"{name} is partial: {report.stopped or 'interrupted'}"
        for problem in report.client.problems:
            yield f"{name}: {problem}"
        figures = report.figures
        num_sent = figures.num_complete + figures.num_failed + figures.num_cut
        if figures.num_failed:
            yield f"{name}: {figures.num_failed} of {num_sent} requests failed"
        if figures.num_cut:
            yield (
                f"{name}: {figures.num_cut} of {num_sent} requests were cut when it ended; "
                "latencies are of the others"
            )
        machine = report.manifest.machine
        if machine.load[0] > MOST_LOAD * machine.num_cpus:
            yield f"{name}: the machine had a load of {machine.load[0]:.1f} before the run"


def _gather(reports: Sequence[Report]) -> dict[str, str]:
    values: dict[str, list[str]] = {}
    for report in reports:
        parts = {
            "manifest": report.manifest,
            "server": report.server,
            "workload": report.workload,
            "load": report.load,
        }
        for name, value in _flatten("", msgspec.to_builtins(parts)):
            values.setdefault(name, []).append(value)
    return {name: ", ".join(dict.fromkeys(each)) for name, each in values.items()}


def _flatten(prefix: str, value: object) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        mapping: Mapping[str, object] = value
        for key, each in mapping.items():
            yield from _flatten(f"{prefix}.{key}" if prefix else key, each)
    elif isinstance(value, list | tuple):
        yield prefix, " ".join(map(str, value))
    else:
        yield prefix, str(value)


MOST_CHANCE: Final = 0.05
SAME_WITHIN: Final = 0.05

Judgement = Literal["better", "worse", "same", "undecided"]


def judge(contrast: Contrast, better: Literal["lower", "higher"]) -> Judgement:
    """Better or worse where interval and test agree; the same where the interval is narrow."""
    low, high = contrast.interval.low, contrast.interval.high
    if contrast.p_value <= MOST_CHANCE and not contrast.interval.holds(1.0):
        is_lower = contrast.ratio < 1
        return "better" if is_lower == (better == "lower") else "worse"
    if low >= 1 - SAME_WITHIN and high <= 1 + SAME_WITHIN:
        return "same"
    return "undecided"


def put_in_words(contrast: Contrast, judgement: Judgement) -> str:
    """One short sentence."""
    low, high = (_percent(each) for each in (contrast.interval.low, contrast.interval.high))
    match judgement:
        case "better" | "worse":
            basis = "" if contrast.test == "runs" else " in these runs"
            return f"B is {judgement}{basis}: {_percent(contrast.ratio)} ({low} to {high})"
        case "same":
            return f"the same, within {SAME_WITHIN:.0%} ({low} to {high})"
        case "undecided":
            return f"not decided: anything from {low} to {high}; measure longer or more often"


def is_worse_by(contrast: Contrast, judgement: Judgement, share: float) -> bool:
    """Whether B is certainly worse, and by more than a share of A."""
    return judgement == "worse" and abs(contrast.ratio - 1) > share


def _percent(ratio: float) -> str:
    return f"{(ratio - 1) * 100:+.1f} %"


SCHEMA: Final = "baton-bench-compare/1"


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """One metric. `a`, `b` in `unit`; `low` and `high`: the 95 % interval of the ratio b / a."""

    metric: str
    unit: str
    a: float
    b: float
    ratio: float
    low: float
    high: float
    p_value: float
    test: str
    judgement: Judgement
    words: str
    is_too_bad: bool


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """The whole comparison; read `differences` and `cautions` before `lines`.

    `failed_share`: of all requests, those that failed or were cut.
    """

    schema: str = SCHEMA
    num_runs: tuple[int, int]
    num_requests: tuple[int, int]
    failed_share: tuple[float, float]
    differences: tuple[Difference, ...]
    cautions: tuple[str, ...]
    lines: tuple[Line, ...]
    is_too_bad: bool


def compare(a: Sequence[Report], b: Sequence[Report], most: float | None = None) -> Comparison:
    """B against A; each side has at least one report.

    By more than the share `most` B may not be worse; None: no limit.
    """
    lines = tuple(line for metric in METRICS if (line := _compare(metric, a, b, most)) is not None)
    shares = _failed_share(a), _failed_share(b)
    fails_more = most is not None and shares[1] > shares[0] + most
    return Comparison(
        num_runs=(len(a), len(b)),
        num_requests=(_num_complete(a), _num_complete(b)),
        failed_share=shares,
        differences=find_differences(a, b),
        cautions=(*find_cautions(a, "A"), *find_cautions(b, "B")),
        lines=lines,
        is_too_bad=fails_more or not lines or any(line.is_too_bad for line in lines),
    )


def _compare(
    metric: Metric, a: Sequence[Report], b: Sequence[Report], most: float | None
) -> Line | None:
    least_runs = min(len(a), len(b))
    runs = metric.collect(a, least_runs), metric.collect(b, least_runs)
    if not (runs[0] and runs[1]):
        return None
    found = contrast(runs[0], runs[1], metric.statistic)
    judgement = judge(found, metric.better)
    return Line(
        metric=metric.name,
        unit=metric.unit,
        a=found.a * metric.scale,
        b=found.b * metric.scale,
        ratio=found.ratio,
        low=found.interval.low,
        high=found.interval.high,
        p_value=found.p_value,
        test=found.test,
        judgement=judgement,
        words=put_in_words(found, judgement),
        is_too_bad=most is not None and is_worse_by(found, judgement, most),
    )


def _num_complete(reports: Sequence[Report]) -> int:
    return sum(report.figures.num_complete for report in reports)


def _failed_share(reports: Sequence[Report]) -> float:
    """A cut request counts: a server that is too slow has the slowest of its answers cut."""
    num_lost = sum(report.figures.num_failed + report.figures.num_cut for report in reports)
    return num_lost / max(1, num_lost + _num_complete(reports))


MAX_FILE_BYTES: Final = 2 << 30


class Head(msgspec.Struct, frozen=True):
    """The first field of every result."""

    schema: str = ""


def read_side(path: Path) -> list[Report]:
    """Read one report, or all reports of a folder, which are runs of the same.

    Raises:
        ConfigError: it cannot be read, or is no such report.
    """
    paths = sorted(path.glob("*.json")) if path.is_dir() else [path]
    if not paths:
        raise ConfigError(f"{path}: no report (*.json) in this folder")
    return [_read(each) for each in paths]


def _read(path: Path) -> Report:
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ConfigError(f"{path}: more than {MAX_FILE_BYTES >> 30} GiB")
        data = path.read_bytes()
    except OSError as exc:
        raise ConfigError(f"cannot read {path}: {exc.strerror}") from exc
    try:
        schema = msgspec.json.decode(data, type=Head).schema
        if schema != REPORT_SCHEMA:
            shown = schema[:60] or "something else"
            raise ConfigError(
                f"{path} is {shown}, not {REPORT_SCHEMA}: `baton bench serve --output`"
            )
        return msgspec.json.decode(data, type=Report)
    except UNDECODABLE as exc:
        raise ConfigError(f"{path} is no report of `baton bench serve`: {exc}") from exc
