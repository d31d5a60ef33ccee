"""Findings → the terminal: the verdict, a table, what makes it doubtful."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TextIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from baton.bench.architectures.charts import show
from baton.bench.architectures.energy import UNMEASURED
from baton.bench.architectures.metrics import METRICS
from baton.bench.architectures.verdict import describe_change

if TYPE_CHECKING:
    from baton.bench.architectures.results import Contrast, Estimate, Findings

COLOURS: Final = {"wins": "green", "loses": "red", "undecided": ""}
WIDTH: Final = 140
SHOWN: Final = ("throughput", "goodput", "ttft_p50", "ttft_p99", "tpot_p50", "itl_p99")


def print_findings(findings: Findings, out: TextIO) -> None:
    """All of it, for people."""
    console = Console(file=out, highlight=False, markup=False)
    if not console.is_terminal:
        console.width = WIDTH
    if findings.is_partial:
        console.print(f"PARTIAL: {findings.ended}", style="bold red")
    console.print(_table(findings))
    for cost in findings.analysis.costs:
        console.print(
            f"  cost, {cost.arm} {cost.level}: {_price(cost.per_1000_input)} per 1,000 input "
            f"tokens, {_price(cost.per_1000_output)} per 1,000 output tokens (each the whole cost)"
        )
    console.print(f"\n{findings.analysis.headline}.\n", style="bold")
    for line in findings.analysis.verdict:
        console.print(f"- {line}")
    console.print(f"- SLO ({findings.analysis.slo_words}): {describe_slo(findings)}")
    if all(cell.energy_j is None for cell in findings.cells):
        console.print(f"- {UNMEASURED}; CPU seconds are in the report")
    for line in (*findings.analysis.cautions, *findings.warnings):
        console.print(f"! {line}", style="yellow")


def describe_slo(findings: Findings) -> str:
    """`TTFT at most 500 ms, …`."""
    slo = findings.analysis.slo
    bounds = (("TTFT", slo.ttft_s), ("TPOT", slo.tpot_s), ("E2E", slo.e2e_s))
    said = [f"{name} at most {show(s * 1e3)} ms" for name, s in bounds if s is not None]
    return ", ".join(said) or "none"


def _table(findings: Findings) -> Table:
    table = Table(
        title=f"{findings.workload}: {findings.workload_words}; mean over repetitions, and change "
        "against replication"
    )
    table.add_column("load", no_wrap=True)
    table.add_column("arm", no_wrap=True)
    shown = [metric for metric in METRICS if metric.key in SHOWN]
    for metric in shown:
        table.add_column(f"{metric.short}\n{metric.unit}", justify="right")
    points = {(p.metric, p.arm, p.level): p.estimate for p in findings.analysis.points}
    against = {(c.metric, c.arm, c.level): c for c in findings.analysis.contrasts}
    for level in findings.levels:
        for arm in findings.arms:
            keys = [(metric.key, arm.name, level.key) for metric in shown]
            cells = [_cell(points.get(key), against.get(key)) for key in keys]
            table.add_row(level.words, arm.name, *cells, end_section=arm == findings.arms[-1])
    return table


def _cell(estimate: Estimate | None, contrast: Contrast | None) -> Text:
    if estimate is None:
        return Text("-")
    text = Text(show(estimate.mean))
    if contrast is not None:
        text.append(f"\n{describe_change(contrast)}", style=COLOURS[contrast.judgement])
    return text


def _price(price: float | None) -> str:
    return "-" if price is None else f"{price:.6f}"
