"""What a handoff between vLLM servers costs in copies: CPU of the two agents' threads.

    python benchmarks/bench_vllm_copies.py [--dtype float32] [--repetitions 7]
        [--transport shared] [--json benchmarks/results/vllm_copies.json]

Prefill's agent announces and hashes (and, over tcp, sends); decode's agent copies and verifies. The
CPU time of both threads is read from /proc/PID/task/*/schedstat around each request of 2,000 random
tokens; in GB/s it is the KV's bytes over that time, and its share is of the prefill's duration in
the request's trace. Wall time of the copy is less where the two cores work at once.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from bench_vllm import MODEL
from completion_client import read_trace, stream
from random_model import make_model
from rich.console import Console
from run_record import write_record
from vllm_servers import Server, Servers, list_group

from baton.testing.fleet import Fleet

AGENT = "baton-handoff"
NUM_TOKENS = 2000
console = Console(stderr=True)


@dataclass(frozen=True)
class Sample:
    """One request; seconds of CPU, and bytes moved."""

    ttft_s: float
    prefill_s: float
    exposed_transfer_s: float
    save_cpu_s: float
    load_cpu_s: float
    num_bytes: int


def main() -> None:
    """Measure, print the medians, keep the samples."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--transport", default="shared")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        samples = measure(Path(folder), options)
    summary = summarize(samples)
    console.print(summary)
    given = {"num_tokens": NUM_TOKENS, "dtype": options.dtype}
    write_record(options.json, **given, summary=summary, samples=samples)


def measure(folder: Path, options: argparse.Namespace) -> list[Sample]:
    """Two servers, a gateway, one request at a time."""
    model = make_model(folder, MODEL, options.dtype)
    environment = dict(os.environ, BATON_CLUSTER_KEY=os.urandom(32).hex())
    rng = np.random.default_rng(0)
    with Servers(folder, model, options.dtype) as servers, Fleet(folder, environment) as fleet:
        pair = [
            servers.start(role, core, transfer_config(role, options.transport), environment)
            for core, role in enumerate(("kv_producer", "kv_consumer"))
        ]
        for server in pair:
            server.wait_ready()
        settings = {"gateway.prefill": [pair[0].url], "gateway.decode": [pair[1].url]}
        gateway = fleet.start_gateway([], [], settings=settings)
        time.sleep(3)
        ask(gateway.url, rng)
        ask(gateway.url, rng)
        return [measure_one(gateway.url, pair, rng) for _ in range(options.repetitions)]


def transfer_config(role: str, transport: str) -> dict[str, object]:
    """Baton's connector over one transport."""
    return {
        "kv_connector": "BatonConnector", "kv_connector_module_path": "baton.engines.vllm",
        "kv_role": role, "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"name": role, "transports": [transport]},
    }  # fmt: skip


def measure_one(gateway: str, pair: list[Server], rng: np.random.Generator) -> Sample:
    """One request, and what it cost the agents."""
    before = [agent_cpu_s(server) for server in pair]
    ttft_s, summary = ask(gateway, rng)
    time.sleep(0.3)
    save_s, load_s = (agent_cpu_s(s) - b for s, b in zip(pair, before, strict=True))
    if summary["num_received_tokens"] != NUM_TOKENS:
        raise RuntimeError(f"not a handoff: {summary}")
    return Sample(
        ttft_s=ttft_s,
        prefill_s=summary["prefill_s"],
        exposed_transfer_s=summary["exposed_transfer_s"],
        save_cpu_s=save_s,
        load_cpu_s=load_s,
        num_bytes=summary["num_bytes"],
    )


def ask(gateway: str, rng: np.random.Generator) -> tuple[float, dict]:
    """Stream one token; (TTFT, the trace's summary)."""
    prompt = rng.integers(300, 4000, NUM_TOKENS).tolist()
    body = {
        "model": "model", "prompt": prompt, "max_tokens": 1, "temperature": 0, "ignore_eos": True,
    }  # fmt: skip
    reply = stream(gateway, body)
    time.sleep(0.2)
    return reply.ttft_s, read_trace(gateway, reply.request_id)


def agent_cpu_s(server: Server) -> float:
    """CPU seconds of the handoff agent's thread in a server's processes."""
    spent_ns = 0
    for pid in list_group(server.popen.pid):
        for task in Path(f"/proc/{pid}/task").iterdir():
            if (task / "comm").read_text().strip() == AGENT:
                spent_ns += int((task / "schedstat").read_text().split()[0])
    return spent_ns / 1e9


def summarize(samples: list[Sample]) -> dict[str, float]:
    """Medians."""
    median = statistics.median
    return {
        "prefill_s": median(s.prefill_s for s in samples),
        "num_bytes": median(s.num_bytes for s in samples),
        "save_cpu_ms": 1e3 * median(s.save_cpu_s for s in samples),
        "save_share_of_prefill": median(s.save_cpu_s / s.prefill_s for s in samples),
        "save_gb_per_s": median(s.num_bytes / s.save_cpu_s / 1e9 for s in samples),
        "load_cpu_ms": 1e3 * median(s.load_cpu_s for s in samples),
        "load_share_of_prefill": median(s.load_cpu_s / s.prefill_s for s in samples),
        "load_gb_per_s": median(s.num_bytes / s.load_cpu_s / 1e9 for s in samples),
        "exposed_transfer_ms": 1e3 * median(s.exposed_transfer_s for s in samples),
    }


if __name__ == "__main__":
    main()
