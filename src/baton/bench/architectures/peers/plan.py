"""Processes and arguments of a peer's configuration, and whether the peer is installed. Pure.

Workers have the same cores and vLLM settings as Baton's own workers.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, TypeAlias, assert_never

import msgspec

from baton.engines.vllm.arguments import REMOVED_VARIABLES, engine_flags, server_environment
from baton.engines.vllm.options import VllmOptions
from baton.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from baton.bench.architectures.plan import Configuration, Peer
    from baton.engines.vllm.arguments import Platform
    from baton.launch.plan import LaunchPlan

MODULES: Final[Mapping[Peer, tuple[str, ...]]] = {
    "nixl": ("vllm", "nixl"),
    "vllm-router": ("vllm", "vllm_router"),
}
HINTS: Final[Mapping[str, str]] = {
    "vllm": "make install ENGINE=vllm",
    "nixl": "pip install --no-deps nixl==1.5.1 nixl_cu12==1.5.1",
    "vllm_router": "pip install --no-deps vllm-router==0.1.17 orjson setproctitle",
}


def find_missing(peer: Peer) -> str | None:
    """Missing packages and how to install them; None: all are installed."""
    missing = [name for name in MODULES[peer] if find_spec(name) is None]
    if not missing:
        return None
    return "; ".join(f"{name} is not installed: {HINTS[name]}" for name in missing)


Role: TypeAlias = Literal["prefill", "decode", "both"]

HOST: Final = "127.0.0.1"
PROXY: Final = "baton.bench.architectures.peers.proxy"
NIXL: Final = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}
LOOPBACK_DEVICE: Final = "lo"
"""Otherwise UCX listens on every network device."""


@dataclass(frozen=True, slots=True)
class Ports:
    """A server's ports: for requests, and for NIXL's handshake."""

    http: int
    handshake: int


@dataclass(frozen=True, slots=True)
class PeerServer:
    """One vLLM server, on its share of the cores."""

    name: str
    role: Role
    cores: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PeerPlan:
    """All processes of a peer's configuration."""

    peer: Peer
    model: Path
    served_name: str
    options: VllmOptions
    platform: Platform
    servers: tuple[PeerServer, ...]

    def server_command(self, port: int) -> tuple[str, ...]:
        """The command of one vLLM server."""
        words = [
            *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
            *("--model", str(self.model), "--served-model-name", self.served_name),
            *("--host", HOST, "--port", str(port)),
            *("--disable-uvicorn-access-log", "--uvicorn-log-level", "warning"),
            *engine_flags(self.options, self.platform),
            *self.options.arguments,
        ]
        match self.peer:
            case "nixl":
                words += ["--kv-transfer-config", msgspec.json.encode(NIXL).decode()]
            case "vllm-router":
                pass
            case other:
                assert_never(other)
        return tuple(words)

    def server_environment(
        self, inherited: Mapping[str, str], server: PeerServer, ports: Ports
    ) -> dict[str, str]:
        """Its environment: that of Baton's vLLM workers, and where NIXL listens."""
        kept = {k: v for k, v in inherited.items() if k not in REMOVED_VARIABLES}
        own = server_environment(self.options, "info", server.cores, self.platform)
        nixl = {
            "VLLM_NIXL_SIDE_CHANNEL_HOST": HOST,
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(ports.handshake),
            "UCX_NET_DEVICES": LOOPBACK_DEVICE,
        }
        return {**kept, **own, **(nixl if self.peer == "nixl" else {})}

    def front_command(self, urls: Mapping[str, str], ports: Ports) -> tuple[str, ...]:
        """The command of the proxy or router; `urls`: of each server by name."""
        match self.peer:
            case "nixl":
                words = [sys.executable, "-m", PROXY, "--port", str(ports.http)]
                for server in self.servers:
                    words += [f"--{server.role}", urls[server.name]]
            case "vllm-router":
                words = [
                    *(sys.executable, "-m", "vllm_router.launch_router", "--host", HOST),
                    *("--port", str(ports.http), "--policy", "round_robin"),
                    *("--prometheus-port", str(ports.handshake), "--prometheus-host", HOST),
                    *("--worker-urls", *urls.values()),
                ]
            case other:
                assert_never(other)
        return tuple(words)


def plan_peer(
    configuration: Configuration,
    launch: LaunchPlan,
    engine: Mapping[str, object],
    platform: Platform,
) -> PeerPlan:
    """A peer's configuration in place of Baton's; `engine`: the options of vLLM.

    Raises:
        ConfigError: no model, or settings that a peer does not have.
    """
    config = launch.config
    if configuration.peer is None:
        raise ConfigError(f"{configuration.name} is no peer's configuration")
    if config.worker.engine != "vllm":
        raise ConfigError(f"--arm {configuration.name}: peers need --engine vllm")
    if config.worker.model is None:
        raise ConfigError(f"--arm {configuration.name}: peers need a model's folder (--model)")
    if config.up.prefill_engine or config.up.decode_engine:
        raise ConfigError(
            f"--arm {configuration.name}: peers have no settings for prefill and decode apart"
        )
    options = msgspec.convert(dict(engine), VllmOptions)
    servers = tuple(
        PeerServer(worker.name, worker.role, _cores(worker.settings["worker.cpu_affinity"]))
        for worker in launch.workers
    )
    if options.num_threads is None and servers:
        options = msgspec.structs.replace(options, num_threads=len(servers[0].cores))
    model = Path(config.worker.model).absolute()
    name = config.worker.served_model_name or model.name
    return PeerPlan(configuration.peer, model, name, options, platform, servers)


def _cores(share: object) -> tuple[int, ...]:
    return msgspec.convert(share, tuple[int, ...])
