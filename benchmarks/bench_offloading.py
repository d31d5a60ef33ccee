"""How soon does vLLM answer a prompt whose beginning is kept outside its pool? Baton and peers.

    python benchmarks/bench_offloading.py --json benchmarks/results/offloading.json

Plain vLLM servers of one model, without a gateway, each with one thread that computes, with vLLM's
prefix cache, and with memory for KV behind it:

    none              no such memory
    baton host        BatonConnector, tier `host`: the server's own memory
    baton shared      BatonConnector, tier `shared`: memory that all servers of a host share
    offloading        vLLM's OffloadingConnector, to the server's own memory; vLLM has no copies
                      for CPUs, so they are those of vllm_host_offloading.py
    mooncake          vLLM's MooncakeStoreConnector (vllm_mooncake_store.py), with Mooncake's memory
                      in the server. Mooncake listens on all interfaces, so that all servers
                      run in a network namespace (`unshare`, `ip`)
    lmcache           LMCache's connector and its server, which it starts (`--lmcache FOLDER`:
                      `pip install --no-deps --target FOLDER lmcache==0.5.6 sortedcontainers nvtx`)

Cases, each with prompts of its own:

    new       a prompt that was never seen
    stored    the server has answered the first 90 % of the prompt, and has lost its prefix cache
              since (/reset_prefix_cache)
    cached    of `none`: the same without that loss; nothing behind the cache can be quicker

Servers are asked one after the other, in the other order every second round, each after a second
in which all are idle. The token is checked against that of `none`. Figures are medians and
quartiles over the rounds of the time until an answer of one token is there.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from bench_prefixes import MODEL
from bench_store_peers import contain, start_master
from completion_client import ServerError, post
from random_model import make_model
from rich import box
from rich.console import Console
from rich.table import Table
from run_record import write_record
from vllm_servers import Server, Servers, find_free_port

ARMS = ("baton host", "baton shared", "offloading", "mooncake")
ARGUMENTS = ("--enable-prompt-tokens-details",)
MASTER_PORT = 50400
SHARE = 0.9
IDLE_S = 1.0
KEPT_BYTES = 512 << 20
RESET_TIMEOUT_S = 20.0
BATON = {
    "kv_connector": "BatonConnector",
    "kv_connector_module_path": "baton.engines.vllm",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
}


@dataclass(frozen=True)
class Run:
    """One answer. `cached`: tokens of the prompt that were not computed."""

    arm: str
    case: str
    num_tokens: int
    ttft_ms: float
    cached: int


@dataclass(frozen=True)
class Bench:
    """The servers, by arm."""

    servers: dict[str, Server]
    rng: np.random.Generator

    def prompt(self, num_tokens: int) -> list[int]:
        """One that nobody has seen."""
        return self.rng.integers(300, 4000, num_tokens).tolist()

    def measure(self, arm: str, num_tokens: int) -> list[Run]:
        """Each case of one arm, once."""
        server = self.servers[arm]
        runs = []
        for case in ("new", "cached" if arm == "none" else "stored"):
            prompt = self.prompt(num_tokens)
            if case != "new":
                ask(server, prompt[: int(SHARE * num_tokens)])
                ask(server, self.prompt(8))  # vLLM's connector begins to store in its next step
                time.sleep(IDLE_S)
            if case == "stored":
                reset_prefix_cache(server)
            time.sleep(IDLE_S)
            took_ms, cached, token = ask(server, prompt)
            runs.append(Run(arm, case, num_tokens, took_ms, cached))
            if case == "new" and cached:
                raise AssertionError(f"{arm}: a new prompt was found")
            if arm != "none" and token != ask(self.servers["none"], prompt)[2]:
                raise AssertionError(f"{arm}, {case}: another token")
        return runs


def ask(server: Server, prompt: list[int]) -> tuple[float, int, str]:
    """Milliseconds to an answer of one token, cached tokens, and the token."""
    body = {"model": "model", "prompt": prompt, "max_tokens": 1, "temperature": 0}
    began = time.perf_counter()
    answer = post(server.url, "/v1/completions", body)
    took_ms = (time.perf_counter() - began) * 1e3
    details = answer["usage"]["prompt_tokens_details"] or {}  # null where nothing is cached
    return took_ms, details.get("cached_tokens", 0), answer["choices"][0]["text"]


def reset_prefix_cache(server: Server) -> None:
    """Forget what is in the pool; refused while blocks are being copied out of it."""
    deadline = time.perf_counter() + RESET_TIMEOUT_S
    while not post(server.url, "/reset_prefix_cache", {})["success"]:
        if time.perf_counter() > deadline:
            raise ServerError(f"{server.name}: its prefix cache is in use")
        ask(server, [5, 6, 7])  # blocks are given back in a step
        time.sleep(0.1)


def connectors(folder: Path) -> dict[str, dict[str, object] | None]:
    """The KV transfer config of each arm."""
    shared = {"directory": str(folder), "capacity_bytes": KEPT_BYTES}
    stores = {
        "host": {"tiers": ["host"], "options": {"host": {"capacity_bytes": KEPT_BYTES}}},
        "shared": {"tiers": ["shared"], "options": {"shared": shared}},
    }
    return {
        "none": None,
        **{
            f"baton {tier}": BATON | {"kv_connector_extra_config": {"store": store}}
            for tier, store in stores.items()
        },
        "offloading": {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "spec_name": "HostOffloadingSpec",
                "spec_module_path": "vllm_host_offloading",
                "cpu_bytes_to_use": KEPT_BYTES,
            },
        },
        "mooncake": {
            "kv_connector": "MooncakeStoreConnector",
            "kv_connector_module_path": "vllm_mooncake_store",
            "kv_role": "kv_both",
        },
        "lmcache": {
            "kv_connector": "LMCacheMPConnector",
            "kv_connector_module_path": "lmcache.integration.vllm.lmcache_mp_connector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "lmcache.mp.host": "tcp://127.0.0.1",
                "lmcache.mp.port": find_free_port(),
                "lmcache.mp.autostart": True,
                "lmcache.mp.autostart.server_args": (
                    "--l1-size-gb 0.5 --chunk-size 128 --disable-observability "
                    "--supported-transfer-mode auto --eviction-policy LRU "
                    f"--http-port {find_free_port()}"
                ),
            },
        },
    }  # fmt: skip


def configure_mooncake(folder: Path) -> dict[str, str]:
    """The environment of its connector, which reads a file."""
    path = folder / "mooncake.json"
    settings = {
        "metadata_server": "P2PHANDSHAKE",
        "master_server_address": f"127.0.0.1:{MASTER_PORT}",
        "protocol": "tcp",
        "global_segment_size": KEPT_BYTES,
        "local_buffer_size": 64 << 20,
    }
    path.write_text(json.dumps(settings))
    return {
        "MOONCAKE_CONFIG_PATH": str(path),
        "MOONCAKE_REQUESTER_LOCAL_HOSTNAME": "127.0.0.1",
    }


def start(servers: Servers, arms: list[str], lmcache: Path | None) -> dict[str, Server]:
    """One server for each arm, all ready; those that do not start are reported and left out."""
    store_folder = Path(tempfile.mkdtemp(dir=servers.folder))
    mooncake = configure_mooncake(servers.folder)
    started = {}
    for arm, transfer in connectors(store_folder).items():
        if arm not in arms:
            continue
        paths = [str(Path(__file__).parent)] + ([str(lmcache)] if arm == "lmcache" else [])
        environment = {
            "PYTHONPATH": ":".join(paths),
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_SERVER_DEV_MODE": "1",  # /reset_prefix_cache
            "BATON_CLUSTER_KEY": os.urandom(32).hex(),
            "LMCACHE_TRACK_USAGE": "false",
            "VLLM_HOST_IP": "127.0.0.1",
            **mooncake,
        }
        started[arm] = servers.start(arm.replace(" ", "-"), "0,1", transfer, environment)
    ready = {}
    for arm, server in started.items():
        try:
            server.wait_ready()
        except ServerError as exc:
            print(exc, file=sys.stderr)
            servers.end([server])
        else:
            ready[arm] = server
    return ready


def main() -> None:
    """Measure all, print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, nargs="*", default=[4000])
    parser.add_argument("--lmcache", type=Path, help="where `pip install --target` put LMCache")
    parser.add_argument("--arms", nargs="*", choices=ARMS, default=ARMS, help="beside none")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--read", type=Path, help="print the table of such a file again")
    parser.add_argument("--contained", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.read is not None:
        show([Run(**run) for run in json.loads(options.read.read_bytes())["runs"]])
        return
    arms = ["none", *options.arms, *(["lmcache"] if options.lmcache else [])]
    if "mooncake" in arms and not options.contained:
        contain()
    runs: list[Run] = []
    with ExitStack() as stack:
        model = make_model(Path(stack.enter_context(tempfile.TemporaryDirectory())), MODEL)
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm")))
        if "mooncake" in arms:
            start_master(stack, MASTER_PORT)
        given = Servers(folder, model, "float32", 128 << 20, 4608, arguments=ARGUMENTS)
        servers = start(stack.enter_context(given), arms, options.lmcache)
        bench = Bench(servers, np.random.default_rng())
        for server in servers.values():  # they learn what tokens take
            ask(server, bench.prompt(max(options.tokens)))
        for number in range(options.rounds):
            for num_tokens in options.tokens:
                for arm in reversed(servers) if number % 2 else servers:
                    runs += bench.measure(arm, num_tokens)
                    print(*runs[-2:], file=sys.stderr)
    show(runs)
    write_record(options.json, share=SHARE, runs=runs)


def show(runs: list[Run]) -> None:
    """Medians, quartiles, and the ratio to a server that computes all."""
    columns = "tokens", "arm", "case", "TTFT, ms", "quartiles", "of none", "found"
    table = Table(*columns, box=box.MARKDOWN)
    for num_tokens in sorted({run.num_tokens for run in runs}):
        found: dict[tuple[str, str], list[Run]] = {}
        for run in runs:
            if run.num_tokens == num_tokens:
                found.setdefault((run.arm, run.case), []).append(run)
        usual = statistics.median(run.ttft_ms for run in found["none", "new"])
        for (arm, case), own in found.items():
            low, middle, high = statistics.quantiles([run.ttft_ms for run in own], n=4)
            share = statistics.fmean(run.cached for run in own) / num_tokens
            row = f"{middle:.1f}", f"{low:.1f} to {high:.1f}", f"{middle / usual:.2f}"
            table.add_row(str(num_tokens), arm, case, *row, f"{share:.0%}")
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
