"""A chart as SVG, drawn by hand: no library, no network, the same on every machine. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from math import ceil, floor, log2, log10
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

WIDTH: Final = 620
HEIGHT: Final = 372
LEFT: Final = 74
RIGHT: Final = 20
TOP: Final = 74
BOTTOM: Final = 50
COLOURS: Final = ("#8a8f98", "#1f6fb4", "#d9541e", "#2b8a3e", "#8e44ad", "#b8860b", "#c2185b")
FONT: Final = "DejaVu Sans, Verdana, Helvetica, Arial, sans-serif"
INK: Final = "#1d2530"
FAINT: Final = "#667080"
GRID: Final = "#e4e8ee"
LOG_FROM: Final = 12.0
"""Where the largest value is so many times the smallest, the axis is logarithmic."""


@dataclass(frozen=True, slots=True)
class Mark:
    """One arm at one load: a mean, its interval where there is one, and what it is made of."""

    x: float
    mean: float
    low: float | None
    high: float | None
    values: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Series:
    """One arm's line. `place` chooses its colour, the same in every chart."""

    name: str
    place: int
    marks: tuple[Mark, ...]


@dataclass(frozen=True, slots=True)
class Chart:
    """One chart. `x_label` is the loads' unit; loads are spread by their logarithm."""

    title: str
    subtitle: str
    x_label: str
    series: tuple[Series, ...]


@dataclass(frozen=True, slots=True)
class _Axis:
    """From values to pixels, and where its lines are."""

    to_pixel: Callable[[float], float]
    ticks: tuple[float, ...]


def draw(chart: Chart) -> str:
    """A whole SVG document; a chart without marks says so."""
    marks = [mark for series in chart.series for mark in series.marks]
    body = list(_frame(chart))
    if marks:
        x, y = _x_axis(marks), _y_axis(marks)
        body += _axes(x, y, chart.x_label)
        for series in chart.series:
            body += _line(series, x, y, num_series=len(chart.series))
    else:
        body.append(_text(WIDTH / 2, HEIGHT / 2, "nothing was measured", anchor="middle"))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'width="{WIDTH}" height="{HEIGHT}" font-family="{FONT}" role="img" '
        f'aria-label="{escape(chart.title)}">{"".join(body)}</svg>\n'
    )


def _frame(chart: Chart) -> Iterator[str]:
    yield f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>'
    yield f'<g font-weight="600">{_text(16, 26, chart.title, size=16)}</g>'
    yield _text(16, 45, chart.subtitle, size=11.5, fill=FAINT)
    left = 20.0
    for series in chart.series:
        colour = colour_of(series.place)
        yield f'<circle cx="{left}" cy="61" r="4.5" fill="{colour}"/>'
        yield _text(left + 9, 65, series.name, size=12)
        left += 9 + 7.6 * len(series.name) + 22


def colour_of(place: int) -> str:
    """An arm's colour."""
    return COLOURS[place % len(COLOURS)]


def _axes(x: _Axis, y: _Axis, x_label: str) -> Iterator[str]:
    for value in y.ticks:
        at = y.to_pixel(value)
        yield _rule(at, GRID)
        yield _text(LEFT - 8, at + 4, show(value), anchor="end", size=11.5, fill=FAINT)
    bottom = HEIGHT - BOTTOM
    yield _rule(bottom, FAINT)
    for value in x.ticks:
        yield _text(x.to_pixel(value), bottom + 18, show(value), anchor="middle", size=11.5)
    middle = (LEFT + WIDTH - RIGHT) / 2
    yield _text(middle, HEIGHT - 10, x_label, anchor="middle", size=11.5, fill=FAINT)


def _rule(at: float, colour: str) -> str:
    return f'<path d="M{LEFT} {at:.1f}H{WIDTH - RIGHT}" stroke="{colour}"/>'


def _line(series: Series, x: _Axis, y: _Axis, *, num_series: int) -> Iterator[str]:
    colour = colour_of(series.place)
    shift = (series.place - (num_series - 1) / 2) * 5.0  # bars of arms stand side by side
    spots = [(x.to_pixel(m.x) + shift, y.to_pixel(m.mean), m) for m in series.marks]
    path = " ".join(f"{px:.1f},{py:.1f}" for px, py, _ in spots)
    yield f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>'
    for px, py, mark in spots:
        yield from _whisker(px, mark, y, colour)
        yield from (
            f'<circle cx="{px:.1f}" cy="{y.to_pixel(value):.1f}" r="2" fill="{colour}" '
            'fill-opacity="0.35"/>'
            for value in mark.values
        )
        said = f"{series.name}, {show(mark.x)}: {show(mark.mean)}{_interval(mark)}"
        yield (
            f'<circle cx="{px:.1f}" cy="{py:.1f}" r="4.2" fill="{colour}" stroke="#ffffff" '
            f'stroke-width="1.2"><title>{escape(said)}</title></circle>'
        )


def _whisker(px: float, mark: Mark, y: _Axis, colour: str) -> Iterator[str]:
    if mark.low is None or mark.high is None:
        return
    top, bottom = y.to_pixel(mark.high), y.to_pixel(mark.low)
    yield (
        f'<path d="M{px - 4:.1f} {top:.1f}h8M{px:.1f} {top:.1f}V{bottom:.1f}M{px - 4:.1f} '
        f'{bottom:.1f}h8" stroke="{colour}" stroke-width="1.4" fill="none" stroke-opacity="0.75"/>'
    )


def _interval(mark: Mark) -> str:
    if mark.low is None or mark.high is None:
        return ", one repetition"
    return f" [{show(mark.low)}, {show(mark.high)}], {len(mark.values)} repetitions"


def _x_axis(marks: Sequence[Mark]) -> _Axis:
    ticks = tuple(sorted({mark.x for mark in marks}))
    first, last = log2(ticks[0]), log2(ticks[-1])
    inset = 30.0
    width = WIDTH - LEFT - RIGHT - 2 * inset

    def to_pixel(value: float) -> float:
        share = (log2(value) - first) / (last - first) if last > first else 0.5
        return LEFT + inset + share * width

    return _Axis(to_pixel, ticks)


def _y_axis(marks: Sequence[Mark]) -> _Axis:
    """From 0 on; logarithmic where values differ by much. Whiskers that leave it are cut."""
    values = [value for mark in marks for value in (*mark.values, mark.mean)]
    largest = max([*values, *(m.high for m in marks if m.high is not None and m.high < 3 * m.mean)])
    positive = [value for value in values if value > 0]
    if len(positive) == len(values) and max(values) / min(values) > LOG_FROM:
        return _log_axis(min(values), largest)
    top = largest * 1.06 or 1.0
    step = nice_step(top / 5)
    ticks = tuple(step * i for i in range(floor(top / step) + 1))
    return _Axis(lambda value: _pixel(value / top), ticks)


def _log_axis(smallest: float, largest: float) -> _Axis:
    first, last = log10(smallest * 0.85), log10(largest * 1.15)
    decades = range(floor(first), ceil(last) + 1)
    wanted = (1, 2, 5) if last - first < 3 else (1,)  # noqa: PLR2004 - decades
    ticks = tuple(
        factor * 10.0**decade
        for decade in decades
        for factor in wanted
        if first <= log10(factor * 10.0**decade) <= last
    )

    def to_pixel(value: float) -> float:
        if value <= 0:
            return _pixel(0.0)
        return _pixel((log10(value) - first) / (last - first))

    return _Axis(to_pixel, ticks)


def _pixel(share: float) -> float:
    """0 is the bottom, 1 the top; what lies outside is put on the edge."""
    bottom = HEIGHT - BOTTOM
    return bottom - min(1.0, max(0.0, share)) * (bottom - TOP - 8)


def nice_step(rough: float) -> float:
    """1, 2 or 5 times a power of ten, at least as large as asked."""
    if rough <= 0:
        return 1.0
    power: float = 10.0 ** floor(log10(rough))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)


def show(value: float) -> str:
    """A number with three digits that matter."""
    if value == 0:
        return "0"
    digits = max(0, 2 - floor(log10(abs(value))))
    text = f"{value:,.{min(digits, 6)}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def _text(
    x: float, y: float, words: str, *, anchor: str = "start", size: float = 12.0, fill: str = INK
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{fill}" text-anchor="{anchor}">'
        f"{escape(words)}</text>"
    )
