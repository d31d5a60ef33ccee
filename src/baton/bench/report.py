"""What a measurement leaves: rows, what was skipped and why, and where all that was true.

`docs/bench-link.md` describes these fields: they are what `--json` prints.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from baton.bench.contender import Kind, LimitName
from baton.bench.figures import Figures, Latency, compute_figures, compute_latency
from baton.bench.machine import Machine
from baton.bench.workload import Direction, Shape

if TYPE_CHECKING:
    from collections.abc import Sequence

    from baton.bench.contender import Traits
    from baton.bench.pair import Taken
    from baton.bench.plan import Entrant
    from baton.bench.workload import Workload

SCHEMA: Final = "baton-bench-link/1"


class Measurement(msgspec.Struct, frozen=True):
    """What was moved."""

    name: str
    shape: Shape
    num_bytes: int
    num_descriptors: int


class Row(msgspec.Struct, frozen=True):
    """One contender, one workload, one direction.

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


class Lent(msgspec.Struct, frozen=True):
    """One contender, one workload, by reference: its pages came into view, and none was copied."""

    name: str
    used: str
    workload: Measurement
    latency: Latency
    is_verified: bool
    samples_s: tuple[tuple[float, ...], ...]


class Skipped(msgspec.Struct, frozen=True):
    """What was not measured, or not to the end. `is_wrong`: other bytes arrived than were sent."""

    kind: Kind
    name: str
    reason: str
    is_wrong: bool = False


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """Where and how it was measured. `load_after`: of the conductor's host, like a machine's."""

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
    lent: tuple[Lent, ...] = ()
    skipped: tuple[Skipped, ...]


class Ledger:
    """Collects rounds, row by row."""

    def __init__(self) -> None:
        self._rounds: dict[tuple[Entrant, Workload, Direction], list[Taken]] = {}
        self._traits: dict[Entrant, Traits] = {}
        self.skipped: dict[Entrant, Skipped] = {}

    def add(
        self, entrant: Entrant, traits: Traits, workload: Workload, way: Direction, *, taken: Taken
    ) -> None:
        """One row's round, after its bytes were verified, if they are the pools'."""
        self._traits[entrant] = traits
        self._rounds.setdefault((entrant, workload, way), []).append(taken)

    def skip(self, entrant: Entrant, reason: str, *, is_wrong: bool = False) -> None:
        """Not to be measured any more."""
        self.skipped[entrant] = Skipped(entrant.kind, entrant.name, reason, is_wrong)

    def make_rows(self, workloads: Sequence[Workload]) -> tuple[Row, ...]:
        """All rows so far: by workload, the fastest first."""
        figures = {
            key: compute_figures(key[1], rounds)
            for key, rounds in self._rounds.items()
            if key[2] != "lend"
        }
        limits = {
            (entrant.name, workload): found.gb_per_s.median
            for (entrant, workload, _), found in figures.items()
            if entrant.kind == "limit"
        }
        rows: list[Row] = []
        for (entrant, workload, direction), found in figures.items():
            traits = self._traits[entrant]
            limit = limits.get((traits.limit, workload))
            taken = self._rounds[entrant, workload, direction]
            rows.append(
                Row(
                    entrant.kind,
                    entrant.name,
                    traits.used,
                    _describe(workload),
                    direction,
                    found,
                    traits.limit,
                    None if limit is None else found.gb_per_s.median / limit * 100,
                    is_verified=traits.bytes_of == "the pools",
                    samples_s=tuple(each.samples_s for each in taken),
                )
            )
        places = {_describe(workload): place for place, workload in enumerate(workloads)}
        rows.sort(key=lambda row: (places[row.workload], -row.figures.gb_per_s.median))
        return tuple(rows)

    def make_lent(self, workloads: Sequence[Workload]) -> tuple[Lent, ...]:
        """What was measured by reference, by contender and workload."""
        return tuple(
            Lent(
                entrant.name,
                self._traits[entrant].used,
                _describe(workload),
                compute_latency(rounds),
                is_verified=True,
                samples_s=tuple(each.samples_s for each in rounds),
            )
            for (entrant, workload, direction), rounds in sorted(
                self._rounds.items(), key=lambda item: workloads.index(item[0][1])
            )
            if direction == "lend"
        )


def _describe(workload: Workload) -> Measurement:
    return Measurement(workload.name, workload.shape, workload.num_bytes, workload.num_descriptors)
