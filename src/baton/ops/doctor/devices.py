"""Devices: GPUs, RDMA, DAX, and on which NUMA node each one is."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from baton.ops.doctor.finding import Area, Finding, Level, write_bytes
from baton.ops.doctor.machine import is_container

if TYPE_CHECKING:
    from baton.ops.doctor.host import Host, ProgramOutput

PCI: Final = "/sys/bus/pci/devices"
INFINIBAND: Final = "/sys/class/infiniband"
DAX: Final = "/sys/bus/dax/devices"
NVIDIA: Final = "0x10de"
DISPLAY_CLASSES: Final = ("0x0300", "0x0302")
QUERY: Final = (
    "nvidia-smi",
    "--query-gpu=index,name,memory.total,pci.bus_id,driver_version",
    "--format=csv,noheader,nounits",
)


@dataclass(frozen=True, slots=True)
class Gpu:
    """One NVIDIA GPU, as its driver describes it."""

    index: int
    name: str
    memory_bytes: int
    numa_node: int | None
    driver: str


@dataclass(frozen=True, slots=True)
class RdmaDevice:
    """One RDMA device, by its first port. `interface`: the network interface of the same port."""

    name: str
    state: str
    rate: str
    link_layer: str
    numa_node: int | None
    interface: str | None

    @property
    def is_active(self) -> bool:
        """Whether its port carries anything."""
        return "ACTIVE" in self.state


def check_gpus(host: Host) -> list[Finding]:
    """NVIDIA GPUs: on the bus, and by the driver's own program."""
    answer = host.run_program(QUERY)
    if answer is None or answer.returncode != 0:
        return [_without_driver(host, answer)]
    gpus = parse_gpus(host, answer.text)
    findings = [
        _finding(
            "GPU",
            Level.OK,
            f"{len(some)} x {name}, {write_bytes(size)}; {_by_node(some)}; driver {driver}",
            "KV moves between GPUs without touching host memory where RDMA or NVLink allows.",
        )
        for (name, size, driver), some in _group_equal(gpus).items()
    ]
    return [*findings, *_check_peer_memory(host, gpus)]


def parse_gpus(host: Host, text: str) -> list[Gpu]:
    """nvidia-smi's rows; those that make no sense are left out."""
    gpus: list[Gpu] = []
    for line in text.splitlines():
        words = [word.strip() for word in line.split(",")]
        if len(words) == 5 and words[0].isdigit():  # noqa: PLR2004 - the columns of QUERY
            index, name, mebibytes, bus, driver = words
            memory = int(mebibytes) << 20 if mebibytes.isdigit() else 0
            node = _numa_node(host, f"{PCI}/{bus.lower().removeprefix('0000')}")
            gpus.append(Gpu(int(index), name, memory, node, driver))
    return gpus


def rdma_devices(host: Host) -> list[RdmaDevice]:
    """What /sys/class/infiniband has."""
    devices: list[RdmaDevice] = []
    for name in host.entries(INFINIBAND):
        at = f"{INFINIBAND}/{name}"
        port = f"{at}/ports/{next(iter(host.entries(f'{at}/ports')), '1')}"
        state, rate = host.read(f"{port}/state") or "unknown", host.read(f"{port}/rate") or "?"
        layer = host.read(f"{port}/link_layer") or "?"
        interface = next(iter(host.entries(f"{at}/device/net")), None)
        node = _numa_node(host, f"{at}/device")
        devices.append(RdmaDevice(name, state, rate, layer, node, interface))
    return devices


def check_rdma(host: Host) -> list[Finding]:
    """RDMA devices: are their ports up, and may this user open them."""
    devices = rdma_devices(host)
    if not devices:
        return [_finding("RDMA", Level.OK, "none", "Between hosts, KV goes over `tcp`.")]
    verbs = [name for name in host.entries("/dev/infiniband") if name.startswith("uverbs")]
    findings = [_describe(device) for device in devices]
    if not any(host.is_usable(f"/dev/infiniband/{name}") for name in verbs):
        findings.append(
            _finding(
                "uverbs",
                Level.WARNING,
                "no /dev/infiniband/uverbs* that this user may open",
                "RDMA devices are there, and no program of this user can use them.",
                fix="docker run --device=/dev/infiniband …"
                if is_container(host)
                else "sudo modprobe ib_uverbs",
            )
        )
    return findings


def check_dax(host: Host) -> list[Finding]:
    """DAX devices: CXL pools and persistent memory that `shared` can map."""
    findings = [_describe_dax(host, name) for name in host.entries(DAX)]
    return findings or [
        _finding(
            "DAX",
            Level.OK,
            "none",
            "No CXL pool or persistent memory is offered as a device here.",
        )
    ]


def _describe_dax(host: Host, name: str) -> Finding:
    driver = (host.target(f"{DAX}/{name}/driver") or "none").rpartition("/")[2]
    found = (
        f"{write_bytes(host.read_number(f'{DAX}/{name}/size') or 0)}, NUMA node "
        f"{host.read(f'{DAX}/{name}/target_node') or '?'}, driver {driver}"
    )
    if driver != "device_dax":
        why = "The kernel uses it as ordinary memory, or no driver has it: `shared` cannot map it."
        fix = f"sudo daxctl reconfigure-device --mode=devdax {name}"
        return _finding(name, Level.NOTE, found, why, fix=fix)
    if not host.is_usable(f"/dev/{name}"):
        why = "KV could lie in it, but this user may not open it."
        fix = (
            f"docker run --device=/dev/{name} …"
            if is_container(host)
            else f"sudo chgrp $(id -g) /dev/{name} && sudo chmod g+rw /dev/{name}"
        )
        return _finding(name, Level.NOTE, f"{found}; not open to this user", why, fix=fix)
    why = (
        "Workers of this host can have their KV in it: set "
        f'transfer.options.shared.device.path = "/dev/{name}" for all of them.'
    )
    return _finding(name, Level.OK, found, why)


def _finding(name: str, level: Level, found: str, why: str, *, fix: str | None = None) -> Finding:
    return Finding(area=Area.DEVICES, name=name, level=level, found=found, why=why, fix=fix)


def _without_driver(host: Host, answer: ProgramOutput | None) -> Finding:
    num_on_bus = _count_gpus_on_bus(host)
    if num_on_bus == 0:
        return _finding("GPU", Level.OK, "none", "Baton runs on CPUs without one.")
    lines = ["nvidia-smi is not installed"] if answer is None else answer.text.splitlines()
    return _finding(
        "GPU",
        Level.WARNING,
        f"{num_on_bus} on the bus, and no driver that answers: {''.join(lines[-1:])}",
        "Without the driver's libraries no engine and no transport can use them.",
        fix="docker run --gpus all …" if is_container(host) else "sudo modprobe nvidia",
    )


def _describe(device: RdmaDevice) -> Finding:
    state = device.state.rpartition(": ")[2]
    node = "?" if device.numa_node is None else device.numa_node
    found = f"{state}, {device.rate}, {device.link_layer}, NUMA node {node}"
    if device.is_active:
        why = "Between hosts this is the fastest way for KV."
        return _finding(device.name, Level.OK, found, why)
    why = "Its port is down: transfers use the other devices, or `tcp`."
    fix = f"sudo ip link set {device.interface} up" if device.interface else None
    return _finding(device.name, Level.WARNING, found, why, fix=fix)


def _check_peer_memory(host: Host, gpus: list[Gpu]) -> list[Finding]:
    if not gpus or not rdma_devices(host) or host.exists("/sys/module/nvidia_peermem"):
        return []
    return [
        Finding(
            area=Area.DEVICES,
            name="GPUDirect",
            level=Level.NOTE,
            found="the kernel module nvidia_peermem is not loaded",
            why="Without it, and without dma-buf, RDMA goes through host memory.",
            fix="sudo modprobe nvidia_peermem",
        )
    ]


def _count_gpus_on_bus(host: Host) -> int:
    return sum(
        host.read(f"{PCI}/{name}/vendor") == NVIDIA
        and (host.read(f"{PCI}/{name}/class") or "").startswith(DISPLAY_CLASSES)
        for name in host.entries(PCI)
    )


def _numa_node(host: Host, device: str) -> int | None:
    """The node of a device; None where the machine has only one, or does not report it (-1)."""
    node = host.read_number(f"{device}/numa_node")
    return None if node is None or node < 0 else node


def _group_equal(gpus: list[Gpu]) -> dict[tuple[str, int, str], list[Gpu]]:
    groups: defaultdict[tuple[str, int, str], list[Gpu]] = defaultdict(list)
    for gpu in gpus:
        groups[gpu.name, gpu.memory_bytes, gpu.driver].append(gpu)
    return groups


def _by_node(gpus: list[Gpu]) -> str:
    nodes: defaultdict[int | None, list[str]] = defaultdict(list)
    for gpu in gpus:
        nodes[gpu.numa_node].append(str(gpu.index))
    return ", ".join(
        f"NUMA node {'?' if node is None else node}: {' '.join(indices)}"
        for node, indices in nodes.items()
    )
