"""vLLM behind Baton, behind the connectors that ship with it, and alone: TTFT, one core a server.

    python benchmarks/bench_vllm.py [--dtype float32] [--repetitions 5]
        [--nixl FOLDER] [--json benchmarks/results/vllm.json]

Needs `make install ENGINE=vllm`. The NIXL arm needs the CPU wheels in a folder of their own:
`pip install --no-deps --target FOLDER nixl==1.5.1 nixl_cu12==1.5.1`.

Every arm has its own real servers and its own random prompts of the same lengths; prefix caches are
off; the arms take turns, in another order each time, and those that do not measure are stopped. An
arm that fails is a row that says why. The two-phase connectors are asked as their proxies do it:
prefill with max_tokens=1, then decode with what prefill answered; no proxy process is in the way.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from completion_client import Reply, ServerError, post, stream
from random_model import make_model
from rich.console import Console
from rich.table import Table
from run_record import write_record
from vllm_servers import Server, Servers

from baton.testing.fleet import Fleet

if TYPE_CHECKING:
    from collections.abc import Callable

LENGTHS = (128, 513, 2000)
MODEL = {"layers": 16, "hidden": 1024, "heads": 16, "kv-heads": 16}
NUM_OUTPUT_TOKENS = 4
NIXL_ASK = {
    "do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None,
    "remote_block_ids": None, "remote_host": None, "remote_port": None,
}  # fmt: skip
console = Console(stderr=True)


@dataclass(frozen=True)
class Sample:
    """One request, seconds. `cpu_s` is what all servers of the arm spent on it."""

    configuration: str
    num_tokens: int
    ttft_s: float
    total_s: float
    cpu_s: float


@dataclass(frozen=True)
class Configuration:
    """A way to serve."""

    name: str
    servers: tuple[Server, ...]
    ask: Callable[[dict[str, object]], Reply]

    def resume(self) -> None:
        """Let its processes run."""
        for server in self.servers:
            server.send(signal.SIGCONT)

    def pause(self) -> None:
        """Stop its processes where they are."""
        for server in self.servers:
            server.send(signal.SIGSTOP)


def main() -> None:
    """Run all arms, print the table, keep the samples."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--arms", nargs="+", default=list(CONFIGURATIONS))
    parser.add_argument("--nixl", type=Path, help="folder with NIXL's wheels")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    failures: dict[str, str] = {}
    with tempfile.TemporaryDirectory(dir="/dev/shm") as shm, tempfile.TemporaryDirectory() as disk:
        model = make_model(Path(disk), MODEL, options.dtype)
        environment = dict(os.environ, BATON_CLUSTER_KEY=os.urandom(32).hex())
        with (
            Servers(Path(disk), model, options.dtype) as servers,
            Fleet(Path(disk), environment) as fleet,
        ):
            configurations = start_configurations(
                Setting(servers, fleet, environment, Path(shm), options), failures
            )
            samples = measure(configurations, options, failures)
    console.print(render(samples, failures))
    write_record(
        options.json,
        model=MODEL | {"dtype": options.dtype},
        summary=summarize(samples),
        failed_arms=failures,
        samples=samples,
    )


@dataclass(frozen=True)
class Setting:
    """What arms are made from."""

    servers: Servers
    fleet: Fleet
    environment: dict[str, str]
    shm: Path
    options: argparse.Namespace


def start_configurations(setting: Setting, failures: dict[str, str]) -> list[Configuration]:
    """Start one arm after the other, so that each has the machine to itself; it is paused then."""
    configurations = []
    for name in setting.options.arms:
        num_servers = len(setting.servers.started)
        try:
            configuration = CONFIGURATIONS[name](setting)
            configuration.ask(make_body(np.random.default_rng(9), 64))
        except (ServerError, OSError, subprocess.SubprocessError) as exc:
            failures[name] = str(exc)
            console.print(f"{name}: failed: {exc}")
            setting.servers.end(setting.servers.started[num_servers:])
            continue
        configuration.pause()
        configurations.append(configuration)
        console.print(f"{name}: up")
    return configurations


def start_colocated(setting: Setting) -> Configuration:
    """One server that does both."""
    server = setting.servers.start("colocated", 0)
    server.wait_ready()
    return Configuration("colocated", (server,), lambda body: stream(server.url, body))


def start_baton(setting: Setting, name: str, transport: str) -> Configuration:
    """Prefill on core 0, decode on core 1, Baton's gateway in front."""
    extra = {"transports": [transport]}
    pair = _start_pair(setting, name, lambda role: {
        "kv_connector": "BatonConnector", "kv_connector_module_path": "baton.engines.vllm",
        "kv_role": role, "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {**extra, "name": f"{name}-{role}"},
    }, setting.environment)  # fmt: skip
    settings = {"gateway.prefill": [pair[0].url], "gateway.decode": [pair[1].url]}
    # The gateway takes no part in the pauses: it sees its workers go and come back.
    gateway = setting.fleet.start_gateway([], [], settings=settings)
    return Configuration(name, pair, lambda body: stream(gateway.url, body))


def start_nixl(setting: Setting) -> Configuration:
    """NIXL over UCX, as vLLM ships it."""
    if setting.options.nixl is None:
        raise ServerError("not measured: --nixl FOLDER was not given")
    environments = {
        "kv_producer": {"VLLM_NIXL_SIDE_CHANNEL_PORT": "15601"},
        "kv_consumer": {"VLLM_NIXL_SIDE_CHANNEL_PORT": "15602"},
    }
    path = {"PYTHONPATH": str(setting.options.nixl), "UCX_NET_DEVICES": "lo"}
    config = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}
    cores = {"kv_producer": 0, "kv_consumer": 1}
    pair = tuple(
        setting.servers.start(f"nixl-{role}", cores[role], config, path | environments[role])
        for role in cores
    )
    for server in pair:
        server.wait_ready()
    return Configuration(
        "vLLM NixlConnector", pair, lambda body: _ask_two_phase(pair, body, NIXL_ASK)
    )


def start_example(setting: Setting) -> Configuration:
    """The example of vLLM itself: KV through files, here in memory (/dev/shm)."""
    pair = _start_pair(setting, "example", lambda role: {
        "kv_connector": "ExampleConnector", "kv_role": role,
        "kv_connector_extra_config": {"shared_storage_path": str(setting.shm)},
    })  # fmt: skip
    return Configuration(
        "vLLM ExampleConnector", pair, lambda body: _ask_two_phase(pair, body, None)
    )


def start_mooncake(setting: Setting) -> Configuration:
    """Mooncake's connector as vLLM ships it."""
    pair = _start_pair(setting, "mooncake", lambda role: {
        "kv_connector": "MooncakeConnector", "kv_role": role,
        "kv_connector_extra_config": {"mooncake_protocol": "tcp"},
    })  # fmt: skip
    return Configuration(
        "vLLM MooncakeConnector", pair, lambda body: _ask_two_phase(pair, body, None)
    )


CONFIGURATIONS: dict[str, Callable[[Setting], Configuration]] = {
    "colocated": start_colocated,
    "baton": lambda setting: start_baton(setting, "Baton, shared", "shared"),
    "baton-tcp": lambda setting: start_baton(setting, "Baton, tcp", "tcp"),
    "nixl": start_nixl,
    "example": start_example,
    "mooncake": start_mooncake,
}


def _start_pair(
    setting: Setting,
    name: str,
    config: Callable[[str], dict[str, object]],
    environment: dict[str, str] | None = None,
) -> tuple[Server, Server]:
    prefill = setting.servers.start(f"{name}-p", 0, config("kv_producer"), environment)
    decode = setting.servers.start(f"{name}-d", 1, config("kv_consumer"), environment)
    prefill.wait_ready()
    decode.wait_ready()
    return prefill, decode


def _ask_two_phase(
    pair: tuple[Server, ...], body: dict[str, object], params: dict[str, object] | None
) -> Reply:
    """What a proxy does: prefill first, then decode with what prefill says."""
    started = time.perf_counter()
    first = body | {"max_tokens": 1, "stream": False}
    if params is not None:
        first["kv_transfer_params"] = params
    answer = post(pair[0].url, "/v1/completions", first)
    second = dict(body)
    if params is not None:
        second["kv_transfer_params"] = answer["kv_transfer_params"]
    return stream(pair[1].url, second, started)


def make_body(rng: np.random.Generator, num_tokens: int) -> dict[str, object]:
    """A request with a random prompt."""
    prompt = rng.integers(300, 4000, num_tokens).tolist()
    return {
        "model": "model", "prompt": prompt, "max_tokens": NUM_OUTPUT_TOKENS, "temperature": 0,
        "ignore_eos": True,
    }  # fmt: skip


def measure(
    configurations: list[Configuration], options: argparse.Namespace, failures: dict[str, str]
) -> list[Sample]:
    """Every arm in turn, all lengths in one turn, in another order each time."""
    rng = np.random.default_rng(0)
    samples: list[Sample] = []
    for repetition in range(options.repetitions):
        turn = repetition % max(1, len(configurations))
        for configuration in [*configurations[turn:], *configurations[:turn]]:
            if configuration.name in failures:
                continue
            try:
                samples += measure_turn(configuration, rng, options.lengths)
            except (ServerError, OSError) as exc:
                failures[configuration.name] = str(exc)
                console.print(f"{configuration.name}: failed: {exc}")
            finally:
                configuration.pause()
    return samples


def measure_turn(
    configuration: Configuration, rng: np.random.Generator, lengths: list[int]
) -> list[Sample]:
    """Wake an arm, warm it up, ask it once for each length."""
    configuration.resume()
    samples = []
    deadline = time.perf_counter() + 60
    while True:  # until pairs have found each other again after the pause
        try:
            configuration.ask(make_body(rng, 256))
            time.sleep(1.5)
            configuration.ask(make_body(rng, 256))
            break
        except ServerError:
            if time.perf_counter() > deadline:
                raise
            time.sleep(0.5)
    for num_tokens in lengths:
        body = make_body(rng, num_tokens)
        before = sum(server.cpu_seconds() for server in configuration.servers)
        reply = configuration.ask(body)
        spent = sum(server.cpu_seconds() for server in configuration.servers) - before
        samples.append(Sample(configuration.name, num_tokens, reply.ttft_s, reply.total_s, spent))
        console.print(f"{configuration.name:24} {num_tokens:5} tokens {reply.ttft_s:7.3f} s")
    return samples


def summarize(samples: list[Sample]) -> list[dict[str, object]]:
    """Medians for each arm and length, and their ratio to the colocated server's."""
    rows: list[dict[str, object]] = []
    for num_tokens in sorted({sample.num_tokens for sample in samples}):
        here = [sample for sample in samples if sample.num_tokens == num_tokens]
        alone = [s.ttft_s for s in here if s.configuration == "colocated"]
        base = statistics.median(alone) if alone else None
        for configuration in dict.fromkeys(sample.configuration for sample in here):
            ttfts = sorted(s.ttft_s for s in here if s.configuration == configuration)
            rows.append({
                "configuration": configuration,
                "num_tokens": num_tokens,
                "ttft_s": statistics.median(ttfts),
                "ttft_min_s": ttfts[0],
                "ttft_max_s": ttfts[-1],
                "over_colocated": statistics.median(ttfts) / base if base else None,
                "cpu_s": statistics.median(
                    s.cpu_s for s in here if s.configuration == configuration
                ),
                "num_samples": len(ttfts),
            })
    return rows


def render(samples: list[Sample], failures: dict[str, str]) -> Table:
    """The summary for people."""
    table = Table(title="TTFT of vLLM servers, one core each")
    for name in ("tokens", "configuration", "TTFT s (min to max)", "over colocated", "CPU s"):
        table.add_column(name, justify="right")
    for row in summarize(samples):
        table.add_row(
            f"{row['num_tokens']}",
            f"{row['configuration']}",
            f"{row['ttft_s']:.3f} ({row['ttft_min_s']:.3f} to {row['ttft_max_s']:.3f})",
            f"{row['over_colocated']:.3f}" if row["over_colocated"] else "not measured",
            f"{row['cpu_s']:.2f}",
        )
    for configuration, reason in failures.items():
        table.add_row("", configuration, f"failed: {reason[:120]}", "", "")
    return table


if __name__ == "__main__":
    main()
