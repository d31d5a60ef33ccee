"""One arm under one load, once: from servers that are up to figures, CPU time and proof."""

from __future__ import annotations

import asyncio
import os
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from baton.bench.architectures.energy import joules_between
from baton.bench.architectures.plan import prompt_seed
from baton.bench.architectures.results import Cell
from baton.bench.architectures.tracing import Names
from baton.bench.architectures.usage import compare_usage, read_usage
from baton.bench.load.bodies import BodyWriter
from baton.bench.load.client import Client
from baton.bench.load.conducting import Conductor
from baton.bench.load.figures import Slo
from baton.bench.load.progress import Tally
from baton.bench.load.running import Job, make_report
from baton.bench.workloads.prompts import PromptWriter
from baton.launch.supervisor import GATEWAY

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from baton.bench.architectures.energy import EnergyMeter
    from baton.bench.architectures.fleet import Servers
    from baton.bench.architectures.keeping import Keep
    from baton.bench.architectures.plan import Level, Plan, Turn
    from baton.bench.architectures.progress import BenchProgress
    from baton.bench.architectures.usage import CpuUse
    from baton.bench.load.conducting import Outcome
    from baton.bench.load.report import Report
    from baton.bench.load.surveying import Surveyed
    from baton.bench.load.target import Target
    from baton.bench.manifest import RunManifest
    from baton.clock import Clock


@dataclass(frozen=True, slots=True)
class Bench:
    """What all cells share."""

    plan: Plan
    keep: Keep
    clock: Clock
    manifest: RunManifest
    meter: EnergyMeter
    progress: BenchProgress
    interrupt: asyncio.Event


@dataclass(frozen=True, slots=True)
class Place:
    """A turn whose servers are up, and how they are asked."""

    turn: Turn
    fleet: Servers
    target: Target
    surveyed: Surveyed


@dataclass(frozen=True, slots=True)
class Measured:
    """A cell, and its run with every request."""

    cell: Cell
    report: Report


async def measure_cell(bench: Bench, place: Place, level: Level) -> Measured:
    """Load the servers, then ask them what they saw.

    Raises:
        NotSavedError: the run could not be kept.
    """
    tally = Tally()
    turn, seed = place.turn, prompt_seed(bench.plan, place.turn.repetition, level)
    bench.progress.begin(f"{turn.arm.name}, {level.words}", tally)
    load_before = os.getloadavg()
    names = Names(f"{turn.arm.name}-{turn.repetition}-{level.key}")
    job = Job(
        place.target,
        bench.plan.approach,
        bench.plan.workload,
        seed,
        bench.plan.effort.plan_load(level),
        bench.plan.slo or Slo(),
    )
    async with Client(
        place.target, bench.clock, bench.plan.effort.request_timeout_s, names
    ) as client:
        await place.fleet.witness.begin(client.session)
        energy_before = bench.meter.read()
        outcome, cpu = await _load(bench, place, client, job, tally=tally)
        energy_j = joules_between(energy_before, bench.meter.read())
        report = make_report(job, bench.manifest, place.surveyed, outcome)
        num_answered = sum(record.is_complete for record in report.records)
        said = await place.fleet.witness.testify(client.session, names.given, num_answered)
    cell = Cell(
        arm=turn.arm.name,
        level=level.key,
        repetition=turn.repetition,
        run=bench.keep.save_run(turn, level, report),
        figures=report.figures,
        client=report.client,
        cpu=cpu,
        num_tokens=_count_tokens(report),
        load=load_before,
        stages=said.stages,
        proof=said.proof if turn.arm.is_disaggregated else None,
        ended_early=_why_early(bench, place, outcome),
        energy_j=energy_j,
    )
    return Measured(cell, report)


async def _load(
    bench: Bench, place: Place, client: Client, job: Job, *, tally: Tally
) -> tuple[Outcome, CpuUse]:
    prompts = PromptWriter(job.seed)
    processes = place.fleet.processes
    async with _stopped_by(bench.interrupt, place.fleet) as stop:
        conductor = Conductor(
            client,
            BodyWriter(place.surveyed.manner, prompts),
            job.plan,
            clock=bench.clock,
            interrupt=stop,
            observers=(tally,),
        )
        before = read_usage(processes.values(), bench.clock.now())
        outcome = await conductor.conduct(job.workload, _number(job.seed))
        after = read_usage(processes.values(), bench.clock.now())
    return outcome, compare_usage(before, after, processes, GATEWAY)


@asynccontextmanager
async def _stopped_by(interrupt: asyncio.Event, fleet: Servers) -> AsyncGenerator[asyncio.Event]:
    """An event that is set when somebody wants the end, or a server has died."""
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


def _why_early(bench: Bench, place: Place, outcome: Outcome) -> str | None:
    if bench.interrupt.is_set():
        return "interrupted"
    if place.fleet.is_over:
        return "a server died"
    return outcome.stopped


def _count_tokens(report: Report) -> int:
    """Of every request that began to answer; what was cut counts as far as it came."""
    begun = [record for record in report.records if record.token_s]
    return sum(record.num_prompt_tokens + record.num_output_tokens for record in begun)


def _number(seed: str) -> int:
    """A seed for arrivals, the same in every arm."""
    return int.from_bytes(msgspec.json.encode(seed)[:64], "big")
