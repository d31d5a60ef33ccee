"""Carries out a plan: round by round, every entrant in each, so that all see the same weather."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

from baton import __version__
from baton.bench.pair import Pair, WrongBytesError
from baton.bench.report import Ledger, Manifest, Report
from baton.bench.workload import PAGE_BYTES
from baton.errors import ConfigError, TransferError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from baton.bench.contender import Role
    from baton.bench.ends import Ends
    from baton.bench.machine import Machine
    from baton.bench.plan import Entrant, Plan
    from baton.bench.progress import Progress
    from baton.bench.workload import Workload
    from baton.clock import Clock

ONE_HOST: Final = "it is measured between two processes of one host only"


@dataclass(frozen=True, slots=True)
class Conductor:
    """Measures. `command` is what the person typed, for the manifest."""

    plan: Plan
    ends: Ends
    progress: Progress
    clock: Clock
    command: Sequence[str]

    def conduct(self) -> Report:
        """All rounds. Ctrl-C ends it early, with what was measured so far.

        Raises:
            ConfigError, AuthenticationError: a listening end cannot be used at all.
        """
        self.ends.check()
        ledger = Ledger()
        machines: dict[Role, Machine] = {}
        began, load_before = self.clock.unix_now(), os.getloadavg()
        is_partial = False
        try:
            for number in range(self.plan.effort.num_rounds):
                self._conduct_round(number, ledger, machines)
        except KeyboardInterrupt:
            is_partial = True
        finally:
            self.progress.end()
        manifest = Manifest(
            baton=__version__,
            started_at=datetime.fromtimestamp(began, UTC).isoformat(timespec="seconds"),
            command=tuple(self.command),
            num_rounds=self.plan.effort.num_rounds,
            budget_s=self.plan.effort.budget_s,
            pool_bytes=self.plan.num_pool_pages * PAGE_BYTES,
            driver=machines.get("driver"),
            owner=machines.get("owner"),
            load_before=load_before,
            load_after=os.getloadavg(),
        )
        return Report(
            is_partial=is_partial,
            manifest=manifest,
            rows=ledger.make_rows(self.plan.workloads),
            lent=ledger.make_lent(self.plan.workloads),
            skipped=tuple(ledger.skipped.values()),
        )

    def _conduct_round(self, number: int, ledger: Ledger, machines: dict[Role, Machine]) -> None:
        for entrant in self.plan.entrants:
            if entrant in ledger.skipped:
                self.progress.advance(len(self.plan.workloads))
                continue
            if not self.ends.is_local and entrant.processes not in {"one", "two"}:
                ledger.skip(entrant, ONE_HOST)
                continue
            self.progress.begin(f"round {number + 1}: {entrant.name}")
            try:
                with Pair(entrant, self.plan.num_pool_pages, self.ends) as pair:
                    machines.update(pair.machines)
                    self._measure_all(entrant, pair, ledger)
            except WrongBytesError as exc:
                ledger.skip(entrant, str(exc), is_wrong=True)
            except (TransferError, ConfigError) as exc:
                ledger.skip(entrant, str(exc))

    def _measure_all(self, entrant: Entrant, pair: Pair, ledger: Ledger) -> None:
        for workload in self.plan.workloads:
            if _is_measured(entrant, workload):
                for direction in pair.traits.directions:
                    if direction == "lend" and workload.shape == "descriptors":
                        continue  # the size of a page that is not copied does not matter
                    self.progress.show(f"{workload.name}, {direction}")
                    if pair.traits.bytes_of == "the pools":
                        pair.verify(workload, direction)
                    taken = pair.measure(workload, direction, self.plan.effort)
                    ledger.add(entrant, pair.traits, workload, direction, taken=taken)
            self.progress.advance(1)


def _is_measured(entrant: Entrant, workload: Workload) -> bool:
    """Whether this contender's figure for it would say something."""
    return workload.shape in entrant.shapes and workload.num_bytes >= entrant.least_bytes
