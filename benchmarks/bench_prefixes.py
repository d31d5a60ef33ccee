"""Four workers under prompts that share beginnings: who sends them where they are cached?

Arms, each in front of the same four embedded workers of both roles:

    round_robin, prefix, cost       Baton's gateway with that policy
    prefix x2, cost x2              two gateway processes on one port, which share nothing
    vllm-router, sglang-router      cache-aware (`--peers FOLDER`, as in bench_control.py)

Loads: conversations (`multi-turn`), common beginnings (`shared-prefix`), and prompts that share
nothing (`fixed`), where no policy can win and none should lose. Prompts are text of chats, which
the gateways tokenize and the routers compare as characters. What all prompts of a load need does
not fit one worker's pool, so a worker that sees all of them forgets. Arms are interleaved, in the
other order every second round; prompts are new in each. Medians over the rounds. "cached": the
share of prompt tokens that was cached, as answers state, without what was loaded; "loaded": that
the answering workers received from other workers' caches; "computed": that some worker computed.
The latter two are from the workers' counters (`baton_worker_prompt_tokens_total`), of whole runs.

    python benchmarks/bench_prefixes.py --peers FOLDER --json benchmarks/results/prefixes.json
    python benchmarks/bench_prefixes.py --table benchmarks/results/prefixes.json
"""

from __future__ import annotations

import argparse
import json
import os
import re
import socket
import statistics
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bench_control import install_peers
from completion_client import get
from control_gateway import PEERS, router
from random_model import make_model
from rich.console import Console
from rich.table import Table
from run_record import write_record
from serve_runs import run_serve
from vllm_servers import find_free_port

from baton.testing.fleet import Fleet, FleetProcess

if TYPE_CHECKING:
    from collections.abc import Callable

NUM_WORKERS = 4
SERVED = "unknown"
"""What sglang-router calls the model of workers that it cannot ask in its own way."""
MODEL = {"layers": 4, "hidden": 256, "heads": 8, "kv-heads": 2}
ARMS: dict[str, dict[str, object]] = {
    "round_robin": {"router.policy": "round_robin"},
    "prefix": {"router.policy": "prefix"},
    "cost": {"router.policy": "cost"},
    "cost, no loading": {"router.policy": "cost", "router.options.cost.load_prefixes": "false"},
}
TWICE = {"prefix x2": "prefix", "cost x2": "cost"}
"""Policies of two gateway processes."""
LOADS = {
    "multi-turn": (
        "--turns", "5", "--prefix-len", "256", "--input-len", "96", "--output-len", "24",
    ),
    "shared-prefix": (
        "--prefixes", "8", "--prefix-len", "1024", "--input-len", "64", "--output-len", "16",
    ),
    "fixed": ("--input-len", "384", "--output-len", "16"),
}  # fmt: skip
ENGINE: dict[str, object] = {
    "engine.num_threads": 1,
    "engine.dtype": "float32",
    "engine.num_blocks": 480,
    "engine.max_batch_tokens": 512,
}
SOURCE = re.compile(r'^baton_worker_prompt_tokens_total\{source="(\w+)"\} (\S+)$', re.MULTILINE)


COLUMNS: tuple[tuple[str, tuple[str, Callable[[Run], float]]], ...] = (
    ("requests/s", (".1f", lambda run: run.requests_per_s)),
    ("TTFT p50, ms", (",.0f", lambda run: run.ttft_p50_ms)),
    ("TTFT p99, ms", (",.0f", lambda run: run.ttft_p99_ms)),
    ("TTFT mean, ms", (",.0f", lambda run: run.ttft_mean_ms)),
    ("cached", (".0%", lambda run: run.cached)),
    ("loaded", (".0%", lambda run: run.loaded)),
    ("computed", (".0%", lambda run: run.computed)),
)
CELLS = tuple(cell for _, cell in COLUMNS)


@dataclass(frozen=True)
class Run:
    """What one arm gave under one load, in one round. Shares are of the prompts' tokens."""

    arm: str
    load: str
    requests_per_s: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    ttft_mean_ms: float
    cached: float
    loaded: float
    computed: float
    num_failed: int


def count_tokens(workers: list[FleetProcess]) -> dict[str, float]:
    """Prompt tokens since the workers' start, by where their KV came from."""
    counts = {"computed": 0.0, "received": 0.0}
    for worker in workers:
        for source, value in SOURCE.findall(get(worker.url, "/metrics")):
            counts[source] = counts.get(source, 0.0) + float(value)
    return counts


def measure(
    arm: str, url: str, load: str, workers: list[FleetProcess], options: argparse.Namespace
) -> Run:
    """One run of `baton bench serve`."""
    before = count_tokens(workers)
    figures = run_serve(
        url, "--model", SERVED, "--endpoint", "chat", "--workload", load, *LOADS[load],
        "--concurrency", str(options.concurrency), "--duration", str(options.duration),
        "--warm-up", "0",
    )["figures"]  # fmt: skip
    after, num_tokens = count_tokens(workers), figures["num_prompt_tokens"]
    num_received = after["received"] - before["received"]
    return Run(
        arm,
        load,
        figures["requests_per_s"],
        figures["ttft_s"]["p50"] * 1e3,
        figures["ttft_s"]["p99"] * 1e3,
        figures["ttft_s"]["mean"] * 1e3,
        ((figures["num_cached_tokens"] or 0) - num_received) / num_tokens,
        num_received / num_tokens,
        (after["computed"] - before["computed"]) / num_tokens,
        figures["num_failed"],
    )


def find_free_ports(num: int) -> int:
    """The first of so many ports that are free now."""
    while True:
        first = find_free_port()
        try:
            for port in range(first, first + num):
                socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        return first


def start_arms(
    fleet: Fleet, stack: ExitStack, workers: list[FleetProcess], options: argparse.Namespace
) -> dict[str, str]:
    """The address of each arm. All run at the same time, so that Baton's gateways keep learning."""
    gateways = dict(ARMS)
    for name, policy in TWICE.items():
        port = {"gateway.management_port": find_free_ports(2), "gateway.processes": 2}
        gateways[name] = {"router.policy": policy, **port}
    arms = {}
    for name, own in gateways.items():
        if not options.arms or name in options.arms:
            arms[name] = fleet.start_gateway([], [], both=workers, settings=own).url
    if options.peers is not None:
        urls = [worker.url for worker in workers]
        for name in PEERS:
            served = router(name, options.peers, urls, policy="cache_aware", model=SERVED)
            arms[name] = stack.enter_context(served)[0]
    return arms


def main() -> None:
    """Measure all, print a table for each load."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peers", type=Path, help="virtual environment of the other routers")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--duration", type=float, default=15.0, help="seconds of each run")
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--loads", nargs="*", choices=LOADS, default=list(LOADS))
    parser.add_argument("--arms", nargs="*", help="all unless named")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--table", type=Path, help="print the table of this result's file instead")
    options = parser.parse_args()
    if options.table is not None:
        print_markdown(options.table)
        return
    if options.peers is not None:
        install_peers(options.peers)
    environment = dict(os.environ, BATON_CLUSTER_KEY=os.urandom(32).hex())
    runs: list[Run] = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        fleet = stack.enter_context(Fleet(folder, environment))
        settings = ENGINE | {
            "worker.model": str(make_model(folder, MODEL)),
            "worker.served_model_name": SERVED,
        }
        workers = [fleet.start_worker(f"w{i}", "both", settings) for i in range(NUM_WORKERS)]
        for worker in workers:
            worker.wait_ready()
        arms = start_arms(fleet, stack, workers, options)
        for number in range(options.rounds):
            for load in options.loads:
                for arm in list(arms) if number % 2 else reversed(arms):
                    runs.append(measure(arm, arms[arm], load, workers, options))
                    print(runs[-1], file=sys.stderr)
    show(runs, list(arms), options.loads)
    write_record(options.json, concurrency=options.concurrency, runs=runs)


def show(runs: list[Run], arms: list[str], loads: list[str]) -> None:
    """Medians over the rounds."""
    for load in loads:
        table = Table(load, *(name for name, _ in COLUMNS), "failed")
        for arm in arms:
            own = [run for run in runs if (run.arm, run.load) == (arm, load)]
            table.add_row(arm, *list_medians(own), str(sum(run.num_failed for run in own)))
        Console(width=120).print(table)


def list_medians(runs: list[Run]) -> list[str]:
    """A row's figures."""
    return [format(statistics.median(read(run) for run in runs), spec) for spec, read in CELLS]


def print_markdown(path: Path) -> None:
    """The table of docs/routing.md, of a result's file."""
    runs = [Run(**run) for run in json.loads(path.read_bytes())["runs"]]
    print(f"| load | gateway | {' | '.join(name for name, _ in COLUMNS)} |")
    print("|---" * (2 + len(COLUMNS)) + "|")
    for load in dict.fromkeys(run.load for run in runs):
        arms = [*ARMS, *TWICE, *PEERS]
        for arm in sorted({run.arm for run in runs}, key=arms.index):
            own = [run for run in runs if (run.arm, run.load) == (arm, load)]
            print(f"| {load} | `{arm}` | {' | '.join(list_medians(own))} |")


if __name__ == "__main__":
    main()
