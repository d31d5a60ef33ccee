"""Results for a terminal: reports of links and loads, comparisons, findings of architectures."""

from __future__ import annotations

from itertools import groupby
from math import floor, log10
from typing import TYPE_CHECKING, Final, TextIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from baton.bench.architectures.results import (
    METRICS,
    Contrast,
    Estimate,
    Findings,
    describe_failed,
)
from baton.bench.architectures.usage import UNMEASURED
from baton.bench.architectures.verdict import format_change

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from baton.bench.compare import Comparison
    from baton.bench.link.report import ReferenceRow, Row
    from baton.bench.link.report import Report as LinkReport
    from baton.bench.load.job import Report as LoadReport
    from baton.bench.load.records import Figures, Spread
    from baton.bench.route_costs import FittedCosts
    from baton.gateway.learned_costs import KeptLine
    from baton.rig.machine import Machine

MAX_COLUMNS: Final = 100
WIDE_COLUMNS: Final = 140
FEW_SAMPLES: Final = 100
SEVERAL_TOKENS: Final = 1.05
MUCH_CACHED: Final = 0.05
MOST_CHARS: Final = 60
COMPARED: Final = {"better": "green", "worse": "red", "same": "", "undecided": "dim"}
JUDGED: Final = {"wins": "green", "loses": "red", "undecided": ""}
SHOWN: Final = ("throughput", "goodput", "ttft_p50", "ttft_p99", "tpot_p50", "itl_p99")


def open_console(file: TextIO) -> Console:
    """As wide as the terminal, at most `MAX_COLUMNS`."""
    console = Console(file=file, highlight=False, markup=False, emoji=False)
    width = min(console.width, MAX_COLUMNS) if console.is_terminal else MAX_COLUMNS
    return Console(file=file, highlight=False, markup=False, emoji=False, width=width)


def new_table(title: str | None, names: Sequence[str], numbers: Sequence[str]) -> Table:
    """A table without lines: columns of names to the left, columns of numbers to the right."""
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    for name in names:
        table.add_column(name, overflow="ellipsis", no_wrap=True)
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def format_number(value: float) -> str:
    """A number with three significant digits."""
    if value == 0:
        return "0"
    digits = max(0, 2 - floor(log10(abs(value))))
    text = f"{value:,.{min(digits, 6)}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def print_fitted_costs(fitted: Mapping[str, FittedCosts], file: TextIO) -> None:
    """What `baton route costs` has found, by model."""
    table = new_table(None, ("model", "cost"), ("fixed, ms", "each, us", "samples", "error"))
    for model, found in fitted.items():
        for name, each in (("prefill, by tokens", found.prefill), ("step, by answers", found.step)):
            seen = str(each.num_seen), f"{100 * each.error:.0f} %"
            table.add_row(model, name, *_format_line(each.line), *seen)
        for distance, line in found.handoff.items():
            table.add_row(model, f"handoff {distance}, by tokens", *_format_line(line), "", "")
    open_console(file).print(table)


def _format_line(line: KeptLine) -> tuple[str, str]:
    return format_number(1e3 * line.fixed_s), format_number(1e6 * line.each_s)


def print_link_report(report: LinkReport, file: TextIO) -> None:
    """A block of rows for each workload, what was skipped, and the machines."""
    console = open_console(file)
    if report.is_partial:
        console.print(
            "PARTIAL: interrupted; rows may rest on fewer rounds, or be absent", style="bold red"
        )
    for _, block in groupby(report.rows, key=lambda row: row.workload):
        rows = list(block)
        is_bulk = rows[0].workload.shape != "descriptors"
        console.print(_bulk_table(rows) if is_bulk else _descriptor_table(rows))
    unverified = dict.fromkeys(row.name for row in report.rows if not row.is_verified)
    if unverified:
        console.print(f"bytes of its own, not compared: {', '.join(unverified)}", style="dim")
    if report.by_reference:
        console.print(_reference_table(report.by_reference))
    for skipped in report.skipped:
        verb = "WRONG" if skipped.is_wrong else "not measured"
        console.print(f"{verb}: {skipped.name}: {skipped.reason}", style="yellow", soft_wrap=True)
    for role, machine in (("A", report.manifest.driver), ("B", report.manifest.owner)):
        if machine is not None:
            console.print(f"{role}: {_describe_machine(machine)}", style="dim", soft_wrap=True)


def _bulk_table(rows: list[Row]) -> Table:
    numbers = ("GB/s", "range", "p50 us", "p99 us", "CPU s/GB A+B", "of limit")
    table = new_table(rows[0].workload.name, ("", "way", "by"), numbers)
    for row in rows:
        figures, rate = row.figures, row.figures.gb_per_s
        table.add_row(
            row.name,
            row.direction,
            row.used,
            f"{rate.median:.2f}",
            f"{rate.min:.2f}-{rate.max:.2f}",
            _format_us(figures.p50_us),
            _format_us(figures.p99_us),
            f"{figures.driver_cpu_s_per_gb:.2f}+{figures.owner_cpu_s_per_gb:.2f}",
            _format_share(row),
        )
    return table


def _descriptor_table(rows: list[Row]) -> Table:
    table = new_table(rows[0].workload.name, ("", "way", "by"), ("us per descriptor",))
    for row in rows:
        figure = f"{row.figures.us_per_descriptor:.3f}"
        table.add_row(row.name, row.direction, row.used, figure)
    return table


def _reference_table(rows: Sequence[ReferenceRow]) -> Table:
    title = "by reference: announced, in view of B, and A knows; no byte is copied"
    numbers = ("p50 us", "range", "p99 us", "CPU us A+B")
    table = new_table(title, ("", "by", "pages of"), numbers)
    for row in rows:
        latency, rounds = row.latency, row.latency.p50_us_of_rounds
        table.add_row(
            row.name,
            row.used,
            row.workload.name,
            _format_us(latency.p50_us),
            f"{_format_us(rounds.min)}-{_format_us(rounds.max)}",
            _format_us(latency.p99_us),
            f"{_format_us(latency.driver_cpu_us)}+{_format_us(latency.owner_cpu_us)}",
        )
    return table


def _format_share(row: Row) -> str:
    if row.kind == "limit":
        return "limit"
    return "-" if row.percent_of_limit is None else f"{row.percent_of_limit:.0f} %"


def _format_us(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.1f}"  # noqa: PLR2004


def _describe_machine(machine: Machine) -> str:
    load = " ".join(f"{each:.2f}" for each in machine.load)
    return (
        f"{machine.host}, {machine.cpu}, {machine.num_cpus} cores, Linux {machine.kernel}, "
        f"load {load}"
    )


def print_load_report(report: LoadReport, file: TextIO) -> None:
    """The load, its latencies and rates, and notes on how far to trust them."""
    console = open_console(file)
    server, load, figures = report.server, report.load, report.figures
    if report.is_partial:
        why = report.stopped or "interrupted"
        console.print(f"PARTIAL: {why}", style="bold red", soft_wrap=True)
    console.print(
        f"{server.url} · {server.model} · {report.workload.name}: {report.workload.description} · "
        f"{load.description} · seed {report.workload.seed}",
        style="bold",
        soft_wrap=True,
    )
    console.print(_format_counts(figures), soft_wrap=True)
    for failure in figures.failures:
        line = f"  {failure.num} x {failure.kind}: {failure.example}"
        console.print(line, style="red", soft_wrap=True)
    if figures.ttft_s is not None:
        console.print(_latency_table(figures))
    console.print(_format_rates(figures), soft_wrap=True)
    for note in find_notes(report):
        console.print(f"note: {note}", style="yellow", soft_wrap=True)
    _print_client(console, report)


def find_notes(report: LoadReport) -> list[str]:
    """What a reader should know before trusting a figure. Pure."""
    figures = report.figures
    found = list(report.warnings)
    if figures.ttft_s is not None and figures.ttft_s.num < FEW_SAMPLES:
        found.append(
            f"p99 of {figures.ttft_s.num} requests is nearly their largest: ask for 100 or more"
        )
    if figures.tokens_per_chunk is not None and figures.tokens_per_chunk > SEVERAL_TOKENS:
        found.append(
            f"a chunk carried {figures.tokens_per_chunk:.2f} tokens on average: ITL is the time "
            "between chunks, not tokens; TPOT is not affected"
        )
    if figures.num_cached_tokens and figures.num_prompt_tokens:
        share = figures.num_cached_tokens / figures.num_prompt_tokens
        if share > MUCH_CACHED:
            shares = report.workload.name.startswith(("shared-prefix", "multi-turn", "trace"))
            hint = "" if shares else ": it has seen these prompts before; use another --seed"
            found.append(f"{share:.0%} of the prompts' tokens came from the server's cache{hint}")
    if figures.num_cut and not report.is_partial:
        found.append(
            f"{figures.num_cut} requests were still running when the drain ended: the longest "
            "answers are missing from the latencies (--drain)"
        )
    return found


def _format_counts(figures: Figures) -> str:
    cut = f", {figures.num_cut} cut" if figures.num_cut else ""
    return (
        f"{figures.num_complete} complete, {figures.num_failed} failed{cut} in "
        f"{figures.window_s:.1f} s; {figures.num_prompt_tokens:,} tokens in, "
        f"{figures.num_output_tokens:,} out; {figures.mean_in_flight:.1f} under way on average"
    )


def _latency_table(figures: Figures) -> Table:
    table = new_table(None, ("ms",), ("mean", "p50", "p90", "p95", "p99", "max"))
    rows = {
        "TTFT": figures.ttft_s,
        "TPOT": figures.tpot_s,
        "ITL": figures.itl_s,
        "E2E": figures.e2e_s,
        "held back": figures.held_s,
    }
    for name, found in rows.items():
        if found is not None:
            table.add_row(name, *_latency_cells(found))
    return table


def _latency_cells(found: Spread) -> list[str]:
    shown = (found.mean, found.p50, found.p90, found.p95, found.p99, found.max)
    return [f"{seconds * 1e3:,.2f}" for seconds in shown]


def _format_rates(figures: Figures) -> str:
    text = (
        f"{figures.requests_per_s:.2f} requests/s ({figures.offered_requests_per_s:.2f} sent) · "
        f"{figures.prompt_tokens_per_s:,.0f} tokens/s in · "
        f"{figures.output_tokens_per_s:,.1f} tokens/s out"
    )
    if figures.goodput is not None:
        good = figures.goodput
        text += f" · goodput {good.requests_per_s:.2f} requests/s ({good.share:.1%} kept the SLO)"
    return text


def _print_client(console: Console, report: LoadReport) -> None:
    client = report.client
    for problem in client.problems:
        console.print(f"CLIENT: {problem}", style="bold red", soft_wrap=True)
    load = report.manifest.machine.load[0], report.manifest.load_after[0]
    console.print(
        f"client: {client.cpu_share:.0%} of a core, event loop {client.lag_p99_s * 1e3:.1f} ms "
        f"late (p99); load of this machine {load[0]:.2f} before, {load[1]:.2f} after",
        style="dim",
        soft_wrap=True,
    )


def print_comparison(comparison: Comparison, file: TextIO) -> None:
    """What was not the same, then a row for each metric."""
    console = open_console(file)
    for each in comparison.differences:
        style = "bold red" if each.is_asked else "yellow"
        note = "NOT ASKED THE SAME: " if each.is_asked else ""
        text = f"{note}{each.field}: A {_shorten(each.a)} · B {_shorten(each.b)}"
        console.print(text, style=style, soft_wrap=True)
    for caution in comparison.cautions:
        console.print(f"caution: {caution}", style="yellow", soft_wrap=True)
    table = new_table(None, ("",), ("A", "B", "p"))
    table.add_column("B against A (95 % interval)")
    for line in comparison.lines:
        table.add_row(
            f"{'!' if line.is_too_bad else ''}{line.metric}, {line.unit}",
            f"{line.a:,.2f}",
            f"{line.b:,.2f}",
            "<0.001" if line.p_value < 0.001 else f"{line.p_value:.3f}",  # noqa: PLR2004
            line.words,
            style=COMPARED[line.judgement],
        )
    console.print(table)
    if not comparison.lines:
        console.print("nothing to compare: one side has no complete request", style="bold red")
    runs, requests = comparison.num_runs, comparison.num_requests
    text = f"A: {runs[0]} runs, {requests[0]} requests · B: {runs[1]} runs, {requests[1]} requests."
    if min(runs) == 1:
        text += (
            " With one run of a side, only chance within runs is known: the same server measured"
            " twice may differ by more. Give folders with several runs each."
        )
    console.print(text, style="dim", soft_wrap=True)


def _shorten(text: str) -> str:
    return text if len(text) <= MOST_CHARS else f"{text[: MOST_CHARS - 1]}…"


def print_findings(findings: Findings, file: TextIO) -> None:
    """The table, the verdict, and what makes it doubtful."""
    console = Console(file=file, highlight=False, markup=False)
    if not console.is_terminal:
        console.width = WIDE_COLUMNS
    if findings.is_partial:
        console.print(f"PARTIAL: {findings.ended}", style="bold red")
    console.print(_findings_table(findings))
    for cost in findings.analysis.costs:
        console.print(
            f"  cost, {cost.configuration} {cost.level}: {format_price(cost.per_1000_input)} per "
            f"1,000 input tokens, {format_price(cost.per_1000_output)} per 1,000 output tokens "
            "(each the whole cost)"
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
    parts = [f"{name} at most {format_number(s * 1e3)} ms" for name, s in bounds if s is not None]
    return ", ".join(parts) or "none"


def format_price(price: float | None) -> str:
    """Of 1,000 tokens."""
    return "-" if price is None else f"{price:.6f}"


def _findings_table(findings: Findings) -> Table:
    table = Table(
        title=f"{findings.workload}: {findings.workload_words}; mean over repetitions, and change "
        "against replication"
    )
    table.add_column("load", no_wrap=True)
    table.add_column("arm", no_wrap=True)
    shown = [metric for metric in METRICS if metric.key in SHOWN]
    for metric in shown:
        table.add_column(f"{metric.short}\n{metric.unit}", justify="right")
    points = {(p.metric, p.configuration, p.level): p.estimate for p in findings.analysis.points}
    against = {(c.metric, c.configuration, c.level): c for c in findings.analysis.contrasts}
    for level in findings.levels:
        for configuration in findings.configurations:
            keys = [(metric.key, configuration.name, level.key) for metric in shown]
            cells = [_findings_cell(points.get(key), against.get(key)) for key in keys]
            is_last = configuration == findings.configurations[-1]
            failed = describe_failed(findings, configuration.name, level.key)
            name = Text(configuration.name)
            if failed is not None:
                name.append(f"\n{failed}", style="red")
            table.add_row(level.words, name, *cells, end_section=is_last)
    return table


def _findings_cell(estimate: Estimate | None, contrast: Contrast | None) -> Text:
    if estimate is None:
        return Text("-")
    text = Text(format_number(estimate.mean))
    if contrast is not None:
        text.append(f"\n{format_change(contrast)}", style=JUDGED[contrast.judgement])
    return text
