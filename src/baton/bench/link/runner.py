"""Runs a plan: every entry in each round, so that all of them see the same noise."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

from baton import __version__
from baton.bench.link.report import Manifest, Report, ReportBuilder
from baton.errors import ConfigError, TransferError
from baton.rig.pages import PAGE_BYTES
from baton.rig.pair import NodePair, WrongBytesError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from baton.bench.link.plan import LinkEntry, Plan
    from baton.bench.progress import StepProgress
    from baton.clock import Clock
    from baton.rig.backend import Role
    from baton.rig.machine import Machine
    from baton.rig.nodes import Nodes
    from baton.rig.pages import Workload

ONE_HOST: Final = "it is measured between two processes of one host only"


@dataclass(frozen=True, slots=True)
class LinkRunner:
    """Measures. `command`: the command line's arguments, for the manifest."""

    plan: Plan
    nodes: Nodes
    progress: StepProgress
    clock: Clock
    command: Sequence[str]

    def run(self) -> Report:
        """All rounds. Ctrl-C ends it early, with what was measured so far.

        Raises:
            ConfigError, AuthenticationError: a listener cannot be used at all.
        """
        self.nodes.check()
        builder = ReportBuilder()
        machines: dict[Role, Machine] = {}
        began, load_before = self.clock.unix_now(), os.getloadavg()
        is_partial = False
        try:
            for number in range(self.plan.effort.num_rounds):
                self._run_round(number, builder, machines)
        except KeyboardInterrupt:
            is_partial = True
        finally:
            self.progress.end()
        manifest = Manifest(
            baton=__version__,
            started_at=datetime.fromtimestamp(began, UTC).isoformat(timespec="seconds"),
            command=tuple(self.command),
            num_rounds=self.plan.effort.num_rounds,
            budget_s=self.plan.effort.samples.budget_s,
            pool_bytes=self.plan.num_pool_pages * PAGE_BYTES,
            driver=machines.get("driver"),
            owner=machines.get("owner"),
            load_before=load_before,
            load_after=os.getloadavg(),
        )
        return Report(
            is_partial=is_partial,
            manifest=manifest,
            rows=builder.make_rows(self.plan.workloads),
            by_reference=builder.make_reference_rows(self.plan.workloads),
            skipped=tuple(builder.skipped.values()),
        )

    def _run_round(
        self, number: int, builder: ReportBuilder, machines: dict[Role, Machine]
    ) -> None:
        for entry in self.plan.entries:
            if entry in builder.skipped:
                self.progress.advance(len(self.plan.workloads))
                continue
            if not self.nodes.is_local and entry.processes not in {"one", "two"}:
                builder.skip(entry, ONE_HOST)
                continue
            self.progress.begin(f"round {number + 1}: {entry.name}")
            try:
                with NodePair(entry, self.plan.num_pool_pages, self.nodes) as pair:
                    machines.update(pair.machines)
                    self._measure_all(entry, pair, builder)
            except WrongBytesError as exc:
                builder.skip(entry, str(exc), is_wrong=True)
            except (TransferError, ConfigError) as exc:
                builder.skip(entry, str(exc))

    def _measure_all(self, entry: LinkEntry, pair: NodePair, builder: ReportBuilder) -> None:
        for workload in self.plan.workloads:
            if _is_measured(entry, workload):
                for direction in pair.traits.directions:
                    if direction == "reference" and workload.shape == "descriptors":
                        continue  # pages are not copied: their size does not matter
                    self.progress.show(f"{workload.name}, {direction}")
                    if pair.traits.bytes_of == "the pools":
                        pair.verify(workload, direction)
                    timings = pair.measure(workload, direction, self.plan.effort.samples)
                    builder.add(entry, pair.traits, workload, direction, timings=timings)
            self.progress.advance(1)


def _is_measured(entry: LinkEntry, workload: Workload) -> bool:
    """Whether this entry's figure for the workload means anything."""
    return workload.shape in entry.shapes and workload.num_bytes >= entry.least_bytes
