"""Two load generators on one server: `baton bench serve` and `vllm bench serve`, in turns.

    python benchmarks/bench_serve_clients.py --url http://127.0.0.1:8000 --model demo \
        --tokenizer src/baton/models/demo [--rounds 5] [--json FILE]

The server runs already, and nothing else should. Both send prompts of the same length, want answers
of the same length, and keep as many requests under way. The order is turned round in each round.
What counts is the ratio of what they report of the same server, by the figures' names.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table
from run_record import write_record

VLLM_CLIENT = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""
METRICS = ("output_tokens_per_s", "mean_ttft_ms", "mean_tpot_ms", "mean_itl_ms", "p99_ttft_ms")
console = Console(stderr=True)


def main() -> None:
    """Run the rounds, print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--concurrency", type=int, default=2)
    parser.add_argument("--input-len", type=int, default=256)
    parser.add_argument("--output-len", type=int, default=32)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    runs: dict[str, list[dict[str, float]]] = {"baton": [], "vllm": []}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(options.rounds):
            clients = [("baton", run_baton), ("vllm", run_vllm)]
            for name, run in clients if number % 2 == 0 else reversed(clients):
                found = run(options, Path(folder) / f"{name}-{number}.json", number)
                console.print(number, name, {key: round(found[key], 2) for key in METRICS})
                runs[name].append(found)
    ratios = {key: compute_ratio(runs, key) for key in METRICS}
    console.print(render(runs, ratios))
    write_record(options.json, runs=runs, ratios=ratios)


def run_baton(options: argparse.Namespace, result: Path, number: int) -> dict[str, float]:
    """One run of ours."""
    command = [
        sys.executable, "-m", "baton.cli", "bench", "serve", "--url", options.url,
        "--model", options.model, "--workload", "fixed", "--input-len", str(options.input_len),
        "--output-len", str(options.output_len), "--requests", str(options.requests),
        "--concurrency", str(options.concurrency), "--warm-up", "2", "--output", str(result),
        "--seed", f"round-{number}-{os.getpid()}",
    ]  # fmt: skip
    subprocess.run(command, capture_output=True, text=True, check=True, timeout=900)
    found = json.loads(result.read_text())["figures"]
    return {
        "output_tokens_per_s": found["output_tokens_per_s"],
        "mean_ttft_ms": found["ttft_s"]["mean"] * 1e3,
        "mean_tpot_ms": found["tpot_s"]["mean"] * 1e3,
        "mean_itl_ms": found["itl_s"]["mean"] * 1e3,
        "p99_ttft_ms": found["ttft_s"]["p99"] * 1e3,
        "num_complete": found["num_complete"],
    }


def run_vllm(options: argparse.Namespace, result: Path, number: int) -> dict[str, float]:
    """One run of vLLM's."""
    command = [
        sys.executable, "-c", VLLM_CLIENT, "--base-url", options.url, "--model", options.model,
        "--tokenizer", str(options.tokenizer), "--dataset-name", "random",
        "--random-input-len", str(options.input_len),
        "--random-output-len", str(options.output_len), "--ignore-eos", "--num-warmups", "2",
        "--num-prompts", str(options.requests), "--max-concurrency", str(options.concurrency),
        "--save-result", "--result-dir", str(result.parent), "--result-filename", result.name,
        "--disable-tqdm", "--seed", str(os.getpid() * 100 + number), "--temperature", "0",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=900)
    if done.returncode or not result.exists():
        sys.exit(f"vLLM's client failed: {done.stderr[-2000:]}")
    found = json.loads(result.read_text())
    return {
        "output_tokens_per_s": found["output_throughput"],
        "mean_ttft_ms": found["mean_ttft_ms"],
        "mean_tpot_ms": found["mean_tpot_ms"],
        "mean_itl_ms": found["mean_itl_ms"],
        "p99_ttft_ms": found["p99_ttft_ms"],
        "num_complete": found["completed"],
    }


def compute_ratio(runs: dict[str, list[dict[str, float]]], key: str) -> dict[str, float]:
    """Ours over theirs: of the medians, and of each round."""
    rounds = [a[key] / b[key] for a, b in zip(runs["baton"], runs["vllm"], strict=True)]
    medians = [statistics.median(run[key] for run in runs[name]) for name in ("baton", "vllm")]
    return {"of_medians": medians[0] / medians[1], "min": min(rounds), "max": max(rounds)}


def render(runs: dict[str, list[dict[str, float]]], ratios: dict[str, dict[str, float]]) -> Table:
    """For people."""
    table = Table(title="medians of the rounds, and baton's over vLLM's")
    for name in ("", "baton", "vllm", "ratio", "rounds' ratios"):
        table.add_column(name, justify="right")
    for key, ratio in ratios.items():
        medians = [statistics.median(run[key] for run in runs[name]) for name in runs]
        cells = (f"{each:,.2f}" for each in medians)
        spread = f"{ratio['min']:.3f} to {ratio['max']:.3f}"
        table.add_row(key, *cells, f"{ratio['of_medians']:.3f}", spread)
    return table


if __name__ == "__main__":
    main()
