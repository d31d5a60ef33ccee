"""A report for a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from rich.table import Table

from baton.bench.printing import open_console

if TYPE_CHECKING:
    from typing import TextIO

    from rich.console import Console

    from baton.bench.load.figures import Figures, Spread
    from baton.bench.load.report import Report

FEW_SAMPLES: Final = 100
SEVERAL_TOKENS: Final = 1.05
MUCH_CACHED: Final = 0.05


def print_report(report: Report, file: TextIO) -> None:
    """What was asked, what came, and what to think of it."""
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
    console.print(_write_counts(figures), soft_wrap=True)
    for failure in figures.failures:
        line = f"  {failure.num} x {failure.kind}: {failure.example}"
        console.print(line, style="red", soft_wrap=True)
    if figures.ttft_s is not None:
        console.print(_latencies(figures))
    console.print(_write_rates(figures), soft_wrap=True)
    for note in notes(report):
        console.print(f"note: {note}", style="yellow", soft_wrap=True)
    _print_client(console, report)


def notes(report: Report) -> list[str]:
    """What a reader should know before believing a figure. Pure."""
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
            found.append(
                f"{share:.0%} of the prompts' tokens came from the server's cache"
                + (
                    ""
                    if _shares(report)
                    else ": it has seen these prompts before; use another --seed"
                )
            )
    if figures.num_cut and not report.is_partial:
        found.append(
            f"{figures.num_cut} requests were still running when the drain ended: the longest "
            "answers are missing from the latencies (--drain)"
        )
    return found


def _shares(report: Report) -> bool:
    return report.workload.name.startswith(("shared-prefix", "multi-turn", "trace"))


def _write_counts(figures: Figures) -> str:
    cut = f", {figures.num_cut} cut" if figures.num_cut else ""
    return (
        f"{figures.num_complete} complete, {figures.num_failed} failed{cut} in "
        f"{figures.window_s:.1f} s; {figures.num_prompt_tokens:,} tokens in, "
        f"{figures.num_output_tokens:,} out; {figures.mean_in_flight:.1f} under way on average"
    )


def _latencies(figures: Figures) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("ms", no_wrap=True)
    for name in ("mean", "p50", "p90", "p95", "p99", "max"):
        table.add_column(name, justify="right", no_wrap=True)
    rows = {
        "TTFT": figures.ttft_s,
        "TPOT": figures.tpot_s,
        "ITL": figures.itl_s,
        "E2E": figures.e2e_s,
        "held back": figures.held_s,
    }
    for name, found in rows.items():
        if found is not None:
            table.add_row(name, *_cells(found))
    return table


def _cells(found: Spread) -> list[str]:
    shown = (found.mean, found.p50, found.p90, found.p95, found.p99, found.max)
    return [f"{seconds * 1e3:,.2f}" for seconds in shown]


def _write_rates(figures: Figures) -> str:
    text = (
        f"{figures.requests_per_s:.2f} requests/s ({figures.offered_requests_per_s:.2f} sent) · "
        f"{figures.prompt_tokens_per_s:,.0f} tokens/s in · "
        f"{figures.output_tokens_per_s:,.1f} tokens/s out"
    )
    if figures.goodput is not None:
        good = figures.goodput
        text += f" · goodput {good.requests_per_s:.2f} requests/s ({good.share:.1%} kept the SLO)"
    return text


def _print_client(console: Console, report: Report) -> None:
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
