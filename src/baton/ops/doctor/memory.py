"""Memory: how much, what limits it, and where shared buffers go. Read from files alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from baton.ops.doctor.devices import rdma_devices
from baton.ops.doctor.finding import Area, Finding, Level, write_bytes
from baton.ops.doctor.machine import is_container, read_cgroup_files

if TYPE_CHECKING:
    from baton.ops.doctor.host import Host

GIB: Final = 1 << 30
MIN_MEMORY_BYTES: Final = 4 * GIB
MIN_SHM_BYTES: Final = GIB
UNLIMITED_BYTES: Final = 1 << 60
"""cgroup v1 writes "no limit" as a number close to 2^63."""

SHM: Final = "/dev/shm"  # noqa: S108 - looked at, not written
STRICT_OVERCOMMIT: Final = 2


def check_memory(host: Host) -> list[Finding]:
    """Memory that this process can have: the machine's, or its cgroup's limit."""
    facts = read_meminfo(host)
    total, available = facts.get("MemTotal"), facts.get("MemAvailable")
    if total is None or available is None:
        return []
    limit = min(_cgroup_limits(host), default=None)
    found = f"{write_bytes(available)} of {write_bytes(total)} available"
    if limit is not None:
        found += f"; the cgroup allows {write_bytes(limit)}"
    is_enough = min(available, limit or available) >= MIN_MEMORY_BYTES
    return [
        Finding(
            area=Area.MEMORY,
            name="memory",
            level=Level.OK if is_enough else Level.WARNING,
            found=found,
            why="Each worker holds a model and a pool of KV pages, which is committed when it "
            "starts; beyond the limit the kernel kills it.",
            fix=None if is_enough else "baton up --set engine.kv_cache_bytes=268435456",
        )
    ]


def check_shm(host: Host) -> list[Finding]:
    """Size of /dev/shm, and the room in it."""
    space = host.measure_space(SHM)
    why = (
        "Engines with several processes (vLLM's tensor parallelism, NCCL) and UCX put buffers "
        "here and die by SIGBUS when it is full. Baton's own regions are memfds: it does not "
        "limit them."
    )
    if space is None:
        return [_shm_finding(Level.WARNING, "there is no /dev/shm", why, _enlarge(host))]
    found = f"{write_bytes(space.total_bytes)}, {write_bytes(space.free_bytes)} free"
    if space.total_bytes < MIN_SHM_BYTES:
        return [_shm_finding(Level.WARNING, found, why, _enlarge(host))]
    if space.free_bytes < MIN_SHM_BYTES:
        return [_shm_finding(Level.WARNING, f"{found}: almost full", why, "ls -lS /dev/shm")]
    return [_shm_finding(Level.OK, found, why, None)]


def _shm_finding(level: Level, found: str, why: str, fix: str | None) -> Finding:
    return Finding(area=Area.MEMORY, name=SHM, level=level, found=found, why=why, fix=fix)


def _enlarge(host: Host) -> str:
    if is_container(host):
        return "docker run --shm-size=8g …"
    return "sudo mount -o remount,size=8G /dev/shm"


def check_huge_pages(host: Host) -> list[Finding]:
    """Huge pages: reserved ones, and transparent ones for shared memory."""
    facts = read_meminfo(host)
    if not facts:
        return []
    size = facts.get("Hugepagesize", 0)
    num_total, num_free = facts.get("HugePages_Total", 0), facts.get("HugePages_Free", 0)
    anonymous, shared = (
        _chosen(host.read(f"/sys/kernel/mm/transparent_hugepage/{name}"))
        for name in ("enabled", "shmem_enabled")
    )
    reserved = f"{num_free} of {num_total} x {write_bytes(size)} free" if num_total else "none"
    return [
        Finding(
            area=Area.MEMORY,
            name="huge pages",
            level=Level.OK,
            found=f"reserved: {reserved}; transparent: {anonymous}, in shared memory: {shared}",
            why="Baton reserves none. It asks for transparent ones, unless the first setting is "
            "never or the second is deny; `huge pages in regions` is what it gets.",
        )
    ]


def check_overcommit(host: Host) -> list[Finding]:
    """Whether the kernel refuses memory that it might not have."""
    mode = host.read_number("/proc/sys/vm/overcommit_memory")
    if mode is None:
        return []
    is_strict = mode == STRICT_OVERCOMMIT
    return [
        Finding(
            area=Area.MEMORY,
            name="overcommit",
            level=Level.WARNING if is_strict else Level.OK,
            found=f"vm.overcommit_memory = {mode}",
            why="With 2 the kernel counts every address that is mapped: a peer's pool is mapped "
            "once more here, and engines reserve far more than they touch.",
            fix="sudo sysctl -w vm.overcommit_memory=0" if is_strict else None,
        )
    ]


def read_meminfo(host: Host) -> dict[str, int]:
    """/proc/meminfo: sizes in bytes, counts as they are. Empty where there is none."""
    facts: dict[str, int] = {}
    for line in (host.read("/proc/meminfo") or "").splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if words and words[0].isdigit():
            facts[name] = int(words[0]) * (1024 if words[1:] == ["kB"] else 1)
    return facts


def _cgroup_limits(host: Host) -> list[int]:
    texts = read_cgroup_files(host, "memory", "memory.max", "memory.limit_in_bytes")
    return [int(text) for text in texts if text.isdigit() and int(text) < UNLIMITED_BYTES]


def _chosen(setting: str | None) -> str:
    """`always [never] advise` → `never`."""
    _, _, rest = (setting or "").partition("[")
    return rest.partition("]")[0] or "unknown"


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
