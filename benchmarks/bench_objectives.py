"""Replicas, each split, and the policy `cost`, in turns before the same workers.

Trials of `baton bench architectures` start each configuration anew, minutes apart; on a machine
whose speed drifts by more than what is compared, turns of some seconds show less of that. Arms,
each a gateway of its own before the same workers of both roles, spread over the cores:

    replicated        turns
    1P1D, 2P2D, …     the first workers prefill, the others decode
    throughput        policy `cost` with that objective
    goodput           policy `cost` with that objective (`--ttft`, `--tpot`: its limits)

In each round every arm has one turn under each load, in another order each time; requests before
`--warm-up` times as many as are under way have ended do not count. Gateways keep what they have
learned of a workload. Shares are of the best of replicas and splits by the median; median and
range of the rounds.

    python benchmarks/bench_objectives.py --workload balanced --concurrency 2 8 --json FILE
    python benchmarks/bench_objectives.py --table FILE [FILE ...]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from run_record import write_record
from serve_runs import run_serve

from baton.testing.fleet import Fleet, FleetProcess

OBJECTIVES = ("throughput", "goodput")
TTFT_LIMITS_MS = {"prefill-heavy": 2000.0, "balanced": 400.0, "decode-heavy": 400.0}
ENGINES: dict[str, dict[str, object]] = {
    "transformers": {},
    "vllm": {"worker.engine": "vllm"},
}


@dataclass(frozen=True)
class Turn:
    """What an arm gave under one load. `good_per_s`: requests within both limits."""

    workload: str
    arm: str
    concurrency: int
    round_number: int
    output_tokens_per_s: float
    good_per_s: float
    ttft_p50_ms: float
    num_failed: int


@dataclass(frozen=True)
class Limits:
    """What a good request keeps, in ms."""

    ttft: float
    tpot: float


def start_arms(
    fleet: Fleet, workers: list[FleetProcess], objectives: list[str], limits: Limits
) -> dict[str, FleetProcess]:
    """The gateway of each arm."""
    turns: dict[str, object] = {"router.policy": "round_robin"}
    arms = {"replicated": fleet.start_gateway([], [], both=workers, settings=turns)}
    for num_prefill in range(1, len(workers)):
        name = f"{num_prefill}P{len(workers) - num_prefill}D"
        prefill, decode = workers[:num_prefill], workers[num_prefill:]
        arms[name] = fleet.start_gateway(prefill, decode, settings=turns)
    for objective in objectives:
        cost = {
            "router.policy": "cost",
            "router.options.cost.objective": objective,
            "router.options.cost.ttft_s": limits.ttft / 1e3,
            "router.options.cost.tpot_s": limits.tpot / 1e3,
        }
        arms[objective] = fleet.start_gateway([], [], both=workers, settings=cost)
    return arms


def measure(
    load: tuple[str, int, int], arm: str, url: str, limits: Limits, options: argparse.Namespace
) -> Turn:
    """One turn of `baton bench serve`. `load`: workload, how many at once, and the round."""
    workload, concurrency, number = load
    figures = run_serve(
        url, "--workload", workload, "--concurrency", str(concurrency),
        "--duration", str(options.duration),
        "--warm-up", str(round(options.warm_up * concurrency)),
        "--goodput", f"ttft:{limits.ttft:g}", "--goodput", f"tpot:{limits.tpot:g}",
    )["figures"]  # fmt: skip
    if figures["failures"]:
        print(f"{arm}: requests that failed: {figures['failures']}", file=sys.stderr, flush=True)
    return Turn(
        workload,
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
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--dtype", default="auto", help="`float32` where a CPU has no bfloat16")
    parser.add_argument("--workload", nargs="+", choices=TTFT_LIMITS_MS, default=["balanced"])
    parser.add_argument("--objective", choices=OBJECTIVES, nargs="+", default=list(OBJECTIVES))
    parser.add_argument("--concurrency", type=int, nargs="+", default=[2, 8])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--duration", type=float, default=6.0, help="seconds of each turn")
    parser.add_argument("--warm-up", type=float, default=1.0, help="times as many as are under way")
    parser.add_argument("--ttft", type=float, help="limit in ms (default: by workload)")
    parser.add_argument("--tpot", type=float, default=12.0, help="limit in ms")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--table", type=Path, nargs="+", help="print these results instead")
    options = parser.parse_args()
    if options.table is not None:
        for path in options.table:
            record = json.loads(path.read_bytes())
            print_tables(record["title"], [Turn(**turn) for turn in record["turns"]])
        return
    environment = dict(os.environ, BATON_CLUSTER_KEY=os.urandom(32).hex())
    turns: list[Turn] = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        fleet = stack.enter_context(Fleet(folder, environment))
        settings = ENGINES[options.engine] | {
            "engine.num_threads": 1,
            "engine.dtype": options.dtype,
        }
        cores = sorted(os.sched_getaffinity(0))
        workers = [
            fleet.start_worker(f"w{i}", "both", settings, [cores[i % len(cores)]])
            for i in range(options.workers)
        ]
        for worker in workers:
            worker.wait_ready()
        order = random.Random(0)
        for workload in options.workload:
            limits = Limits(options.ttft or TTFT_LIMITS_MS[workload], options.tpot)
            arms = start_arms(fleet, workers, options.objective, limits)
            for number in range(options.rounds):
                for concurrency in options.concurrency:
                    load = workload, concurrency, number
                    for arm in order.sample(list(arms), len(arms)):
                        turns.append(measure(load, arm, arms[arm].url, limits, options))
                        print(turns[-1], file=sys.stderr, flush=True)
            for gateway in arms.values():
                gateway.stop()
    title = f"{options.engine}, {options.workers} workers, {options.tpot:g} ms a token"
    print_tables(title, turns)
    write_record(options.json, title=title, turns=turns)


def print_tables(title: str, turns: list[Turn]) -> None:
    """A table for each workload and objective, and the requests that failed, by arm."""
    for workload in dict.fromkeys(turn.workload for turn in turns):
        of_workload = [turn for turn in turns if turn.workload == workload]
        for objective in OBJECTIVES:
            if any(turn.arm == objective for turn in of_workload):
                print_table(f"{title}, {workload}", objective, of_workload)
        failed: Counter[str] = Counter()
        for turn in of_workload:
            failed[turn.arm] += turn.num_failed
        if shown := ", ".join(f"{arm} {num}" for arm, num in failed.items() if num):
            print(f"\n{workload}: requests that failed: {shown}")


def print_table(title: str, objective: str, turns: list[Turn]) -> None:
    """One row for each load: the objective's figure, and the shares of the rounds.

    Medians of output tokens/s; good requests/s of each round, since what is learned in the first
    one shows in the next.
    """
    unit = "output tokens/s" if objective == "throughput" else "good requests/s"
    fixed = [arm for arm in dict.fromkeys(sorted(t.arm for t in turns)) if arm not in OBJECTIVES]
    print(
        f"\n{title}: {unit}\n\n| at once | {' | '.join([objective, 'share of the best', *fixed])} |"
    )
    print("|---" * (3 + len(fixed)) + "|")
    for concurrency in dict.fromkeys(turn.concurrency for turn in turns):
        values: dict[str, dict[int, float]] = {arm: {} for arm in (objective, *fixed)}
        for turn in turns:
            if turn.concurrency == concurrency and turn.arm in values:
                is_throughput = objective == "throughput"
                value = turn.output_tokens_per_s if is_throughput else turn.good_per_s
                values[turn.arm][turn.round_number] = value
        medians = {arm: statistics.median(each.values()) for arm, each in values.items()}
        best = max(fixed, key=medians.__getitem__)
        shares = [
            own / values[best][number]
            for number, own in values[objective].items()
            if values[best][number]
        ]
        share = "-"
        if shares:
            share = f"{statistics.median(shares):.2f} ({min(shares):.2f} to {max(shares):.2f})"
        row = [f"{medians[arm]:.4g}" for arm in (objective, *fixed)]
        if objective == "goodput":
            row = [
                ", ".join(f"{each:.2f}" for _, each in sorted(values[arm].items()))
                for arm in (objective, *fixed)
            ]
        print(f"| {concurrency} | {row[0]} | {share} | {' | '.join(row[1:])} |")


if __name__ == "__main__":
    main()
