"""What would be chosen, and what that would cost. Pure."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from baton.bench.choice.plan import shape_of
from baton.bench.choice.report import ALLOWED_REGRET, Cell, Decision, Verdict
from baton.bench.report import Measurement
from baton.transfer.links.choice import Chooser

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from baton.bench.workload import Direction, Workload
    from baton.transfer.links.model import LinkModel

NUM_LESSONS: Final = 100
"""So many times a refined link has carried, or was passed over for, each of the transfers."""

Models = dict[str, "LinkModel"]


@dataclass(frozen=True, slots=True)
class Timed:
    """What each transport took for one transfer: its samples, in seconds; one or more."""

    workload: Workload
    direction: Direction
    samples_s: Mapping[str, tuple[float, ...]]

    @property
    def median_s(self) -> dict[str, float]:
        """Of each transport."""
        return {kind: statistics.median(samples) for kind, samples in self.samples_s.items()}


def judge(
    timed: Sequence[Timed], surveys: Sequence[Mapping[Direction, Models]]
) -> tuple[Cell, ...]:
    """A cell for each that was timed, with a decision for each survey."""
    taught = [teach(timed, survey) for survey in surveys]
    fresh = [{direction: Chooser("measured") for direction in survey} for survey in surveys]
    return tuple(
        Cell(
            workload=Measurement(
                each.workload.name,
                each.workload.shape,
                each.workload.num_bytes,
                each.workload.num_descriptors,
            ),
            page_bytes=each.workload.pool_page_bytes,
            direction=each.direction,
            best=min(each.median_s, key=lambda kind: each.median_s[kind]),
            median_s=each.median_s,
            samples_s=dict(each.samples_s),
            surveyed=_decide(each, surveys, fresh),
            refined=_decide(each, [t.models for t in taught], [t.choosers for t in taught]),
        )
        for each in timed
    )


@dataclass(frozen=True, slots=True)
class Taught:
    """What a worker knows after many transfers."""

    models: dict[Direction, Models]
    choosers: dict[Direction, Chooser]


def teach(timed: Sequence[Timed], survey: Mapping[Direction, Models]) -> Taught:
    """The links after many transfers, each over the one that is chosen at the time.

    The samples are replayed in random order: a link learns from a time that it really took.
    """
    models = {direction: dict(links) for direction, links in survey.items()}
    choosers = {direction: Chooser("measured") for direction in models}
    rng = np.random.default_rng(3)
    for _ in range(NUM_LESSONS):
        for number in rng.permutation(len(timed)).tolist():
            each = timed[number]
            links = models[each.direction]
            usable = [kind for kind in links if kind in each.samples_s]
            shape = shape_of(each.workload)
            choice = choosers[each.direction].choose(shape, links, usable)
            if choice is not None:
                samples = each.samples_s[choice.used]
                took_s = samples[int(rng.integers(len(samples)))]
                links[choice.used] = links[choice.used].refine(shape, took_s)
    return Taught(models, choosers)


def sum_up(decisions: Sequence[Decision]) -> Verdict | None:
    """Of all decisions; None if there is none."""
    if not decisions:
        return None
    regrets = [decision.regret for decision in decisions]
    return Verdict(
        num_decisions=len(regrets),
        num_within=sum(regret <= ALLOWED_REGRET for regret in regrets),
        worst_regret=max(regrets),
        mean_regret=statistics.fmean(regrets),
        median_error=statistics.median(abs(decision.error) for decision in decisions),
    )


def _decide(
    timed: Timed,
    surveys: Sequence[Mapping[Direction, Models]],
    choosers: Sequence[Mapping[Direction, Chooser]],
) -> tuple[Decision, ...]:
    decisions: list[Decision] = []
    for survey, chooser in zip(surveys, choosers, strict=True):
        links, took_s = survey[timed.direction], timed.median_s
        usable = [kind for kind in links if kind in took_s]
        choice = chooser[timed.direction].choose(shape_of(timed.workload), links, usable)
        if choice is not None:
            of_used = took_s[choice.used]
            regret = of_used / min(took_s.values()) - 1
            error = choice.predicted_s / of_used - 1
            decisions.append(Decision(choice.used, choice.predicted_s, regret, error))
    return tuple(decisions)
