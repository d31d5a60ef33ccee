"""A plan of a fleet for a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TextIO

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from baton.planner.fleet_plan import FleetPlan, PlannedWorker

WIDTH: Final = 100
MAX_SHOWN: Final = 3
ENOUGH: Final = 0.8
"""A link that is busy for more of the time delays what it sends."""


def print_plan(plan: FleetPlan, file: TextIO) -> None:
    """Workers and their hosts, then the KV between them."""
    console = Console(file=file, highlight=False, markup=False, emoji=False, width=WIDTH)
    workers = Table(box=None, pad_edge=False)
    for title in ("worker", "host (zone/rack/host)", "nearest of the other role"):
        workers.add_column(title, overflow="fold")
    for each in plan.workers:
        workers.add_row(each.name, each.host or "left to Ray", _show_nearest(each))
    console.print(workers)
    if plan.spread != "none":
        console.print(f"no {plan.spread} has more than half of a role's workers, rounded up")
    if not plan.traffic:
        console.print("no KV is handed over between two roles: hosts get even numbers of workers")
        return
    if (kv := plan.kv) is None:
        console.print("\nKV, handed over to the nearest decode workers")
    else:
        console.print(
            f"\nKV of {kv.requests_per_s:g} prompts/s of {kv.prompt_tokens:,} tokens "
            f"({kv.model}): {kv.bytes_per_s / 1e9:.3g} GB/s, handed over to the nearest decode "
            "workers",
            soft_wrap=True,
        )
    links = Table(box=None, pad_edge=False)
    links.add_column("distance")
    for title in ("share", "GB/s", "link GB/s"):
        links.add_column(title, justify="right")
    links.add_column("from")
    links.add_column("busy", justify="right")
    for line in plan.traffic:
        links.add_row(
            line.distance,
            f"{line.share:.0%}",
            "-" if line.bytes_per_s is None else f"{line.bytes_per_s / 1e9:.3g}",
            f"{line.gb_per_s:.3g}",
            line.source,
            "-" if line.busy is None else f"{line.busy:.0%}",
        )
    console.print(links)
    console.print("busy: the busiest link of a prefill worker at this distance")
    for line in plan.traffic:
        if line.busy is not None and line.busy > ENOUGH:
            console.print(
                f"note: links of {line.distance} would be busy for {line.busy:.0%} of the time: "
                "more prefill workers, or hosts that are nearer, relieve them",
                style="yellow",
                soft_wrap=True,
            )


def _show_nearest(worker: PlannedWorker) -> str:
    if worker.distance is None:
        return "-"
    shown = ", ".join(worker.nearest[:MAX_SHOWN])
    rest = len(worker.nearest) - MAX_SHOWN
    return f"{shown}{f' and {rest} more' if rest > 0 else ''} ({worker.distance})"
