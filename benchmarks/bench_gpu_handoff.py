"""Two workers on one GPU: KV through mirrored pages and `shared`, or from GPU to GPU by `cuda_ipc`.

    python benchmarks/bench_gpu_handoff.py [--json benchmarks/results/gpu-handoff.json]
    python benchmarks/bench_gpu_handoff.py --table benchmarks/results/gpu-handoff.json

A pair of workers for each of `--pairs` (a transport, and settings behind commas), and one worker
that serves prompts alone, share the GPU. Each has a gateway; one more asks each pair by pull, where
the transfer begins after prefill. Weights and KV
are float32 (a random Llama, made on first use), so that all answers must be equal, token by token.
Prompts are random: no prefix cache helps. Times come from the requests' traces. With
`--device cpu --pairs shared tcp` it runs without a GPU.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from completion_client import read_trace, stream
from random_model import make_model
from run_record import write_record

from baton.testing.fleet import Fleet

if TYPE_CHECKING:
    from baton.testing.fleet import FleetProcess

MODEL = {"layers": 16, "hidden": 1024, "heads": 16, "kv-heads": 16, "context": 16_384}
PAIRS = (
    "shared",
    "cuda_ipc",
    "cuda_ipc,handoff.device_layer_batch_bytes=0",
    "cuda_ipc,handoff.verify_same_host=identity",
)
"""The last two show what batches of layers gain, and what digests cost."""
MODES = ("push", "pull")
NUM_TOKENS = 8
PROBED = re.compile(r"over (\S+) \((\w+)\): ([\d.]+) us, ([\d.]+) us a descriptor, ([\d.]+) GB/s")
DEVICE = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "no GPU"


@dataclass(frozen=True)
class Sample:
    """One request; times in seconds. What only a handoff has is None where one worker served it."""

    configuration: str
    prompt: str
    num_tokens: int
    ttft_s: float
    tokens: list[str]
    prefill_s: float | None
    exposed_transfer_s: float | None
    num_bytes: int
    transport: str | None
    fallbacks: list[str]


def main() -> None:
    """Run it, print a line for each length and configuration, keep the samples."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--pairs", nargs="+", default=PAIRS)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 4096])
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--blocks", type=int, default=1200)
    parser.add_argument("--layers", type=int, default=MODEL["layers"])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--table", type=Path, help="print the table of such a file, and end")
    options = parser.parse_args()
    if options.table:
        print(render(json.loads(options.table.read_text())["summary"]))
        return
    with tempfile.TemporaryDirectory() as folder:
        samples, links = measure(Path(folder), options)
    rows = summarize(samples)
    for row in rows:
        print(json.dumps(row))
    failures = find_failures(samples)
    print("\n".join(failures) or "all answers are equal, and every handoff arrived")
    write_record(
        options.json,
        device=DEVICE,
        model=MODEL | {"layers": options.layers, "dtype": "float32"},
        links=links,
        summary=rows,
        failures=failures,
        samples=samples,
    )
    if failures:
        sys.exit(1)


def measure(folder: Path, options: argparse.Namespace) -> tuple[list[Sample], list[str]]:
    """Start all workers, ask the configurations in turn; the samples, and what probes found."""
    began_at = time.monotonic()
    settings: dict[str, object] = {
        "worker.model": str(make_model(folder, MODEL | {"layers": options.layers})),
        "worker.served_model_name": "model",
        "engine.device": options.device,
        "engine.dtype": "float32",
        "engine.num_blocks": options.blocks,
        "engine.max_batch_tokens": max(options.lengths),
    }
    print(f"model made after {time.monotonic() - began_at:.0f} s", flush=True)
    environment = dict(os.environ, BATON_CLUSTER_KEY=os.urandom(32).hex())
    rng = np.random.default_rng(0)
    samples: list[Sample] = []
    with Fleet(folder, environment) as fleet:
        pairs = {
            pair: [
                fleet.start_worker(f"{role}-{number}", role, settings | read_pair(pair))
                for role in ("prefill", "decode")
            ]
            for number, pair in enumerate(options.pairs)
        }
        alone = fleet.start_worker("alone", "both", settings | {"transfer.transports": ["tcp"]})
        for worker in (alone, *itertools.chain(*pairs.values())):
            worker.wait_ready()
            print(f"{worker.name} ready after {time.monotonic() - began_at:.0f} s", flush=True)
        colocated = fleet.start_gateway([], [], both=[alone])
        gateways = {
            (pair, mode): fleet.start_gateway([prefill], [decode], settings={"gateway.mode": mode})
            for pair, (prefill, decode) in pairs.items()
            for mode in MODES
        }
        for repetition in range(-1, options.repetitions):
            for length, mode in itertools.product(options.lengths, MODES):
                key, ids = f"{repetition} {length} {mode}", rng.integers(300, 4000, length).tolist()
                asked = [("colocated", colocated)]
                asked += [(f"{each} {mode}", gateways[each, mode]) for each in pairs]
                found = [ask(*one, key, ids) for one in asked[:: 1 if repetition % 2 else -1]]
                if repetition >= 0:  # before, kernels are compiled and links measured
                    samples += found
            print(f"round {repetition} after {time.monotonic() - began_at:.0f} s", flush=True)
        links = [
            f"{pair}: {' '.join(found)}"
            for pair, workers in pairs.items()
            for worker in workers
            for found in PROBED.findall(worker.log.read_text())
        ]
    return samples, links


def read_pair(pair: str) -> dict[str, object]:
    """Its settings."""
    transport, *others = pair.split(",")
    settings: dict[str, object] = {"transfer.transports": [transport]}
    for other in others:
        name, _, value = other.partition("=")
        settings[name] = int(value) if value.isdecimal() else value
    return settings


def ask(configuration: str, gateway: FleetProcess, key: str, prompt: list[int]) -> Sample:
    """Stream some tokens; time to the first event."""
    body = {"model": "model", "prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0}
    reply = stream(gateway.url, body | {"ignore_eos": True, "logprobs": 1})
    logprobs = (choice.get("logprobs") or {} for choice in reply.choices)
    summary = read_trace(gateway.url, reply.request_id)
    return Sample(
        configuration=configuration,
        prompt=key,
        num_tokens=len(prompt),
        ttft_s=reply.ttft_s,
        tokens=[token for each in logprobs for token in each.get("tokens", ())],
        prefill_s=summary["prefill_s"],
        exposed_transfer_s=summary["exposed_transfer_s"],
        num_bytes=summary["num_bytes"],
        transport=summary["transport"],
        fallbacks=summary["fallbacks"],
    )


def find_failures(samples: list[Sample]) -> list[str]:
    """Answers that differ from the worker's that served alone, and handoffs that did not arrive."""
    failures = []
    alone = {each.prompt: each.tokens for each in samples if each.configuration == "colocated"}
    for one in samples:
        name, expected = one.configuration, alone[one.prompt]
        if one.tokens != expected or len(expected) != NUM_TOKENS:
            failures.append(f"{name}: {one.tokens} where one worker has {expected}")
        if name != "colocated" and (
            one.fallbacks or one.transport not in name.split()[0].split(",")
        ):
            failures.append(f"{name}: {one.transport}, {one.fallbacks}")
    return failures


def summarize(samples: list[Sample]) -> list[dict[str, object]]:
    """Medians for each length and configuration; the least and the largest TTFT."""
    rows = []
    for length in sorted({sample.num_tokens for sample in samples}):
        for name in dict.fromkeys(sample.configuration for sample in samples):
            here = [s for s in samples if s.num_tokens == length and s.configuration == name]
            ttfts = sorted(sample.ttft_s for sample in here)
            exposed = [s.exposed_transfer_s for s in here if s.exposed_transfer_s is not None]
            row: dict[str, object] = {
                "num_tokens": length,
                "configuration": name,
                "ttft_ms": [round(1e3 * each, 2) for each in (
                    statistics.median(ttfts), ttfts[0], ttfts[-1])],
                "prefill_ms": round(1e3 * statistics.median(s.prefill_s or 0 for s in here), 2),
            }  # fmt: skip
            if exposed:
                row["exposed_ms"] = round(1e3 * statistics.median(exposed), 2)
                row["kv_mb"] = round(here[0].num_bytes / 1e6, 1)
                if name.endswith("pull"):
                    row["gb_per_s"] = round(here[0].num_bytes / statistics.median(exposed) / 1e9, 2)
            rows.append(row)
    return rows


def render(rows: list[dict]) -> str:
    """The summary as docs/gpu.md has it."""
    lines = [
        "| tokens, KV | workers | TTFT (min to max) | prefill | exposed transfer |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        median, least, most = row["ttft_ms"]
        size = f", {row['kv_mb']:.0f} MB" if "kv_mb" in row else ""
        exposed = f"{row['exposed_ms']:.1f} ms" if "exposed_ms" in row else ""
        if "gb_per_s" in row:
            exposed += f", {row['gb_per_s']} GB/s"
        lines.append(
            f"| {row['num_tokens']}{size} | {row['configuration']} | {median:.1f} ms "
            f"({least:.1f} to {most:.1f}) | {row['prefill_ms']:.1f} ms | {exposed} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
