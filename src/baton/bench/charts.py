"""Reports and findings as figures, drawn by matplotlib, which is imported when one is drawn."""

from __future__ import annotations

import importlib
import io
import re
from dataclasses import dataclass
from html import escape
from itertools import groupby
from typing import TYPE_CHECKING, Any, Final

from baton.bench.architectures.results import Findings, LevelInfo, Metric, measured_metrics
from baton.bench.printing import format_number
from baton.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from baton.bench.link.report import ReferenceRow, Report, Row
    from baton.protocol.route_explanation import RouteCandidate, RouteExplanation

KIND_COLOURS: Final = {"transport": "#2c6fbb", "limit": "#999999", "peer": "#d08a2c"}
BAR_INCHES: Final = 0.28
PANEL_INCHES: Final = 0.9
WIDTH_INCHES: Final = 9.0
COLOURS: Final = ("#8a8f98", "#1f6fb4", "#d9541e", "#2b8a3e", "#8e44ad", "#b8860b", "#c2185b")
INK: Final = "#1d2530"
FAINT: Final = "#667080"
GRID: Final = "#e4e8ee"
FONTS: Final = ("DejaVu Sans", "Verdana", "Helvetica", "Arial", "sans-serif")
ROUTE_PARTS: Final[tuple[str, ...]] = (
    "queue_s",
    "load_s",
    "prefill_s",
    "handoff_s",
    "decode_queue_s",
)
MOST_CANDIDATES: Final = 16
CHART_INCHES: Final = (6.2, 3.72)
PNG_DPI: Final = 200
LOG_FROM: Final = 12.0
"""Where the largest value is this many times the smallest, the axis is logarithmic."""
OFFSET_POINTS: Final = 5.0
"""Between configurations at one load: their intervals stand side by side."""


def require_charts() -> None:
    """Fail before anything is measured, rather than after it.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    _load("matplotlib.figure")


def check_plot(path: Path) -> None:
    """Fail before anything is measured.

    Raises:
        ConfigError: matplotlib is not installed, the directory does not exist, or the suffix names
            no format that matplotlib writes.
    """
    if not path.resolve().parent.is_dir():
        raise ConfigError(f"--plot: there is no directory {path.resolve().parent}")
    formats = _load("matplotlib.backend_bases").FigureCanvasBase.get_supported_filetypes()
    suffix = path.suffix.removeprefix(".").lower()
    if suffix and suffix not in formats:  # without one, matplotlib appends .png
        raise ConfigError(f"--plot {path}: give one of the suffixes .{', .'.join(sorted(formats))}")


def plot_report(report: Report, path: Path) -> None:
    """Write a link report's figure: a panel for each workload, a bar for each row.

    Raises:
        ConfigError: the suffix names no known format, or the file cannot be written.
    """
    figures = _load("matplotlib.figure")
    panels = [list(rows) for _, rows in groupby(report.rows, key=lambda row: row.workload)]
    numbers = [len(rows) for rows in panels]
    numbers += [len(report.by_reference)] if report.by_reference else []
    if not numbers:
        raise ConfigError("--plot: nothing was measured")
    heights = [PANEL_INCHES + BAR_INCHES * number for number in numbers]
    figure = figures.Figure(figsize=(WIDTH_INCHES, sum(heights)), layout="constrained")
    axes = figure.subplots(len(numbers), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axis, rows in zip(axes, panels, strict=False):
        _draw_rows(axis, rows)
    if report.by_reference:
        _draw_by_reference(axes[-1], report.by_reference)
    if report.is_partial:
        figure.suptitle("partial: interrupted")
    try:
        figure.savefig(path)
    except (OSError, ValueError) as exc:
        raise ConfigError(f"--plot: cannot write {path}: {exc}") from exc


def _draw_rows(axis: Any, rows: list[Row]) -> None:  # noqa: ANN401 - matplotlib is optional
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
    colours = [KIND_COLOURS[row.kind] for row in rows]
    axis.barh(range(len(rows)), values, xerr=spread if is_bulk else None, color=colours)
    axis.set_yticks(range(len(rows)), [f"{row.name}, {row.direction}" for row in rows])
    axis.invert_yaxis()
    axis.set_title(rows[0].workload.name, loc="left")
    axis.set_xlabel("GB/s (median and range of rounds)" if is_bulk else "us per descriptor")


def _draw_by_reference(axis: Any, rows: Sequence[ReferenceRow]) -> None:  # noqa: ANN401
    medians = [row.latency.p50_us for row in rows]
    rounds = [row.latency.p50_us_of_rounds for row in rows]
    below = [max(0.0, p50 - each.min) for p50, each in zip(medians, rounds, strict=True)]
    above = [max(0.0, each.max - p50) for p50, each in zip(medians, rounds, strict=True)]
    axis.barh(range(len(rows)), medians, xerr=[below, above], color=KIND_COLOURS["transport"])
    axis.set_yticks(range(len(rows)), [f"{row.name}, {row.workload.name}" for row in rows])
    axis.invert_yaxis()
    axis.set_title("by reference: no byte is copied", loc="left")
    axis.set_xlabel("us until both sides know (p50 and range of rounds)")


def plot_route(found: RouteExplanation, path: Path) -> None:
    """Write a placement's figure: a bar for each candidate, of the parts of its time.

    Of a policy that predicts no times, of what it compares.

    Raises:
        ConfigError: there is nothing to draw, the suffix names no known format, or the file cannot
            be written.
    """
    candidates = [each for each in found.candidates if each.why_not is None and each.figures]
    candidates = candidates[:MOST_CANDIDATES]
    if not candidates:
        raise ConfigError("--plot: the policy compares no figures, or no worker is usable")
    figure = _load("matplotlib.figure").Figure(
        figsize=(WIDTH_INCHES, PANEL_INCHES + BAR_INCHES * (len(candidates) + 1)),
        layout="constrained",
    )
    axis = figure.subplots()
    _draw_candidates(axis, candidates)
    num = found.num_prompt_tokens
    axis.set_title(f"{found.model}, policy {found.policy}: a prompt of {num} tokens", loc="left")
    try:
        figure.savefig(path)
    except (OSError, ValueError) as exc:
        raise ConfigError(f"--plot: cannot write {path}: {exc}") from exc


def _draw_candidates(axis: Any, candidates: Sequence[RouteCandidate]) -> None:  # noqa: ANN401
    listed = dict.fromkeys(name for each in candidates for name in each.figures)
    is_time = any(name in listed for name in ROUTE_PARTS)
    names = [name for name in ROUTE_PARTS if name in listed] if is_time else [*listed][:1]
    places, ends = range(len(candidates)), [0.0] * len(candidates)
    for number, name in enumerate(names):
        values = [each.figures.get(name, 0.0) for each in candidates]
        label = name.removesuffix("_s").replace("_", " ")
        axis.barh(places, values, left=ends, color=colour_of(number), label=label)
        ends = [end + value for end, value in zip(ends, values, strict=True)]
    for place, each, end in zip(places, candidates, ends, strict=True):
        text = _describe_candidate(each) if is_time else f" {end:g}"
        weight = "bold" if each.is_chosen else "normal"
        axis.text(end, place, text, va="center", size=8.3, color=INK, weight=weight)
    axis.set_yticks(places, [_name_candidate(each) for each in candidates])
    axis.invert_yaxis()
    axis.set_xlim(0, (max(ends) or 1.0) * 1.45)
    axis.spines[["top", "right"]].set_visible(False)
    axis.set_xlabel("seconds until the first token" if is_time else names[0].replace("_", " "))
    if is_time:
        axis.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=len(names), frameon=False)


def _name_candidate(candidate: RouteCandidate) -> str:
    name = " → ".join(each for each in (candidate.prefill, candidate.decode) if each is not None)
    num_loaded = candidate.figures.get("loaded_tokens", 0)
    if num_loaded:
        name += f"\n({num_loaded:.0f} tokens loaded)"
    return f"✓ {name}" if candidate.is_chosen else name


def _describe_candidate(candidate: RouteCandidate) -> str:
    figures = candidate.figures
    return (
        f" cost {figures.get('cost', 0):.3f} · {figures.get('cached_tokens', 0):.0f} cached"
        f" · TPOT {1e3 * figures.get('tpot_s', 0):.1f} ms"
    )


@dataclass(frozen=True, slots=True)
class Mark:
    """One configuration at one load: a mean, its interval, and the values of the repetitions."""

    x: float
    mean: float
    low: float | None
    high: float | None
    values: tuple[float, ...]

    @property
    def text(self) -> str:
        """The tooltip: load, mean, interval."""
        text = f"{format_number(self.x)}: {format_number(self.mean)}"
        if self.low is None or self.high is None:
            return f"{text}, one repetition"
        bounds = f"[{format_number(self.low)}, {format_number(self.high)}]"
        return f"{text} {bounds}, {len(self.values)} repetitions"


@dataclass(frozen=True, slots=True)
class Series:
    """One configuration's line. `place` chooses its colour, the same in every chart."""

    name: str
    place: int
    marks: tuple[Mark, ...]


@dataclass(frozen=True, slots=True)
class Chart:
    """One metric over loads of one kind; loads are spread by their logarithm."""

    title: str
    subtitle: str
    x_label: str
    series: tuple[Series, ...]


@dataclass(frozen=True, slots=True)
class ChartFiles:
    """One chart, as SVG for the page and as PNG."""

    svg: str
    png: bytes


def draw_findings(findings: Findings) -> dict[str, ChartFiles]:
    """Charts by name: one for each metric, `NAME-rate` for open loops."""
    closed = [level for level in findings.levels if level.concurrency is not None]
    rates = [level for level in findings.levels if level.requests_per_s is not None]
    charts = {}
    for metric in measured_metrics(findings.cells):
        if closed:
            charts[metric.key] = draw_chart(make_chart(findings, metric, closed))
        if rates:
            charts[f"{metric.key}-rate"] = draw_chart(make_chart(findings, metric, rates))
    return charts


def make_chart(findings: Findings, metric: Metric, levels: Sequence[LevelInfo]) -> Chart:
    """One metric over loads of one kind."""
    places = {level.key: level.concurrency or level.requests_per_s or 0.0 for level in levels}
    series = []
    for place, configuration in enumerate(findings.configurations):
        marks = tuple(
            Mark(places[p.level], each.mean, each.low, each.high, each.values)
            for p in findings.analysis.points
            if (p.metric, p.configuration) == (metric.key, configuration.name)
            and p.level in places
            and (each := p.estimate) is not None
        )
        series.append(Series(configuration.name, place, marks))
    wanted = "more is better" if metric.better == "more" else "less is better"
    is_closed = levels[0].concurrency is not None
    return Chart(
        metric.title,
        f"{metric.unit} · {wanted} · mean and 95 % interval over repetitions; dots: each one",
        "requests at once" if is_closed else "requests per second, Poisson arrivals",
        tuple(series),
    )


def draw_chart(chart: Chart) -> ChartFiles:
    """Draw it; a chart without marks is marked as empty."""
    figure = _load("matplotlib.figure").Figure(figsize=CHART_INCHES)
    axis = figure.add_axes((0.12, 0.15, 0.85, 0.62))
    figure.text(0.026, 0.925, chart.title, size=11.5, weight="bold", color=INK)
    figure.text(0.026, 0.868, chart.subtitle, size=8.3, color=FAINT)
    axis.set_xlabel(chart.x_label, size=8.3, color=FAINT)
    tooltips: dict[str, str] = {}
    marks = [mark for series in chart.series for mark in series.marks]
    if marks:
        _style_axes(axis, marks)
        for series in chart.series:
            tooltips |= _draw_series(axis, series, num_series=len(chart.series))
        figure.legend(
            *axis.get_legend_handles_labels(), loc="upper left", bbox_to_anchor=(0.015, 0.865),
            ncols=len(chart.series), frameon=False, fontsize=8.6, handletextpad=0.1,
            columnspacing=1.2, handlelength=1.2, borderpad=0.2, labelcolor=INK,
        )  # fmt: skip
    else:
        axis.set_axis_off()
        axis.text(0.5, 0.5, "nothing was measured", transform=axis.transAxes, ha="center")
    return ChartFiles(_to_svg(figure, chart.title, tooltips), _to_png(figure))


def colour_of(place: int) -> str:
    """The colour of a configuration, the same in every chart and table."""
    return COLOURS[place % len(COLOURS)]


def _style_axes(axis: Any, marks: Sequence[Mark]) -> None:  # noqa: ANN401
    """Values from 0 on, or by their logarithm where they differ much."""
    ticker = _load("matplotlib.ticker")
    axis.spines[["top", "left", "right"]].set_visible(False)
    axis.spines["bottom"].set_color(FAINT)
    axis.grid(axis="y", color=GRID)
    axis.set_axisbelow(True)
    axis.set_xscale("log", base=2)
    xs = sorted({mark.x for mark in marks})
    axis.set_xticks(xs)
    margin = (xs[-1] / xs[0]) ** 0.08 if len(xs) > 1 else 2.0
    axis.set_xlim(xs[0] / margin, xs[-1] * margin)
    values = [value for mark in marks for value in (*mark.values, mark.mean)]
    # Intervals that are much wider than their mean are cut, or the rest could not be seen.
    highs = [m.high for m in marks if m.high is not None and m.high < 3 * m.mean]
    largest = max([*values, *highs])
    if min(values) > 0 and max(values) / min(values) > LOG_FROM:
        axis.set_yscale("log")
        axis.set_ylim(min(values) * 0.85, largest * 1.15)
        is_wide = max(values) / min(values) > 1000  # noqa: PLR2004 - three decades
        subs = (1.0,) if is_wide else (1.0, 2.0, 5.0)
        axis.yaxis.set_major_locator(ticker.LogLocator(subs=subs))
    else:
        axis.set_ylim(0, largest * 1.06 or 1.0)
        axis.yaxis.set_major_locator(ticker.MaxNLocator(5, steps=(1, 2, 5, 10)))
    axis.minorticks_off()
    axis.tick_params(length=0, labelsize=8.3, labelcolor=FAINT)
    for each in (axis.xaxis, axis.yaxis):
        each.set_major_formatter(ticker.FuncFormatter(lambda value, _: format_number(value)))


def _draw_series(axis: Any, series: Series, *, num_series: int) -> dict[str, str]:  # noqa: ANN401
    """One configuration; returns the tooltips of its marks by their ids in the SVG."""
    shift = (series.place - (num_series - 1) / 2) * OFFSET_POINTS / 72
    moved = _load("matplotlib.transforms").ScaledTranslation(shift, 0, axis.figure.dpi_scale_trans)
    style = {"color": colour_of(series.place), "transform": axis.transData + moved}
    means = [mark.mean for mark in series.marks]
    axis.plot([mark.x for mark in series.marks], means, linewidth=1.5, **style)
    tooltips = {}
    for number, mark in enumerate(series.marks):
        if mark.low is not None and mark.high is not None:
            ends = (mark.low, mark.high)
            axis.plot([mark.x, mark.x], ends, marker="_", alpha=0.75, linewidth=1, **style)
        xs = [mark.x] * len(mark.values)
        axis.plot(xs, mark.values, "o", markersize=3, alpha=0.35, markeredgewidth=0, **style)
        gid = f"mark-{series.place}-{number}"
        axis.plot(
            [mark.x], [mark.mean], "o", gid=gid, markersize=6.5, markeredgecolor="white",
            label="" if number else series.name, **style,
        )  # fmt: skip
        tooltips[gid] = f"{series.name}, {mark.text}"
    return tooltips


def _to_svg(figure: Any, title: str, tooltips: dict[str, str]) -> str:  # noqa: ANN401
    """An SVG element with text as text, which refers to nothing outside; tooltips on its marks."""
    file = io.StringIO()
    settings = {"svg.fonttype": "none", "svg.hashsalt": title, "font.family": list(FONTS)}
    with _load("matplotlib").rc_context(settings):
        empty = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(file, format="svg", metadata=empty)
    text = file.getvalue()
    text = re.sub(r'(width|height)="([\d.]+)pt"', r'\1="\2"', text, count=2)
    text = text[text.index("<svg") :].replace(
        "<svg ", f'<svg role="img" aria-label="{escape(title)}" ', 1
    )
    for gid, tooltip in tooltips.items():
        text = text.replace(f'<g id="{gid}">', f"<g><title>{escape(tooltip)}</title>", 1)
    return text


def _to_png(figure: Any) -> bytes:  # noqa: ANN401
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=PNG_DPI)
    return file.getvalue()


def _load(name: str) -> Any:  # noqa: ANN401
    try:
        return importlib.import_module(name)
    except ImportError as exc:
        raise ConfigError(
            "charts need matplotlib: pip install 'baton-kv[bench]', or pip install matplotlib"
        ) from exc
