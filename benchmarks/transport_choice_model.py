"""What two workers would choose between transports, and what that would cost. Pure.

A cell is one size, shape and direction. Its transports are timed; the choice is what two handoff
agents would take after they probed their links. `transport_choice.py` measures.
"""

from __future__ import annotations

import statistics
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TextIO

import msgspec

from baton.bench.files import RunManifest
from baton.bench.link.report import Measurement, Skipped
from baton.bench.printing import new_table, open_console
from baton.rig.pages import Direction, Workload, format_size
from baton.transfer.links.choice import Chooser
from baton.transfer.links.cost_model import LinkModel, TransferShape

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rich.table import Table

    from baton.bench.link.report import LinkEntry


class MeasuredLink(msgspec.Struct, frozen=True):
    """A link's model, as the probes of two workers left it."""

    transport: str
    latency_s: float
    descriptor_s: float
    byte_s: float
    num_probes: int


PAGE_SIZES: Final = (2 << 10, 32 << 10, 128 << 10)
ADJACENT_IN: Final = 32 << 10
"""The pool whose pages adjacent bytes are measured in."""
SIZES: Final = (4 << 10, 32 << 10, 256 << 10, 2 << 20, 16 << 20, 64 << 20, 256 << 20)
MAX_SCATTERED_PAGES: Final = 32_768
"""More would take the slowest transport minutes."""
QUICK_SIZES: Final = (4 << 10, 256 << 10, 4 << 20)


@dataclass(frozen=True, slots=True)
class ChoiceEffort:
    """`num_surveys` times two workers meet; each cell is timed for `budget_s` in each round.

    A round goes through all transports of one cell, then the next round begins.
    """

    sizes: tuple[int, ...]
    num_surveys: int
    num_rounds: int
    budget_s: float
    max_samples: int


THOROUGH: Final = ChoiceEffort(SIZES, 3, 4, 0.05, 50)
QUICK: Final = ChoiceEffort(QUICK_SIZES, 1, 2, 0.02, 20)


@dataclass(frozen=True, slots=True)
class ChoicePlan:
    """What is measured."""

    transports: tuple[LinkEntry, ...]
    effort: ChoiceEffort

    def workloads_of(self, page_bytes: int) -> tuple[Workload, ...]:
        """Those that are measured in pools of such pages: two scattered pages or more."""
        sizes = self.effort.sizes
        scattered = [s for s in sizes if 2 * page_bytes <= s <= MAX_SCATTERED_PAGES * page_bytes]
        return (
            *(Workload("message", size, page_bytes) for size in sizes if page_bytes == ADJACENT_IN),
            *(Workload("scattered", size, page_bytes) for size in scattered),
        )

    def num_pages_of(self, page_bytes: int) -> int:
        """Pages of such a pool."""
        return max(self.effort.sizes) // page_bytes

    @property
    def workloads(self) -> tuple[Workload, ...]:
        """All of them."""
        return tuple(each for size in PAGE_SIZES for each in self.workloads_of(size))


def shape_of(workload: Workload) -> TransferShape:
    """What its cost depends on."""
    return TransferShape(workload.num_bytes, workload.num_descriptors)


SCHEMA: Final = "baton-bench-choice/1"
ALLOWED_REGRET: Final = 0.05


class Decision(msgspec.Struct, frozen=True):
    """What is chosen for one transfer, and what of it.

    `regret`: its median time over the best one's, less 1. `error`: what was predicted of it over
    its median time, less 1.
    """

    chosen: str
    predicted_s: float
    regret: float
    error: float


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """One size and shape, one direction. `samples_s[transport][i]`, and their medians.

    `surveyed[i]` is chosen after survey number i.
    """

    workload: Measurement
    page_bytes: int
    direction: Direction
    best: str
    median_s: dict[str, float]
    samples_s: dict[str, tuple[float, ...]]
    surveyed: tuple[Decision, ...]


class SurveyedLink(msgspec.Struct, frozen=True):
    """One link as one survey left it."""

    survey: int
    direction: Direction
    link: MeasuredLink


class Verdict(msgspec.Struct, frozen=True):
    """Of all cells and surveys: how many within the allowed regret, and how bad it gets."""

    num_decisions: int
    num_within: int
    worst_regret: float
    mean_regret: float
    median_error: float
    """Of the absolute errors."""


class ChoiceReport(msgspec.Struct, frozen=True, kw_only=True):
    """Everything."""

    schema: str = SCHEMA
    manifest: RunManifest
    links: tuple[SurveyedLink, ...]
    cells: tuple[Cell, ...]
    surveyed: Verdict | None
    skipped: tuple[Skipped, ...]


Models = dict[str, LinkModel]


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
        )
        for each in timed
    )


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


def print_choices(report: ChoiceReport, file: TextIO) -> None:
    """The links of each survey, a row for each cell, the verdict, what was skipped."""
    console = open_console(file)
    console.print(_link_table(report))
    console.print(_cell_table(report.cells))
    if report.surveyed is not None:
        console.print(_write_verdict(report.surveyed), soft_wrap=True)
    for skipped in report.skipped:
        verb = "WRONG" if skipped.is_wrong else "not measured"
        console.print(f"{verb}: {skipped.name}: {skipped.reason}", style="yellow", soft_wrap=True)


def _link_table(report: ChoiceReport) -> Table:
    numbers = ("latency us", "us per descriptor", "GB/s", "probes")
    table = new_table("links, as each survey left them", ("", "way", "by"), numbers)
    for each in report.links:
        link = each.link
        table.add_row(
            str(each.survey + 1),
            each.direction,
            link.transport,
            f"{link.latency_s * 1e6:.1f}",
            f"{link.descriptor_s * 1e6:.3f}",
            f"{1e-9 / link.byte_s:.2f}",
            str(link.num_probes),
        )
    return table


def _cell_table(cells: Sequence[Cell]) -> Table:
    numbers = ("p50 us", "next best", "chosen", "regret", "error")
    table = new_table("what each transfer would go by", ("size", "pages", "way", "best"), numbers)
    for cell in cells:
        others = sorted(took_s for kind, took_s in cell.median_s.items() if kind != cell.best)
        best_s = cell.median_s[cell.best]
        is_run = cell.workload.shape == "message"
        table.add_row(
            format_size(cell.workload.num_bytes),
            "adjacent" if is_run else format_size(cell.page_bytes),
            cell.direction,
            cell.best,
            f"{best_s * 1e6:,.0f}",
            f"{others[0] / best_s - 1:+.0%}" if others else "-",
            *_write_decisions(cell.surveyed),
        )
    return table


def _write_decisions(decisions: Sequence[Decision]) -> tuple[str, str, str]:
    """Who is chosen most often, the worst regret, the median error."""
    if not decisions:
        return "-", "-", "-"
    (chosen, count), *_ = Counter(each.chosen for each in decisions).most_common()
    share = "" if count == len(decisions) else f" {count}/{len(decisions)}"
    regret = max(each.regret for each in decisions)
    error = statistics.median(each.error for each in decisions)
    return f"{chosen}{share}", f"{regret:.0%}", f"{error:+.0%}"


def _write_verdict(verdict: Verdict) -> str:
    return (
        f"{verdict.num_within} of {verdict.num_decisions} choices within 5 % of the best; regret "
        f"{verdict.mean_regret:.1%} on average, {verdict.worst_regret:.0%} at worst; the model is "
        f"off by {verdict.median_error:.0%} (median)"
    )
