"""What `bench_gpu.py` finds, and its tables for docs/gpu.md."""

from __future__ import annotations

import statistics
from itertools import groupby
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


class Spread(msgspec.Struct, frozen=True):
    """Of `num` values: the median, the lowest and the highest."""

    median: float
    low: float
    high: float
    num: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """One or more values."""
        return cls(statistics.median(values), min(values), max(values), len(values))


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One way to move `num_bytes`, and its seconds until they are in place.

    `what` is the request, equal for all that are compared; `by` what served it. `calling_s`: for
    how long the calling thread was not free.
    """

    part: str
    what: str
    by: str
    num_bytes: int
    seconds: Spread
    calling_s: Spread | None = None

    @property
    def gb_per_s(self) -> float:
        """Of bytes moved: a byte that is read and written counts once."""
        return self.num_bytes / self.seconds.median / 1e9


class BesideRow(msgspec.Struct, frozen=True, kw_only=True):
    """A matrix product while pages are copied on another stream of the same GPU.

    `slowdown` is that of each round over the product alone in the same round. `is_covered`: copies
    were in progress until the end of the product, in each round.
    """

    by: str
    matmul_s: Spread
    slowdown: Spread
    copied_gb_per_s: Spread
    is_covered: bool


class Failure(msgspec.Struct, frozen=True):
    """What did not run, and why."""

    what: str
    reason: str


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """One run."""

    command: str
    gpu: str
    versions: dict[str, str]
    rows: list[Row]
    beside: list[BesideRow]
    failures: list[Failure]


def format_tables(result: Result) -> str:
    """Markdown: one table for each part, requests to the right; then what did not run."""
    parts = groupby(result.rows, key=lambda row: row.part)
    blocks = [f"{result.gpu}; {', '.join(map(' '.join, result.versions.items()))}."]
    blocks += ["\n".join(_format_part(part, list(rows))) for part, rows in parts]
    if result.beside:
        blocks.append("\n".join(_format_beside(result.beside)))
    blocks += [f"Not measured: {each.what} ({each.reason})." for each in result.failures]
    return "\n\n".join(blocks) + "\n"


def _format_part(part: str, rows: list[Row]) -> Iterator[str]:
    """GB/s by request; in parentheses the range, then microseconds of the calling thread.

    A request of one page is a matter of latency: microseconds.
    """
    requests = list(dict.fromkeys(row.what for row in rows))
    found = {(row.by, row.what): row for row in rows}
    yield f"| {part}: GB/s (range); us of the calling thread | " + " | ".join(requests) + " |"
    yield "|---" * (len(requests) + 1) + "|"
    for by in dict.fromkeys(row.by for row in rows):
        cells = (found.get((by, what)) for what in requests)
        yield f"| {by} | " + " | ".join(map(_format_cell, cells)) + " |"


def _format_cell(row: Row | None) -> str:
    if row is None:
        return ""
    fast, slow = (row.num_bytes / each / 1e9 for each in (row.seconds.low, row.seconds.high))
    cell = f"{_short(row.gb_per_s)} ({_short(slow)} to {_short(fast)})"
    if row.what.startswith("1 page"):
        times = row.seconds
        cell = f"{times.median * 1e6:.1f} us ({times.low * 1e6:.1f} to {times.high * 1e6:.1f})"
    return cell if row.calling_s is None else f"{cell}; {row.calling_s.median * 1e6:.0f}"


def _format_beside(rows: list[BesideRow]) -> Iterator[str]:
    yield "| copies beside a matrix product | its slowdown (range) | ms | GB/s copied (range) |"
    yield "|---|---|---|---|"
    for row in rows:
        slowdown, copied = row.slowdown, row.copied_gb_per_s
        mark = "" if row.is_covered else " (ended before the product)"
        yield (
            f"| {row.by}{mark} | {slowdown.median:.3f} ({slowdown.low:.3f} to {slowdown.high:.3f}) "
            f"| {row.matmul_s.median * 1e3:.2f} "
            f"| {_short(copied.median)} ({_short(copied.low)} to {_short(copied.high)}) |"
        )


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
