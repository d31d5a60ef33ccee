"""What it gives that two workers share one prompt: TTFT with and without, before the same workers.

Two gateways with the policy `cost` before two workers of both roles, a core for each; one of them
may not split prompts (`router.options.cost.split_prompts = false`). In each round both have a turn
under each load, in another order each time. Ratios are of turns of one round; median and range.

    python benchmarks/bench_split_prompts.py --tokens 1024 2048 --concurrency 1 2 4 --json FILE
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import tempfile
import urllib.request
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from run_record import write_record
from serve_runs import run_serve

from baton.testing.fleet import Fleet

ARMS = ("split", "whole")


@dataclass(frozen=True)
class Turn:
    """What an arm gave under one load.

    `num_split`: its prompts that two workers computed, those before the warm-up has ended, too.
    """

    arm: str
    num_tokens: int
    concurrency: int
    round_number: int
    ttft_p50_ms: float
    output_tokens_per_s: float
    num_requests: int
    num_failed: int
    num_split: int


def count_split(management_url: str) -> int:
    """The gateway's own count of split prompts."""
    with urllib.request.urlopen(f"{management_url}/metrics", timeout=30) as response:
        for line in response.read().decode().splitlines():
            if line.startswith("baton_gateway_split_prompts_total"):
                return int(float(line.rpartition(" ")[2]))
    return 0


def measure(arm: str, url: str, load: tuple[int, int, int], options: argparse.Namespace) -> Turn:
    """One turn of `baton bench serve`. `load`: tokens of a prompt, how many at once, the round."""
    num_tokens, concurrency, number = load
    before = count_split(url)
    figures = run_serve(
        url, "--workload", "fixed", "--input-len", str(num_tokens),
        "--output-len", str(options.output), "--concurrency", str(concurrency),
        "--duration", str(options.duration), "--warm-up", str(concurrency),
    )["figures"]  # fmt: skip
    return Turn(
        arm,
        num_tokens,
        concurrency,
        number,
        figures["ttft_s"]["p50"] * 1e3,
        figures["output_tokens_per_s"],
        figures["num_complete"],
        figures["num_failed"],
        count_split(url) - before,
    )


def main() -> None:
    """Measure all in turns, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 2048])
    parser.add_argument("--output", type=int, default=32, help="tokens of an answer")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--duration", type=float, default=6.0, help="seconds of each turn")
    parser.add_argument("--model", type=Path, help="its folder (default: the demo)")
    parser.add_argument("--objective", choices=("goodput", "throughput"), default="goodput")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    environment = dict(os.environ, BATON_CLUSTER_KEY=os.urandom(32).hex())
    turns: list[Turn] = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        fleet = stack.enter_context(Fleet(folder, environment))
        settings: dict[str, object] = {"engine.num_threads": 1}
        if options.model is not None:
            settings["worker.model"] = str(options.model)
        cores = sorted(os.sched_getaffinity(0))
        workers = [fleet.start_worker(f"w{i}", "both", settings, [cores[i]]) for i in range(2)]
        for worker in workers:
            worker.wait_ready()
        cost = {"router.policy": "cost", "router.options.cost.objective": options.objective}
        gateways = {
            arm: fleet.start_gateway(
                [], [], both=workers,
                settings=cost | {"router.options.cost.split_prompts": arm == "split"},
            )
            for arm in ARMS
        }  # fmt: skip
        order = random.Random(0)
        for number in range(options.rounds):
            for num_tokens in options.tokens:
                for concurrency in options.concurrency:
                    for arm in order.sample(ARMS, len(ARMS)):
                        load = num_tokens, concurrency, number
                        turns.append(measure(arm, gateways[arm].url, load, options))
                        print(turns[-1], file=sys.stderr, flush=True)
    print_table(turns)
    write_record(options.json, turns=turns)


def print_table(turns: list[Turn]) -> None:
    """A row for each load."""
    print("| tokens | at once | prompts split | TTFT p50, ms, whole | split | split / whole |"
          " output tokens/s, split / whole |")  # fmt: skip
    print("|---" * 7 + "|")
    for load in dict.fromkeys((turn.num_tokens, turn.concurrency) for turn in turns):
        of_load = [t for t in turns if (t.num_tokens, t.concurrency) == load]
        split, whole = (
            sorted((t for t in of_load if t.arm == arm), key=lambda t: t.round_number)
            for arm in ARMS
        )
        pairs = list(zip(split, whole, strict=True))
        ttft = [one.ttft_p50_ms / other.ttft_p50_ms for one, other in pairs]
        rate = [one.output_tokens_per_s / other.output_tokens_per_s for one, other in pairs]
        num_split = sum(turn.num_split for turn in split)
        medians = [statistics.median(t.ttft_p50_ms for t in each) for each in (whole, split)]
        print(f"| {load[0]} | {load[1]} | {num_split} | {medians[0]:.0f} | {medians[1]:.0f} "
              f"| {show(ttft)} | {show(rate)} |")  # fmt: skip


def show(ratios: list[float]) -> str:
    """Median and range."""
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


if __name__ == "__main__":
    main()
