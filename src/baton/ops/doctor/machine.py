"""The machine itself: kernel, processors, NUMA, container. Read from files alone."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from baton.config.bfloat16 import CPU_INFO, computes_bfloat16
from baton.config.numa import parse_ranges
from baton.ops.doctor.finding import Area, Finding, Level

if TYPE_CHECKING:
    from baton.ops.doctor.host import Host

NODES: Final = "/sys/devices/system/node"
INITIAL_PID_NAMESPACE: Final = "pid:[4026531836]"
MIN_CPUS: Final = 2

_PIDFD_OF_PEER: Final = (6, 5)
_POPULATE_WRITE: Final = (5, 14)
_PIDFD: Final = (5, 3)


def check_kernel(host: Host) -> list[Finding]:
    """Which of the kernel's features that Baton uses are there, by its version."""
    release = host.read("/proc/sys/kernel/osrelease")
    if release is None:
        return [
            Finding(
                area=Area.MACHINE,
                name="kernel",
                level=Level.PROBLEM,
                found="/proc/sys/kernel is missing: this is not Linux, or /proc is not mounted",
                why="Workers need Linux: memfd, pidfd and Unix sockets that name no file.",
            )
        ]
    version = read_kernel_version(release)
    if version >= _PIDFD_OF_PEER:
        level, why = Level.OK, "All that Baton uses is there."
    elif version >= _POPULATE_WRITE:
        level = Level.NOTE
        why = "Before 6.5, `shared` can watch a peer's process in its own PID namespace only."
    elif version >= _PIDFD:
        level = Level.NOTE
        why = "Before 5.14 a peer's memory cannot be mapped ahead: first handoffs are slower."
    else:
        level = Level.WARNING
        why = "Before 5.3 there is no pidfd: `shared` cannot prove that a peer has died."
    return [
        Finding(area=Area.MACHINE, name="kernel", level=level, found=f"Linux {release}", why=why)
    ]


def read_kernel_version(release: str) -> tuple[int, int]:
    """`6.18.44-fc` → `(6, 18)`; `(0, 0)` where it makes no sense."""
    found = re.match(r"(\d+)\.(\d+)", release)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def check_processors(host: Host) -> list[Finding]:
    """Processors that this process may use: affinity and cgroup quota together."""
    num_online = len(parse_ranges(host.read("/sys/devices/system/cpu/online") or ""))
    num_usable = len(host.cpus)
    quota = _read_cpu_quota(host)
    limit = num_usable if quota is None else min(num_usable, quota)
    found = f"{num_usable} of {num_online or num_usable} processors"
    if quota is not None:
        found += f", cgroup quota {quota:g}"
    is_enough = limit >= MIN_CPUS
    return [
        Finding(
            area=Area.MACHINE,
            name="processors",
            level=Level.OK if is_enough else Level.WARNING,
            found=found,
            why="A prefill and a decode worker each keep one processor busy: with fewer than two, "
            "they take turns and every handoff waits.",
        )
    ]


def check_bfloat16(host: Host) -> list[Finding]:
    """Whether models in bfloat16 are quick on these processors."""
    is_quick = computes_bfloat16(host.read(f"/{CPU_INFO}") or "")
    found = "the processors compute it" if is_quick else "the processors convert it to float32"
    return [
        Finding(
            area=Area.MACHINE,
            name="bfloat16",
            level=Level.OK if is_quick else Level.NOTE,
            found=found,
            why="Most models are in bfloat16. On processors without instructions for it a prompt "
            "takes several times as long as in float32: set engine.dtype=float32 for workers "
            "without a GPU.",
        )
    ]


def check_numa(host: Host) -> list[Finding]:
    """NUMA nodes and their processors."""
    nodes = numa_nodes(host)
    parts = [f"node {node}: cpus {host.read(f'{NODES}/node{node}/cpulist')}" for node in nodes]
    return [
        Finding(
            area=Area.MACHINE,
            name="numa",
            level=Level.OK,
            found=f"{len(nodes)} nodes; {'; '.join(parts)}" if len(nodes) > 1 else "one node",
            why="Pages that cross from one node to another move more slowly: worker.numa_node "
            "keeps a worker and its memory on the node of its GPU or NIC.",
        )
    ]


def numa_nodes(host: Host) -> tuple[int, ...]:
    """Numbers of the nodes; one, 0, where the kernel shows none."""
    return tuple(sorted(parse_ranges(host.read(f"{NODES}/online") or "0")))


def check_container(host: Host) -> list[Finding]:
    """Whether this is a container, and what peers in other containers need."""
    signs = container_signs(host)
    if signs:
        return [
            Finding(
                area=Area.MACHINE,
                name="container",
                level=Level.NOTE,
                found=f"this is a container ({', '.join(signs)})",
                why="`shared` works between workers of one network namespace: in two containers, "
                "start them with --network=host (or in one pod), and with --pid=host before "
                "kernel 6.5. Else they use `tcp`.",
            )
        ]
    return [
        Finding(
            area=Area.MACHINE,
            name="container",
            level=Level.OK,
            found="none: the host's own PID namespace",
            why="Workers see each other's processes, so `shared` can prove a peer's death.",
        )
    ]


def is_container(host: Host) -> bool:
    """Whether this process runs in a container, as far as is visible from inside."""
    return bool(container_signs(host))


def container_signs(host: Host) -> list[str]:
    """What speaks for a container."""
    namespace = host.target("/proc/self/ns/pid")
    signs = [file for file in ("/.dockerenv", "/run/.containerenv") if host.exists(file)]
    if namespace not in {None, INITIAL_PID_NAMESPACE}:
        signs.append("a PID namespace of its own")
    if "KUBERNETES_SERVICE_HOST" in host.environment:
        signs.append("Kubernetes")
    return signs


def read_cgroup_files(host: Host, controller: str, name_v2: str, name_v1: str) -> list[str]:
    """One limit's text for this process's cgroup and each of its ancestors that can be seen."""
    texts: list[str | None] = []
    for line in (host.read("/proc/self/cgroup") or "").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "":
            roots, name = ("/sys/fs/cgroup", "/sys/fs/cgroup/unified"), name_v2
        elif controller in controllers.split(","):
            roots, name = (f"/sys/fs/cgroup/{controllers}", f"/sys/fs/cgroup/{controller}"), name_v1
        else:
            continue
        for level in _ancestors(path):
            texts += [host.read(f"{root}{level}/{name}") for root in roots]
    return [text for text in texts if text]


def _ancestors(path: str) -> list[str]:
    """`/a/b` → `/a/b`, `/a`, the root."""
    parts = [part for part in path.split("/") if part not in {"", ".."}]
    return ["".join(f"/{part}" for part in parts[:end]) for end in range(len(parts), -1, -1)]


def _read_cpu_quota(host: Host) -> float | None:
    """Processors' worth of time that the cgroup allows; None: no limit."""
    limits: list[float] = []
    for text in read_cgroup_files(host, "cpu", "cpu.max", "cpu.cfs_quota_us"):
        words = text.split()
        period = words[1] if len(words) > 1 else "100000"  # v1 has its default only
        if words[0].isdigit() and period.isdigit() and int(period):
            limits.append(int(words[0]) / int(period))
    return min(limits, default=None)
