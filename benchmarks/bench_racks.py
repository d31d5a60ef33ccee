"""Two racks with a slow link between them: which policy keeps handoffs within a rack?

Each rack is three hosts, network namespaces on one bridge: a prefill worker and two decode workers,
embedded engine, `tcp`. htb gives what a host sends to its own rack `--near` Mbit/s, and what it
sends to the other rack `--far`; the namespaces have no other way to each other. In front of the
same workers stand three gateways: `round_robin`, `prefix`, `cost`.

    racks         the links differ, and workers report their rack
    unlabelled    the links differ, and all workers report the same rack: what is learned of pairs
    equal         all links are near ones, and all workers report the same rack: nothing to gain

Prompts are random tokens, so no cache helps. Arms are interleaved, in the other order every second
round. Beside times, `near`, `far` and `alone` are the shares of the latest placements (up to 100 of
each run) within a rack, between racks, and without a handoff. Needs root and iproute2.

    python benchmarks/bench_racks.py --json benchmarks/results/racks.json
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import urllib.request
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from random_model import make_model
from rich.console import Console
from rich.table import Table
from run_record import write_record
from serve_runs import run_serve

from baton.testing.fleet import Fleet, start_command
from baton.testing.network_namespaces import BridgedHost, NoNamespaceError, bridged_hosts, run

if TYPE_CHECKING:
    from collections.abc import Sequence

    from baton.testing.fleet import FleetProcess

POLICIES = ("round_robin", "prefix", "cost")
SCENARIOS = ("racks", "unlabelled", "equal")
ROLES = ("prefill", "decode", "decode")
NUM_RACKS = 2
MODEL = {"layers": 4, "hidden": 256, "heads": 8, "kv-heads": 8}
KV_BYTES_PER_TOKEN = 4 * 2 * 256 * 4
ENGINE: dict[str, object] = {
    "engine.num_threads": 1,
    "engine.dtype": "float32",
    "engine.num_blocks": 1024,
    "transfer.transports": ["tcp"],
}


@dataclass(frozen=True)
class Run:
    """What one arm gave in one round."""

    scenario: str
    arm: str
    requests_per_s: float
    ttft_mean_ms: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    near: float
    far: float
    alone: float
    num_requests: int
    num_failed: int


def shape(hosts: Sequence[BridgedHost], racks: Sequence[int], near: int, far: int) -> None:
    """Limit what each host sends, in Mbit/s: to its own rack, and to the other."""
    for host, rack in zip(hosts, racks, strict=True):
        tc = ("tc", "-n", host.namespace)
        run(*tc, "qdisc", "add", "dev", "eth0", "root", "handle", "1:", "htb", "default", "10")
        for number, rate in ((10, near), (20, far)):
            limit = ("htb", "rate", f"{rate}mbit", "burst", "64kb", "cburst", "64kb")
            add = ("class", "add", "dev", "eth0", "parent", "1:", "classid", f"1:{number}")
            run(*tc, *add, *limit)
        for other, its in zip(hosts, racks, strict=True):
            if its != rack:
                match = ("u32", "match", "ip", "dst", f"{other.address}/32", "flowid", "1:20")
                add = ("filter", "add", "dev", "eth0", "parent", "1:", "protocol", "ip")
                run(*tc, *add, *match)


def start_workers(
    fleet: Fleet, hosts: Sequence[BridgedHost], racks: Sequence[int], settings: dict[str, object]
) -> dict[str, list[FleetProcess]]:
    """One worker on each host; by role."""
    workers: dict[str, list[FleetProcess]] = {"prefill": [], "decode": []}
    for number, (host, rack) in enumerate(zip(hosts, racks, strict=True)):
        role = ROLES[number % len(ROLES)]
        own = {
            "worker.host": host.address,
            "worker.handoff_host": host.address,
            "worker.topology": f"zone/rack-{rack}/host-{number}",
        }
        fleet.start = partial(start_command, prefix=host.prefix)
        name = f"{role}-{number}"
        workers[role].append(fleet.start_worker(name, role, ENGINE | settings | own))
    fleet.start = start_command
    for worker in (*workers["prefill"], *workers["decode"]):
        worker.wait_ready()
    return workers


def count_places(url: str, racks: dict[str, int]) -> dict[str, float]:
    """Shares of the latest placements: within a rack, between racks, without a handoff."""
    counts = {"near": 0, "far": 0, "alone": 0}
    for request in fetch(f"{url}/debug/requests")["requests"]:
        shown = fetch(f"{url}/debug/requests/{request['id']}")
        prefill, decode = shown["prefill"], shown["decode"]
        if prefill is None or decode is None:
            counts["alone"] += 1
        else:
            is_near = racks[prefill["worker"]] == racks[decode["worker"]]
            counts["near" if is_near else "far"] += 1
    return {name: count / max(1, sum(counts.values())) for name, count in counts.items()}


def fetch(url: str) -> dict[str, list[dict[str, str]] | dict[str, str] | None]:
    """JSON of this benchmark's own gateway."""
    with urllib.request.urlopen(url, timeout=10) as answer:
        return json.load(answer)


def measure(
    scenario: str, arm: str, url: str, racks: dict[str, int], options: argparse.Namespace
) -> Run:
    """One run of `baton bench serve`."""
    figures = run_serve(
        url, "--workload", "fixed", "--input-len", str(options.input_len), "--output-len", "16",
        "--concurrency", str(options.concurrency), "--duration", str(options.duration),
    )["figures"]  # fmt: skip
    return Run(
        scenario,
        arm,
        figures["requests_per_s"],
        figures["ttft_s"]["mean"] * 1e3,
        figures["ttft_s"]["p50"] * 1e3,
        figures["ttft_s"]["p99"] * 1e3,
        **count_places(url, racks),
        num_requests=figures["num_complete"],
        num_failed=figures["num_failed"],
    )


def measure_scenario(scenario: str, options: argparse.Namespace) -> list[Run]:
    """All arms in turns, before workers of their own."""
    environment = dict(os.environ, BATON_CLUSTER_KEY=os.urandom(32).hex())
    racks = [rack for rack in range(NUM_RACKS) for _ in ROLES]
    runs: list[Run] = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        hosts = stack.enter_context(bridged_hosts(len(racks)))
        fleet = stack.enter_context(Fleet(folder, environment))
        shape(hosts, racks, options.near, options.near if scenario == "equal" else options.far)
        shown = [rack if scenario == "racks" else 0 for rack in racks]
        settings = {"worker.model": str(make_model(folder, MODEL))}
        workers = start_workers(fleet, hosts, shown, settings)
        names = {f"{ROLES[n % len(ROLES)]}-{n}": rack for n, rack in enumerate(racks)}
        arms = {
            policy: fleet.start_gateway(
                workers["prefill"], workers["decode"], settings={"router.policy": policy}
            ).url
            for policy in POLICIES
        }
        for number in range(options.rounds):
            for arm in list(arms) if number % 2 else reversed(arms):
                runs.append(measure(scenario, arm, arms[arm], names, options))
                print(runs[-1], file=sys.stderr)
        if options.links:
            print(json.dumps(fetch(f"{arms['cost']}/debug/links"), indent=1), file=sys.stderr)
    return runs


def main() -> None:
    """Measure all, print a table for each scenario."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--duration", type=float, default=12.0, help="seconds of each run")
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--input-len", type=int, default=512)
    parser.add_argument("--near", type=int, default=2000, help="Mbit/s within a rack")
    parser.add_argument("--far", type=int, default=100, help="Mbit/s between racks")
    parser.add_argument("--scenarios", nargs="*", choices=SCENARIOS, default=list(SCENARIOS))
    parser.add_argument("--links", action="store_true", help="print the gateway's /debug/links")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    runs: list[Run] = []
    try:
        for scenario in options.scenarios:
            runs += measure_scenario(scenario, options)
    except NoNamespaceError as exc:
        sys.exit(f"skipped: {exc}; run it as root, with iproute2")
    show(runs, options.scenarios)
    named = ("concurrency", "input_len", "duration", "near", "far")
    given = {name: getattr(options, name) for name in named}
    write_record(options.json, **given, kv_bytes_per_token=KV_BYTES_PER_TOKEN, runs=runs)


def show(runs: Sequence[Run], scenarios: Sequence[str]) -> None:
    """Medians over the rounds."""
    columns = {
        "requests/s": ("requests_per_s", "{:.2f}"),
        "TTFT mean, ms": ("ttft_mean_ms", "{:.0f}"),
        "TTFT p50, ms": ("ttft_p50_ms", "{:.0f}"),
        "TTFT p99, ms": ("ttft_p99_ms", "{:.0f}"),
        "near": ("near", "{:.0%}"),
        "far": ("far", "{:.0%}"),
        "alone": ("alone", "{:.0%}"),
    }
    for scenario in scenarios:
        table = Table(scenario, *columns, "failed")
        for arm in POLICIES:
            own = [run for run in runs if (run.arm, run.scenario) == (arm, scenario)]
            medians = [
                text.format(statistics.median(getattr(run, name) for run in own))
                for name, text in columns.values()
            ]
            table.add_row(arm, *medians, str(sum(run.num_failed for run in own)))
        Console().print(table)


if __name__ == "__main__":
    main()
