"""Links by their nominal rates: what a data sheet promises, in one direction, for one worker.

Real transfers are slower; `baton bench link` measures. `source` is where a rate is from.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from baton.errors import UNDECODABLE, ConfigError

if TYPE_CHECKING:
    from pathlib import Path


class Link(msgspec.Struct, frozen=True):
    """One kind of link. `gb_per_s` in 1e9 bytes, one direction."""

    name: str
    gb_per_s: float
    source: str


def _ethernet(gbit: int, what: str = "Ethernet") -> Link:
    return Link(f"{gbit} Gbit/s {what}", gbit / 8, "line rate / 8")


_PCIE: Final = "PCI-SIG: GT/s x 128/130 / 8"
_NVLINK: Final = "NVIDIA: half of both directions"

NOMINAL_LINKS: Final = (
    _ethernet(10),
    _ethernet(25),
    _ethernet(100, "Ethernet or RoCE"),
    _ethernet(200, "RoCE or InfiniBand HDR"),
    _ethernet(400, "RoCE or InfiniBand NDR"),
    Link("PCIe 4.0 x16", 16 * 16 * 128 / 130 / 8, _PCIE),
    Link("PCIe 5.0 x16", 16 * 32 * 128 / 130 / 8, _PCIE),
    Link("CXL 2.0 x8", 8 * 32 * 128 / 130 / 8, "PCIe 5.0's rate"),
    Link("CXL 2.0 x16", 16 * 32 * 128 / 130 / 8, "PCIe 5.0's rate"),
    Link("shared memory, DDR5-4800 x8", 4.8 * 8 * 8 / 2, "JEDEC: 307 GB/s, read and write"),
    Link("NVLink 3 (A100)", 300.0, _NVLINK),
    Link("NVLink 4 (H100, H200)", 450.0, _NVLINK),
    Link("NVLink 5 (B200)", 900.0, _NVLINK),
)


def transfer_s(num_bytes: int, gb_per_s: float, latency_s: float = 0.0) -> float:
    """Seconds for so many bytes."""
    return latency_s + num_bytes / (gb_per_s * 1e9)


SCHEMA: Final = "baton-bench-link/1"
MAX_FILE_BYTES: Final = 256 << 20


class Rate(msgspec.Struct, frozen=True):
    """Of rounds, in GB/s."""

    median: float


class RowFigures(msgspec.Struct, frozen=True):
    """Figures of a row's samples."""

    gb_per_s: Rate
    p50_us: float


class MeasuredWorkload(msgspec.Struct, frozen=True):
    """What was moved."""

    name: str
    shape: str
    num_bytes: int


class Row(msgspec.Struct, frozen=True):
    """One backend, workload and direction."""

    kind: str
    name: str
    direction: str
    workload: MeasuredWorkload
    figures: RowFigures


class LinkReport(msgspec.Struct, frozen=True):
    """As much of the report as is needed here."""

    schema: str
    rows: tuple[Row, ...]


class MeasuredLink(msgspec.Struct, frozen=True):
    """One transport, one direction: its rate for scattered pages, and its shortest transfer."""

    name: str
    gb_per_s: float
    latency_s: float
    source: str


def read_links(path: Path) -> tuple[MeasuredLink, ...]:
    """Every transport that moved scattered pages in this report.

    Raises:
        ConfigError: unreadable, or something else.
    """
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ConfigError(f"{path}: more than {MAX_FILE_BYTES >> 20} MiB")
        report = msgspec.json.decode(path.read_bytes(), type=LinkReport)
    except OSError as exc:
        raise ConfigError(f"cannot read {path}: {exc.strerror}") from exc
    except UNDECODABLE as exc:
        raise ConfigError(f"{path} is no report of `baton bench link --json`: {exc}") from exc
    if report.schema != SCHEMA:
        raise ConfigError(f"{path} is {report.schema[:60]}, not {SCHEMA}")
    links = tuple(
        MeasuredLink(
            f"{row.name}, {row.direction}",
            row.figures.gb_per_s.median,
            _latency_s(report, row),
            f"measured: {row.workload.name}",
        )
        for row in report.rows
        if row.kind == "transport"
        and row.workload.shape == "scattered"
        and row.figures.gb_per_s.median > 0
    )
    if not links:
        raise ConfigError(f"{path}: no transport moved scattered pages in this report")
    return links


def _latency_s(report: LinkReport, bulk: Row) -> float:
    """What the smallest message took, less what its bytes take at the bulk rate."""
    smallest = min(
        (
            row
            for row in report.rows
            if (row.kind, row.name, row.direction) == (bulk.kind, bulk.name, bulk.direction)
            and row.workload.shape == "message"
        ),
        key=lambda row: row.workload.num_bytes,
        default=None,
    )
    if smallest is None:
        return 0.0
    moving_s = smallest.workload.num_bytes / (bulk.figures.gb_per_s.median * 1e9)
    return max(0.0, smallest.figures.p50_us / 1e6 - moving_s)
