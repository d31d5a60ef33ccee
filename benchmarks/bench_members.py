"""What it costs a gateway that its many workers come, report and go: time of its event loop.

    python benchmarks/bench_members.py [--workers 1000] [--rounds 7] [--json FILE]
    python benchmarks/bench_members.py --table benchmarks/results/members.json

The parts are those of a real gateway, but no worker is connected to: workers identify themselves
and report their load by calls. One round:

    list      all are new in a source's list
    identify  each reports who it is, and a fleet is made of all
    change    one of them is replaced by another in the list
    reports   each reports another load, and a fleet is made ten times: what a second brings
    look      what is done twice a second to find workers that have left
    leave     the list is empty: all are drained, and forgotten

Processor time in milliseconds: the median of all rounds, and their range.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING

from baton.auth.credentials import Credentials
from baton.auth.key import ClusterKey
from baton.clock import MachineClock
from baton.gateway import process
from baton.gateway.health_monitor import HealthMonitor
from baton.gateway.members.membership import Membership
from baton.gateway.options import GatewayOptions, WorkerAddress
from baton.ids import WorkerId, new_epoch
from baton.protocol.worker_http import Health, Role, WorkerInfo, WorkerLoad

if TYPE_CHECKING:
    from collections.abc import Callable

    from baton.gateway.workers import Workers

ROLES = (Role.PREFILL, Role.DECODE, Role.DECODE, Role.BOTH)
Figures = dict[str, list[float]]


class NoProbes(HealthMonitor):
    """The addresses are of no machine."""

    def update(self) -> None:
        """Probe none."""


def address(number: int) -> WorkerAddress:
    """The address of one worker of the whole run."""
    host = f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}"
    return WorkerAddress(f"https://{host}:8100", ROLES[number % len(ROLES)])


def identify(workers: Workers) -> None:
    """Those that are new report who they are."""
    for worker in workers.all:
        if worker.info is None:
            info = WorkerInfo(
                worker=WorkerId(f"worker-{worker.url.host}"),
                epoch=new_epoch(),
                role=worker.address.role,
                served_model_name="demo",
                fingerprint="f",
                max_context_tokens=4096,
                handoff_address=f"{worker.url.host}:8200",
                transports=("shared", "tcp"),
                version="0",
            )
            workers.register(worker, info)
    workers._make_fleet()  # noqa: SLF001 - what a timer does


def report(workers: Workers, number: int) -> None:
    """A second of load reports: of many workers, a fleet is made every 0.1 s."""
    for tenth in range(10):
        for at, worker in enumerate(workers.all[tenth::10]):
            workers.note_report(worker, Health(load=WorkerLoad((number + at) % 9, 100, 50, 16)))
        workers._make_fleet()  # noqa: SLF001 - what a timer does


def run_round(membership: Membership, workers: Workers, first: int, num: int) -> dict[str, float]:
    """Milliseconds of each step."""
    source = membership.sources[0]
    listed = [address(first + at) for at in range(num)]
    changed = frozenset([*listed[1:], address(first + num)])
    steps: dict[str, Callable[[], None]] = {
        "list": lambda: membership.apply(source, frozenset(listed)),
        "identify": lambda: identify(workers),
        "change": lambda: membership.apply(source, changed),
        "reports": lambda: report(workers, first),
        "look": membership.look,
        "leave": lambda: membership.apply(source, frozenset()),
    }
    figures = {}
    for name, step in steps.items():
        began = time.thread_time()
        step()
        figures[name] = 1e3 * (time.thread_time() - began)
    if workers.all:
        raise RuntimeError("a worker without requests was not forgotten")
    return figures


async def measure(num_workers: int, num_rounds: int) -> Figures:
    """The figures of all rounds, by step."""
    opened: list[tuple[Membership, Workers]] = []

    class Opened(Membership):
        async def __aenter__(self) -> Membership:
            opened.append((self, self._services.workers))
            return await super().__aenter__()

    process.HealthMonitor, process.Membership = NoProbes, Opened  # type: ignore[misc]
    options = GatewayOptions(
        addresses=(), credentials=Credentials.of(ClusterKey(b"k" * 32)), members=("file:/nowhere",)
    )
    figures: Figures = {}
    async with process.open_gateway(options, MachineClock()):
        for number in range(num_rounds + 1):
            first = 1 + number * (num_workers + 1)
            found = run_round(*opened[0], first, num_workers)
            for name, milliseconds in found.items() if number else ():  # the first one warms up
                figures.setdefault(name, []).append(milliseconds)
            await asyncio.sleep(0)
    return figures


def print_table(result: dict[str, object]) -> None:
    """As docs/clusters/members.md has it."""
    figures: Figures = result["milliseconds"]  # type: ignore[assignment]
    print(f"| of {result['num_workers']} workers | ms | range |\n|---|---|---|")
    for name, found in figures.items():
        print(f"| {name} | {statistics.median(found):.1f} | {min(found):.1f} to {max(found):.1f} |")


def main() -> None:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--table", type=Path)
    given = parser.parse_args()
    if given.table is not None:
        print_table(json.loads(given.table.read_text(encoding="utf-8")))
        return
    figures = asyncio.run(measure(given.workers, given.rounds))
    result: dict[str, object] = {
        "num_workers": given.workers,
        "python": platform.python_version(),
        "milliseconds": figures,
    }
    print_table(result)
    if given.json is not None:
        given.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
