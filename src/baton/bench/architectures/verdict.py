"""Analysis → sentences. Pure."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Final

import numpy as np

from baton.bench.architectures.results import GOODPUT, THROUGHPUT, metric_of
from baton.bench.load.plan import Closed

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from baton.bench.architectures.plan import Plan
    from baton.bench.architectures.results import (
        Analysis,
        Cell,
        Contrast,
        Crossover,
        Judgement,
        Metric,
        Trouble,
    )

MOST_OTHERS_SHARE: Final = 0.05
MOST_VARIATION: Final = 0.10
MOST_RATIO: Final = 10.0
LEAST_ANSWERS_EACH: Final = 3
ENOUGH_REPETITIONS: Final = 5
VERDICT_METRICS: Final = ("goodput", "throughput", "ttft_p50", "ttft_p99", "tpot_p50", "itl_p99")


def headline(plan: Plan, analysis: Analysis, unproved: Collection[str]) -> str:
    """The decision by goodput and throughput. `unproved`: configurations without proof."""
    what, why = _decide(plan, analysis)
    doubt = f"; WITHOUT PROOF that KV moved in {', '.join(sorted(unproved))}" if unproved else ""
    return (
        f"{what}, with {plan.num_workers} workers, for {plan.workload.name} "
        f"({plan.workload.description}): {why}{doubt}"
    )


def _decide(plan: Plan, analysis: Analysis) -> tuple[str, str]:
    own = {
        configuration.name for configuration in plan.configurations if configuration.peer is None
    }
    keys = {GOODPUT.key, THROUGHPUT.key}
    deciding = [c for c in analysis.contrasts if c.metric in keys and c.configuration in own]
    if not any(c.ratio is not None for c in deciding):
        return "No verdict", "replication and a split are needed, and both must have figures"
    if all(c.low is None and c.judgement == "undecided" for c in deciding):
        return "Not decided", "one repetition of each configuration may be noise alone"
    configurations = dict.fromkeys(c.configuration for c in deciding)
    marks = {
        configuration: {c.judgement for c in deciding if c.configuration == configuration}
        for configuration in configurations
    }
    better = [
        configuration
        for configuration in configurations
        if "wins" in marks[configuration] and "loses" not in marks[configuration]
    ]
    mixed = [
        configuration
        for configuration in configurations
        if {"wins", "loses"} <= marks[configuration]
    ]
    what = "Not decided"
    if better:
        what = f"Disaggregate ({', '.join(better)})"
    elif mixed:
        what = "It depends on the load"
    elif all("loses" in marks[configuration] for configuration in configurations):
        what = "Replicate"
    decided = [
        configuration for configuration in configurations if marks[configuration] != {"undecided"}
    ]
    why = "; ".join(_sum_up(plan, analysis, configuration) for configuration in decided)
    return what, why or "no difference beyond the noise of this machine was found"


def _sum_up(plan: Plan, analysis: Analysis, name: str) -> str:
    """`1P1D against replication: wins with …, loses with …`, by the metric that decides more."""
    by_metric = {
        key: [
            c
            for c in analysis.contrasts
            if (c.configuration, c.metric) == (name, key) and c.judgement != "undecided"
        ]
        for key in (THROUGHPUT.key, GOODPUT.key)
    }
    key, mine = max(by_metric.items(), key=lambda item: len(item[1]))
    words = {level.key: level.words for level in plan.levels}
    parts = []
    for judgement in ("wins", "loses"):
        some = [c for c in mine if c.judgement == judgement]
        if some:
            parts.append(f"{judgement} with {_list(some, words)} (most {_most(some, words)})")
    crossing = _where(analysis, name, key) if len(parts) > 1 else ""
    return (
        f"{name} against replication, {metric_of(key).title.lower()}: {', '.join(parts)}{crossing}"
    )


def _where(analysis: Analysis, name: str, key: str) -> str:
    found = (x for x in analysis.crossovers if (x.configuration, x.metric) == (name, key))
    crossover = next(found, None)
    if crossover is None or crossover.at is None:
        return ""
    ahead = "ahead" if crossover.kind == "ahead_from" else "behind"
    return f"; {ahead} from about {crossover.at:.1f} at once on"


def verdict(plan: Plan, analysis: Analysis) -> tuple[str, ...]:
    """A sentence for each compared configuration and main metric."""
    return tuple(
        sentence
        for configuration in plan.configurations
        if configuration.is_compared
        for key in VERDICT_METRICS
        for sentence in _sentence(plan, analysis, configuration.name, metric_of(key))
    )


def _sentence(plan: Plan, analysis: Analysis, configuration: str, metric: Metric) -> Iterator[str]:
    mine = [
        c for c in analysis.contrasts if (c.configuration, c.metric) == (configuration, metric.key)
    ]
    mine = [c for c in mine if c.ratio is not None or c.judgement != "undecided"]
    if not mine:
        return
    words = {level.key: level.words for level in plan.levels}
    parts = []
    for judgement, verb in (("wins", "wins against"), ("loses", "loses against")):
        some = [c for c in mine if c.judgement == judgement]
        if some:
            parts.append(f"{verb} replication with {_list(some, words)}; most {_most(some, words)}")
    rest = [c for c in mine if c.judgement == "undecided"]
    if rest:
        parts.append(f"no difference found with {_list(rest, words)}; {_most(rest, words)}")
    crossing = [
        x for x in analysis.crossovers if (x.configuration, x.metric) == (configuration, metric.key)
    ]
    judged = {c.judgement for c in mine}
    parts += [describe_crossover(each, judged) for each in crossing]
    sentences = [part[0].upper() + part[1:] if i else part for i, part in enumerate(parts) if part]
    yield f"{configuration}, {metric.title}: {'. '.join(sentences)}."


def describe_crossover(crossover: Crossover, judged: set[Judgement]) -> str:
    """Where it is, and how certain; nothing where the loads decide alone."""
    if crossover.at is None or judged == {"undecided"}:
        return ""
    ahead = "ahead" if crossover.kind == "ahead_from" else "behind"
    sure = "one repetition: no interval"
    if crossover.low is not None and crossover.high is not None:
        sure = f"95 % [{crossover.low:.1f}, {crossover.high:.1f}]"
        sure = f"{sure}; {crossover.share:.0%} of resamplings agree"
    doubt = "" if {"wins", "loses"} <= judged else ", not certain"
    return f"Crossover{doubt}: {ahead} from about {crossover.at:.1f} at once ({sure})"


def format_change(contrast: Contrast) -> str:
    """`+12 % [8, 16]`, against replication."""
    if contrast.ratio is None:
        return "no ratio"
    change = _percent(contrast.ratio)
    if contrast.low is None or contrast.high is None:
        return f"{change}, no interval"
    return f"{change} [{_percent(contrast.low)}, {_percent(contrast.high)}]"


def _percent(ratio: float) -> str:
    """A change; a ratio above ten is noise and not written out."""
    if ratio > MOST_RATIO:
        return "over +900 %"
    change = round((ratio - 1) * 100)  # a whole number: no "-0 %"
    return f"{change:+d} %" if change else "0 %"


def _most(contrasts: Sequence[Contrast], words: dict[str, str]) -> str:
    known = [c for c in contrasts if c.ratio]
    if not known:
        return "where one side has none at all"
    largest = max(known, key=lambda c: abs(np.log(c.ratio or 1.0)))
    return f"{format_change(largest)} with {words[largest.level]}"


def _list(contrasts: Sequence[Contrast], words: dict[str, str]) -> str:
    """`1, 2 and 4 at once`."""
    by_unit: dict[str, list[str]] = defaultdict(list)
    for each in contrasts:
        number, _, unit = words[each.level].partition(" ")
        by_unit[unit].append(number)
    return " and ".join(f"{', '.join(numbers)} {unit}" for unit, numbers in by_unit.items())


def find_cautions(plan: Plan, cells: Sequence[Cell], troubles: Sequence[Trouble]) -> Iterator[str]:
    """Reasons to doubt these figures, the worst first."""
    for trouble in troubles:
        where = f"{trouble.configuration} FAILED in repetition {trouble.repetition}"
        yield f"{where}: {trouble.message}"
    yield from _unproved(cells)
    yield from _broken(cells)
    if plan.effort.num_repetitions < ENOUGH_REPETITIONS:
        yield (
            f"{plan.effort.num_repetitions} repetitions: intervals are wide or missing; five or "
            "more give an answer"
        )
    yield from _short(plan, cells)
    yield from _noisy(plan, cells)
    yield from _client(cells)


def _unproved(cells: Sequence[Cell]) -> Iterator[str]:
    by_name: dict[str, list[str]] = defaultdict(list)
    for cell in cells:
        if cell.unproved:
            where = f"{cell.level}, repetition {cell.repetition}"
            by_name[cell.configuration].append(f"{where}: {cell.unproved}")
    for name, problems in by_name.items():
        yield f"{name}: NO PROOF that KV moved in {len(problems)} cells, such as {problems[0]}"


def _broken(cells: Sequence[Cell]) -> Iterator[str]:
    by_name: dict[str, list[Cell]] = defaultdict(list)
    for cell in cells:
        by_name[cell.configuration].append(cell)
    for name, some in by_name.items():
        num_failed = sum(cell.figures.num_failed for cell in some)
        if num_failed:
            kinds = dict.fromkeys(f.kind for cell in some for f in cell.figures.failures)
            yield f"{name}: {num_failed} requests failed ({', '.join(kinds)})"
        for cell in some:
            if cell.ended_early is not None:
                yield (
                    f"{name}, {cell.level}, repetition {cell.repetition}: left out, it ended early "
                    f"({cell.ended_early})"
                )
            elif not cell.figures.num_complete:
                yield (
                    f"{name}, {cell.level}, repetition {cell.repetition}: left out, no request was "
                    "complete; let it last longer (--duration)"
                )


def _short(plan: Plan, cells: Sequence[Cell]) -> Iterator[str]:
    """A window with few answers per client shows the start of a load only."""
    words: list[str] = []
    for level in plan.levels:
        if isinstance(level.load, Closed):
            least = LEAST_ANSWERS_EACH * level.load.concurrency
            some = [cell for cell in cells if cell.level == level.key and cell.is_usable]
            if any(cell.figures.num_complete < least for cell in some):
                words.append(level.words)
    if words and plan.effort.num_requests is None:
        yield (
            f"too short with {', '.join(words)}: fewer than {LEAST_ANSWERS_EACH} answers for each "
            "place, so the first rush weighs much; let loads last longer (--duration)"
        )


def _noisy(plan: Plan, cells: Sequence[Cell]) -> Iterator[str]:
    shares = [c.cpu.others_share for c in cells if c.cpu.others_share is not None]
    loud = [share for share in shares if share > MOST_OTHERS_SHARE]
    if loud:
        yield (
            f"a busy machine: in {len(loud)} of {len(cells)} cells others used more than "
            f"{MOST_OTHERS_SHARE:.0%} of it (up to {max(loud):.0%})"
        )
    for each in plan.configurations:
        varying = {}
        for level in plan.levels:
            some = [
                c
                for c in cells
                if (c.configuration, c.level) == (each.name, level.key) and c.is_usable
            ]
            rates = np.array([c.figures.output_tokens_per_s for c in some])
            if len(rates) > 1 and rates.mean() > 0:
                varying[level.words] = float(rates.std(ddof=1) / rates.mean())
        loud_levels = [words for words, share in varying.items() if share > MOST_VARIATION]
        if loud_levels:
            yield (
                f"{each.name}: noisy with {', '.join(loud_levels)}: throughput varies between "
                f"repetitions by up to {max(varying.values()):.0%}"
            )


def _client(cells: Sequence[Cell]) -> Iterator[str]:
    limited = [cell for cell in cells if cell.client.problems]
    if limited:
        yield (
            f"the client was at its limit in {len(limited)} of {len(cells)} cells, such as "
            f"{limited[0].configuration} {limited[0].level}: {limited[0].client.problems[0]}"
        )
