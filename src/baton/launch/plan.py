"""Which processes `baton up` starts, with which arguments. Pure.

Children read the same file and environment as the launcher. What it got by flags, and what it
decides itself, it hands on by flags, which win over both. Secrets never stand among them.
"""

from __future__ import annotations

import sys
from collections import ChainMap
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, Self, TypeAlias, cast
from urllib.parse import urlsplit

import msgspec

from baton.config.cluster_key import is_loopback
from baton.config.resolve import FromFlag, Resolved, closed_keys, quote_key
from baton.errors import ConfigError
from baton.protocol.worker_http import Role as PlacementRole
from baton.router.placement import choose_policy

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from baton.config.sections import Config, GatewaySection, Role
    from baton.telemetry.process_status import Ready


def share_cores(cores: Sequence[int], num_workers: int) -> list[tuple[int, ...]]:
    """Disjoint, equal runs of cores for each worker; overlapping single ones if they are few."""
    size = max(1, len(cores) // num_workers)
    return [
        tuple(cores[(worker * size + i) % len(cores)] for i in range(size))
        for worker in range(num_workers)
    ]


LOOPBACK: Final = "127.0.0.1"

Settings: TypeAlias = "dict[str, object]"
Pinning: TypeAlias = Literal["shared_cores", "own_cores"]

LAUNCHER_ONLY: Final = frozenset({
    "gateway.prefill",
    "gateway.decode",
    "gateway.workers",
    "gateway.members",
})
LAUNCHER_SECTIONS: Final = ("up.", "ray.", "fleet.")
"""Keys, and beginnings of keys, that a child never gets handed on."""

WORKER_LISTS: Final[Mapping[Role, str]] = {
    "prefill": "gateway.prefill",
    "decode": "gateway.decode",
    "both": "gateway.workers",
}
PEER_LISTEN: Final = "store.options.host.listen"
PEER_URLS: Final = "store.options.peer.urls"


@dataclass(frozen=True, slots=True)
class Ports:
    """A process's TCP ports; 0 leaves the choice to the kernel, or to the configuration."""

    http: int = 0
    handoff: int = 0

    @classmethod
    def of(cls, ready: Ready) -> Self:
        """Those that a process got."""
        handoff = ready.handoff_address or ":0"
        return cls(urlsplit(ready.url).port or 0, int(handoff.rpartition(":")[2]))


@dataclass(frozen=True, slots=True)
class WorkerPlan:
    """One worker to start, and the settings in which it differs from the file."""

    name: str
    role: Role
    settings: Settings

    def command(self, file: Path | None, ports: Ports) -> tuple[str, ...]:
        """Its command line, on ports chosen by the kernel (0) or those of an earlier life."""
        own = {
            "worker.name": self.name,
            "worker.role": self.role,
            "worker.port": ports.http,
            "worker.handoff_port": ports.handoff,
        }
        return command_line("worker", file, self.settings | own)


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """Everything that one launch starts."""

    config: Config
    file: Path | None
    workers: tuple[WorkerPlan, ...]
    gateway_settings: Settings

    def gateway_command(self, workers: Mapping[str, str] | Path, port: int) -> tuple[str, ...]:
        """The gateway's command line.

        `workers` is the file in which a gateway finds them while the launch runs, or the URL of
        each by its name: these stay the same.
        """
        gateway = self.config.gateway
        # One that replaces another inherits its sockets: they are as many as when it was started.
        own: Settings = {
            "gateway.host": gateway.host,
            "gateway.port": port,
            "gateway.processes": gateway.processes,
        }
        if (management_port := choose_management_port(gateway)) is not None:
            own["gateway.management_port"] = management_port
        if isinstance(workers, Path):
            # As for several: workers are added while it runs.
            roles = [PlacementRole(worker.role) for worker in self.workers] * 2
            own |= {
                **dict.fromkeys(WORKER_LISTS.values(), ()),
                "gateway.members": [f"file:{workers}"],
                "router.policy": choose_policy(self.config.router.policy, roles),
            }
        else:
            own |= self._worker_lists(workers)
        return command_line("gateway", self.file, self.gateway_settings | own)

    def _worker_lists(self, urls: Mapping[str, str]) -> Settings:
        return {
            key: [urls[worker.name] for worker in self.workers if worker.role == role]
            for role, key in WORKER_LISTS.items()
        }


def plan_launch(
    resolved: Resolved,
    cores: Sequence[int],
    engine_keys: Mapping[str, frozenset[str]],
    pinning: Pinning,
    *,
    peer_ports: Sequence[int] = (),
) -> LaunchPlan:
    """Decide on processes and their settings.

    `engine_keys` are the options that each chosen engine knows. With no prefill workers, or no
    decode workers, the others do both parts. `peer_ports`: where each worker's memory is read by
    the others (`count_peer_ports`).

    Raises:
        ConfigError: there would be no worker at all.
    """
    config = resolved.to_config()
    positions = worker_positions(config)
    shares = share_cores(cores, len(positions))
    flags = _forwarded_settings(resolved)
    workers = []
    for at, ((name, role, group), share) in enumerate(zip(positions, shares, strict=True)):
        settings: ChainMap[str, object] = ChainMap(
            dict(flatten_table(f"engine.{group.engine}", group.overrides)),
            {"worker.engine": group.engine},
            {"worker.cpu_affinity": share} if pinning == "own_cores" else {},
            _peer_settings(peer_ports, at) if peer_ports else {},
            flags,
            _thread_default(config, engine_keys[group.engine], len(share)),
        )
        workers.append(WorkerPlan(name, role, dict(settings)))
    return LaunchPlan(config, resolved.file, tuple(workers), flags)


def count_peer_ports(config: Config) -> int:
    """How many ports the workers need to read each other's memory: none where peers are configured.

    Raises:
        ConfigError: there is no other worker to read from, none keeps what others could read, or
            all would listen at one address.
    """
    store, num_workers = config.store, config.up.prefill + config.up.decode
    listen = store.options.get("host", {}).get("listen")
    if listen is not None and num_workers > 1:
        raise ConfigError(
            f"store.options.host.listen = {listen!r} is one address, and {num_workers} workers "
            "would listen there: leave it out, and with tiers host and peer each gets its own"
        )
    if "peer" not in store.tiers or "urls" in store.options.get("peer", {}):
        return 0
    if "host" not in store.tiers:
        raise ConfigError(
            "--store peer without host: no worker has memory that the others could read; give "
            "--store host,peer, or set store.options.peer.urls"
        )
    if num_workers < 2:  # noqa: PLR2004 - a worker and another one
        raise ConfigError(
            "--store host,peer with one worker: there is no other one whose memory it could read; "
            "start more workers, or set store.options.peer.urls to those of other hosts, or of "
            "baton store serve"
        )
    return num_workers


def _peer_settings(ports: Sequence[int], own: int) -> Settings:
    others = [f"tcp://{LOOPBACK}:{port}" for at, port in enumerate(ports) if at != own]
    return {
        PEER_LISTEN: f"{LOOPBACK}:{ports[own]}",
        PEER_URLS: others,
    }


def choose_management_port(section: GatewaySection) -> int | None:
    """Where /metrics is answered, by which a launcher sees what the gateway uses.

    None: on its own port, over HTTP. 0: a free port, where it is not answered there.
    """
    is_answered = is_loopback(section.host) or section.insecure
    if section.management_port is None and is_answered and section.tls_certificate is None:
        return None
    return section.management_port or 0


def another_worker(like: WorkerPlan, index: int, peer_port: int | None = None) -> WorkerPlan:
    """A plan for one more worker: as another one, on the same cores where that is pinned.

    `peer_port`: where its memory is read by others, of a launch whose workers do that.
    """
    name = f"{like.name.rpartition('-')[0]}-{index}"
    if peer_port is None:
        return replace(like, name=name)
    urls = cast("list[str]", like.settings[PEER_URLS])
    peers = {
        PEER_LISTEN: f"{LOOPBACK}:{peer_port}",
        PEER_URLS: [*urls, f"tcp://{like.settings[PEER_LISTEN]}"],
    }
    return replace(like, name=name, settings=like.settings | peers)


class WorkerGroup(NamedTuple):
    """What runs in the workers of one role: their engine, and its options that differ."""

    engine: str
    overrides: Mapping[str, object]


def worker_groups(config: Config) -> tuple[WorkerGroup, ...]:
    """What the workers of a launch run, prefill first.

    Raises:
        ConfigError: there would be no worker at all.
    """
    found: list[WorkerGroup] = []
    for _, _, group in worker_positions(config):
        if group not in found:
            found.append(group)
    return tuple(found)


def worker_positions(config: Config) -> list[tuple[str, Role, WorkerGroup]]:
    """Name, role and group of each worker that a launch starts with, prefill first.

    Raises:
        ConfigError: there would be no worker at all.
    """
    up = config.up
    prefill = WorkerGroup(up.prefill_engine_name or config.worker.engine, up.prefill_engine)
    decode = WorkerGroup(up.decode_engine_name or config.worker.engine, up.decode_engine)
    num_workers = up.prefill + up.decode
    if num_workers == 0:
        raise ConfigError("nothing to start: --prefill and --decode are both 0")
    if up.prefill == 0 or up.decode == 0:
        group = prefill if up.decode == 0 else decode
        return [(f"worker-{i}", "both", group) for i in range(num_workers)]
    return [
        *((f"prefill-{i}", "prefill", prefill) for i in range(up.prefill)),
        *((f"decode-{i}", "decode", decode) for i in range(up.decode)),
    ]


def flatten_table(prefix: str, table: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    """A table's values under their full names: `--set` takes values, not tables."""
    for key, value in table.items():
        if isinstance(value, dict):
            yield from flatten_table(f"{prefix}.{quote_key(key)}", value)
        else:
            yield f"{prefix}.{quote_key(key)}", value


def _thread_default(config: Config, engine_keys: frozenset[str], num_cores: int) -> Settings:
    if "num_threads" not in engine_keys or "num_threads" in config.engine:
        return {}
    return {"engine.num_threads": num_cores}


def flag_settings(resolved: Resolved) -> Settings:
    """What was given by flags."""
    return {
        name: value.value
        for name, value in resolved.values.items()
        if isinstance(value.origin, FromFlag)
    }


def _forwarded_settings(resolved: Resolved) -> Settings:
    given = flag_settings(resolved)
    return {
        name: value
        for name, value in given.items()
        if name not in LAUNCHER_ONLY and not name.startswith(LAUNCHER_SECTIONS)
    }


def command_line(command: str, file: Path | None, settings: Settings) -> tuple[str, ...]:
    """The command line of a process of ours that is to have these settings."""
    words = [sys.executable, "-m", "baton.cli", command]
    if file is not None:
        words += ["--config", str(file.absolute())]
    for name, value in settings.items():
        words += ["--set", f"{name}={_as_text(name, value)}"]
    return tuple(words)


def _as_text(name: str, value: object) -> str:
    """What `--set` reads back as the same value: plain for a closed string, else TOML."""
    if isinstance(value, str) and name in closed_keys():
        return value
    # JSON's scalars and arrays of scalars are TOML's.
    return msgspec.json.encode(value).decode()
