"""Where a worker is: `zone/rack/host/device`, as configured, from the environment, or found out.

    zone     BATON_TOPOLOGY_ZONE
    rack     BATON_TOPOLOGY_NVLINK_DOMAIN, else BATON_TOPOLOGY_RACK
    host     BATON_TOPOLOGY_HOST, else this kernel's boot id, which containers of one host share
    device   BATON_TOPOLOGY_DEVICE, else the one GPU that this process was given by its UUID,
             else, without GPUs, the one core that it may use

Each level by itself, and the configured path first. What is not known stays empty.
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Final

from baton.clock import read_clock_domain
from baton.config.environment import read_environment
from baton.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from baton.config.sections import WorkerSection

NUM_LEVELS: Final = 4
MAX_NAME_CHARS: Final = 253
"""Of a Kubernetes node; labels are shorter."""
VARIABLES: Final[tuple[tuple[str, ...], ...]] = (
    ("BATON_TOPOLOGY_ZONE",),
    ("BATON_TOPOLOGY_NVLINK_DOMAIN", "BATON_TOPOLOGY_RACK"),
    ("BATON_TOPOLOGY_HOST",),
    ("BATON_TOPOLOGY_DEVICE",),
)
"""Of each level, the first that is set counts: hosts that NVLink joins are nearest."""
_GPU_VARIABLES: Final = ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES")
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]*")
_GPU: Final = re.compile(r"(?:GPU|MIG)-[0-9a-fA-F-]{8,64}")
_BOOT_ID_CHARS: Final = 13


def find_worker_topology(worker: WorkerSection) -> str:
    """The path of a worker in this process, which may not be bound to its cores yet.

    Raises:
        ConfigError: `worker.topology`, or a variable, does not name levels.
    """
    cores = worker.cpu_affinity or os.sched_getaffinity(0)
    return find_topology(worker.topology, read_environment(), read_clock_domain(), cores)


def find_topology(
    configured: str | None,
    environment: Mapping[str, str],
    boot_id: str,
    cores: Collection[int] = (),
) -> str:
    """A path, without what is not known at its end. `cores`: those that may be used, if known.

    Raises:
        ConfigError: the configured path, or a variable, does not name levels.
    """
    *names, device = (_find(level, environment) for level in range(NUM_LEVELS))
    names[2] = names[2] or f"boot-{boot_id[:_BOOT_ID_CHARS]}"
    names.append(device or _find_processor(environment, cores))
    for level, name in enumerate(_read_path(configured or "")):
        names[level] = name or names[level]
    return "/".join(names).rstrip("/")


def _read_path(path: str) -> list[str]:
    names = path.split("/") if path else []
    if len(names) > NUM_LEVELS:
        raise ConfigError(
            f"worker.topology {path[:128]!r} has {len(names)} levels; it has at most "
            f"{NUM_LEVELS}: zone/rack/host/device"
        )
    for name in names:
        _check(name, "worker.topology")
    return names


def _find(level: int, environment: Mapping[str, str]) -> str:
    for variable in VARIABLES[level]:
        if name := environment.get(variable, ""):
            _check(name, variable)
            return name
    return ""


def _find_processor(environment: Mapping[str, str], cores: Collection[int]) -> str:
    """What a worker computes with, where it is one: workers with the same one share its time."""
    given = [name for variable in _GPU_VARIABLES if (name := environment.get(variable, ""))]
    if given:
        return next((name for name in given if _GPU.fullmatch(name)), "")
    return f"core-{next(iter(cores))}" if len(cores) == 1 else ""


def _check(name: str, source: str) -> None:
    if name and (len(name) > MAX_NAME_CHARS or not _NAME.fullmatch(name)):
        raise ConfigError(
            f"{source} names a level {name[:128]!r}; a name has letters, digits and . _ : - "
            f"(the first a letter or digit), at most {MAX_NAME_CHARS}"
        )
