"""Replicas, a split, and the policy `cost`, in turns before the same two workers.

Trials of `baton bench architectures` start each configuration anew, minutes apart; on a machine
whose speed drifts by more than what is compared, turns of some seconds show less of that. Arms,
each a gateway of its own before the same two workers of both roles, each pinned to a core:

    replicated        turns
    1P1D              the first worker prefills, the second decodes
    throughput        policy `cost` with that objective
    goodput           policy `cost` with that objective (`--ttft`, `--tpot`: its limits)

In each round every arm has one turn under each load, in another order each time; requests before
`--warm-up` times as many as are under way have ended do not count. Gateways keep what they have
learned. Shares are of the better of replicas and the split in the same round; median and range of
the rounds.

    python benchmarks/bench_objectives.py --workload balanced --concurrency 2 8 --json FILE
    python benchmarks/bench_objectives.py --table FILE [FILE ...]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from run_record import write_record

from baton.testing.fleet import Fleet, FleetProcess

FIXED = ("replicated", "1P1D")
ENGINES: dict[str, dict[str, object]] = {
    "transformers": {"engine.num_threads": 1},
    "vllm": {"worker.engine": "vllm", "engine.num_threads": 1},
}


@dataclass(frozen=True)
class Turn:
    """What an arm gave under one load. `good_per_s`: requests within both limits."""

    arm: str
    concurrency: int
    round_number: int
    output_tokens_per_s: float
    good_per_s: float
    ttft_p50_ms: float
    num_failed: int


def start_arms(
    fleet: Fleet, workers: list[FleetProcess], options: argparse.Namespace
) -> dict[str, str]:
    """The address of each arm."""
    first, second = workers
    cost = {
        "router.policy": "cost",
        "router.options.cost.objective": options.objective,
        "router.options.cost.ttft_s": options.ttft / 1e3,
        "router.options.cost.tpot_s": options.tpot / 1e3,
    }
    turns: dict[str, object] = {"router.policy": "round_robin"}
    return {
        "replicated": fleet.start_gateway([], [], both=workers, settings=turns).url,
        "1P1D": fleet.start_gateway([first], [second], settings=turns).url,
        options.objective: fleet.start_gateway([], [], both=workers, settings=cost).url,
    }


def measure(arm: str, url: str, concurrency: int, number: int, options: argparse.Namespace) -> Turn:
    """One turn of `baton bench serve`."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [
            sys.executable, "-m", "baton.cli", "bench", "serve", "--url", url,
            "--workload", options.workload, "--concurrency", str(concurrency),
            "--duration", str(options.duration),
            "--warm-up", str(round(options.warm_up * concurrency)), "--output", str(report),
            "--goodput", f"ttft:{options.ttft:g}", "--goodput", f"tpot:{options.tpot:g}",
        ]  # fmt: skip
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        figures = json.loads(report.read_bytes())["figures"]
    return Turn(
        arm,
        concurrency,
        number,
        figures["output_tokens_per_s"],
        figures["goodput"]["requests_per_s"],
        figures["ttft_s"]["p50"] * 1e3,
        figures["num_failed"],
    )


def main() -> None:
    """Measure all in turns, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engine", choices=ENGINES, default="vllm")
    parser.add_argument("--workload", default="balanced")
    parser.add_argument("--objective", choices=("throughput", "goodput"), default="throughput")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[2, 8])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--duration", type=float, default=6.0, help="seconds of each turn")
    parser.add_argument("--warm-up", type=float, default=1.0, help="times as many as are under way")
    parser.add_argument("--ttft", type=float, default=2000.0, help="limit in ms")
    parser.add_argument("--tpot", type=float, default=20.0, help="limit in ms")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--table", type=Path, nargs="+", help="print these results instead")
    options = parser.parse_args()
    if options.table is not None:
        for path in options.table:
            record = json.loads(path.read_bytes())
            print_table(record["title"], record["objective"], [Turn(**t) for t in record["turns"]])
        return
    environment = dict(os.environ, BATON_CLUSTER_KEY=os.urandom(32).hex())
    turns: list[Turn] = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        fleet = stack.enter_context(Fleet(folder, environment))
        settings, cores = ENGINES[options.engine], sorted(os.sched_getaffinity(0))
        workers = [
            fleet.start_worker(f"w{i}", "both", settings, [cores[i % len(cores)]]) for i in range(2)
        ]
        for worker in workers:
            worker.wait_ready()
        arms = start_arms(fleet, workers, options)
        order = random.Random(0)
        for number in range(options.rounds):
            for concurrency in options.concurrency:
                for arm in order.sample(list(arms), len(arms)):
                    turns.append(measure(arm, arms[arm], concurrency, number, options))
                    print(turns[-1], file=sys.stderr)
    title = f"{options.engine}, {options.workload}"
    if options.objective == "goodput":
        title += f" within {options.ttft:g} ms, {options.tpot:g} ms a token"
    print_table(title, options.objective, turns)
    write_record(options.json, title=title, objective=options.objective, turns=turns)


def print_table(title: str, objective: str, turns: list[Turn]) -> None:
    """One row for each load: the objective's figure, and the shares of the rounds.

    Medians of output tokens/s; good requests/s of each round, since what is learned in the first
    one shows in the next.
    """
    unit = "output tokens/s" if objective == "throughput" else "good requests/s"
    print(
        f"\n{title}: {unit}\n\n| at once | {objective} | share of the better | replicated | 1P1D |"
    )
    print("|---" * 5 + "|")
    for concurrency in dict.fromkeys(turn.concurrency for turn in turns):
        values: dict[str, dict[int, float]] = {arm: {} for arm in (objective, *FIXED)}
        for turn in turns:
            if turn.concurrency == concurrency:
                is_throughput = objective == "throughput"
                value = turn.output_tokens_per_s if is_throughput else turn.good_per_s
                values[turn.arm][turn.round_number] = value
        medians = {arm: statistics.median(each.values()) for arm, each in values.items()}
        better = max(FIXED, key=medians.__getitem__)
        shares = [
            own / values[better][number]
            for number, own in values[objective].items()
            if values[better][number]
        ]
        share = "-"
        if shares:
            share = f"{statistics.median(shares):.2f} ({min(shares):.2f} to {max(shares):.2f})"
        row = [f"{medians[arm]:.4g}" for arm in (objective, *FIXED)]
        if objective == "goodput":
            row = [
                ", ".join(f"{each:.2f}" for _, each in sorted(values[arm].items()))
                for arm in (objective, *FIXED)
            ]
        print(f"| {concurrency} | {row[0]} | {share} | {row[1]} | {row[2]} |")


if __name__ == "__main__":
    main()
