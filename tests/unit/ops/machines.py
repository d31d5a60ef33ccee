"""Recorded trees of other machines: what their /proc, /sys and programs say."""

from pathlib import Path

from baton.ops.doctor.host import Host, ProgramOutput, Space

GIB = 1 << 30

H100_MEMINFO = """\
MemTotal:       2113407800 kB
MemFree:        1987654320 kB
MemAvailable:   2001234568 kB
HugePages_Total:    1024
HugePages_Free:     1000
HugePages_Rsvd:        0
Hugepagesize:       2048 kB
"""

LIMITS = """\
Limit                     Soft Limit           Hard Limit           Units
Max stack size            8388608              unlimited            bytes
Max open files            {files}              {hard_files}              files
Max locked memory         {locked}                {locked}                bytes
"""

NVIDIA_SMI = "\n".join(
    f"{i}, NVIDIA H100 80GB HBM3, 81559, 00000000:{bus}:00.0, 570.86.15"
    for i, bus in enumerate(("18", "2A", "3A", "5D", "9A", "AB", "BA", "DB"))
)


def recorded(root: Path, files, *, links=(), programs=None, space=None, versions=None, **others):
    """A host whose files are `files` (path → text), below `root`."""
    for path, text in files.items():
        at = root / path.lstrip("/")
        at.parent.mkdir(parents=True, exist_ok=True)
        at.write_text(text if text.endswith("\n") else f"{text}\n", "utf-8")
    for path, target in dict(links).items():
        at = root / path.lstrip("/")
        at.parent.mkdir(parents=True, exist_ok=True)
        at.symlink_to(target)
    return Host(
        root=root,
        environment=others.get("environment", {}),
        cpus=frozenset(range(others.get("num_cpus", 2))),
        run_program=lambda command: (programs or {}).get(command[0]),
        measure_space=lambda _path: space,
        find_version=(versions or {}).get,
    )


def h100_box(root: Path) -> Host:
    """Eight H100s, eight ConnectX-7 (one port down), two NUMA nodes, little locked memory."""
    files = {
        "/proc/sys/kernel/osrelease": "5.15.0-119-generic",
        "/proc/meminfo": H100_MEMINFO,
        "/proc/self/limits": LIMITS.format(files="1024", hard_files="1048576", locked="65536"),
        "/proc/self/cgroup": "0::/user.slice/user-1000.slice/session-3.scope",
        "/proc/sys/vm/overcommit_memory": "0",
        "/proc/sys/net/core/rmem_max": "212992",
        "/proc/sys/net/core/wmem_max": "212992",
        "/proc/sys/net/ipv4/tcp_mem": "24748614\t32998154\t49497228",
        "/proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX Open Kernel Module  570.86.15",
        "/sys/devices/system/cpu/online": "0-111",
        "/sys/devices/system/node/online": "0-1",
        "/sys/devices/system/node/node0/cpulist": "0-55",
        "/sys/devices/system/node/node1/cpulist": "56-111",
        "/sys/kernel/mm/transparent_hugepage/shmem_enabled": "always within_size [advise] never",
        "/usr/lib/x86_64-linux-gnu/libibverbs.so.1": "",
        "/dev/infiniband/uverbs0": "",
        "/sys/class/net/lo/mtu": "65536",
        "/sys/class/net/eno1/operstate": "up",
        "/sys/class/net/eno1/speed": "100000",
        "/sys/class/net/eno1/mtu": "1500",
        "/sys/class/net/eno1/device/numa_node": "0",
        "/sys/bus/dax/devices/dax0.0/size": str(256 * GIB),
        "/sys/bus/dax/devices/dax0.0/target_node": "2",
        "/dev/dax0.0": "",
        "/sys/bus/dax/devices/dax1.0/size": str(64 * GIB),
        "/sys/bus/dax/devices/dax2.0/size": str(64 * GIB),
    }
    for i, bus in enumerate(("18", "2a", "3a", "5d", "9a", "ab", "ba", "db")):
        device = f"/sys/bus/pci/devices/0000:{bus}:00.0"
        files[f"{device}/vendor"] = "0x10de"
        files[f"{device}/class"] = "0x030200"
        files[f"{device}/numa_node"] = str(i // 4)
        port = f"/sys/class/infiniband/mlx5_{i}/ports/1"
        files[f"{port}/state"] = "4: ACTIVE" if i != 6 else "1: DOWN"
        files[f"{port}/rate"] = "400 Gb/sec (4X NDR)"
        files[f"{port}/link_layer"] = "InfiniBand"
        files[f"/sys/class/infiniband/mlx5_{i}/device/numa_node"] = str(i // 4)
        files[f"/sys/class/infiniband/mlx5_{i}/device/net/ibs{i}/mtu"] = "4092"
    return recorded(
        root,
        files,
        links={
            "/proc/self/ns/pid": "pid:[4026531836]",
            "/sys/bus/dax/devices/dax0.0/driver": "../../../../bus/dax/drivers/device_dax",
            "/sys/bus/dax/devices/dax1.0/driver": "../../../../bus/dax/drivers/kmem",
            "/sys/bus/dax/devices/dax2.0/driver": "../../../../bus/dax/drivers/device_dax",
        },
        programs={"nvidia-smi": ProgramOutput(0, NVIDIA_SMI)},
        space=Space(1007 * GIB, 1000 * GIB),
        versions={"torch": "2.13.0+cpu", "transformers": "5.19.0", "safetensors": "0.8.0"},
        num_cpus=112,
    )


def small_container(root: Path) -> Host:
    """Docker as it comes: 64 MiB of /dev/shm, one processor, 2 GiB, an old kernel below."""
    return recorded(
        root,
        {
            "/.dockerenv": "",
            "/proc/sys/kernel/osrelease": "5.10.0-28-amd64",
            "/proc/meminfo": "MemTotal: 65843210 kB\nMemAvailable: 60000000 kB",
            "/proc/self/limits": LIMITS.format(files="1024", hard_files="2048", locked="65536"),
            "/proc/self/cgroup": "0::/",
            "/sys/fs/cgroup/memory.max": str(2 * GIB),
            "/sys/fs/cgroup/cpu.max": "100000 100000",
            "/proc/sys/vm/overcommit_memory": "2",
            "/sys/devices/system/cpu/online": "0-15",
            "/sys/class/net/eth0/mtu": "1500",
        },
        links={"/proc/self/ns/pid": "pid:[4026532201]"},
        space=Space(64 << 20, 64 << 20),
        num_cpus=16,
    )


def no_proc(root: Path) -> Host:
    """A machine without /proc and /sys, as a Mac is."""
    return recorded(root, {}, num_cpus=8)


def rubbish(root: Path) -> Host:
    """The H100 box, each of whose files says something that makes no sense."""
    box = h100_box(root)
    for number, file in enumerate(path for path in root.rglob("*") if path.is_file()):
        file.write_bytes(
            (b"\xff\xfe,,:-5--3\n\n  :", b"", b"1" * 30, b"0-x,9-", b"a b c d e")[number % 5]
        )
    return recorded(
        root,
        {},
        programs={"nvidia-smi": ProgramOutput(0, "a,b,c\n1,2,3,4,5\n,,,,")},
        space=Space(0, 0),
        versions={"torch": "rubbish"},
        environment=box.environment,
    )
