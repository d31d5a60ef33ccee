"""`baton bench serve`: from a job to its report; docs/bench-serve.md describes the fields."""

from __future__ import annotations

import asyncio
import signal
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import msgspec
import uvloop

from baton.bench.files import LineFile, RunManifest, close_manifest
from baton.bench.load.client import BodyWriter, Client, Target
from baton.bench.load.plan import Closed, LoadPlan, Open, Replay, describe_load
from baton.bench.load.records import Figures, Phase, Record, Slo, compute_figures
from baton.bench.load.runner import ClientLoad, LoadRunner, Outcome
from baton.bench.load.server_check import CheckedServer, RequestOptions, Server, check_server
from baton.bench.progress import RequestCounter, follow
from baton.bench.workloads.synthetic import PromptWriter

if TYPE_CHECKING:
    from collections.abc import Generator

    from baton.bench.workloads.requests import Workload
    from baton.clock import Clock

SCHEMA: Final = "baton-bench-serve/1"


class WorkloadInfo(msgspec.Struct, frozen=True):
    """The workload. The same name, lengths and seed are the same prompts."""

    name: str
    description: str
    seed: str


class LoadInfo(msgspec.Struct, frozen=True):
    """The load: a description, and the numbers that this kind of load has."""

    description: str
    concurrency: int | None
    requests_per_s: float | None
    max_in_flight: int | None
    num_warm_up: int
    num_requests: int | None
    duration_s: float | None


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """One run. `is_partial`: it was interrupted, or stopped early for the reason `stopped`.

    `records`: every request, the warm-up's too.
    """

    schema: str = SCHEMA
    is_partial: bool
    stopped: str | None
    manifest: RunManifest
    server: Server
    workload: WorkloadInfo
    load: LoadInfo
    figures: Figures
    client: ClientLoad
    warnings: tuple[str, ...]
    records: tuple[Record, ...]


@dataclass(frozen=True, slots=True)
class Job:
    """One run. `lines` receives records as they end, and is closed at the end."""

    target: Target
    request_options: RequestOptions
    workload: Workload
    seed: str
    plan: LoadPlan
    slo: Slo
    lines: LineFile | None = None


@dataclass(slots=True)
class RecordLines:
    """See `Observer`: writes each record to a file."""

    file: LineFile

    def sent(self, phase: Phase) -> None:
        """See `Observer`: only ended requests are written."""

    def ended(self, record: Record) -> None:
        """See `Observer`."""
        self.file.append(record)


def run_job(job: Job, manifest: RunManifest, clock: Clock) -> Report:
    """Run it in an event loop of its own.

    Raises:
        BatonError: it could not start; the message is the reason.
        KeyboardInterrupt: a second signal came, and there is no report.
    """
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        try:
            return runner.run(run_load(job, manifest, clock))
        except asyncio.CancelledError as exc:
            raise KeyboardInterrupt from exc


async def run_load(job: Job, manifest: RunManifest, clock: Clock) -> Report:
    """Run it. A first SIGINT or SIGTERM ends it early, with a report; a second one kills.

    Raises:
        BatonError: it could not start; the message is the reason.
    """
    prompts = PromptWriter(job.seed)
    counter = RequestCounter()
    async with AsyncExitStack() as stack:
        if job.lines is not None:
            stack.callback(job.lines.close)
        client = await stack.enter_async_context(
            Client(job.target, clock, job.plan.limits.request_timeout_s)
        )
        checked = await check_server(client, job.workload, job.request_options, prompts)
        interrupt = stack.enter_context(interrupt_on_signals())
        await stack.enter_async_context(follow(counter, job.plan))
        runner = LoadRunner(
            client,
            BodyWriter(checked.style, prompts),
            job.plan,
            clock=clock,
            interrupt=interrupt,
            observers=(counter,) if job.lines is None else (counter, RecordLines(job.lines)),
        )
        outcome = await runner.run(job.workload, arrival_seed(job.seed))
    return make_report(job, manifest, checked, outcome)


def make_report(
    job: Job, manifest: RunManifest, checked: CheckedServer, outcome: Outcome
) -> Report:
    """The report of a run."""
    load, limits = job.plan.load, job.plan.limits
    info = LoadInfo(
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
        server=checked.server,
        workload=WorkloadInfo(job.workload.name, job.workload.description, job.seed),
        load=info,
        figures=compute_figures(outcome.records, outcome.window_s, job.slo),
        client=outcome.client,
        warnings=checked.warnings,
        records=outcome.records,
    )


@contextmanager
def interrupt_on_signals() -> Generator[asyncio.Event]:
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


def arrival_seed(seed: str) -> int:
    """A number for arrival times, the same for equal seeds."""
    return int.from_bytes(msgspec.json.encode(seed)[:64], "big")
