"""Which backends and workloads are measured, and the run: every entry in each round.

So all of them see the same noise.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

from baton import __version__
from baton.bench.link.backends import REUSED
from baton.bench.link.report import LinkEntry, Manifest, Report, ReportBuilder
from baton.errors import ConfigError, PeerLostError, TransferError, UnknownPluginError
from baton.rig.backend import MAX_POOL_PAGES, Role
from baton.rig.pages import PAGE_BYTES, TINY_PAGE_BYTES, Shape, Workload, format_size, plan_pool
from baton.rig.pair import NodePair, SampleBudget, WrongBytesError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from baton.bench.progress import StepProgress
    from baton.clock import Clock
    from baton.rig.machine import Machine
    from baton.rig.nodes import Nodes

DEFAULT_SIZES: Final = (32 << 10, 1 << 20, 16 << 20, 100 * 10**6)
QUICK_SIZES: Final = (32 << 10, 1 << 20)


BULK: Final[tuple[Shape, ...]] = ("message", "scattered")
"""A Python loop's cost of a descriptor is no property of the machine."""
STREAM_BYTES: Final = 1_000_000
"""iperf3 has no messages: the rate of its stream is compared with large ones only."""

LIMITS: Final = (
    LinkEntry("limit", "memcpy", {}, "one", BULK),
    LinkEntry("limit", "tuned socket", {}, shapes=BULK),
)
PEERS: Final = (
    LinkEntry("peer", "NIXL", {}),
    LinkEntry("peer", "NIXL shm", {}),
    LinkEntry("peer", "NIXL reused", {}),
    LinkEntry("peer", "NIXL (TCP)", {}),
    LinkEntry("peer", "Mooncake", {}, "two contained"),
    LinkEntry("peer", "gloo", {}, "two on one host"),
    LinkEntry("peer", "socket", {}),
    LinkEntry("peer", "iperf3", {}, "two on one host", ("message",), STREAM_BYTES),
    LinkEntry("peer", "iperf3 -P 2", {}, "two on one host", ("message",), STREAM_BYTES),
)


@dataclass(frozen=True, slots=True)
class Effort:
    """How long is measured: `num_rounds` with new processes, `samples` of each row in a round."""

    num_rounds: int
    samples: SampleBudget
    num_scattered_pages: int
    least_pool_pages: int


THOROUGH: Final = Effort(3, SampleBudget(0.4, 5, 2000), 8192, 16_384)
QUICK: Final = Effort(1, SampleBudget(0.05, 3, 200), 1024, 2048)


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that is measured. Each round runs all entries."""

    entries: tuple[LinkEntry, ...]
    workloads: tuple[Workload, ...]
    effort: Effort

    @property
    def num_pool_pages(self) -> int:
        """Pages of either side's pool."""
        return plan_pool(self.workloads, self.effort.least_pool_pages)


def choose_transports(
    asked: Sequence[str], installed: Sequence[str], options: Mapping[str, Mapping[str, object]]
) -> tuple[LinkEntry, ...]:
    """The transports of the command line, or all that are installed.

    Raises:
        UnknownPluginError: one of the command line is not installed.
    """
    for kind in asked:
        if kind not in installed:
            raise UnknownPluginError("baton.transports", kind, tuple(installed))
    return tuple(
        LinkEntry("transport", kind, options.get(kind, {}))
        for kind in dict.fromkeys(asked or installed)
    )


def add_reused(transports: Sequence[LinkEntry]) -> tuple[LinkEntry, ...]:
    """Each of them again, with transfers that were made before: of messages only."""
    shapes: tuple[Shape, ...] = ("message",)
    return tuple(replace(each, name=each.name + REUSED, shapes=shapes) for each in transports)


def make_workloads(sizes: Sequence[int], effort: Effort) -> tuple[Workload, ...]:
    """A message of each size, scattered pages, and descriptors alone.

    Raises:
        ConfigError: these sizes need a larger pool than a node allocates.
    """
    num_pages = effort.num_scattered_pages
    messages = [Workload("message", size) for size in sorted(set(sizes))]
    workloads = (
        *messages,
        Workload("scattered", num_pages * PAGE_BYTES),
        Workload("descriptors", num_pages * TINY_PAGE_BYTES),
    )
    if plan_pool(workloads, effort.least_pool_pages) > MAX_POOL_PAGES:
        largest = format_size(MAX_POOL_PAGES * PAGE_BYTES // 2)
        raise ConfigError(f"--sizes: messages of more than {largest} cannot be measured")
    return workloads


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
                    try:
                        if pair.traits.bytes_of == "the pools":
                            pair.verify(workload, direction)
                        timings = pair.measure(workload, direction, self.plan.effort.samples)
                    except PeerLostError as exc:
                        raise PeerLostError(
                            f"{workload.name}, {direction}: {exc}; on a slow link measure less "
                            "(--quick, smaller --sizes)"
                        ) from exc
                    builder.add(entry, pair.traits, workload, direction, timings=timings)
            self.progress.advance(1)


def _is_measured(entry: LinkEntry, workload: Workload) -> bool:
    """Whether this entry's figure for the workload means anything."""
    return workload.shape in entry.shapes and workload.num_bytes >= entry.least_bytes
