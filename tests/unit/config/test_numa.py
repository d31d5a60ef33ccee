"""NUMA nodes from trees as Linux's /sys and NVIDIA's /proc have them."""

import os
import subprocess
import sys

import pytest

from baton.config.numa import find_cores, parse_ranges, read_nodes
from baton.config.sections import WorkerSection
from baton.errors import ConfigError

ALL = frozenset(range(64))


@pytest.fixture
def machine(tmp_path):
    """Two sockets of 32 cores, a node of memory alone, GPUs on both, a NIC on the second."""

    def write(path, text):
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    for node, cores in ((0, "0-15,32-47\n"), (1, "16-31,48-63\n"), (2, "\n")):
        write(f"sys/devices/system/node/node{node}/cpulist", cores)
    for bus, node, uuid in (("17", 0, "GPU-aaaa"), ("ca", 1, "GPU-bbbb"), ("e1", -1, "GPU-cccc")):
        address = f"0000:{bus}:00.0"
        write(f"proc/driver/nvidia/gpus/{address}/information", f"GPU UUID: \t {uuid}\n")
        write(f"sys/bus/pci/devices/{address}/numa_node", f"{node}\n")
    write("sys/class/infiniband/mlx5_0/device/numa_node", "1\n")
    return tmp_path


def first_core(root, node, *, name="decode-0", usable=ALL, **environment):
    worker = WorkerSection(name=name, numa_node=node)
    cores = find_cores(worker, environment, usable, root=root)
    return cores[0] if cores else None


@pytest.mark.parametrize(
    ("text", "cores"),
    [("0-3,8\n", {0, 1, 2, 3, 8}), ("5", {5}), ("\n", set()), ("0-1,4-5", {0, 1, 4, 5})],
)
def test_lists_of_cores(text, cores):
    assert parse_ranges(text) == cores


def test_nodes_without_cores_do_not_count(machine):
    assert {node: len(cores) for node, cores in read_nodes(machine).items()} == {0: 32, 1: 32}


@pytest.mark.parametrize(
    ("visible", "core"),
    [("0", 0), ("1", 16), ("1,0", 16), ("GPU-bbbb", 16), ("2", 16), ("9", 16), ("", 16)],
)
def test_a_worker_is_beside_its_gpu_else_beside_the_nic(machine, visible, core):
    assert first_core(machine, "auto", CUDA_VISIBLE_DEVICES=visible) == core


@pytest.mark.parametrize(("name", "core"), [("prefill-0", 0), ("decode-0", 0), ("decode-1", 16)])
def test_without_devices_a_pair_of_one_number_shares_a_node(machine, name, core):
    for path in ("sys/class/infiniband/mlx5_0/device/numa_node", *(
        f"sys/bus/pci/devices/0000:{bus}:00.0/numa_node" for bus in ("17", "ca", "e1")
    )):  # fmt: skip
        (machine / path).unlink()
    assert first_core(machine, "auto", name=name) == core


def test_only_usable_cores_count(machine):
    assert first_core(machine, 1, usable=frozenset({3, 20, 21})) == 20
    with pytest.raises(ConfigError, match=r"NUMA node 1 \(worker.numa_node\)"):
        first_core(machine, 1, usable=frozenset({3}))
    with pytest.raises(ConfigError, match=r"has the nodes \[0, 1\]"):
        first_core(machine, 7)


def test_nothing_is_bound_where_there_is_no_choice(machine, tmp_path_factory):
    assert first_core(tmp_path_factory.mktemp("empty"), "auto") is None
    given = WorkerSection(cpu_affinity=(2,), numa_node=1)
    assert find_cores(given, {}, ALL, root=machine) == (2,), "listed cores win"


def test_a_process_is_really_bound(tmp_path):
    """To a node that this machine could have: its last core alone."""
    core = max(os.sched_getaffinity(0))
    for node, cores in ((0, "4000-4095"), (1, str(core))):
        file = tmp_path / f"sys/devices/system/node/node{node}/cpulist"
        file.parent.mkdir(parents=True)
        file.write_text(f"{cores}\n")
    code = (
        "import os, pathlib; from baton.config.numa import bind_worker; "
        "from baton.config.sections import WorkerSection; "
        f"bind_worker(WorkerSection(numa_node=1), pathlib.Path({str(tmp_path)!r})); "
        "print(sorted(os.sched_getaffinity(0)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == f"[{core}]"
