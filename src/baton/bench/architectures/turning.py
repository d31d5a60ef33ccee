"""One arm's turn: servers start, every load in its order, servers stop."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from baton.bench.architectures.cells import Place, measure_cell
from baton.bench.architectures.fleet import InterruptedBenchError
from baton.bench.architectures.opening import open_servers
from baton.bench.load.client import Client
from baton.bench.load.surveying import survey
from baton.bench.load.target import open_target
from baton.bench.saving import NotSavedError
from baton.bench.workloads.prompts import PromptWriter
from baton.errors import BatonError, ConfigError

if TYPE_CHECKING:
    from baton.bench.architectures.cells import Bench, Measured
    from baton.bench.architectures.fleet import Servers, Surroundings
    from baton.bench.architectures.opening import ArmPlan
    from baton.bench.architectures.plan import Turn

DEATH_NOTICE_S: Final = 2.0
"""So long a server that no longer answers may take to be seen dead."""


@dataclass(slots=True)
class TurnOutcome:
    """What a turn brought. `failure`: why it is not whole, of the arm's own fault.

    `unsaved`: a run could not be kept, so going on makes no sense.
    """

    measured: list[Measured] = field(default_factory=list)
    warnings: tuple[str, ...] = ()
    failure: str | None = None
    unsaved: str | None = None


async def take_turn(
    bench: Bench, turn: Turn, launch: ArmPlan, surroundings: Surroundings
) -> TurnOutcome:
    """Take it. An arm that fails is an outcome; what would fail for every arm is raised.

    Raises:
        ConfigError: the workload does not fit, or another wish that no arm could fulfil.
    """
    outcome = TurnOutcome()
    where = f"{turn.arm.name}, repetition {turn.repetition}"
    bench.progress.begin(f"{where}: servers start")
    try:
        async with open_servers(launch, surroundings, bench.keep.log(turn)) as fleet:
            trouble = await _measure_or_tell(bench, turn, fleet, outcome)
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
        outcome.failure = f"{exc} (more: {bench.keep.log(turn)})"
    return outcome


async def _measure_or_tell(
    bench: Bench, turn: Turn, fleet: Servers, outcome: TurnOutcome
) -> BatonError | None:
    """What went wrong, if anything. It counts where no server died: leaving `fleet` says who did.

    Raises:
        NotSavedError: a run could not be kept.
    """
    try:
        await _measure(bench, turn, fleet, outcome)
    except NotSavedError:
        raise
    except BatonError as exc:
        with suppress(TimeoutError):
            await asyncio.wait_for(fleet.until_ended(), DEATH_NOTICE_S)
        return exc
    return None


async def _measure(bench: Bench, turn: Turn, fleet: Servers, outcome: TurnOutcome) -> None:
    bench.progress.begin(f"{turn.arm.name}, repetition {turn.repetition}: first requests")
    target = open_target(fleet.url, None)
    prompts = PromptWriter(f"{bench.plan.seed}/{turn.repetition}/survey")
    async with Client(target, bench.clock, bench.plan.effort.request_timeout_s) as client:
        surveyed = await survey(client, bench.plan.workload, bench.plan.approach, prompts)
    outcome.warnings = (*surveyed.warnings, *fleet.notes)
    place = Place(turn, fleet, target, surveyed)
    for level in turn.levels:
        if bench.interrupt.is_set() or fleet.is_over:
            return
        measured = await measure_cell(bench, place, level)
        outcome.measured.append(measured)
        bench.progress.finished(1, _describe(measured, turn, level.words))


def _describe(measured: Measured, turn: Turn, words: str) -> str:
    figures, cell = measured.cell.figures, measured.cell
    parts = [f"{turn.arm.name}, {words}, repetition {turn.repetition}:"]
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
