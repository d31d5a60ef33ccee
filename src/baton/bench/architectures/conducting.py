"""All turns, one after another; what is known is kept after each."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, assert_never

import uvloop

from baton.bench.architectures.analysing import Samples, analyse
from baton.bench.architectures.cells import Bench
from baton.bench.architectures.energy import EnergyMeter
from baton.bench.architectures.fleet import Surroundings
from baton.bench.architectures.opening import cores_of
from baton.bench.architectures.plan import plan_turns
from baton.bench.architectures.progress import BenchProgress
from baton.bench.architectures.results import ArmSaid, Findings, LevelSaid, Trouble
from baton.bench.architectures.turning import take_turn
from baton.bench.load.plan import Closed, Open, Replay
from baton.bench.load.running import interrupted_by_signals
from baton.bench.manifest import close_manifest
from baton.bench.saving import NotSavedError
from baton.bench.workloads.asking import GivenBody

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from baton.bench.architectures.arms import Arm
    from baton.bench.architectures.keeping import Keep
    from baton.bench.architectures.opening import ArmPlan
    from baton.bench.architectures.plan import Level, Plan, Turn
    from baton.bench.architectures.turning import TurnOutcome
    from baton.bench.manifest import RunManifest
    from baton.clock import Clock

MOST_FAILURES: Final = 2
"""An arm that failed so often is not started again."""


@dataclass(slots=True)
class State:
    """What is known so far."""

    measured: list[Samples] = field(default_factory=list)
    troubles: list[Trouble] = field(default_factory=list)
    warnings: dict[str, None] = field(default_factory=dict)
    ended: str | None = None

    def is_given_up(self, arm: Arm) -> bool:
        """Whether an arm has failed too often."""
        return Counter(each.arm for each in self.troubles)[arm.name] >= MOST_FAILURES

    def add(self, turn: Turn, outcome: TurnOutcome) -> None:
        """What a turn brought."""
        self.measured += [Samples(each.cell, each.report.records) for each in outcome.measured]
        self.warnings |= dict.fromkeys(outcome.warnings)
        if outcome.failure is not None:
            self.troubles.append(Trouble(turn.arm.name, turn.repetition, outcome.failure))


@dataclass(frozen=True, slots=True)
class Undertaking:
    """A benchmark, ready to begin. `environment` is the servers'; `notes` go to the warnings."""

    plan: Plan
    launches: Mapping[str, ArmPlan]
    keep: Keep
    environment: Mapping[str, str]
    manifest: RunManifest
    clock: Clock
    notes: tuple[str, ...] = ()


def run_benchmark(undertaking: Undertaking) -> Findings:
    """Run it, in an event loop of its own.

    Raises:
        ConfigError: no arm could do what is asked for.
        KeyboardInterrupt: a second signal came; what was kept until then lies in the folder.
    """
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        try:
            return runner.run(_conduct(undertaking))
        except asyncio.CancelledError as exc:
            raise KeyboardInterrupt from exc


async def _conduct(undertaking: Undertaking) -> Findings:
    plan, clock, state = undertaking.plan, undertaking.clock, State()
    turns = plan_turns(plan)
    num_cells = sum(len(turn.levels) for turn in turns)
    with interrupted_by_signals() as interrupt:
        async with BenchProgress(num_cells, clock) as progress:
            bench = Bench(
                plan=plan,
                keep=undertaking.keep,
                clock=clock,
                manifest=undertaking.manifest,
                meter=EnergyMeter(),
                progress=progress,
                interrupt=interrupt,
            )
            progress.say(_foresee(plan, turns))
            for note in undertaking.notes:
                progress.say(note)
            surroundings = Surroundings(undertaking.environment, clock, interrupt)
            await _take_turns(bench, undertaking, surroundings, state)
    if interrupt.is_set():
        state.ended = "interrupted"
    return describe(undertaking, state)


def _foresee(plan: Plan, turns: tuple[Turn, ...]) -> str:
    num_cells = sum(len(turn.levels) for turn in turns)
    least_s = num_cells * plan.effort.duration_s
    return (
        f"{len(turns)} turns ({len(plan.arms)} arms, {plan.effort.num_repetitions} repetitions) of "
        f"{len(plan.levels)} loads: {least_s / 60:.0f} min of measuring, and starts and ends; seed "
        f"{plan.seed}"
    )


async def _take_turns(
    bench: Bench, undertaking: Undertaking, surroundings: Surroundings, state: State
) -> None:
    for turn in plan_turns(undertaking.plan):
        if bench.interrupt.is_set():
            return
        if state.is_given_up(turn.arm):
            bench.progress.finished(len(turn.levels), f"{turn.arm.name}: given up")
            continue
        launch = undertaking.launches[turn.arm.name]
        outcome = await take_turn(bench, turn, launch, surroundings)
        state.add(turn, outcome)
        if outcome.failure is not None:
            num_lost = len(turn.levels) - len(outcome.measured)
            bench.progress.finished(num_lost, f"{turn.arm.name} FAILED: {outcome.failure}")
        if outcome.unsaved is not None:
            state.ended = outcome.unsaved
            return
        try:
            # A machine that loses power in an hour's benchmark leaves all but one turn.
            undertaking.keep.save_findings(describe(undertaking, state, is_whole=False))
        except NotSavedError as exc:
            state.ended = str(exc)
            return


def describe(undertaking: Undertaking, state: State, *, is_whole: bool = True) -> Findings:
    """All that is known so far. `is_whole` False: more is to come."""
    plan = undertaking.plan
    ended = state.ended if is_whole else "still running when this was written"
    return Findings(
        is_partial=ended is not None,
        ended=ended,
        manifest=close_manifest(undertaking.manifest),
        engine=plan.engine,
        model=plan.model,
        num_workers=plan.num_workers,
        workload=plan.workload.name,
        workload_words=plan.workload.description,
        seed=plan.seed,
        num_repetitions=plan.effort.num_repetitions,
        duration_s=plan.effort.duration_s,
        order=tuple(f"{turn.repetition}: {turn.arm.name}" for turn in plan_turns(plan)),
        arms=tuple(_say_arm(arm, undertaking.launches[arm.name]) for arm in plan.arms),
        levels=tuple(_say_level(level) for level in plan.levels),
        cells=tuple(each.cell for each in state.measured),
        troubles=tuple(state.troubles),
        warnings=(*undertaking.notes, *state.warnings, *_crowding(undertaking)),
        analysis=analyse(plan, state.measured, state.troubles),
    )


def _crowding(undertaking: Undertaking) -> Iterator[str]:
    """Where cores are fewer than they should be."""
    machine = undertaking.manifest.machine
    if undertaking.plan.num_workers > machine.num_cpus:
        yield (
            f"{undertaking.plan.num_workers} workers share {machine.num_cpus} cores: none has one "
            "of its own"
        )
    plan = undertaking.plan
    if isinstance(plan.workload.largest.prompt, GivenBody):
        yield (
            "the trace has texts of its own, the same in every cell: what a load asks, the loads "
            "before it in that turn (and its warm-up) have left in the caches"
        )
    yield (
        "gateway and load generator run on the workers' cores, in every arm alike: their CPU time "
        "is in the tables"
    )


def _say_arm(arm: Arm, launch: ArmPlan) -> ArmSaid:
    counts = arm.num_both, arm.num_prefill, arm.num_decode
    return ArmSaid(arm.name, *counts, cores_of(launch), arm.peer)


def _say_level(level: Level) -> LevelSaid:
    match level.load:
        case Closed(concurrency):
            return LevelSaid(level.key, level.words, concurrency, None)
        case Open(rate):
            return LevelSaid(level.key, level.words, None, rate)
        case Replay():
            return LevelSaid(level.key, level.words, None, None)
        case other:
            assert_never(other)
