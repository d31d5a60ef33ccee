"""Panels of Grafana's board and their PromQL, of which most have the same forms."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Query:
    """PromQL, and the legend of its lines."""

    expr: str
    legend: str = ""


@dataclass(frozen=True, slots=True)
class Panel:
    """One chart. `unit` is Grafana's name of a unit."""

    title: str
    text: str
    unit: str
    queries: tuple[Query, ...]
    width: int = 8
    kind: Literal["timeseries", "stat", "table"] = "timeseries"
    is_stacked: bool = False
    limits: tuple[float, float] | None = None
    """From the first value on a stat is orange, from the second on red."""


def rate(counter: str, by: str = "") -> str:
    """Sum of the rates of a counter, by labels."""
    grouped = f" by ({by})" if by else ""
    return f"sum{grouped} (rate({counter}[$__rate_interval]))"


def quantile(share: float, histogram: str, labels: str = "", by: str = "") -> str:
    """A quantile of a histogram's latest values, over all processes."""
    grouped = f"le, {by}" if by else "le"
    buckets = f"{histogram}_bucket{{{labels}}}" if labels else f"{histogram}_bucket"
    return f"histogram_quantile({share}, sum by ({grouped}) (rate({buckets}[$__rate_interval])))"


def quantiles(histogram: str, labels: str = "") -> tuple[Query, ...]:
    """The three that are read most."""
    shares = ((0.5, "p50"), (0.9, "p90"), (0.99, "p99"))
    return tuple(Query(quantile(share, histogram, labels), name) for share, name in shares)
