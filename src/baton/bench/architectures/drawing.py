"""Findings → charts, one for each metric and kind of load. Pure; `to_png` alone needs a library."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from baton.bench.architectures.charts import Chart, Mark, Series, draw
from baton.bench.architectures.metrics import measured_metrics

if TYPE_CHECKING:
    from collections.abc import Sequence

    from baton.bench.architectures.metrics import Metric
    from baton.bench.architectures.results import Findings, LevelSaid


def draw_all(findings: Findings) -> dict[str, str]:
    """SVG documents by name: `throughput`, …, and `throughput-rate`, … where there are rates."""
    closed = [level for level in findings.levels if level.concurrency is not None]
    rates = [level for level in findings.levels if level.requests_per_s is not None]
    charts = {}
    for metric in measured_metrics(findings.cells):
        if closed:
            charts[metric.key] = draw(make_chart(findings, metric, closed))
        if rates:
            charts[f"{metric.key}-rate"] = draw(make_chart(findings, metric, rates))
    return charts


def make_chart(findings: Findings, metric: Metric, levels: Sequence[LevelSaid]) -> Chart:
    """One metric, over loads of one kind."""
    places = {level.key: level.concurrency or level.requests_per_s or 0.0 for level in levels}
    series = []
    for place, arm in enumerate(findings.arms):
        marks = tuple(
            Mark(
                places[p.level], p.estimate.mean, p.estimate.low, p.estimate.high, p.estimate.values
            )
            for p in findings.analysis.points
            if (p.metric, p.arm) == (metric.key, arm.name)
            and p.level in places
            and p.estimate is not None
        )
        series.append(Series(arm.name, place, marks))
    wanted = "more is better" if metric.better == "more" else "less is better"
    is_closed = levels[0].concurrency is not None
    return Chart(
        metric.title,
        f"{metric.unit} · {wanted} · mean and 95 % interval over repetitions; dots: each one",
        "requests at once" if is_closed else "requests per second, Poisson arrivals",
        tuple(series),
    )


def load_rasteriser() -> Any:  # noqa: ANN401 - an optional library
    """The module of resvg, or None where it is not installed."""
    try:
        return importlib.import_module("resvg_py")
    except ImportError:
        return None


def to_png(rasteriser: Any, svg: str) -> bytes:  # noqa: ANN401
    """A picture of twice the chart's size."""
    return bytes(rasteriser.svg_to_bytes(svg_string=svg, zoom=2))
