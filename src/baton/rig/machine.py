"""The machine, its load, and the versions of what is measured."""

from __future__ import annotations

import ipaddress
import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final, TypeAlias

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


Address: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address


OWN_PROCESS: Final = Path("/proc/self")


LISTENING: Final = "0A"


def find_open_listeners(process: Path = OWN_PROCESS) -> tuple[str, ...]:
    """`address:port` of each one; none where there is no /proc, since nothing is known then."""
    own = _own_sockets(process / "fd")
    found: set[str] = set()
    for name in ("tcp", "tcp6"):
        for row in _rows(process / "net" / name):
            address, port = parse_address(row[1])
            if row[3] == LISTENING and row[9] in own and not _is_loopback(address):
                found.add(f"[{address}]:{port}" if address.version == 6 else f"{address}:{port}")  # noqa: PLR2004
    return tuple(sorted(found))


def parse_address(text: str) -> tuple[Address, int]:
    """`0100007F:1F90` → 127.0.0.1, 8080: the kernel prints words as this machine stores them."""
    digits, _, port = text.partition(":")
    words = [int(digits[at : at + 8], 16) for at in range(0, len(digits), 8)]
    packed = b"".join(word.to_bytes(4, sys.byteorder) for word in words)
    return ipaddress.ip_address(packed), int(port, 16)


def _is_loopback(address: Address) -> bool:
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


def _rows(table: Path) -> list[list[str]]:
    try:
        lines = table.read_text("ascii").splitlines()[1:]
    except OSError:
        return []
    return [line.split() for line in lines]


def _own_sockets(descriptors: Path) -> set[str]:
    """Inodes of the process's sockets."""
    inodes: set[str] = set()
    try:
        entries = list(descriptors.iterdir())
    except OSError:
        return inodes
    for entry in entries:
        try:
            target = str(entry.readlink())
        except OSError:  # closed meanwhile: the listing's own descriptor
            continue
        if target.startswith("socket:["):
            inodes.add(target.removeprefix("socket:[").removesuffix("]"))
    return inodes
