"""A report of sizes for a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TextIO

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from baton.planner.sizing import SizeReport

WIDTH: Final = 100
STEP: Final = 1024


def print_sizes(report: SizeReport, file: TextIO) -> None:
    """Sizes, then times, then notes."""
    console = Console(file=file, highlight=False, markup=False, emoji=False, width=WIDTH)
    sizes = report.sizes
    console.print(f"{report.model} ({report.family}), KV in {sizes.kv_format}", style="bold")
    for kind, num in sizes.layers.items():
        console.print(f"  {num} layers: {kind}")
    table = Table(box=None, pad_edge=False, show_header=sizes.num_shards > 1)
    table.add_column("")
    table.add_column("all workers", justify="right")
    if sizes.num_shards > 1:
        table.add_column(f"one of {sizes.num_shards}", justify="right")
    rows = [("one token", sizes.token_bytes, sizes.rank_token_bytes)]
    if sizes.growing_token_bytes != sizes.token_bytes:
        growing = sizes.growing_token_bytes
        rows.append(("one token, windows full", growing, growing // sizes.num_shards))
    if sizes.state_bytes:
        rows.append(("states", sizes.state_bytes, sizes.state_bytes // sizes.num_shards))
    where = f"{sizes.num_tokens:,} tokens, {sizes.num_blocks:,} blocks of {sizes.block_size}"
    rows.append((f"{where}: all kept", sizes.kept_bytes, sizes.rank_kept_bytes))
    if sizes.needed_bytes != sizes.kept_bytes:
        rows.append((f"{where}: needed", sizes.needed_bytes, sizes.rank_needed_bytes))
    for name, total, rank in rows:
        cells = [write_bytes(total)] + ([write_bytes(rank)] if sizes.num_shards > 1 else [])
        table.add_row(name, *cells)
    console.print(table)
    console.print(_moves(report))
    for note in report.notes:
        console.print(f"note: {note}", style="yellow", soft_wrap=True)


def write_bytes(num_bytes: float) -> str:
    """In binary units, and exactly."""
    value, unit = float(num_bytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB", "PiB"):
        if value < STEP:
            break
        value, unit = value / STEP, larger
    exact = f" ({num_bytes:,.0f} B)" if unit != "B" else ""
    return f"{value:,.4g} {unit}{exact}"


def write_seconds(seconds: float) -> str:
    """In the unit that fits."""
    if seconds >= 1:
        return f"{seconds:,.2f} s"
    return f"{seconds * 1e3:,.2f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:,.0f} us"  # noqa: PLR2004


def _moves(report: SizeReport) -> Table:
    workers = "" if report.sizes.num_shards == 1 else ", each worker its own link"
    title = f"time to move what is needed{workers}: nominal rates are lower bounds"
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    table.add_column("link", no_wrap=True, min_width=33)
    for name in ("GB/s", "time"):
        table.add_column(name, justify="right", no_wrap=True, min_width=10)
    table.add_column("rate from", overflow="ellipsis", no_wrap=True)
    for move in report.moves:
        style = "green" if move.is_measured else ""
        table.add_row(
            move.link,
            f"{move.gb_per_s:,.1f}",
            write_seconds(move.seconds),
            move.source,
            style=style,
        )
    return table
