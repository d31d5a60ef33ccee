"""The machine, its load, and the versions of what is measured."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

import msgspec

DISTRIBUTIONS: Final = (
    "baton-kv",
    "aiohttp",
    "numpy",
    "torch",
    "transformers",
    "uvloop",
    "vllm",
    "nixl-cu12",
    "nixl-cu13",
    "mooncake-transfer-engine",
    "mooncake-transfer-engine-non-cuda",
)
CPU_INFO: Final = Path("/proc/cpuinfo")


class Machine(msgspec.Struct, frozen=True):
    """One host. `load` is the run queue's average over 1, 5 and 15 minutes."""

    host: str
    kernel: str
    cpu: str
    num_cpus: int
    memory_bytes: int
    python: str
    versions: dict[str, str]
    load: tuple[float, float, float]


def describe_machine() -> Machine:
    """This host, now."""
    return Machine(
        host=platform.node(),
        kernel=platform.release(),
        cpu=_read_cpu(),
        num_cpus=len(os.sched_getaffinity(0)),
        memory_bytes=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        python=platform.python_version(),
        versions=_read_versions(),
        load=os.getloadavg(),
    )


def _read_cpu() -> str:
    try:
        lines = CPU_INFO.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def _read_versions() -> dict[str, str]:
    found = {}
    for name in DISTRIBUTIONS:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
