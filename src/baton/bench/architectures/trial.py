"""One trial: a configuration's servers start, run every load, and stop.

A cell is one load of a trial: figures, CPU time, and the proof that KV moved.
"""

from __future__ import annotations

import asyncio
import os
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, TypeAlias

from baton.bench.architectures.peers.plan import PeerPlan
from baton.bench.architectures.peers.servers import open_peer_fleet
from baton.bench.architectures.plan import Level, Plan, Trial, prompt_seed
from baton.bench.architectures.results import Cell
from baton.bench.architectures.servers import InterruptedBenchError, open_fleet
from baton.bench.architectures.transfer_check import RequestIds
from baton.bench.architectures.usage import compare_usage, joules_between, read_usage
from baton.bench.files import NotSavedError, RunManifest
from baton.bench.load.client import BodyWriter, Client, Target, open_target
from baton.bench.load.job import Job, Report, arrival_seed, make_report
from baton.bench.load.records import Slo
from baton.bench.load.runner import LoadRunner, Outcome
from baton.bench.load.server_check import CheckedServer, check_server
from baton.bench.progress import CellProgress, RequestCounter
from baton.bench.workloads.synthetic import PromptWriter
from baton.errors import BatonError, ConfigError
from baton.launch.plan import LaunchPlan
from baton.launch.slots import GATEWAY

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator
    from pathlib import Path

    from baton.bench.architectures.folder import ResultFolder
    from baton.bench.architectures.servers import ServerContext, Servers
    from baton.bench.architectures.usage import CpuUse, EnergyMeter
    from baton.clock import Clock


@dataclass(frozen=True, slots=True)
class Bench:
    """What all cells share."""

    plan: Plan
    results: ResultFolder
    clock: Clock
    manifest: RunManifest
    meter: EnergyMeter
    progress: CellProgress
    interrupt: asyncio.Event


@dataclass(frozen=True, slots=True)
class Place:
    """A trial whose servers are up, and how their requests look."""

    trial: Trial
    fleet: Servers
    target: Target
    checked: CheckedServer


@dataclass(frozen=True, slots=True)
class Measured:
    """A cell, and its run with every request."""

    cell: Cell
    report: Report


async def measure_cell(bench: Bench, place: Place, level: Level) -> Measured:
    """Load the servers, then read their traces.

    Raises:
        NotSavedError: the run could not be saved.
    """
    counter = RequestCounter()
    trial, seed = place.trial, prompt_seed(bench.plan, place.trial.repetition, level)
    bench.progress.begin(f"{trial.configuration.name}, {level.words}", counter)
    load_before = os.getloadavg()
    names = RequestIds(f"{trial.configuration.name}-{trial.repetition}-{level.key}")
    job = Job(
        place.target,
        bench.plan.request_options,
        bench.plan.workload,
        seed,
        bench.plan.effort.plan_load(level),
        bench.plan.slo or Slo(),
    )
    async with Client(
        place.target, bench.clock, bench.plan.effort.request_timeout_s, names
    ) as client:
        await place.fleet.transfer_check.begin(client.session)
        energy_before = bench.meter.read()
        outcome, cpu = await _load(bench, place, client, job, counter=counter)
        energy_j = joules_between(energy_before, bench.meter.read())
        report = make_report(job, bench.manifest, place.checked, outcome)
        num_answered = sum(record.is_complete for record in report.records)
        evidence = await place.fleet.transfer_check.verify(
            client.session, names.given, num_answered
        )
    cell = Cell(
        configuration=trial.configuration.name,
        level=level.key,
        repetition=trial.repetition,
        run=bench.results.save_run(trial, level, report),
        figures=report.figures,
        client=report.client,
        cpu=cpu,
        num_tokens=_count_tokens(report),
        load=load_before,
        stages=evidence.stages,
        proof=evidence.proof if trial.configuration.is_disaggregated else None,
        ended_early=_reason_of_end(bench, place, outcome),
        energy_j=energy_j,
    )
    return Measured(cell, report)


async def _load(
    bench: Bench, place: Place, client: Client, job: Job, *, counter: RequestCounter
) -> tuple[Outcome, CpuUse]:
    prompts = PromptWriter(job.seed)
    processes = place.fleet.processes
    async with _stopped_by(bench.interrupt, place.fleet) as stop:
        runner = LoadRunner(
            client,
            BodyWriter(place.checked.style, prompts),
            job.plan,
            clock=bench.clock,
            interrupt=stop,
            observers=(counter,),
        )
        before = read_usage(processes.values(), bench.clock.now())
        outcome = await runner.run(job.workload, arrival_seed(job.seed))
        after = read_usage(processes.values(), bench.clock.now())
    return outcome, compare_usage(before, after, processes, GATEWAY)


@asynccontextmanager
async def _stopped_by(interrupt: asyncio.Event, fleet: Servers) -> AsyncGenerator[asyncio.Event]:
    """An event that is set on an interrupt, or when a server has died."""
    stop = asyncio.Event()

    async def watch() -> None:
        waits = [
            asyncio.create_task(interrupt.wait()),
            asyncio.create_task(fleet.until_ended()),
        ]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            stop.set()
        finally:
            for each in waits:
                each.cancel()

    watching = asyncio.create_task(watch())
    try:
        yield stop
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


def _reason_of_end(bench: Bench, place: Place, outcome: Outcome) -> str | None:
    if bench.interrupt.is_set():
        return "interrupted"
    if place.fleet.is_over:
        return "a server died"
    return outcome.stopped


def _count_tokens(report: Report) -> int:
    """Of every request that began to answer; a cut one counts what it received."""
    begun = [record for record in report.records if record.token_s]
    return sum(record.num_prompt_tokens + record.num_output_tokens for record in begun)


ServerPlan: TypeAlias = LaunchPlan | PeerPlan


def open_servers(
    plan: ServerPlan, context: ServerContext, log: Path
) -> AbstractAsyncContextManager[Servers]:
    """See `open_fleet` and `open_peer_fleet`."""
    match plan:
        case LaunchPlan():
            return open_fleet(plan, context, log)
        case PeerPlan():
            return open_peer_fleet(plan, context, log)


def cores_of(plan: ServerPlan) -> dict[str, tuple[int, ...]]:
    """Each worker's share of the machine's cores, by name."""
    match plan:
        case LaunchPlan():
            shares = {w.name: w.settings.get("worker.cpu_affinity", ()) for w in plan.workers}
            return {name: x if isinstance(x, tuple) else () for name, x in shares.items()}
        case PeerPlan():
            return {server.name: server.cores for server in plan.servers}


DEATH_NOTICE_S: Final = 2.0
"""How long the death of a server that no longer answers may take to be observed."""


@dataclass(slots=True)
class TrialOutcome:
    """The result of a trial. `failure`: why it is incomplete, by the configuration's own fault.

    `unsaved`: a run could not be saved, so the benchmark ends.
    """

    measured: list[Measured] = field(default_factory=list)
    warnings: tuple[str, ...] = ()
    failure: str | None = None
    unsaved: str | None = None


async def run_trial(
    bench: Bench, trial: Trial, launch: ServerPlan, context: ServerContext
) -> TrialOutcome:
    """Run one trial. A failing configuration is an outcome; what fails for all is raised.

    Raises:
        ConfigError: the workload does not fit, or another flag that no configuration can satisfy.
    """
    outcome = TrialOutcome()
    where = f"{trial.configuration.name}, repetition {trial.repetition}"
    bench.progress.begin(f"{where}: servers start")
    try:
        async with open_servers(launch, context, bench.results.log(trial)) as fleet:
            trouble = await _measure_or_explain(bench, trial, fleet, outcome)
            bench.progress.begin(f"{where}: servers stop")
        if trouble is not None:
            raise trouble
    except InterruptedBenchError:
        pass
    except ConfigError:
        raise
    except NotSavedError as exc:
        outcome.unsaved = str(exc)
    except BatonError as exc:
        outcome.failure = f"{exc} (more: {bench.results.log(trial)})"
    return outcome


async def _measure_or_explain(
    bench: Bench, trial: Trial, fleet: Servers, outcome: TrialOutcome
) -> BatonError | None:
    """The error, if any. Where a server died, leaving `fleet` raises the better one.

    Raises:
        NotSavedError: a run could not be saved.
    """
    try:
        await _measure(bench, trial, fleet, outcome)
    except NotSavedError:
        raise
    except BatonError as exc:
        with suppress(TimeoutError):
            await asyncio.wait_for(fleet.until_ended(), DEATH_NOTICE_S)
        return exc
    return None


async def _measure(bench: Bench, trial: Trial, fleet: Servers, outcome: TrialOutcome) -> None:
    bench.progress.begin(
        f"{trial.configuration.name}, repetition {trial.repetition}: first requests"
    )
    target = open_target(fleet.url, None)
    prompts = PromptWriter(f"{bench.plan.seed}/{trial.repetition}/probe")
    async with Client(target, bench.clock, bench.plan.effort.request_timeout_s) as client:
        checked = await check_server(
            client, bench.plan.workload, bench.plan.request_options, prompts
        )
    outcome.warnings = (*checked.warnings, *fleet.notes)
    place = Place(trial, fleet, target, checked)
    for level in trial.levels:
        if bench.interrupt.is_set() or fleet.is_over:
            return
        measured = await measure_cell(bench, place, level)
        outcome.measured.append(measured)
        bench.progress.finished(1, _describe(measured, trial, level.words))


def _describe(measured: Measured, trial: Trial, words: str) -> str:
    figures, cell = measured.cell.figures, measured.cell
    parts = [f"{trial.configuration.name}, {words}, repetition {trial.repetition}:"]
    parts.append(f"{figures.output_tokens_per_s:.1f} tokens/s out,")
    if figures.ttft_s is not None:
        parts.append(f"TTFT {figures.ttft_s.p50 * 1e3:,.0f} ms,")
    parts.append(f"{figures.num_complete} answers")
    if figures.num_failed:
        parts.append(f"· {figures.num_failed} FAILED")
    if cell.proof is not None:
        parts.append(f"· KV {'moved' if cell.proof.is_proved else 'NOT PROVED to have moved'}")
    if cell.ended_early is not None:
        parts.append(f"· ENDED EARLY: {cell.ended_early}")
    return " ".join(parts)
