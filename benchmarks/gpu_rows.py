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
    calling_s: Spread

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


class Result(msgspec.Struct, kw_only=True):
    """One run, as far as it is. `system_calls_us`: of one send and one recv, which differ a lot."""

    command: str
    gpu: str
    versions: dict[str, str]
    system_calls_us: float = 0.0
    rows: list[Row] = []
    beside: list[BesideRow] = []
    failures: list[Failure] = []

    def add(self, found: Sequence[Row | BesideRow | Failure]) -> None:
        """What one more part has given."""
        for each in found:
            match each:
                case Row():
                    self.rows.append(each)
                case BesideRow():
                    self.beside.append(each)
                case Failure():
                    self.failures.append(each)


def encode_result(result: Result) -> bytes:
    """JSON with a line for each row."""
    fields = []
    for name, value in msgspec.to_builtins(result).items():
        text = msgspec.json.encode(value).decode()
        if isinstance(value, list):
            rows = ",\n  ".join(msgspec.json.encode(each).decode() for each in value)
            text = f"[\n  {rows}\n ]" if rows else "[]"
        fields.append(f' "{name}": {text}')
    return ("{\n" + ",\n".join(fields) + "\n}\n").encode()


def format_tables(result: Result) -> str:
    """Markdown: a table for each part, medians and ± half the range; then what did not run."""
    parts = groupby(result.rows, key=lambda row: row.part)
    about = [result.gpu, ", ".join(map(" ".join, result.versions.items()))]
    if result.system_calls_us:
        about.append(f"a send and a recv take {result.system_calls_us:.1f} us")
    blocks = [f"{'; '.join(about)}."]
    blocks += ["\n".join(_format_part(part, list(rows))) for part, rows in parts]
    if result.beside:
        blocks.append("\n".join(_format_beside(result.beside)))
    blocks += [f"Not measured: {each.what} ({each.reason})." for each in result.failures]
    return "\n\n".join(blocks) + "\n"


def _format_part(part: str, rows: list[Row]) -> Iterator[str]:
    """By request: GB/s, or microseconds of a request of one page; microseconds of the call."""
    requests = list(dict.fromkeys(row.what for row in rows))
    found = {(row.by, row.what): row for row in rows}
    yield f"| {part}: GB/s; us of the calling thread | " + " | ".join(requests) + " |"
    yield "|---" * (len(requests) + 1) + "|"
    for by in dict.fromkeys(row.by for row in rows):
        cells = (found.get((by, what)) for what in requests)
        yield f"| {by} | " + " | ".join(map(_format_cell, cells)) + " |"


def _format_cell(row: Row | None) -> str:
    if row is None:
        return ""
    times = row.seconds
    is_latency = row.what.startswith("1 page")
    value = f"{times.median * 1e6:.0f} us" if is_latency else _short(row.gb_per_s)
    return f"{value} {_format_range(times)}; {row.calling_s.median * 1e6:.0f}"


def _format_range(spread: Spread) -> str:
    """Half of the range, of the median."""
    return f"±{(spread.high - spread.low) / 2 / spread.median:.0%}" if spread.median else ""


def _format_beside(rows: list[BesideRow]) -> Iterator[str]:
    yield "| copies beside a matrix product | its slowdown | ms | GB/s copied |"
    yield "|---|---|---|---|"
    for row in rows:
        slowdown, copied = row.slowdown, row.copied_gb_per_s
        mark = "" if row.is_covered else " (ended before the product)"
        yield (
            f"| {row.by}{mark} | {slowdown.median:.3f} {_format_range(slowdown)} "
            f"| {row.matmul_s.median * 1e3:.3g} "
            f"| {_short(copied.median)} {_format_range(copied)} |"
        )


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
