"""Samples → rows, and what `--json` prints; docs/bench-link.md describes its fields. Pure."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import msgspec

from baton.rig.backend import BackendSpec, Kind, LimitName, Traits
from baton.rig.machine import Machine
from baton.rig.pages import Direction, Shape, Workload

if TYPE_CHECKING:
    from collections.abc import Sequence

    from baton.rig.pair import Timings


class Spread(msgspec.Struct, frozen=True):
    """Of the rounds' medians: the median, and the extremes."""

    median: float
    min: float
    max: float


class Figures(msgspec.Struct, frozen=True):
    """Figures of one row.

    `gb_per_s` in 1e9 bytes. `p50_us` and `p99_us` over all samples of all rounds.
    `*_cpu_s_per_gb` is user and system time of each process, busy polling included.
    `us_per_descriptor`: time of the whole transfer / number of descriptors.
    """

    gb_per_s: Spread
    p50_us: float
    p99_us: float
    driver_cpu_s_per_gb: float
    owner_cpu_s_per_gb: float
    us_per_descriptor: float


class Latency(msgspec.Struct, frozen=True):
    """Latency of transfers by reference, which move no bytes.

    `p50_us` and `p99_us` over all samples of all rounds; `*_cpu_us` for one transfer.
    """

    p50_us: float
    p50_us_of_rounds: Spread
    p99_us: float
    driver_cpu_us: float
    owner_cpu_us: float


def compute_figures(workload: Workload, rounds: Sequence[Timings]) -> Figures:
    """Figures of one row; at least one round."""
    samples = sorted(sample for timings in rounds for sample in timings.samples_s)
    num_gb = sum(timings.num_moves for timings in rounds) * workload.num_bytes / 1e9
    rates = [workload.num_bytes / 1e9 / statistics.median(timings.samples_s) for timings in rounds]
    p50_s = statistics.median(samples)
    return Figures(
        gb_per_s=Spread(statistics.median(rates), min(rates), max(rates)),
        p50_us=p50_s * 1e6,
        p99_us=find_percentile(samples, 0.99) * 1e6,
        driver_cpu_s_per_gb=sum(timings.driver_cpu_s for timings in rounds) / num_gb,
        owner_cpu_s_per_gb=sum(timings.owner_cpu_s for timings in rounds) / num_gb,
        us_per_descriptor=p50_s * 1e6 / workload.num_descriptors,
    )


def compute_latency(rounds: Sequence[Timings]) -> Latency:
    """Latency of one row; at least one round."""
    samples = sorted(sample for timings in rounds for sample in timings.samples_s)
    medians = [statistics.median(timings.samples_s) * 1e6 for timings in rounds]
    num_moves = sum(timings.num_moves for timings in rounds)
    return Latency(
        p50_us=statistics.median(samples) * 1e6,
        p50_us_of_rounds=Spread(statistics.median(medians), min(medians), max(medians)),
        p99_us=find_percentile(samples, 0.99) * 1e6,
        driver_cpu_us=sum(timings.driver_cpu_s for timings in rounds) * 1e6 / num_moves,
        owner_cpu_us=sum(timings.owner_cpu_s for timings in rounds) * 1e6 / num_moves,
    )


def find_percentile(ascending: Sequence[float], fraction: float) -> float:
    """The smallest sample that at least this fraction of them does not exceed."""
    return ascending[max(0, math.ceil(fraction * len(ascending)) - 1)]


SCHEMA: Final = "baton-bench-link/1"


class Measurement(msgspec.Struct, frozen=True):
    """What was moved."""

    name: str
    shape: Shape
    num_bytes: int
    num_descriptors: int


class Row(msgspec.Struct, frozen=True):
    """One backend, one workload, one direction.

    `used` carried the bytes. `percent_of_limit`: its median rate in percent of the limit's in this
    same run; None where the limit was not measured. `samples_s[round][i]`, in seconds.
    `is_verified`: the bytes that arrived were compared; not those of a program that sends its own.
    """

    kind: Kind
    name: str
    used: str
    workload: Measurement
    direction: Direction
    figures: Figures
    limit: LimitName
    percent_of_limit: float | None
    is_verified: bool
    samples_s: tuple[tuple[float, ...], ...]


class ReferenceRow(msgspec.Struct, frozen=True):
    """One backend, one workload, by reference: pages were mapped, and none was copied."""

    name: str
    used: str
    workload: Measurement
    latency: Latency
    is_verified: bool
    samples_s: tuple[tuple[float, ...], ...]


class Skipped(msgspec.Struct, frozen=True):
    """A backend that was not measured, or not completely. `is_wrong`: wrong bytes arrived."""

    kind: Kind
    name: str
    reason: str
    is_wrong: bool = False


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """Where and how it was measured. `load_*`: of the runner's host."""

    baton: str
    started_at: str
    command: tuple[str, ...]
    num_rounds: int
    budget_s: float
    pool_bytes: int
    driver: Machine | None
    owner: Machine | None
    load_before: tuple[float, float, float]
    load_after: tuple[float, float, float]


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Everything. `is_partial`: it was interrupted, and some rows lack rounds or are absent."""

    schema: str = SCHEMA
    is_partial: bool
    manifest: Manifest
    rows: tuple[Row, ...]
    by_reference: tuple[ReferenceRow, ...] = ()
    skipped: tuple[Skipped, ...]


class ReportBuilder:
    """Collects the rounds of each row."""

    def __init__(self) -> None:
        self._rounds: dict[tuple[LinkEntry, Workload, Direction], list[Timings]] = {}
        self._traits: dict[LinkEntry, Traits] = {}
        self.skipped: dict[LinkEntry, Skipped] = {}

    def add(
        self,
        entry: LinkEntry,
        traits: Traits,
        workload: Workload,
        direction: Direction,
        *,
        timings: Timings,
    ) -> None:
        """Add one round of one row."""
        self._traits[entry] = traits
        self._rounds.setdefault((entry, workload, direction), []).append(timings)

    def skip(self, entry: LinkEntry, reason: str, *, is_wrong: bool = False) -> None:
        """Measure this entry no more."""
        self.skipped[entry] = Skipped(entry.kind, entry.name, reason, is_wrong)

    def make_rows(self, workloads: Sequence[Workload]) -> tuple[Row, ...]:
        """All rows so far: by workload, the fastest first."""
        figures = {
            key: compute_figures(key[1], rounds)
            for key, rounds in self._rounds.items()
            if key[2] != "reference"
        }
        limits = {
            (entry.name, workload): found.gb_per_s.median
            for (entry, workload, _), found in figures.items()
            if entry.kind == "limit"
        }
        rows: list[Row] = []
        for (entry, workload, direction), found in figures.items():
            traits = self._traits[entry]
            limit = limits.get((traits.limit, workload))
            timings = self._rounds[entry, workload, direction]
            rows.append(
                Row(
                    entry.kind,
                    entry.name,
                    traits.used,
                    _describe(workload),
                    direction,
                    found,
                    traits.limit,
                    None if limit is None else found.gb_per_s.median / limit * 100,
                    is_verified=traits.bytes_of == "the pools",
                    samples_s=tuple(each.samples_s for each in timings),
                )
            )
        places = {_describe(workload): place for place, workload in enumerate(workloads)}
        rows.sort(key=lambda row: (places[row.workload], -row.figures.gb_per_s.median))
        return tuple(rows)

    def make_reference_rows(self, workloads: Sequence[Workload]) -> tuple[ReferenceRow, ...]:
        """All rows by reference, by workload."""
        return tuple(
            ReferenceRow(
                entry.name,
                self._traits[entry].used,
                _describe(workload),
                compute_latency(rounds),
                is_verified=True,
                samples_s=tuple(each.samples_s for each in rounds),
            )
            for (entry, workload, direction), rounds in sorted(
                self._rounds.items(), key=lambda item: workloads.index(item[0][1])
            )
            if direction == "reference"
        )


def _describe(workload: Workload) -> Measurement:
    return Measurement(workload.name, workload.shape, workload.num_bytes, workload.num_descriptors)


@dataclass(frozen=True, slots=True)
class LinkEntry(BackendSpec):
    """A backend, and the workloads that it is measured with."""

    shapes: tuple[Shape, ...] = ("message", "scattered", "descriptors")
    least_bytes: int = 0
