"""All trials, one after another; results are saved after each."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, assert_never

import uvloop

from baton.bench.architectures.analysis import Samples, analyse
from baton.bench.architectures.plan import Configuration, Level, Plan, Trial, plan_trials
from baton.bench.architectures.results import ConfigurationInfo, Findings, LevelInfo, Trouble
from baton.bench.architectures.servers import ServerContext
from baton.bench.architectures.trial import Bench, ServerPlan, TrialOutcome, cores_of, run_trial
from baton.bench.architectures.usage import EnergyMeter
from baton.bench.files import NotSavedError, RunManifest, close_manifest
from baton.bench.load.job import interrupt_on_signals
from baton.bench.load.plan import Closed, Open, Replay
from baton.bench.progress import CellProgress
from baton.bench.workloads.requests import GivenBody

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from baton.bench.architectures.folder import ResultFolder
    from baton.clock import Clock

MOST_FAILURES: Final = 2
"""A configuration with this many failures is not started again."""


@dataclass(slots=True)
class State:
    """Results so far."""

    measured: list[Samples] = field(default_factory=list)
    troubles: list[Trouble] = field(default_factory=list)
    warnings: dict[str, None] = field(default_factory=dict)
    ended: str | None = None

    def has_failed_too_often(self, configuration: Configuration) -> bool:
        """Whether a configuration is not started again."""
        return (
            Counter(each.configuration for each in self.troubles)[configuration.name]
            >= MOST_FAILURES
        )

    def add(self, trial: Trial, outcome: TrialOutcome) -> None:
        """Add the result of a trial."""
        self.measured += [Samples(each.cell, each.report.records) for each in outcome.measured]
        self.warnings |= dict.fromkeys(outcome.warnings)
        if outcome.failure is not None:
            self.troubles.append(
                Trouble(trial.configuration.name, trial.repetition, outcome.failure)
            )


@dataclass(frozen=True, slots=True)
class BenchmarkJob:
    """A benchmark, ready to start. `environment`: of the servers; `notes` become warnings."""

    plan: Plan
    launches: Mapping[str, ServerPlan]
    results: ResultFolder
    environment: Mapping[str, str]
    manifest: RunManifest
    clock: Clock
    notes: tuple[str, ...] = ()


def run_benchmark(job: BenchmarkJob) -> Findings:
    """Run it, in an event loop of its own.

    Raises:
        ConfigError: no configuration can satisfy the flags.
        KeyboardInterrupt: a second signal; the folder has the results until then.
    """
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        try:
            return runner.run(_run(job))
        except asyncio.CancelledError as exc:
            raise KeyboardInterrupt from exc


async def _run(job: BenchmarkJob) -> Findings:
    plan, clock, state = job.plan, job.clock, State()
    trials = plan_trials(plan)
    num_cells = sum(len(trial.levels) for trial in trials)
    with interrupt_on_signals() as interrupt:
        async with CellProgress(num_cells, clock) as progress:
            bench = Bench(
                plan=plan,
                results=job.results,
                clock=clock,
                manifest=job.manifest,
                meter=EnergyMeter(),
                progress=progress,
                interrupt=interrupt,
            )
            progress.print_line(_describe_effort(plan, trials))
            for note in job.notes:
                progress.print_line(note)
            context = ServerContext(job.environment, clock, interrupt)
            await _run_trials(bench, job, context, state)
    if interrupt.is_set():
        state.ended = "interrupted"
    return describe(job, state)


def _describe_effort(plan: Plan, trials: tuple[Trial, ...]) -> str:
    num_cells = sum(len(trial.levels) for trial in trials)
    least_s = num_cells * (plan.effort.settle_s + plan.effort.duration_s)
    return (
        f"{len(trials)} trials ({len(plan.configurations)} configurations, "
        f"{plan.effort.num_repetitions} repetitions) of "
        f"{len(plan.levels)} loads: {least_s / 60:.0f} min of measuring, and starts and ends; seed "
        f"{plan.seed}"
    )


async def _run_trials(
    bench: Bench, job: BenchmarkJob, context: ServerContext, state: State
) -> None:
    for trial in plan_trials(job.plan):
        if bench.interrupt.is_set():
            return
        if state.has_failed_too_often(trial.configuration):
            bench.progress.finished(len(trial.levels), f"{trial.configuration.name}: given up")
            continue
        launch = job.launches[trial.configuration.name]
        outcome = await run_trial(bench, trial, launch, context)
        state.add(trial, outcome)
        if outcome.failure is not None:
            num_lost = len(trial.levels) - len(outcome.measured)
            bench.progress.finished(
                num_lost, f"{trial.configuration.name} FAILED: {outcome.failure}"
            )
        if outcome.unsaved is not None:
            state.ended = outcome.unsaved
            return
        try:
            # A crash of the machine loses one trial at most.
            job.results.save_findings(describe(job, state, is_whole=False))
        except NotSavedError as exc:
            state.ended = str(exc)
            return


def describe(job: BenchmarkJob, state: State, *, is_whole: bool = True) -> Findings:
    """All results so far. `is_whole` False: more trials follow."""
    plan = job.plan
    ended = state.ended if is_whole else "still running when this was written"
    return Findings(
        is_partial=ended is not None,
        ended=ended,
        manifest=close_manifest(job.manifest),
        engine=plan.engine,
        model=plan.model,
        num_workers=plan.num_workers,
        workload=plan.workload.name,
        workload_words=plan.workload.description,
        seed=plan.seed,
        num_repetitions=plan.effort.num_repetitions,
        duration_s=plan.effort.duration_s,
        settle_s=plan.effort.settle_s,
        order=tuple(
            f"{trial.repetition}: {trial.configuration.name}" for trial in plan_trials(plan)
        ),
        configurations=tuple(
            _describe_configuration(configuration, job.launches[configuration.name])
            for configuration in plan.configurations
        ),
        levels=tuple(_describe_level(level) for level in plan.levels),
        cells=tuple(each.cell for each in state.measured),
        troubles=tuple(state.troubles),
        warnings=(*job.notes, *state.warnings, *_crowding(job)),
        analysis=analyse(plan, state.measured, state.troubles),
    )


def _crowding(job: BenchmarkJob) -> Iterator[str]:
    """Warnings about shared cores and cached texts."""
    machine = job.manifest.machine
    if job.plan.num_workers > machine.num_cpus:
        yield (
            f"{job.plan.num_workers} workers share {machine.num_cpus} cores: none has one "
            "of its own"
        )
    plan = job.plan
    if isinstance(plan.workload.largest.prompt, GivenBody):
        yield (
            "the trace has texts of its own, the same in every cell: earlier loads of the trial "
            "have left them in the caches"
        )
    yield (
        "gateway and load generator run on the workers' cores, in every configuration alike: their "
        "CPU time is in the tables"
    )


def _describe_configuration(configuration: Configuration, launch: ServerPlan) -> ConfigurationInfo:
    counts = configuration.num_both, configuration.num_prefill, configuration.num_decode
    return ConfigurationInfo(configuration.name, *counts, cores_of(launch), configuration.peer)


def _describe_level(level: Level) -> LevelInfo:
    match level.load:
        case Closed(concurrency):
            return LevelInfo(level.key, level.words, concurrency, None)
        case Open(rate):
            return LevelInfo(level.key, level.words, None, rate)
        case Replay():
            return LevelInfo(level.key, level.words, None, None)
        case other:
            assert_never(other)
