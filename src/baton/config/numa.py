"""Which cores a worker runs on: those that are listed, or those of one NUMA node, by Linux's /sys.

Memory needs no call of its own: by Linux's default policy a thread gets pages of the node on which
it runs (set_mempolicy(2)), and a worker is bound before its engine allocates anything.
"""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Final

from baton.config.environment import pin_to, read_environment
from baton.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from collections.abc import Set as AbstractSet

    from baton.config.sections import WorkerSection

NODES: Final = "sys/devices/system/node"
GPUS: Final = "proc/driver/nvidia/gpus"
PCI_DEVICES: Final = "sys/bus/pci/devices"
RDMA_DEVICES: Final = "sys/class/infiniband"
VISIBLE: Final = "CUDA_VISIBLE_DEVICES"

log = logging.getLogger(__name__)


def bind_worker(worker: WorkerSection, root: Path = Path("/")) -> None:
    """Bind this process, before an engine loads. `root` has `sys` and `proc`.

    Raises:
        ConfigError: the configured node or a core does not exist, or may not be used.
    """
    usable = frozenset(os.sched_getaffinity(0))
    pin_to(find_cores(worker, read_environment(), usable, root=root))


def find_cores(
    worker: WorkerSection,
    environment: Mapping[str, str],
    usable: AbstractSet[int],
    *,
    root: Path = Path("/"),
) -> tuple[int, ...]:
    """The cores to bind a worker to, of the `usable` ones; none: it is not bound.

    Raises:
        ConfigError: the configured node does not exist, or none of its cores may be used.
    """
    if worker.cpu_affinity or worker.numa_node is None:
        return worker.cpu_affinity
    nodes = read_nodes(root)
    if worker.numa_node == "auto":
        if len(nodes) < 2:  # noqa: PLR2004 - there is no choice
            return ()
        node, why = _choose(worker.name, nodes, environment, root)
    else:
        node, why = worker.numa_node, "worker.numa_node"
    cores = tuple(sorted(nodes.get(node, frozenset()) & usable))
    if not cores:
        raise ConfigError(
            f"{worker.name} cannot run on NUMA node {node} ({why}): this machine has the nodes "
            f"{sorted(nodes)}, and this process may use the cores {sorted(usable)}"
        )
    log.info("%s runs on NUMA node %d (%s), on %d cores", worker.name, node, why, len(cores))
    return cores


def read_nodes(root: Path) -> dict[int, frozenset[int]]:
    """Cores by node; nodes of memory alone are left out. Empty: the system has no such files."""
    found = {}
    for folder in (root / NODES).glob("node[0-9]*"):
        cores = parse_ranges(_read(folder / "cpulist"))
        if cores:
            found[int(folder.name.removeprefix("node"))] = cores
    return found


def parse_ranges(text: str) -> frozenset[int]:
    """Linux's lists of cores and nodes: `0-2,7` → `{0, 1, 2, 7}`, without what cannot be read."""
    cores: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first.isdecimal() and (last or first).isdecimal():
            cores.update(range(int(first), int(last or first) + 1))
    return frozenset(cores)


def _choose(
    name: str, nodes: Mapping[int, AbstractSet[int]], environment: Mapping[str, str], root: Path
) -> tuple[int, str]:
    """The node of its GPU, else of an RDMA device; else workers of one number share a node."""
    gpu = _find_gpu(environment, root)
    devices = [] if gpu is None else [(f"its GPU {gpu}", root / PCI_DEVICES / gpu)]
    devices += [
        (f"the RDMA device {device.name}", device / "device")
        for device in sorted((root / RDMA_DEVICES).glob("*"))
    ]
    for what, folder in devices:
        node = _read(folder / "numa_node").strip()  # -1: the firmware does not report it
        if node.isdecimal() and int(node) in nodes:
            return int(node), f"{what} is there"
    number = int((re.findall(r"\d+$", name) or ["0"])[0])
    return sorted(nodes)[number % len(nodes)], "by its number"


def _find_gpu(environment: Mapping[str, str], root: Path) -> str | None:
    """PCI address of the first GPU that the process may use; None: there is none."""
    gpus = sorted((root / GPUS).glob("*"))
    first = environment.get(VISIBLE, "0").split(",")[0].strip()
    if first.isdecimal():
        return gpus[int(first)].name if int(first) < len(gpus) else None
    if not first:
        return None
    return next((gpu.name for gpu in gpus if first in _read(gpu / "information")), None)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
