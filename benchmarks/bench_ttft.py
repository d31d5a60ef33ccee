"""TTFT of a disaggregated pair over TTFT of one colocated worker, one core for each worker.

    python benchmarks/bench_ttft.py [--repetitions 7] [--json benchmarks/results/ttft.json]

Both arms go through a gateway of their own and run the same random Llama (made on first use). The
prompts are random, so no prefix cache helps; the order of the arms alternates. The exposed transfer
(last layer landed minus prefill done) comes from the request's trace; below zero, all of the
transfer was hidden behind the rest of prefill.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import numpy as np
from random_model import make_model
from rich.console import Console
from rich.table import Table

from baton.testing.fleet import Fleet

if TYPE_CHECKING:
    from baton.testing.fleet import FleetProcess

LENGTHS = (128, 512, 2048, 4096)
MODEL = {"layers": 16, "hidden": 1024, "heads": 16, "kv-heads": 8}
console = Console(stderr=True)


@dataclass(frozen=True)
class Sample:
    """One request. Times in seconds; `exposed_transfer_s` and what follows is None if colocated."""

    configuration: str
    num_tokens: int
    ttft_s: float
    exposed_transfer_s: float | None
    prefill_s: float | None
    num_received_tokens: int | None
    transport: str | None


def main() -> None:
    """Run the benchmark, print a table, keep the samples."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--transport", default="shared", choices=["shared", "tcp"])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder), MODEL, options.dtype)
        samples = measure(Path(folder), model, options)
    console.print(render(samples))
    if options.json:
        record = {
            "command": " ".join(["python", *sys.argv]),
            "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
            "load_before": LOAD_BEFORE,
            "load_after": os.getloadavg()[0],
            "model": MODEL | {"dtype": options.dtype},
            "summary": summarize(samples),
            "samples": [asdict(sample) for sample in samples],
        }
        options.json.write_text(json.dumps(record, indent=1) + "\n")


LOAD_BEFORE = os.getloadavg()[0]


def measure(folder: Path, model: Path, options: argparse.Namespace) -> list[Sample]:
    """Start both arms and ask them in turn."""
    settings: dict[str, object] = {
        "worker.model": str(model),
        "worker.served_model_name": "model",
        "engine.num_threads": 1,
        "engine.dtype": options.dtype,
        "engine.num_blocks": 1024,
        "transfer.transports": [options.transport],
    }
    environment = dict(os.environ, BATON_CLUSTER_KEY=os.urandom(32).hex())
    rng = np.random.default_rng(0)
    samples: list[Sample] = []
    with Fleet(folder, environment) as fleet:
        prefill = fleet.start_worker("prefill-0", "prefill", settings, cores=(0,))
        decode = fleet.start_worker("decode-0", "decode", settings, cores=(1,))
        colocated = fleet.start_worker("colocated", "both", settings, cores=(0,))
        for worker in (prefill, decode, colocated):
            worker.wait_ready()
            if len(os.sched_getaffinity(worker.pid)) != 1:
                raise RuntimeError(f"{worker.name} is not pinned to one core")
        configurations = {
            "disaggregated": fleet.start_gateway([prefill], [decode]),
            "colocated": fleet.start_gateway([], [], both=[colocated]),
        }
        for name, gateway in configurations.items():
            ask(name, gateway, rng.integers(300, 4000, 64).tolist())  # warm-up
        for repetition in range(options.repetitions):
            for num_tokens in options.lengths:
                order = list(configurations) if repetition % 2 else list(reversed(configurations))
                for name in order:
                    prompt = rng.integers(300, 4000, num_tokens).tolist()
                    sample = ask(name, configurations[name], prompt)
                    samples.append(sample)
                    console.print(f"{name:14} {num_tokens:5} tokens {sample.ttft_s:7.3f} s")
    return samples


def ask(configuration: str, gateway: FleetProcess, prompt: list[int]) -> Sample:
    """Stream one token; time to the first byte of the first event."""
    connection = http.client.HTTPConnection(urlsplit(gateway.url).netloc, timeout=300)
    body = {"model": "model", "prompt": prompt, "max_tokens": 1, "temperature": 0, "stream": True}
    body["ignore_eos"] = True
    started = time.perf_counter()
    connection.request("POST", "/v1/completions", json.dumps(body))
    response = connection.getresponse()
    first = response.readline()
    ttft_s = time.perf_counter() - started
    rest = response.read()
    if response.status != 200 or b'"error"' in first + rest:
        raise RuntimeError(f"{configuration}: HTTP {response.status}: {(first + rest)[:500]!r}")
    trace = read_trace(connection, response.headers["x-request-id"])
    connection.close()
    is_pair = configuration == "disaggregated"
    if is_pair and trace["num_received_tokens"] != len(prompt):
        raise RuntimeError(f"not a handoff: {trace}")
    return Sample(
        configuration=configuration,
        num_tokens=len(prompt),
        ttft_s=ttft_s,
        exposed_transfer_s=trace["exposed_transfer_s"] if is_pair else None,
        prefill_s=trace["prefill_s"] if is_pair else None,
        num_received_tokens=trace["num_received_tokens"] if is_pair else None,
        transport=trace["transport"] if is_pair else None,
    )


def read_trace(connection: http.client.HTTPConnection, request_id: str) -> dict:
    """The summary that the gateway keeps."""
    connection.request("GET", f"/debug/requests/{request_id}")
    return json.load(connection.getresponse())["summary"]


def summarize(samples: list[Sample]) -> list[dict[str, float]]:
    """For each length: medians, the ratio and its spread over repetitions."""
    rows = []
    for num_tokens in sorted({sample.num_tokens for sample in samples}):
        here = [sample for sample in samples if sample.num_tokens == num_tokens]
        pair = [s for s in here if s.configuration == "disaggregated"]
        one = [s for s in here if s.configuration == "colocated"]
        if not pair or not one:
            continue
        ratios = sorted(p.ttft_s / c.ttft_s for p, c in zip(pair, one, strict=True))
        shares = sorted(s.exposed_transfer_s / s.prefill_s for s in pair)
        rows.append({
            "num_tokens": num_tokens,
            "ttft_disaggregated_s": statistics.median(s.ttft_s for s in pair),
            "ttft_colocated_s": statistics.median(s.ttft_s for s in one),
            "ratio": statistics.median(ratios),
            "ratio_min": ratios[0],
            "ratio_max": ratios[-1],
            "exposed_transfer_ms": 1e3 * statistics.median(s.exposed_transfer_s for s in pair),
            "visible_share_of_prefill": statistics.median(shares),
            "visible_share_max": shares[-1],
        })
    return rows


def render(samples: list[Sample]) -> Table:
    """The summary for people."""
    table = Table(title="TTFT, disaggregated over colocated (one core for each worker)")
    for name in (
        "tokens", "disaggregated s", "colocated s", "ratio (min to max)", "exposed transfer",
        "of prefill",
    ):  # fmt: skip
        table.add_column(name, justify="right")
    for row in summarize(samples):
        table.add_row(
            f"{row['num_tokens']}",
            f"{row['ttft_disaggregated_s']:.3f}",
            f"{row['ttft_colocated_s']:.3f}",
            f"{row['ratio']:.3f} ({row['ratio_min']:.3f} to {row['ratio_max']:.3f})",
            f"{row['exposed_transfer_ms']:.1f} ms",
            f"{row['visible_share_of_prefill']:.2%}",
        )
    return table


if __name__ == "__main__":
    main()
