"""Real vLLM servers: an oracle without Baton, and pairs that hand over, behind gateways.

The model has random weights in float32, made so that one foreign page of KV changes the next greedy
tokens. Servers cost some 15 s and 1 GiB each: tests share them.
"""

from __future__ import annotations

import json
import os
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from baton.clock import MachineClock
from baton.engines.transformers.random_model import RandomModelSpec, make_random_model
from baton.telemetry.process_status import Ready
from baton.testing.fleet import Fleet, FleetProcess, get_status
from tests.chaos import store_failpoints
from tests.chaos.process_state import find_processes_of_sessions
from tests.e2e_vllm.client import KEY, get_text, wait_until
from tests.free_ports import find_free_port
from tests.preloaded import start_plain_vllm, start_preloaded_vllm

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from baton.config.sections import Role

    Starter = Callable[["ClusterFactory"], tuple[FleetProcess, ...]]

"""Of this run alone: a store belongs to a key, and another run on this host may have one."""
MODEL: Final = "demo"
NUM_LAYERS: Final = 4
SPEC: Final = RandomModelSpec(
    num_layers=NUM_LAYERS,
    hidden_size=256,
    num_heads=8,
    num_kv_heads=2,
    max_context_tokens=4096,
    dtype="float32",
)
BLOCK_SIZE: Final = 32
KV_BYTES_PER_TOKEN: Final = NUM_LAYERS * 2 * SPEC.num_kv_heads * SPEC.head_dim * 4
POOL_TOKENS: Final = 16_384
PREFILL_POOL_TOKENS: Final = 8_192
"""Of the server that prefills for all: what fills it is computed."""
CHUNK_TOKENS: Final = 256
"""A long prompt is computed in many chunks."""
LEASE_S: Final = 40.0
"""Longer than tests wait for idle servers: a lease does not free what prefill forgets to free."""

ENGINE: Final[Mapping[str, object]] = {
    "worker.engine": "vllm",
    "handoff.lease_s": LEASE_S,
    "handoff.liveness_timeout_s": 6.0,  # busy machines are no fault
    "handoff.timeout_s": 120.0,
    "engine.dtype": "float32",
    "engine.num_threads": 1,
    "engine.max_context_tokens": 4096,
    "engine.block_size": BLOCK_SIZE,
    "engine.kv_cache_bytes": POOL_TOKENS * KV_BYTES_PER_TOKEN,
    "engine.max_num_batched_tokens": CHUNK_TOKENS,
    "engine.arguments": [
        "--enable-prompt-tokens-details",
        "--enable-auto-tool-choice",
        "--tool-call-parser=hermes",
    ],
    # In mode push it is not used.
    "store.tiers": ["shared"],
    "store.options.shared.capacity_bytes": 128 << 20,
    "store.num_parts": 2,  # some have two ranks
    "store.prefixes": False,  # tests ask what others asked, and say what is handed over
}
PLAIN_ARGUMENTS: Final = (
    "--dtype=float32",
    "--max-model-len=4096",
    f"--block-size={BLOCK_SIZE}",
    f"--kv-cache-memory-bytes={POOL_TOKENS * KV_BYTES_PER_TOKEN}",
    f"--max-num-batched-tokens={CHUNK_TOKENS}",
    "--enforce-eager",
    "--enable-prompt-tokens-details",
)
PLAIN_START_TIMEOUT_S: Final = 240.0
LEAVE_WITHIN_S: Final = 10.0
PLAIN_LEAVE_WITHIN_S: Final = 60.0
"""vLLM's own worker outlives its server by seconds: it searches its modules for garbage."""
GATEWAY: Final[Mapping[str, object]] = {"gateway.probe_timeout_s": 4.0}
"""Two cores are busy at times with three servers."""


@dataclass(frozen=True)
class VllmCluster:
    """`oracle` is a plain vLLM server that knows nothing of Baton."""

    oracle: FleetProcess
    prefill: FleetProcess
    decode: FleetProcess
    gateway: FleetProcess
    model: Path


@dataclass(frozen=True)
class ClusterFactory:
    """Where servers are started. `run_directory` is this user's runtime directory for all.

    `plain`: the sessions of servers that nothing of Baton is in. `planned` are started before they
    are asked for, one after another; `loading` were, and nobody has asked for them yet;
    `taken` somebody has, and they are not planned again.
    """

    fleet: Fleet
    model: Path
    run_directory: Path
    plain: set[int] = field(default_factory=set)
    planned: dict[str, Starter] = field(default_factory=dict)
    taken: set[str] = field(default_factory=set)
    loading: dict[str, tuple[FleetProcess, ...]] = field(default_factory=dict)

    @classmethod
    @contextmanager
    def open(cls, folder: Path, run_directory: Path) -> Iterator[ClusterFactory]:
        """Make the model; whatever was started is ended at the end."""
        make_random_model(folder / "model", SPEC)
        logs, plugins = folder / "logs", folder / "plugins"
        logs.mkdir()
        plugins.mkdir()
        store_failpoints.install(plugins)
        print(f"logs in {logs}")
        places = [str(plugins), str(Path.cwd()), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(places),
            "BATON_CLUSTER_KEY": KEY,
            "XDG_RUNTIME_DIR": str(run_directory),
            "XDG_STATE_HOME": str(run_directory),
            "VLLM_RPC_BASE_PATH": str(run_directory),  # of servers that Baton does not start
        }
        with Fleet(logs, environment, start=start_preloaded_vllm, tls="control") as fleet:
            yield cls(fleet, folder / "model", run_directory)

    def start(self, name: str, role: Role, **changes: object) -> FleetProcess:
        """Start `baton worker --engine vllm`; `section__key=value` change its settings."""
        settings = {key.replace("__", ".", 1): value for key, value in changes.items()}
        return self.fleet.start_worker(name, role, {**ENGINE, **self._served(), **settings})

    def start_transformers(
        self, name: str, role: Role, store: Mapping[str, object] | None = None, **engine: object
    ) -> FleetProcess:
        """Start a worker with the transformers engine and the same model."""
        options = {"dtype": "float32", "num_threads": 1, "num_blocks": 1100, **engine}
        settings = {f"engine.{key}": value for key, value in options.items()}
        return self.fleet.start_worker(name, role, {**self._served(), **settings, **(store or {})})

    def start_plain(
        self,
        name: str,
        *arguments: str,
        transfer: Mapping[str, object] | None = None,
        variables: Mapping[str, str] | None = None,
    ) -> FleetProcess:
        """Start vLLM's own server as a user of vLLM does, and do not wait for it."""
        port = find_free_port()
        kv = () if transfer is None else ("--kv-transfer-config", json.dumps(transfer))
        log = self.fleet.logs / f"{name}.log"
        offline = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
        settings = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        if transfer is None:  # only its answers count: without a worker process, which spins
            settings["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        words = [
            *("--model", str(self.model), "--served-model-name", MODEL),
            *("--host", "127.0.0.1", "--port", str(port)),
            *(*PLAIN_ARGUMENTS, *kv, *arguments),
        ]
        environment = {**self.fleet.environment, **offline, **settings, **(variables or {})}
        with log.open("wb") as stream:
            child = start_plain_vllm(words, environment, stream)
        ready = Ready(f"http://127.0.0.1:{port}")
        process = FleetProcess(name, child, log, MachineClock(), ready=ready)
        self.fleet.processes.append(process)
        if transfer is None:
            self.plain.add(process.pid)
        return process

    def start_gateway(
        self,
        prefill: Sequence[FleetProcess],
        decode: Sequence[FleetProcess],
        **changes: object,
    ) -> FleetProcess:
        """Start a gateway in front of servers that answer, and wait until it has met them all."""
        # vLLM's own server, as a user of vLLM starts it, has no TLS.
        is_plain = any(each.url.startswith("http:") for each in (*prefill, *decode))
        tls = {"security.tls": "off"} if is_plain else {}
        settings = {**GATEWAY, **tls, **changes}
        gateway = self.fleet.start_gateway(prefill, decode, settings=settings)
        wait_until(lambda: read_states(gateway) == {"up"}, 20.0, gateway.tail)
        return gateway

    def build_cluster(self) -> VllmCluster:
        """Start the three servers that all tests share."""
        oracle = self.start_plain("oracle")
        prefill = self.start(
            "prefill",
            "prefill",
            engine__kv_cache_bytes=PREFILL_POOL_TOKENS * KV_BYTES_PER_TOKEN,
        )
        # Not measured, as elsewhere: tests say what this one uses.
        decode = self.start("decode", "decode", transfer__choice="listed")
        wait_ready(oracle, prefill, decode)
        gateway = self.start_gateway([prefill], [decode])
        return VllmCluster(oracle, prefill, decode, gateway, self.model)

    def plan(self, name: str, start: Starter) -> None:
        """Some test will ask for these servers, after those that were planned before."""
        if name not in self.taken:
            self.planned.setdefault(name, start)

    def start_ahead(self) -> None:
        """Start the next ones that are planned: one group at a time, for the sake of memory."""
        if self.planned and not self.loading:
            name, start = next(iter(self.planned.items()))
            del self.planned[name]
            self.loading[name] = start(self)

    def take(self, name: str, start: Starter) -> tuple[FleetProcess, ...]:
        """These servers, ready, whether they were started ahead or not; then the next ones load."""
        self.taken.add(name)
        servers = self.loading.pop(name, None)
        if servers is None:
            self.planned.pop(name, None)
            servers = start(self)
        wait_ready(*servers)
        self.start_ahead()
        return servers

    def end(self, *processes: FleetProcess) -> None:
        """Drain and end those that live; each must end well."""
        for process in processes:
            assert not process.is_alive or process.stop() == 0, process.tail(80)

    def check_shutdown(self) -> None:
        """Whatever happened before, SIGTERM ends every process well, and nothing of it is left."""
        unused = [server for servers in self.loading.values() for server in servers]
        wait_ready(*unused)  # where the tests that want them did not run
        statuses = self.fleet.stop()
        assert set(statuses.values()) <= {0}, statuses
        ours = {process.pid for process in self.fleet.processes} - self.plain
        for sessions, within_s in ((ours, LEAVE_WITHIN_S), (self.plain, PLAIN_LEAVE_WITHIN_S)):
            wait_until(
                lambda sessions=sessions: not find_processes_of_sessions(sessions),
                within_s,
                lambda sessions=sessions: find_processes_of_sessions(sessions),
            )
        assert not list(self.run_directory.rglob("worker-*"))

    def _served(self) -> dict[str, object]:
        return {"worker.model": str(self.model), "worker.served_model_name": MODEL}


def wait_ready(*processes: FleetProcess) -> None:
    """Wait for servers that load at the same time."""
    for process in processes:
        if process.ready is None:
            process.wait_ready()
        else:
            wait_until(
                lambda process=process: answers(process), PLAIN_START_TIMEOUT_S, process.tail
            )


def answers(process: FleetProcess) -> bool:
    """Whether a server answers that it is well."""
    assert process.is_alive, process.tail(60)
    return get_status(f"{process.url}/health") == 200


def read_states(gateway: FleetProcess) -> set[str]:
    """In which states a gateway sees its workers."""
    workers = json.loads(get_text(f"{gateway.url}/debug/workers"))["workers"]
    return {worker["state"] for worker in workers}
