"""A report as a figure: one panel for each workload, a bar for each row; one for what was lent."""

from __future__ import annotations

import importlib
from itertools import groupby
from typing import TYPE_CHECKING, Any, Final

from baton.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from baton.bench.report import Lent, Report, Row

COLOURS: Final = {"transport": "#2c6fbb", "limit": "#999999", "peer": "#d08a2c"}
BAR_INCHES: Final = 0.28
PANEL_INCHES: Final = 0.9
WIDTH_INCHES: Final = 9.0


def require_plotting(path: Path) -> None:
    """Refuse early, before anything is measured.

    Raises:
        ConfigError: matplotlib is not installed, or there is nowhere to write.
    """
    if not path.resolve().parent.is_dir():
        raise ConfigError(f"--plot: there is no directory {path.resolve().parent}")
    _load()


def plot_report(report: Report, path: Path) -> None:
    """Write the figure; the file's suffix says in which format.

    Raises:
        ConfigError: the format is unknown, or the file cannot be written.
    """
    figures = _load()
    panels = [list(rows) for _, rows in groupby(report.rows, key=lambda row: row.workload)]
    numbers = [len(rows) for rows in panels] + ([len(report.lent)] if report.lent else [])
    if not numbers:
        raise ConfigError("--plot: nothing was measured")
    heights = [PANEL_INCHES + BAR_INCHES * number for number in numbers]
    figure = figures.Figure(figsize=(WIDTH_INCHES, sum(heights)), layout="constrained")
    axes = figure.subplots(len(numbers), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axis, rows in zip(axes, panels, strict=False):
        _draw(axis, rows)
    if report.lent:
        _draw_lent(axes[-1], report.lent)
    if report.is_partial:
        figure.suptitle("partial: interrupted")
    try:
        figure.savefig(path)
    except (OSError, ValueError) as exc:
        raise ConfigError(f"--plot: cannot write {path}: {exc}") from exc


def _draw(axis: Any, rows: list[Row]) -> None:  # noqa: ANN401 - matplotlib is optional
    is_bulk = rows[0].workload.shape != "descriptors"
    rates = [row.figures.gb_per_s for row in rows]
    values = [
        rate.median if is_bulk else row.figures.us_per_descriptor
        for rate, row in zip(rates, rows, strict=True)
    ]
    spread = [
        [rate.median - rate.min for rate in rates],
        [rate.max - rate.median for rate in rates],
    ]
    axis.barh(
        range(len(rows)),
        values,
        xerr=spread if is_bulk else None,
        color=[COLOURS[row.kind] for row in rows],
    )
    axis.set_yticks(range(len(rows)), [f"{row.name}, {row.direction}" for row in rows])
    axis.invert_yaxis()
    axis.set_title(rows[0].workload.name, loc="left")
    axis.set_xlabel("GB/s (median and range of rounds)" if is_bulk else "us per descriptor")


def _draw_lent(axis: Any, rows: Sequence[Lent]) -> None:  # noqa: ANN401
    medians = [row.latency.p50_us for row in rows]
    rounds = [row.latency.p50_us_of_rounds for row in rows]
    below = [max(0.0, p50 - each.min) for p50, each in zip(medians, rounds, strict=True)]
    above = [max(0.0, each.max - p50) for p50, each in zip(medians, rounds, strict=True)]
    axis.barh(range(len(rows)), medians, xerr=[below, above], color=COLOURS["transport"])
    axis.set_yticks(range(len(rows)), [f"{row.name}, {row.workload.name}" for row in rows])
    axis.invert_yaxis()
    axis.set_title("by reference: no byte is copied", loc="left")
    axis.set_xlabel("us until both sides know (p50 and range of rounds)")


def _load() -> Any:  # noqa: ANN401
    try:
        return importlib.import_module("matplotlib.figure")
    except ImportError as exc:
        raise ConfigError(
            "--plot needs matplotlib: pip install 'baton-kv[bench]', or pip install matplotlib"
        ) from exc
