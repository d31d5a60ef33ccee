"""Two results of `baton bench architectures`: do they agree within their stated intervals?

    python benchmarks/architectures_agreement.py DIR_A DIR_B [--json]

Two 95 % intervals of the same quantity overlap far more often than 95 times in 100: agreement of
wide intervals proves little, so their width is printed too. Ratios against replication are compared
as well: the verdict rests on them, and what drifts between two runs cancels in them.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Final, Literal, TextIO, TypeAlias

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from baton.bench.architectures.folder import RESULTS
from baton.bench.architectures.results import (
    GOODPUT,
    METRICS,
    Contrast,
    Estimate,
    Findings,
    Judgement,
)
from baton.bench.architectures.verdict import MOST_OTHERS_SHARE
from baton.bench.printing import format_number
from baton.errors import BatonError, ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

MAX_FILE_BYTES: Final = 256 << 20


def read_findings(path: Path) -> Findings:
    """One result, by its folder or file.

    Raises:
        ConfigError: unreadable, or something else.
    """
    file = find_results(path)
    try:
        if file.stat().st_size > MAX_FILE_BYTES:
            raise ConfigError(f"{file}: more than {MAX_FILE_BYTES >> 20} MiB")
        return msgspec.json.decode(file.read_bytes(), type=Findings)
    except OSError as exc:
        raise ConfigError(f"cannot read {file}: {exc.strerror}") from exc
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise ConfigError(f"{file} is no result of `baton bench architectures`: {exc}") from exc


def find_results(path: Path) -> Path:
    """The file that is meant."""
    return path / RESULTS if path.is_dir() else path


SCHEMA: Final = "baton-bench-agreement/1"

Verdict: TypeAlias = Literal["agree", "apart", "unknown"]
OPPOSITE: Final = frozenset({"wins", "loses"})


class Span(msgspec.Struct, frozen=True):
    """A value with its 95 % interval; None: of one repetition, or without a ratio."""

    value: float | None
    low: float | None
    high: float | None

    def meets(self, other: Span) -> Verdict:
        """Whether the two intervals overlap."""
        if self.low is None or self.high is None or other.low is None or other.high is None:
            return "unknown"
        return "agree" if self.low <= other.high and other.low <= self.high else "apart"

    @property
    def half_share(self) -> float | None:
        """Half of the interval, as a share of the value."""
        if not self.value or self.low is None or self.high is None:
            return None
        return abs((self.high - self.low) / 2 / self.value)


class Pair(msgspec.Struct, frozen=True):
    """One figure in both. `unknown`: one of the two has no interval."""

    metric: str
    configuration: str
    level: str
    a: Span
    b: Span
    verdict: Verdict


class Opposed(msgspec.Struct, frozen=True):
    """A configuration wins against replication in one of the two, and loses in the other."""

    metric: str
    configuration: str
    level: str
    a: Judgement
    b: Judgement


class Unlike(msgspec.Struct, frozen=True):
    """A field that differs. `is_asked`: the two do not answer the same question."""

    field: str
    a: str
    b: str
    is_asked: bool


class Agreement(msgspec.Struct, frozen=True, kw_only=True):
    """All. `points`: means; `ratios`: against replication. `left_out`: why some are not there.

    `cautions`: what may set the two apart although nothing else has changed.
    """

    schema: str = SCHEMA
    unlike: tuple[Unlike, ...]
    left_out: tuple[str, ...]
    cautions: tuple[str, ...]
    points: tuple[Pair, ...]
    ratios: tuple[Pair, ...]
    opposed: tuple[Opposed, ...]


class Tally(msgspec.Struct, frozen=True):
    """How many pairs agree, of those that have intervals; `half_share`: the median interval's."""

    num_agreeing: int
    num_known: int
    num_unknown: int
    half_share: float | None


def count(pairs: tuple[Pair, ...]) -> Tally:
    """All of them."""
    known = [pair for pair in pairs if pair.verdict != "unknown"]
    shares = [s for pair in known for s in (pair.a.half_share, pair.b.half_share) if s is not None]
    return Tally(
        sum(pair.verdict == "agree" for pair in known),
        len(known),
        len(pairs) - len(known),
        median(shares) if shares else None,
    )


def compare_findings(a: Findings, b: Findings) -> Agreement:
    """Compare what both have measured."""
    skipped = _skipped_metrics(a, b)
    return Agreement(
        unlike=tuple(_unlike(a, b)),
        left_out=tuple(_left_out(a, b)),
        cautions=tuple(_cautions(a, b)),
        points=tuple(pair for pair in _points(a, b) if pair.metric not in skipped),
        ratios=tuple(pair for pair in _ratios(a, b) if pair.metric not in skipped),
        opposed=tuple(each for each in _opposed(a, b) if each.metric not in skipped),
    )


def _skipped_metrics(a: Findings, b: Findings) -> frozenset[str]:
    """Goodput by two SLOs cannot be compared."""
    return frozenset() if a.analysis.slo == b.analysis.slo else frozenset({GOODPUT.key})


def _points(a: Findings, b: Findings) -> Iterator[Pair]:
    theirs = {(p.metric, p.configuration, p.level): p.estimate for p in b.analysis.points}
    for point in a.analysis.points:
        key = (point.metric, point.configuration, point.level)
        other = theirs.get(key)
        if point.estimate is not None and other is not None:
            spans = _span_of(point.estimate), _span_of(other)
            yield Pair(*key, *spans, spans[0].meets(spans[1]))


def _ratios(a: Findings, b: Findings) -> Iterator[Pair]:
    for mine, other in _contrasts(a, b):
        if mine.ratio is not None and other.ratio is not None:
            spans = Span(mine.ratio, mine.low, mine.high), Span(other.ratio, other.low, other.high)
            yield Pair(
                mine.metric, mine.configuration, mine.level, *spans, spans[0].meets(spans[1])
            )


def _opposed(a: Findings, b: Findings) -> Iterator[Opposed]:
    for mine, other in _contrasts(a, b):
        if {mine.judgement, other.judgement} == OPPOSITE:
            yield Opposed(
                mine.metric, mine.configuration, mine.level, mine.judgement, other.judgement
            )


def _contrasts(a: Findings, b: Findings) -> Iterator[tuple[Contrast, Contrast]]:
    theirs = {(c.metric, c.configuration, c.level): c for c in b.analysis.contrasts}
    for mine in a.analysis.contrasts:
        other = theirs.get((mine.metric, mine.configuration, mine.level))
        if other is not None:
            yield mine, other


def _span_of(estimate: Estimate) -> Span:
    return Span(estimate.mean, estimate.low, estimate.high)


def _unlike(a: Findings, b: Findings) -> Iterator[Unlike]:
    for field, is_asked, mine, other in (
        ("model", True, a.model, b.model),
        ("engine", True, a.engine, b.engine),
        ("workers", True, a.num_workers, b.num_workers),
        ("workload", True, a.workload_words, b.workload_words),
        ("seconds of each load", False, a.duration_s, b.duration_s),
        ("seconds before each load", False, a.settle_s, b.settle_s),
        ("repetitions", False, a.num_repetitions, b.num_repetitions),
        ("host", False, a.manifest.machine.host, b.manifest.machine.host),
        ("processor", False, a.manifest.machine.cpu, b.manifest.machine.cpu),
        ("cores", False, a.manifest.machine.num_cpus, b.manifest.machine.num_cpus),
        ("baton", False, a.manifest.baton, b.manifest.baton),
        ("versions", False, a.manifest.machine.versions, b.manifest.machine.versions),
    ):
        if mine != other:
            yield Unlike(field, str(mine), str(other), is_asked)


def _left_out(a: Findings, b: Findings) -> Iterator[str]:
    for side, findings in (("A", a), ("B", b)):
        if findings.is_partial:
            yield f"{side} is partial: {findings.ended}"
        for trouble in findings.troubles:
            yield f"{side}: {trouble.configuration} failed in repetition {trouble.repetition}"
    if _skipped_metrics(a, b):
        yield (
            f"{GOODPUT.title.lower()}: each has an SLO of its own ({a.analysis.slo_words}); give "
            "--goodput to compare it"
        )
    cells = [{(c.configuration, c.level) for c in each.cells if c.is_usable} for each in (a, b)]
    for name, level in sorted(cells[0] ^ cells[1]):
        side = "A" if (name, level) in cells[0] else "B"
        yield f"{name}, {level}: measured in {side} alone"


def _cautions(a: Findings, b: Findings) -> Iterator[str]:
    for side, findings in (("A", a), ("B", b)):
        shares = [c.cpu.others_share for c in findings.cells if c.cpu.others_share is not None]
        loud = [share for share in shares if share > MOST_OTHERS_SHARE]
        if loud:
            yield (
                f"{side} had a busy machine: others used up to {max(loud):.0%} of it, and over "
                f"{MOST_OTHERS_SHARE:.0%} in {len(loud)} of {len(shares)} cells"
            )


def titles() -> dict[str, str]:
    """Short titles of the metrics."""
    return {metric.key: metric.short for metric in METRICS}


WIDTH: Final = 140
STYLES: Final[dict[Verdict, str]] = {"agree": "green", "apart": "bold red", "unknown": "dim"}


def print_agreement(agreement: Agreement, a: Findings, file: TextIO) -> None:
    """All of it. The loads are named as in `a`."""
    console = Console(file=file, highlight=False, markup=False)
    if not console.is_terminal:
        console.width = WIDTH
    _print_circumstances(console, agreement)
    if not agreement.points:
        console.print("nothing to compare: no arm and load has figures in both", style="bold red")
        return
    words = {level.key: level.words for level in a.levels}
    console.print(_table(agreement.points, words))
    _print_apart(console, agreement, words)
    console.print(f"Means: {format_tally(count(agreement.points))}.", style="bold")
    if agreement.ratios:
        console.print(
            f"Ratios to replication: {format_tally(count(agreement.ratios))}; opposite verdicts: "
            f"{len(agreement.opposed)}.",
            style="bold",
        )


def _print_circumstances(console: Console, agreement: Agreement) -> None:
    for each in agreement.unlike:
        note = "NOT ASKED THE SAME: " if each.is_asked else ""
        style = "bold red" if each.is_asked else "yellow"
        console.print(f"{note}{each.field}: A {each.a} · B {each.b}", style=style)
    for line in agreement.left_out:
        console.print(f"left out or incomplete: {line}", style="yellow")
    for line in agreement.cautions:
        console.print(f"caution: {line}", style="yellow")


def _print_apart(console: Console, agreement: Agreement, words: dict[str, str]) -> None:
    for kind, pairs in (("mean", agreement.points), ("ratio to replication", agreement.ratios)):
        for pair in pairs:
            if pair.verdict == "apart":
                console.print(f"apart: {_describe(pair, kind, words)}", style="red")
    for each in agreement.opposed:
        console.print(
            f"OPPOSED: {each.configuration}, {words[each.level]}, {titles()[each.metric]}: "
            f"{each.a} against replication in A, {each.b} in B",
            style="bold red",
        )


def format_tally(tally: Tally) -> str:
    """`17 of 18 agree (94 %); …`."""
    if not tally.num_known:
        return "no intervals to hold against each other (one repetition has none)"
    text = (
        f"{tally.num_agreeing} of {tally.num_known} agree within their 95 % intervals "
        f"({tally.num_agreeing / tally.num_known:.0%})"
    )
    if tally.half_share is not None:
        text += f"; the median interval is ± {tally.half_share:.0%}"
    return text + (f"; {tally.num_unknown} have no interval" if tally.num_unknown else "")


def _table(points: Sequence[Pair], words: dict[str, str]) -> Table:
    metrics = list(dict.fromkeys(pair.metric for pair in points))
    rows = list(dict.fromkeys((pair.level, pair.configuration) for pair in points))
    found = {(pair.level, pair.configuration, pair.metric): pair for pair in points}
    order = list(words)
    title = "Means of A, and below of B; green: their 95 % intervals meet"
    table = Table(title=title, show_lines=True)
    table.add_column("load", no_wrap=True)
    table.add_column("configuration", no_wrap=True)
    for metric in metrics:
        table.add_column(titles()[metric], justify="right")
    table.add_column("agree", justify="right")
    for level, name in sorted(rows, key=lambda row: order.index(row[0])):
        pairs = [found.get((level, name, metric)) for metric in metrics]
        tally = count(tuple(pair for pair in pairs if pair is not None))
        table.add_row(
            words[level], name, *map(_cell, pairs), f"{tally.num_agreeing} of {tally.num_known}"
        )
    return table


def _cell(pair: Pair | None) -> Text:
    if pair is None:
        return Text("-")
    mark = "\napart" if pair.verdict == "apart" else ""
    return Text(f"{_value(pair.a)}\n{_value(pair.b)}{mark}", style=STYLES[pair.verdict])


def _describe(pair: Pair, kind: str, words: dict[str, str]) -> str:
    return (
        f"{pair.configuration}, {words[pair.level]}, {titles()[pair.metric]}, {kind}: "
        f"A {_whole(pair.a)} · B {_whole(pair.b)}"
    )


def _value(span: Span) -> str:
    return "-" if span.value is None else format_number(span.value)


def _whole(span: Span) -> str:
    if span.low is None or span.high is None:
        return _value(span)
    return f"{_value(span)} [{format_number(span.low)}, {format_number(span.high)}]"


def main() -> int:
    """Compare two results."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("a", type=Path, help="a folder, or its results.json")
    parser.add_argument("b", type=Path, help="another")
    parser.add_argument("--json", action="store_true")
    flags = parser.parse_args()
    try:
        a, b = read_findings(flags.a), read_findings(flags.b)
    except BatonError as exc:
        print(f"{exc}", file=sys.stderr)
        return 2
    found = compare_findings(a, b)
    if flags.json:
        print(msgspec.json.format(msgspec.json.encode(found)).decode())
    else:
        print_agreement(found, a, sys.stdout)
    return 0 if found.points else 1


if __name__ == "__main__":
    sys.exit(main())
