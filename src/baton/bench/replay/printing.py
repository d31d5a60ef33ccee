"""A replay's figures as a table: a row for each policy."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final, TextIO

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from baton.bench.replay.runner import PolicyReplay, ReplayReport

WIDTH: Final = 200
"""Of the table, at most: a figure must not be cut."""
HEADINGS: Final = (
    "TTFT p50, s",
    "p99",
    "TPOT p50, ms",
    "p99",
    "requests/s",
    "good",
    "saved tokens",
    "loaded",
    "handed over",
    "busiest",
)


def print_replay(report: ReplayReport, out: TextIO) -> None:
    """Print it."""
    console = Console(file=out, markup=False, highlight=False, soft_wrap=True, width=WIDTH)
    roles = ", ".join(f"{num} {role}" for role, num in Counter(report.workers.values()).items())
    num = report.policies[0].summary.num_requests
    several = f", gateways: {report.num_gateways}" if report.num_gateways > 1 else ""
    load = f"{report.workload} ({report.description})"
    if report.is_partial:
        last = report.policies[-1]
        num_last = last.summary.num_requests
        console.print(f"PARTIAL: interrupted; {last.policy} after {num_last} requests")
    console.print(f"{load}: {num} requests, workers: {roles}{several}")
    for warning in report.warnings:
        console.print(f"warning: {warning}")
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("policy", no_wrap=True)
    for heading in HEADINGS:
        table.add_column(heading, justify="right", no_wrap=True)
    for each in report.policies:
        table.add_row(each.policy, *_row(each))
    console.print(table)
    itl = "" if report.itl_s is None else f", ITL within {1000 * report.itl_s:g} ms"
    console.print(
        f"good: TTFT within {report.ttft_s:g} s, TPOT within {1000 * report.tpot_s:g} ms{itl}; "
        "saved: tokens of prompts that were cached where they were to be computed, or loaded "
        "there; loaded: requests that loaded some of their prompt; busiest: the worker "
        "with the most answers, and its share of them. Virtual time, simulated workers."
    )


def _row(each: PolicyReplay) -> tuple[str, ...]:
    found = each.summary
    num = found.num_requests
    busiest, most = max(found.answers.items(), key=lambda item: item[1])
    return (
        f"{found.ttft_s.p50:.3f}",
        f"{found.ttft_s.p99:.3f}",
        f"{1000 * found.tpot_s.p50:.1f}",
        f"{1000 * found.tpot_s.p99:.1f}",
        f"{found.requests_per_s:.2f}",
        f"{found.num_good / num:.1%}",
        f"{found.saved_tokens / found.prompt_tokens:.1%}",
        f"{found.loaded_requests / num:.1%}",
        f"{found.decisions['handed over'] / num:.1%}",
        f"{busiest} {most / num:.0%}",
    )
