"""Cells → means, contrasts, crossovers and costs. Pure, seeded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np

from baton.bench.architectures.plan import REPLICATED, Configuration, Level, Plan
from baton.bench.architectures.results import (
    Analysis,
    Cell,
    Contrast,
    Cost,
    Crossover,
    Estimate,
    Judgement,
    Point,
    Trouble,
    measured_metrics,
)
from baton.bench.architectures.verdict import find_cautions, headline, verdict
from baton.bench.load.plan import Closed
from baton.bench.load.records import Record, Slo, compute_figures
from baton.bench.statistics import find_crossing, mean_of, ratio_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from baton.bench.architectures.results import Metric

TTFT_SCALE: Final = 5.0
TPOT_SCALE: Final = 2.0
SURE_SIGNS: Final = 5
"""This many pairs with one sign by chance alone: p = 0.06, two-sided."""


@dataclass(frozen=True, slots=True)
class Samples:
    """A cell with every request."""

    cell: Cell
    records: tuple[Record, ...]


@dataclass(frozen=True, slots=True)
class Table:
    """Values by configuration, load and repetition, of usable cells."""

    plan: Plan
    cells: Mapping[tuple[str, str, int], Cell]

    def values(
        self, metric: Metric, configuration: Configuration, level: Level
    ) -> dict[int, float]:
        """By repetition, in the metric's unit."""
        found = {}
        for repetition in range(1, self.plan.effort.num_repetitions + 1):
            cell = self.cells.get((configuration.name, level.key, repetition))
            value = None if cell is None else metric.read(cell, configuration.num_workers)
            if value is not None:
                found[repetition] = value * metric.scale
        return found


def analyse(plan: Plan, measured: Sequence[Samples], troubles: Sequence[Trouble]) -> Analysis:
    """Analyse all cells. Without an SLO in the plan one is derived."""
    slo, slo_words = choose_slo(plan, measured)
    cells = [with_slo(each, slo) for each in measured]
    usable = {(c.configuration, c.level, c.repetition): c for c in cells if c.is_usable}
    table = Table(plan, usable)
    contrasts = tuple(_contrasts(table))
    crossovers = tuple(_crossovers(table))
    bare = Analysis(
        slo=slo,
        slo_words=slo_words,
        points=tuple(_points(table)),
        contrasts=contrasts,
        crossovers=crossovers,
        costs=tuple(_costs(table)),
        headline="",
        verdict=(),
        cautions=tuple(find_cautions(plan, cells, troubles)),
    )
    sentences = verdict(plan, bare)
    unproved = {cell.configuration for cell in cells if cell.unproved}
    return msgspec.structs.replace(bare, headline=headline(plan, bare, unproved), verdict=sentences)


def choose_slo(plan: Plan, measured: Sequence[Samples]) -> tuple[Slo, str]:
    """The plan's SLO; else a multiple of the latency of the least loaded configuration."""
    if plan.slo is not None:
        return plan.slo, "as given"
    lowest, first = plan.levels[0].key, plan.configurations[0].name
    base = [
        s.cell.figures
        for s in measured
        if (s.cell.configuration, s.cell.level) == (first, lowest) and s.cell.is_usable
    ]
    ttfts = [figures.ttft_s.p50 for figures in base if figures.ttft_s is not None]
    tpots = [figures.tpot_s.p50 for figures in base if figures.tpot_s is not None]
    if not ttfts:
        return Slo(), "none could be derived"
    words = (
        f"derived: {TTFT_SCALE:g} times TTFT and {TPOT_SCALE:g} times TPOT of {first} with "
        f"{plan.levels[0].words}"
    )
    tpot_s = float(np.median(tpots)) * TPOT_SCALE if tpots else None
    return Slo(float(np.median(ttfts)) * TTFT_SCALE, tpot_s), words


def with_slo(samples: Samples, slo: Slo) -> Cell:
    """The cell, with goodput by this SLO."""
    if slo.is_empty:
        return samples.cell
    figures = compute_figures(samples.records, samples.cell.figures.window_s, slo)
    return msgspec.structs.replace(samples.cell, figures=figures)


def _points(table: Table) -> Iterator[Point]:
    for metric in measured_metrics(table.cells.values()):
        for configuration in table.plan.configurations:
            for level in table.plan.levels:
                values = tuple(table.values(metric, configuration, level).values())
                estimate = None
                if values:
                    mean = mean_of(values)
                    estimate = Estimate(values, mean.value, mean.low, mean.high)
                yield Point(metric.key, configuration.name, level.key, estimate)


def _contrasts(table: Table) -> Iterator[Contrast]:
    base = _replicated(table.plan)
    if base is None:
        return
    for metric in measured_metrics(table.cells.values()):
        for configuration in _others(table.plan):
            for level in table.plan.levels:
                ours, theirs = (table.values(metric, each, level) for each in (configuration, base))
                pairs = [(theirs[i], ours[i]) for i in sorted(ours.keys() & theirs.keys())]
                yield contrast(metric, configuration.name, level.key, pairs)


def contrast(
    metric: Metric, configuration: str, level: str, pairs: Sequence[tuple[float, float]]
) -> Contrast:
    """From pairs of (replicated, this configuration), one for each repetition that has both."""
    ratio = ratio_of(pairs)
    if ratio is not None:
        judged = _judge(metric, ratio.low, ratio.high)
        return Contrast(
            metric.key, configuration, level, ratio.value, ratio.low, ratio.high, judged
        )
    # Where one side is 0 (no request kept the SLO) there is no ratio: signs are counted.
    gains = [metric.sign * (b - a) for a, b in pairs]
    whole = None
    if sum(a for a, _ in pairs) > 0:
        whole = sum(b for _, b in pairs) / sum(a for a, _ in pairs)
    sure: Judgement = "undecided"
    if len(gains) >= SURE_SIGNS and all(gain > 0 for gain in gains):
        sure = "wins"
    if len(gains) >= SURE_SIGNS and all(gain < 0 for gain in gains):
        sure = "loses"
    return Contrast(metric.key, configuration, level, whole, None, None, sure)


def _judge(metric: Metric, low: float | None, high: float | None) -> Judgement:
    if low is None or high is None or low <= 1 <= high:
        return "undecided"
    return "wins" if (low > 1) == (metric.better == "more") else "loses"


def _crossovers(table: Table) -> Iterator[Crossover]:
    base = _replicated(table.plan)
    closed = [level for level in table.plan.levels if isinstance(level.load, Closed)]
    if base is None:
        return
    for metric in measured_metrics(table.cells.values()):
        for configuration in _others(table.plan):
            found = _find_crossover(table, metric, (base, configuration), closed)
            if found is not None:
                yield found


def _find_crossover(
    table: Table,
    metric: Metric,
    configurations: tuple[Configuration, Configuration],
    levels: Sequence[Level],
) -> Crossover | None:
    """Of repetitions that have both configurations under every load."""
    rows = []
    for repetition in range(1, table.plan.effort.num_repetitions + 1):
        values = [
            tuple(
                table.values(metric, configuration, level).get(repetition, 0.0)
                for configuration in configurations
            )
            for level in levels
        ]
        if values and all(a > 0 and b > 0 for a, b in values):
            rows.append([metric.sign * float(np.log(b / a)) for a, b in values])
    if not rows:
        return None
    loads = [float(lv.load.concurrency) for lv in levels if isinstance(lv.load, Closed)]
    found = find_crossing(loads, np.array(rows))
    if found is None:
        return None
    return Crossover(
        metric.key, configurations[1].name, found.kind, found.at, found.low, found.high, found.share
    )


def _costs(table: Table) -> Iterator[Cost]:
    price = table.plan.cost_per_worker_hour
    if price is None:
        return
    for configuration in table.plan.configurations:
        for level in table.plan.levels:
            cells = [
                c
                for (a, lv, _), c in table.cells.items()
                if (a, lv) == (configuration.name, level.key)
            ]
            if cells:
                yield compute_cost(configuration, level.key, cells, price / 3600)


def compute_cost(
    configuration: Configuration, level: str, cells: Sequence[Cell], price_per_s: float
) -> Cost:
    """Means over cells; `price_per_s` is one worker's."""
    num_in = float(np.mean([cell.figures.prompt_tokens_per_s for cell in cells]))
    num_out = float(np.mean([cell.figures.output_tokens_per_s for cell in cells]))

    def per_1000(num_workers: int, tokens_per_s: float) -> float | None:
        return num_workers * price_per_s / tokens_per_s * 1000 if tokens_per_s else None

    return Cost(
        configuration.name,
        level,
        per_1000(configuration.num_workers, num_in),
        per_1000(configuration.num_workers, num_out),
        per_1000(configuration.num_prefill, num_in) if configuration.is_disaggregated else None,
        per_1000(configuration.num_decode, num_out) if configuration.is_disaggregated else None,
    )


def _replicated(plan: Plan) -> Configuration | None:
    return next(
        (
            configuration
            for configuration in plan.configurations
            if configuration.name == REPLICATED
        ),
        None,
    )


def _others(plan: Plan) -> list[Configuration]:
    """All that is compared with replication: every split, and every peer."""
    return [configuration for configuration in plan.configurations if configuration.is_compared]
