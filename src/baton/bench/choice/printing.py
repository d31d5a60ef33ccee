"""The table of choices for a terminal, at most 100 columns."""

from __future__ import annotations

import statistics
from collections import Counter
from typing import TYPE_CHECKING

from rich.table import Table

from baton.bench.printing import open_console
from baton.bench.workload import write_size

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import TextIO

    from baton.bench.choice.report import Cell, ChoiceReport, Decision, Verdict


def print_choices(report: ChoiceReport, file: TextIO) -> None:
    """The links of each survey, a row for each cell, the verdict, what was skipped."""
    console = open_console(file)
    if report.is_partial:
        console.print("PARTIAL: interrupted; cells are absent", style="bold red")
    console.print(_link_table(report))
    console.print(_cell_table(report.cells))
    for name, verdict in (("after the survey", report.surveyed), ("refined", report.refined)):
        if verdict is not None:
            console.print(f"{name}: {_write_verdict(verdict)}", soft_wrap=True)
    for skipped in report.skipped:
        verb = "WRONG" if skipped.is_wrong else "not measured"
        console.print(f"{verb}: {skipped.name}: {skipped.reason}", style="yellow", soft_wrap=True)


def _link_table(report: ChoiceReport) -> Table:
    table = _new_table("links, as each survey left them", ("", "way", "by"))
    for name in ("latency us", "us per descriptor", "GB/s", "probes"):
        table.add_column(name, justify="right", no_wrap=True)
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
    table = _new_table("what each transfer would go by", ("size", "pages", "way", "best"))
    for name in ("p50 us", "next best", "chosen", "regret", "error", "refined", "regret", "error"):
        table.add_column(name, justify="right", no_wrap=True)
    for cell in cells:
        others = sorted(took_s for kind, took_s in cell.median_s.items() if kind != cell.best)
        best_s = cell.median_s[cell.best]
        is_run = cell.workload.shape == "message"
        table.add_row(
            write_size(cell.workload.num_bytes),
            "adjacent" if is_run else write_size(cell.page_bytes),
            cell.direction,
            cell.best,
            f"{best_s * 1e6:,.0f}",
            f"{others[0] / best_s - 1:+.0%}" if others else "-",
            *_write_decisions(cell.surveyed),
            *_write_decisions(cell.refined),
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


def _new_table(title: str, columns: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold")
    table.box, table.pad_edge = None, False
    for name in columns:
        table.add_column(name, no_wrap=True)
    return table
