"""What Baton costs a vLLM server for each token it serves, where nothing is handed over.

    python benchmarks/bench_vllm_steps.py [--model /tmp/m] [--repetitions 5] [--streams 1 4]
        [--json benchmarks/results/vllm_steps.json]

Needs `make install ENGINE=vllm`. Two servers on core 0: one without a connector, and one with
Baton's (`kv_both`), which is asked directly and through a gateway on core 0 as well: what that
spends, the server lacks. The load generator has core 1. Arms take turns, in another order each
time; servers that are not asked are stopped. Reported are output tokens per second and the CPU time
of each process per token. Without --model a random Llama of 4 layers, 256 wide, is made: a step of
a few milliseconds, on which a fraction of one shows.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from completion_client import ServerError, stream
from random_model import make_model
from rich.console import Console
from rich.table import Table
from run_record import write_record
from vllm_servers import Server, Servers

from baton.testing.fleet import Fleet

MODEL = {"layers": 4, "hidden": 256, "heads": 8, "kv-heads": 8, "context": 4096}
CONNECTOR = {
    "kv_connector": "BatonConnector", "kv_connector_module_path": "baton.engines.vllm",
    "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
    "kv_connector_extra_config": {"transports": ["shared", "tcp"], "name": "worker"},
}  # fmt: skip
CONNECTORS = {"plain": None, "baton": CONNECTOR}
console = Console(stderr=True)


@dataclass(frozen=True)
class Configuration:
    """A server, and the gateway in front of it if there is one."""

    name: str
    server: Server
    url: str
    gateway: int | None

    def cpu_seconds(self) -> tuple[float, float]:
        """Of the server and of the gateway, so far."""
        return self.server.cpu_seconds(), cpu_seconds(self.gateway) if self.gateway else 0.0


@dataclass(frozen=True)
class Sample:
    """One turn of one arm."""

    configuration: str
    num_streams: int
    tokens_per_s: float
    server_ms_per_token: float
    gateway_ms_per_token: float


def main() -> None:
    """Start the servers, take turns, print and keep what was measured."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--num-tokens", type=int, default=384)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    environment = dict(os.environ, BATON_CLUSTER_KEY=os.urandom(32).hex())
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = options.model or make_model(folder, MODEL)
        with Servers(folder, model, "float32") as servers, Fleet(folder, environment) as fleet:
            samples = measure(start(servers, fleet, environment), options)
    console.print(render(samples))
    write_record(options.json, samples=samples)


def start(servers: Servers, fleet: Fleet, environment: dict[str, str]) -> list[Configuration]:
    """Every arm, one server after the other, each paused once it is up."""
    configurations = []
    for name, transfer in CONNECTORS.items():
        server = servers.start(name, 0, transfer, environment if transfer else None)
        server.wait_ready()
        configurations.append(Configuration(name, server, server.url, None))
        if transfer is not None:  # a gateway takes no vLLM without Baton in it
            settings = {"gateway.workers": [server.url]}
            gateway = fleet.start_gateway([], [], settings=settings)
            os.sched_setaffinity(gateway.pid, {0})
            configurations.append(
                Configuration(f"{name}, gateway", server, gateway.url, gateway.pid)
            )
        stream(configurations[-1].url, make_body(np.random.default_rng(9), 16))
        server.send(signal.SIGSTOP)
        console.print(f"{name}: up")
    return configurations


def measure(configurations: list[Configuration], options: argparse.Namespace) -> list[Sample]:
    """All repetitions; the arms' order is drawn anew for each."""
    os.sched_setaffinity(0, {1})
    rng, order = np.random.default_rng(7), random.Random(7)
    samples = []
    for _ in range(options.repetitions):
        for num_streams in options.streams:
            turns = order.sample(configurations, len(configurations))
            samples += [
                take_turn(configuration, num_streams, options.num_tokens, rng)
                for configuration in turns
            ]
    return samples


def take_turn(
    configuration: Configuration, num_streams: int, num_tokens: int, rng: np.random.Generator
) -> Sample:
    """So many streams at once, from their first tokens to their last."""
    configuration.server.send(signal.SIGCONT)
    bodies = [make_body(rng, num_tokens) for _ in range(num_streams)]
    warm_up(configuration, rng)
    server_s, gateway_s = configuration.cpu_seconds()
    began = time.perf_counter()
    with ThreadPoolExecutor(num_streams) as pool:
        list(pool.map(lambda body: stream(configuration.url, body, began), bodies))
    took_s = time.perf_counter() - began
    after = configuration.cpu_seconds()
    configuration.server.send(signal.SIGSTOP)
    count = num_streams * num_tokens
    sample = Sample(
        configuration.name,
        num_streams,
        count / took_s,
        1e3 * (after[0] - server_s) / count,
        1e3 * (after[1] - gateway_s) / count,
    )
    console.print(
        f"{configuration.name:16} {num_streams} at once: {sample.tokens_per_s:7.1f} tokens/s"
    )
    return sample


def warm_up(configuration: Configuration, rng: np.random.Generator) -> None:
    """A gateway whose server was stopped finds it again first."""
    deadline = time.monotonic() + 30
    error: Exception | None = None
    while time.monotonic() < deadline:
        try:
            stream(configuration.url, make_body(rng, 4))
        except (ServerError, OSError) as exc:
            error = exc
            time.sleep(0.5)
        else:
            return
    raise ServerError(f"{configuration.name} does not answer any more: {error}")


def make_body(rng: np.random.Generator, num_tokens: int) -> dict[str, object]:
    """A short random prompt with a long answer."""
    prompt = rng.integers(300, 1000, 16).tolist()
    return {"model": "model", "prompt": prompt, "max_tokens": num_tokens, "ignore_eos": True,
            "temperature": 0}  # fmt: skip


def cpu_seconds(pid: int) -> float:
    """User and system time of one process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def render(samples: list[Sample]) -> Table:
    """Medians, and each turn's ratio to the plain server asked directly."""
    table = Table(title="One vLLM server on one core")
    for name in (
        "at once",
        "configuration",
        "tokens/s (range)",
        "server ms/token",
        "gateway ms/token",
    ):
        table.add_column(name, justify="right")
    for num_streams in sorted({sample.num_streams for sample in samples}):
        for configuration in dict.fromkeys(sample.configuration for sample in samples):
            here = [
                s
                for s in samples
                if (s.configuration, s.num_streams) == (configuration, num_streams)
            ]
            rates = sorted(s.tokens_per_s for s in here)
            table.add_row(
                f"{num_streams}",
                configuration,
                f"{statistics.median(rates):.1f} ({rates[0]:.1f} to {rates[-1]:.1f})",
                f"{statistics.median(s.server_ms_per_token for s in here):.3f}",
                f"{statistics.median(s.gateway_ms_per_token for s in here):.3f}",
            )
    return table


if __name__ == "__main__":
    main()
