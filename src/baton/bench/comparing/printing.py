"""A comparison for a terminal: first what was not the same, then the figures."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from rich.table import Table

from baton.bench.printing import open_console

if TYPE_CHECKING:
    from typing import TextIO

    from rich.console import Console

    from baton.bench.comparing.comparing import Comparison

STYLES: Final = {"better": "green", "worse": "red", "same": "", "undecided": "dim"}
MOST_CHARS: Final = 60


def print_comparison(comparison: Comparison, file: TextIO) -> None:
    """All of it."""
    console = open_console(file)
    _print_circumstances(console, comparison)
    table = Table(box=None, pad_edge=False)
    table.add_column("", no_wrap=True)
    for name in ("A", "B", "p"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("B against A (95 % interval)")
    for line in comparison.lines:
        mark = "!" if line.is_too_bad else ""
        table.add_row(
            f"{mark}{line.metric}, {line.unit}",
            f"{line.a:,.2f}",
            f"{line.b:,.2f}",
            _write_p(line.p_value),
            line.words,
            style=STYLES[line.judgement],
        )
    console.print(table)
    if not comparison.lines:
        console.print("nothing to compare: one side has no complete request", style="bold red")
    _print_basis(console, comparison)


def _print_circumstances(console: Console, comparison: Comparison) -> None:
    for each in comparison.differences:
        style = "bold red" if each.is_asked else "yellow"
        note = "NOT ASKED THE SAME: " if each.is_asked else ""
        console.print(
            f"{note}{each.field}: A {_short(each.a)} · B {_short(each.b)}",
            style=style,
            soft_wrap=True,
        )
    for caution in comparison.cautions:
        console.print(f"caution: {caution}", style="yellow", soft_wrap=True)


def _print_basis(console: Console, comparison: Comparison) -> None:
    runs, requests = comparison.num_runs, comparison.num_requests
    text = f"A: {runs[0]} runs, {requests[0]} requests · B: {runs[1]} runs, {requests[1]} requests."
    if min(runs) == 1:
        text += (
            " With one run of a side, only chance within runs is known: the same server measured"
            " twice may differ by more. Give folders with several runs each."
        )
    console.print(text, style="dim", soft_wrap=True)


def _short(text: str) -> str:
    return text if len(text) <= MOST_CHARS else f"{text[: MOST_CHARS - 1]}…"


def _write_p(value: float) -> str:
    return "<0.001" if value < 0.001 else f"{value:.3f}"  # noqa: PLR2004
