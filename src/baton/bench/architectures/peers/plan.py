"""Which processes a peer's arm has, with which arguments. Pure.

Workers have the cores, and vLLM the settings, that Baton's own workers have in the same place.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, TypeAlias, assert_never

import msgspec

from baton.engines.vllm.arguments import REMOVED_VARIABLES, engine_flags, server_environment
from baton.engines.vllm.options import VllmOptions
from baton.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from baton.bench.architectures.arms import Arm, Peer
    from baton.engines.vllm.arguments import Platform
    from baton.launch.plan import LaunchPlan

Role: TypeAlias = Literal["prefill", "decode", "both"]

HOST: Final = "127.0.0.1"
PROXY: Final = "baton.bench.architectures.peers.proxy"
NIXL: Final = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}
LOOPBACK_DEVICE: Final = "lo"
"""UCX would otherwise listen on every network device of the machine."""


@dataclass(frozen=True, slots=True)
class Ports:
    """A server's own: for requests, and NIXL's for the handshake."""

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
    """Everything that a peer's arm starts."""

    peer: Peer
    model: Path
    served_name: str
    options: VllmOptions
    platform: Platform
    servers: tuple[PeerServer, ...]

    def server_command(self, port: int) -> tuple[str, ...]:
        """One vLLM server."""
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
        """Its variables: those of Baton's own vLLM workers, and where NIXL listens."""
        kept = {k: v for k, v in inherited.items() if k not in REMOVED_VARIABLES}
        own = server_environment(self.options, "info", server.cores, self.platform)
        nixl = {
            "VLLM_NIXL_SIDE_CHANNEL_HOST": HOST,
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(ports.handshake),
            "UCX_NET_DEVICES": LOOPBACK_DEVICE,
        }
        return {**kept, **own, **(nixl if self.peer == "nixl" else {})}

    def front_command(self, urls: Mapping[str, str], ports: Ports) -> tuple[str, ...]:
        """What stands before the servers; `urls` has each server's by name."""
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
    arm: Arm, launch: LaunchPlan, engine: Mapping[str, object], platform: Platform
) -> PeerPlan:
    """A peer's arm in the place of Baton's; `engine` holds the options of vLLM.

    Raises:
        ConfigError: no model, or settings that a peer could not have alike.
    """
    config = launch.config
    if arm.peer is None:
        raise ConfigError(f"{arm.name} is no peer's arm")
    if config.worker.engine != "vllm":
        raise ConfigError(f"--arm {arm.name}: peers are compared with --engine vllm alone")
    if config.worker.model is None:
        raise ConfigError(f"--arm {arm.name}: peers need a model's folder (--model)")
    if config.up.prefill_engine or config.up.decode_engine:
        raise ConfigError(
            f"--arm {arm.name}: prefill and decode with settings of their own are Baton's alone"
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
    return PeerPlan(arm.peer, model, name, options, platform, servers)


def _cores(share: object) -> tuple[int, ...]:
    return msgspec.convert(share, tuple[int, ...])
