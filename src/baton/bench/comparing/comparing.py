"""Two sides → a comparison. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import msgspec

from baton.bench.comparing.differences import Difference, find_cautions, find_differences
from baton.bench.comparing.metrics import METRICS
from baton.bench.comparing.statistics import contrast
from baton.bench.comparing.verdict import Judgement, is_worse_by, judge, put_in_words

if TYPE_CHECKING:
    from collections.abc import Sequence

    from baton.bench.comparing.metrics import Metric
    from baton.bench.load.report import Report

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
    """All. `differences` and `cautions` are to be read before `lines`."""

    schema: str = SCHEMA
    num_runs: tuple[int, int]
    num_requests: tuple[int, int]
    failed_share: tuple[float, float]
    differences: tuple[Difference, ...]
    cautions: tuple[str, ...]
    lines: tuple[Line, ...]
    is_too_bad: bool


@dataclass(frozen=True, slots=True)
class Tolerance:
    """By how much B may be worse; None: by anything."""

    worse_share: float | None = None


def compare(
    a: Sequence[Report], b: Sequence[Report], tolerance: Tolerance | None = None
) -> Comparison:
    """B against A; each side has at least one report."""
    most = None if tolerance is None else tolerance.worse_share
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
    runs = metric.collect(a), metric.collect(b)
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
    num_failed = sum(report.figures.num_failed for report in reports)
    return num_failed / max(1, num_failed + _num_complete(reports))
