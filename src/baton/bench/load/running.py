"""`baton bench serve`, from what was asked for to a report."""

from __future__ import annotations

import asyncio
import signal
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import uvloop

from baton.bench.load.bodies import BodyWriter
from baton.bench.load.client import Client
from baton.bench.load.conducting import Conductor
from baton.bench.load.figures import compute_figures
from baton.bench.load.plan import Closed, Open, Replay, describe_load
from baton.bench.load.progress import Tally, follow
from baton.bench.load.report import LoadSaid, Report, WorkloadSaid
from baton.bench.load.surveying import survey
from baton.bench.manifest import close_manifest
from baton.bench.workloads.prompts import PromptWriter

if TYPE_CHECKING:
    from collections.abc import Generator

    from baton.bench.load.conducting import Outcome
    from baton.bench.load.figures import Slo
    from baton.bench.load.plan import LoadPlan
    from baton.bench.load.record import Phase, Record
    from baton.bench.load.surveying import Approach, Surveyed
    from baton.bench.load.target import Target
    from baton.bench.manifest import RunManifest
    from baton.bench.saving import LineFile
    from baton.bench.workloads.asking import Workload
    from baton.clock import Clock


@dataclass(frozen=True, slots=True)
class Job:
    """Everything that one run is. `lines` gets records as they come, and is closed at the end."""

    target: Target
    approach: Approach
    workload: Workload
    seed: str
    plan: LoadPlan
    slo: Slo
    lines: LineFile | None = None


@dataclass(slots=True)
class RecordLines:
    """See `Observer`: keeps each record in a file."""

    file: LineFile

    def sent(self, phase: Phase) -> None:
        """See `Observer`: only ends are kept."""

    def ended(self, record: Record) -> None:
        """See `Observer`."""
        self.file.append(record)


def run_job(job: Job, manifest: RunManifest, clock: Clock) -> Report:
    """Run it, in an event loop of its own.

    Raises:
        BatonError: it could not begin; the message says why.
        KeyboardInterrupt: a second signal came, and there is no report.
    """
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        try:
            return runner.run(run_load(job, manifest, clock))
        except asyncio.CancelledError as exc:
            raise KeyboardInterrupt from exc


async def run_load(job: Job, manifest: RunManifest, clock: Clock) -> Report:
    """Run it. A first SIGINT or SIGTERM ends it early, with what there is; a second one kills.

    Raises:
        BatonError: it could not begin; the message says why.
    """
    prompts = PromptWriter(job.seed)
    tally = Tally()
    async with AsyncExitStack() as stack:
        if job.lines is not None:
            stack.callback(job.lines.close)
        client = await stack.enter_async_context(
            Client(job.target, clock, job.plan.limits.request_timeout_s)
        )
        surveyed = await survey(client, job.workload, job.approach, prompts)
        interrupt = stack.enter_context(interrupted_by_signals())
        await stack.enter_async_context(follow(tally, job.plan))
        conductor = Conductor(
            client,
            BodyWriter(surveyed.manner, prompts),
            job.plan,
            clock=clock,
            interrupt=interrupt,
            observers=(tally,) if job.lines is None else (tally, RecordLines(job.lines)),
        )
        outcome = await conductor.conduct(job.workload, _number(job.seed))
    return make_report(job, manifest, surveyed, outcome)


def make_report(job: Job, manifest: RunManifest, surveyed: Surveyed, outcome: Outcome) -> Report:
    """What a run leaves."""
    load, limits = job.plan.load, job.plan.limits
    said = LoadSaid(
        describe_load(load),
        load.concurrency if isinstance(load, Closed) else None,
        load.requests_per_s if isinstance(load, Open) else None,
        load.max_in_flight if isinstance(load, Open | Replay) else None,
        job.plan.num_warm_up,
        limits.num_requests,
        limits.duration_s,
    )
    return Report(
        is_partial=outcome.is_partial,
        stopped=outcome.stopped,
        manifest=close_manifest(manifest),
        server=surveyed.server,
        workload=WorkloadSaid(job.workload.name, job.workload.description, job.seed),
        load=said,
        figures=compute_figures(outcome.records, outcome.window_s, job.slo),
        client=outcome.client,
        warnings=surveyed.warnings,
        records=outcome.records,
    )


@contextmanager
def interrupted_by_signals() -> Generator[asyncio.Event]:
    """An event that the first SIGINT or SIGTERM sets; a second one cancels the running task."""
    interrupt = asyncio.Event()
    loop, task = asyncio.get_running_loop(), asyncio.current_task()

    def arrive() -> None:
        if interrupt.is_set() and task is not None:
            task.cancel()
        interrupt.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, arrive)
    try:
        yield interrupt
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


def _number(seed: str) -> int:
    """A seed for arrivals, from the seed's text."""
    return int.from_bytes(msgspec.json.encode(seed)[:64], "big")
