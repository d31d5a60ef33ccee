"""What this process may have: open files, locked memory. Read from /proc/self/limits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from baton.ops.doctor.devices import rdma_devices
from baton.ops.doctor.finding import Area, Finding, Level
from baton.ops.doctor.machine import is_container
from baton.ops.doctor.probe import write_bytes

if TYPE_CHECKING:
    from baton.ops.doctor.host import Host

MIN_OPEN_FILES: Final = 4096
WANTED_OPEN_FILES: Final = 65_536
UNLIMITED: Final = "unlimited"


def check_open_files(host: Host) -> list[Finding]:
    """RLIMIT_NOFILE."""
    limits = read_limit(host, "Max open files")
    if limits is None:
        return []
    soft, hard = limits
    is_enough = soft is None or soft >= MIN_OPEN_FILES
    fix = f"ulimit -n {WANTED_OPEN_FILES}"
    if hard is not None and hard < WANTED_OPEN_FILES:
        fix = f"sudo prlimit --pid $$ --nofile={WANTED_OPEN_FILES}"
    return [
        Finding(
            area=Area.LIMITS,
            name="open files",
            level=Level.OK if is_enough else Level.WARNING,
            found=f"{_write_count(soft)} (hard limit {_write_count(hard)})",
            why="The gateway holds two sockets for each request under way; each pair of workers "
            "some for each transport.",
            fix=None if is_enough else fix,
        )
    ]


def check_locked_memory(host: Host) -> list[Finding]:
    """RLIMIT_MEMLOCK: what RDMA may register."""
    limits = read_limit(host, "Max locked memory")
    if limits is None:
        return []
    soft, _ = limits
    has_rdma = bool(rdma_devices(host))
    is_bad = soft is not None and has_rdma
    fix = "sudo prlimit --pid $$ --memlock=unlimited"
    if is_container(host):
        fix = "docker run --ulimit memlock=-1 …"
    return [
        Finding(
            area=Area.LIMITS,
            name="locked memory",
            level=Level.WARNING if is_bad else Level.OK,
            found=UNLIMITED if soft is None else write_bytes(soft),
            why="RDMA locks every page that it registers: a pool larger than this cannot be "
            "registered." + ("" if has_rdma else " There is no RDMA here."),
            fix=fix if is_bad else None,
        )
    ]


def read_limit(host: Host, name: str) -> tuple[int | None, int | None] | None:
    """Soft and hard limit, each None where unlimited; None where the kernel does not report it."""
    for line in (host.read("/proc/self/limits") or "").splitlines():
        if line.startswith(name):
            words = line.removeprefix(name).split()
            if len(words) >= 2:  # noqa: PLR2004 - soft, hard
                return _parse(words[0]), _parse(words[1])
    return None


def _parse(word: str) -> int | None:
    return int(word) if word.isdigit() else None


def _write_count(limit: int | None) -> str:
    return UNLIMITED if limit is None else str(limit)
