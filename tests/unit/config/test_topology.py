"""Where a worker is: what is configured wins, level by level, and mistakes are named."""

import pytest

from baton.config.topology import find_topology
from baton.errors import ConfigError

BOOT = "6b1c2f3a-aaaa-4bbb-8ccc-000000000000"
LABELS = {
    "BATON_TOPOLOGY_ZONE": "eu-1a",
    "BATON_TOPOLOGY_RACK": "r7",
    "BATON_TOPOLOGY_HOST": "node-12.example.org",
    "BATON_TOPOLOGY_DEVICE": "gpu0",
}


@pytest.mark.parametrize(
    ("configured", "environment", "expected"),
    [
        (None, {}, "//boot-6b1c2f3a-aaaa"),
        ("", {}, "//boot-6b1c2f3a-aaaa"),
        ("zone-a/rack-3", {}, "zone-a/rack-3/boot-6b1c2f3a-aaaa"),
        ("zone-a/rack-3/host-7", {}, "zone-a/rack-3/host-7"),
        (None, LABELS, "eu-1a/r7/node-12.example.org/gpu0"),
        ("/r8", LABELS, "eu-1a/r8/node-12.example.org/gpu0"),
        (
            None,
            LABELS | {"BATON_TOPOLOGY_NVLINK_DOMAIN": "u.1"},
            "eu-1a/u.1/node-12.example.org/gpu0",
        ),
        ("z/r/h", {"CUDA_VISIBLE_DEVICES": "GPU-0a1b2c3d-1"}, "z/r/h/GPU-0a1b2c3d-1"),
        ("z/r/h", {"CUDA_VISIBLE_DEVICES": "0"}, "z/r/h"),
        ("z/r/h", {"NVIDIA_VISIBLE_DEVICES": "GPU-0a1b2c3d,GPU-0a1b2c3e"}, "z/r/h"),
    ],
)
def test_each_level_comes_from_the_first_source_that_has_it(configured, environment, expected):
    assert find_topology(configured, environment, BOOT) == expected


@pytest.mark.parametrize(
    ("configured", "environment", "cores", "device"),
    [
        (None, {}, {3}, "core-3"),
        (None, {}, {3, 4}, ""),
        ("///gpu1", {}, {3}, "gpu1"),
        (None, {"BATON_TOPOLOGY_DEVICE": "gpu2"}, {3}, "gpu2"),
        (None, {"NVIDIA_VISIBLE_DEVICES": "GPU-0a1b2c3d"}, {3}, "GPU-0a1b2c3d"),
        (None, {"CUDA_VISIBLE_DEVICES": "0,1"}, {3}, ""),
    ],
)
def test_the_only_core_of_a_worker_without_a_gpu_is_its_device(
    configured, environment, cores, device
):
    found = find_topology(configured, environment, BOOT, cores)
    assert found.removeprefix("//boot-6b1c2f3a-aaaa").lstrip("/") == device


@pytest.mark.parametrize(
    ("configured", "environment", "message"),
    [
        ("a/b/c/d/e", {}, r"worker.topology 'a/b/c/d/e' has 5 levels; it has at most 4: zone/rack"),
        ("zone a", {}, r"worker.topology names a level 'zone a'; a name has letters"),
        ("z/-r", {}, r"worker.topology names a level '-r'"),
        ("x" * 254, {}, r"at most 253"),
        (None, {"BATON_TOPOLOGY_RACK": "r/7"}, r"BATON_TOPOLOGY_RACK names a level 'r/7'"),
    ],
)
def test_what_names_no_level_is_refused(configured, environment, message):
    with pytest.raises(ConfigError, match=message):
        find_topology(configured, environment, BOOT)
