"""A report for a terminal: one block for each workload, at most 100 columns."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Final

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import TextIO

    from baton.bench.machine import Machine
    from baton.bench.report import Lent, Report, Row

MAX_COLUMNS: Final = 100


def open_console(file: TextIO) -> Console:
    """As wide as the terminal, up to what every table fits into."""
    console = Console(file=file, highlight=False, markup=False, emoji=False)
    width = min(console.width, MAX_COLUMNS) if console.is_terminal else MAX_COLUMNS
    return Console(file=file, highlight=False, markup=False, emoji=False, width=width)


def print_report(report: Report, file: TextIO) -> None:
    """All rows; what was skipped; the machines."""
    console = open_console(file)
    if report.is_partial:
        console.print(
            "PARTIAL: interrupted; rows may rest on fewer rounds, or be absent", style="bold red"
        )
    for _, block in groupby(report.rows, key=lambda row: row.workload):
        rows = list(block)
        is_bulk = rows[0].workload.shape != "descriptors"
        console.print(_bulk_table(rows) if is_bulk else _descriptor_table(rows))
    unverified = dict.fromkeys(row.name for row in report.rows if not row.is_verified)
    if unverified:
        console.print(f"bytes of its own, not compared: {', '.join(unverified)}", style="dim")
    if report.lent:
        console.print(_lent_table(report.lent))
    for skipped in report.skipped:
        verb = "WRONG" if skipped.is_wrong else "not measured"
        console.print(f"{verb}: {skipped.name}: {skipped.reason}", style="yellow", soft_wrap=True)
    for role, machine in (("A", report.manifest.driver), ("B", report.manifest.owner)):
        if machine is not None:
            console.print(f"{role}: {_write_machine(machine)}", style="dim", soft_wrap=True)


def _bulk_table(rows: list[Row]) -> Table:
    table = _new_table(rows)
    for name in ("GB/s", "range", "p50 us", "p99 us", "CPU s/GB A+B", "of limit"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        figures, rate = row.figures, row.figures.gb_per_s
        table.add_row(
            row.name,
            row.direction,
            row.used,
            f"{rate.median:.2f}",
            f"{rate.min:.2f}-{rate.max:.2f}",
            _write_us(figures.p50_us),
            _write_us(figures.p99_us),
            f"{figures.driver_cpu_s_per_gb:.2f}+{figures.owner_cpu_s_per_gb:.2f}",
            _write_share(row),
        )
    return table


def _descriptor_table(rows: list[Row]) -> Table:
    table = _new_table(rows)
    table.add_column("us per descriptor", justify="right", no_wrap=True)
    for row in rows:
        figure = f"{row.figures.us_per_descriptor:.3f}"
        table.add_row(row.name, row.direction, row.used, figure)
    return table


def _lent_table(rows: Sequence[Lent]) -> Table:
    title = "by reference: announced, in view of B, and A knows; no byte is copied"
    table = Table(title=title, title_justify="left", title_style="bold")
    table.box, table.pad_edge = None, False
    for name in ("", "by", "pages of"):
        table.add_column(name, overflow="ellipsis", no_wrap=True)
    for name in ("p50 us", "range", "p99 us", "CPU us A+B"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        latency, rounds = row.latency, row.latency.p50_us_of_rounds
        table.add_row(
            row.name,
            row.used,
            row.workload.name,
            _write_us(latency.p50_us),
            f"{_write_us(rounds.min)}-{_write_us(rounds.max)}",
            _write_us(latency.p99_us),
            f"{_write_us(latency.driver_cpu_us)}+{_write_us(latency.owner_cpu_us)}",
        )
    return table


def _new_table(rows: list[Row]) -> Table:
    table = Table(title=rows[0].workload.name, title_justify="left", title_style="bold")
    table.box, table.pad_edge = None, False
    for name in ("", "way", "by"):
        table.add_column(name, overflow="ellipsis", no_wrap=True)
    return table


def _write_share(row: Row) -> str:
    if row.kind == "limit":
        return "limit"
    return "-" if row.percent_of_limit is None else f"{row.percent_of_limit:.0f} %"


def _write_us(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.1f}"  # noqa: PLR2004


def _write_machine(machine: Machine) -> str:
    load = " ".join(f"{each:.2f}" for each in machine.load)
    return (
        f"{machine.host}, {machine.cpu}, {machine.num_cpus} cores, Linux {machine.kernel}, "
        f"load {load}"
    )
