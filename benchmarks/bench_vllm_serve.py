"""vLLM's own load generator against Baton's gateway in front of two vLLM servers.

    python benchmarks/bench_vllm_serve.py [--concurrency 1 4 16] [--num-prompts 32]
        [--json benchmarks/results/vllm_serve.json]

`vllm bench serve` (its `vllm` command does not start on the CPU build, so its function is called)
sends random prompts of 512 tokens and wants 32 back. What counts is that all complete; its figures
are kept as it reports them.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench_vllm import MODEL
from bench_vllm_copies import transfer_config
from random_model import make_model
from rich.console import Console
from rich.table import Table
from completion_client import ServerError
from vllm_servers import Servers

from baton.testing.fleet import Fleet

CLIENT = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""
KEPT = (
    "completed", "failed", "duration", "request_throughput", "output_throughput",
    "median_ttft_ms", "p99_ttft_ms", "median_tpot_ms", "median_itl_ms",
)  # fmt: skip
console = Console(stderr=True)


def main() -> None:
    """Run each concurrency, print what came of it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--concurrency", type=int, nargs="+", default=(1, 4, 16))
    parser.add_argument("--num-prompts", type=int, default=32)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    load_before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(Path(folder), options)
    console.print(render(rows))
    if options.json:
        record = {
            "command": " ".join(["python", *sys.argv]),
            "load_before": load_before,
            "rows": rows,
        }
        options.json.write_text(json.dumps(record, indent=1) + "\n")


def measure(folder: Path, options: argparse.Namespace) -> list[dict]:
    """Two servers, a gateway, one run of the client for each concurrency."""
    model = make_model(folder, MODEL, options.dtype)
    environment = dict(os.environ, BATON_CLUSTER_KEY=os.urandom(32).hex())
    with Servers(folder, model, options.dtype) as servers, Fleet(folder, environment) as fleet:
        pair = [
            servers.start(role, core, transfer_config(role, "shared"), environment)
            for core, role in enumerate(("kv_producer", "kv_consumer"))
        ]
        for server in pair:
            server.wait_ready()
        settings = {"gateway.prefill": [pair[0].url], "gateway.decode": [pair[1].url]}
        gateway = fleet.start_gateway([], [], settings=settings)
        time.sleep(3)
        return [run_client(gateway.url, model, folder, c, options) for c in options.concurrency]


def run_client(
    url: str, model: Path, folder: Path, concurrency: int, options: argparse.Namespace
) -> dict:
    """One run; what the client reports."""
    result = folder / f"result-{concurrency}.json"
    command = [
        sys.executable, "-c", CLIENT, "--base-url", url, "--model", "model",
        "--tokenizer", str(model), "--dataset-name", "random", "--random-input-len", "512",
        "--random-output-len", "32", "--ignore-eos", "--num-prompts", str(options.num_prompts),
        "--max-concurrency", str(concurrency), "--save-result", "--result-dir", str(folder),
        "--result-filename", result.name, "--disable-tqdm", "--seed", str(concurrency),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    if done.returncode or not result.exists():
        raise ServerError(f"the client failed: {done.stderr[-2000:]}")
    record = json.loads(result.read_text())
    row = {"concurrency": concurrency} | {key: record.get(key) for key in KEPT}
    console.print(row)
    return row


def render(rows: list[dict]) -> Table:
    """For people."""
    table = Table(title="vllm bench serve against Baton's gateway")
    for name in rows[0]:
        table.add_column(name, justify="right")
    for row in rows:
        cells = (f"{v:.1f}" if isinstance(v, float) else str(v) for v in row.values())
        table.add_row(*cells)
    return table


if __name__ == "__main__":
    main()
