"""A snapshot on standard output, for people and for files."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TextIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from baton.ops.top.tables import TopTable, describe_traffic, make_tables

if TYPE_CHECKING:
    from baton.ops.top.snapshot import FleetSnapshot

FILE_COLUMNS: Final = 160


def print_snapshot(snapshot: FleetSnapshot, file: TextIO) -> None:
    """One frame."""
    console = Console(file=file, highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = FILE_COLUMNS
    for line in describe_traffic(snapshot):
        console.print(Text(line), soft_wrap=True)
    for table in make_tables(snapshot):
        console.print()
        if table.rows:
            console.print(Text(table.title, style="bold"))
            console.print(_lay_out(table))
        else:
            console.print(Text.assemble((table.title, "bold"), f"  {table.note}"), soft_wrap=True)


def _lay_out(table: TopTable) -> Table:
    shown = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for column in table.columns:
        shown.add_column(column.title, justify="right" if column.is_figure else "left")
    for row in table.rows.values():
        shown.add_row(*map(Text, row))
    return shown
