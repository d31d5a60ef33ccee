"""A report for a terminal: aligned, at most 100 columns wide, coloured only where it shows."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Final

from rich.console import Console
from rich.table import Table
from rich.text import Text

from baton.ops.doctor.finding import Level

if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import TextIO

    from baton.ops.doctor.finding import Finding, Report

MAX_COLUMNS: Final = 100
STYLES: Final = {
    Level.OK: "green",
    Level.NOTE: "cyan",
    Level.WARNING: "yellow",
    Level.PROBLEM: "bold red",
}


def print_report(report: Report, file: TextIO) -> None:
    """One block for each area; the reason and the fix only where there is one."""
    console = Console(file=file, highlight=False, markup=False, emoji=False)
    width = min(console.width, MAX_COLUMNS) if console.is_terminal else MAX_COLUMNS
    console = Console(file=file, highlight=False, markup=False, emoji=False, width=width)
    console.print(Text(f"baton {report.baton} on {report.subject}", style="bold"))
    # One width for all blocks, so that the columns of the whole report are aligned.
    name_width = max((len(finding.name) for finding in report.findings), default=0)
    for area, findings in groupby(report.findings, key=lambda finding: finding.area):
        console.print()
        console.print(Text(str(area), style="bold"))
        console.print(_block(findings, name_width))
    console.print()
    console.print(_summary(report))


def _block(findings: Iterable[Finding], name_width: int) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(width=max(map(len, Level)) + 2, no_wrap=True)
    table.add_column(width=name_width, overflow="fold")
    table.add_column(overflow="fold", ratio=1)
    for finding in findings:
        table.add_row(
            Text(f"  {finding.level}", style=STYLES[finding.level]),
            finding.name,
            _describe(finding),
        )
    return table


def _describe(finding: Finding) -> Text:
    text = Text(finding.found)
    if finding.level is not Level.OK:
        text.append(f"\n{finding.why}", style="dim")
    if finding.fix is not None:
        text.append("\nfix: ").append(finding.fix, style="bold")
    return text


def _summary(report: Report) -> Text:
    parts = [
        f"{number} {level}{'s' if number != 1 and level is not Level.OK else ''}"
        for level in reversed(Level)
        if (number := report.count(level))
    ]
    worst = next(level for level in reversed(Level) if report.count(level) or level is Level.OK)
    return Text(f"{', '.join(parts)} in {report.duration_s:.1f} s", style=STYLES[worst])
