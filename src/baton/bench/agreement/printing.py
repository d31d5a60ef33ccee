"""An agreement for a terminal: what was not the same, every arm and load, and the sum."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from rich.console import Console
from rich.table import Table
from rich.text import Text

from baton.bench.agreement.agreeing import count, titles
from baton.bench.architectures.charts import show

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import TextIO

    from baton.bench.agreement.agreeing import Agreement, Pair, Span, Tally, Verdict
    from baton.bench.architectures.results import Findings

WIDTH: Final = 140
STYLES: Final[dict[Verdict, str]] = {"agree": "green", "apart": "bold red", "unknown": "dim"}


def print_agreement(agreement: Agreement, a: Findings, file: TextIO) -> None:
    """All of it. `a`: whose words for the loads are taken."""
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
    console.print(f"Means: {say_tally(count(agreement.points))}.", style="bold")
    if agreement.ratios:
        console.print(
            f"Ratios to replication: {say_tally(count(agreement.ratios))}; opposite verdicts: "
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
            f"OPPOSED: {each.arm}, {words[each.level]}, {titles()[each.metric]}: {each.a} against "
            f"replication in A, {each.b} in B",
            style="bold red",
        )


def say_tally(tally: Tally) -> str:
    """`17 of 18 agree (94 %); …`."""
    if not tally.num_known:
        return "no intervals to hold against each other (one repetition has none)"
    said = (
        f"{tally.num_agreeing} of {tally.num_known} agree within their 95 % intervals "
        f"({tally.num_agreeing / tally.num_known:.0%})"
    )
    if tally.half_share is not None:
        said += f"; the median interval is ± {tally.half_share:.0%}"
    return said + (f"; {tally.num_unknown} have no interval" if tally.num_unknown else "")


def _table(points: Sequence[Pair], words: dict[str, str]) -> Table:
    metrics = list(dict.fromkeys(pair.metric for pair in points))
    rows = list(dict.fromkeys((pair.level, pair.arm) for pair in points))
    found = {(pair.level, pair.arm, pair.metric): pair for pair in points}
    order = list(words)
    title = "Means of A, and below of B; green: their 95 % intervals meet"
    table = Table(title=title, show_lines=True)
    table.add_column("load", no_wrap=True)
    table.add_column("arm", no_wrap=True)
    for metric in metrics:
        table.add_column(titles()[metric], justify="right")
    table.add_column("agree", justify="right")
    for level, arm in sorted(rows, key=lambda row: order.index(row[0])):
        pairs = [found.get((level, arm, metric)) for metric in metrics]
        tally = count(tuple(pair for pair in pairs if pair is not None))
        table.add_row(
            words[level], arm, *map(_cell, pairs), f"{tally.num_agreeing} of {tally.num_known}"
        )
    return table


def _cell(pair: Pair | None) -> Text:
    if pair is None:
        return Text("-")
    mark = "\napart" if pair.verdict == "apart" else ""
    return Text(f"{_value(pair.a)}\n{_value(pair.b)}{mark}", style=STYLES[pair.verdict])


def _describe(pair: Pair, kind: str, words: dict[str, str]) -> str:
    return (
        f"{pair.arm}, {words[pair.level]}, {titles()[pair.metric]}, {kind}: A {_whole(pair.a)} · "
        f"B {_whole(pair.b)}"
    )


def _value(span: Span) -> str:
    return "-" if span.value is None else show(span.value)


def _whole(span: Span) -> str:
    if span.low is None or span.high is None:
        return _value(span)
    return f"{_value(span)} [{show(span.low)}, {show(span.high)}]"
