"""A fleet on a Ray whose autoscaler starts hosts for what waits, and ends those that are idle.

The autoscaler and its hosts' processes are Ray's own (its provider `FakeMultiNodeProvider`), all
on one isolated host. `make test-ray` runs this; see `test_fleet.py`.
"""

import importlib.util
import json
import shutil
import sys
import time

import msgspec
import pytest

from baton.launch.fleet import FleetStatus
from baton.testing.network_namespaces import NoNamespaceError
from baton.testing.ray_hosts import HEAD_PORT, ray_cluster

if importlib.util.find_spec("ray") is None:
    pytest.skip("Ray is not installed: make test-ray", allow_module_level=True)

HEAD_ID = "fffffffffffffffffffffffffffffffffffffffffffffffffff00000"
IDLE_S = 6.0
FLEET = ("--on", "ray", "--fleet", "scaled")
CALL_TIMEOUT_S = 150.0
ENVIRONMENT = {
    "AUTOSCALER_UPDATE_INTERVAL_S": "1",
    "RAY_FAKE_CLUSTER": "1",
    "RAY_enable_autoscaler_v2": "1",
    "RAY_CLOUD_INSTANCE_ID": HEAD_ID,
    "RAY_OVERRIDE_NODE_ID_FOR_TESTING": HEAD_ID,
}
LIST_HOSTS = """
import json, ray
ray.init(address="auto", log_to_driver=False)
print(json.dumps([node["Labels"] for node in ray.nodes() if node["Alive"]]))
"""


def autoscaling_config():
    return {
        "cluster_name": "fake_multinode",
        "provider": {
            "type": "external",  # else its defaults are read, which Ray's wheel does not have
            "module": "ray.autoscaler._private.fake_multi_node.node_provider.FakeMultiNodeProvider",
            "launch_multiple": True,
            "head_node_id": HEAD_ID,
            "gcs_address": f"127.0.0.1:{HEAD_PORT}",
            "disable_node_updaters": True,
            "disable_launch_config_check": True,
        },
        "max_workers": 2,
        "idle_timeout_minutes": IDLE_S / 60,
        "head_node_type": "ray.head.default",
        "available_node_types": {
            "ray.head.default": {"resources": {"CPU": 1}, "node_config": {}, "max_workers": 0},
            "spot": {
                "resources": {"CPU": 1, "object_store_memory": 80 << 20},
                "labels": {"tier": "spot"},
                "node_config": {},
                "min_workers": 0,
                "max_workers": 2,
            },
        },
    }


@pytest.fixture
def host():
    for program in ("nsenter", "unshare", "ip"):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed")
    try:
        with ray_cluster([{"kind": "head"}]) as opened:
            host = opened.head
            config = host.folder / "autoscaling.json"
            config.write_text(json.dumps(autoscaling_config()))
            plain = dict(host.environment)
            host.environment |= ENVIRONMENT
            started = host.run(
                *(sys.executable, "-m", "ray.scripts.scripts", "start", "--head"),
                f"--port={HEAD_PORT}",
                "--node-ip-address=127.0.0.1",
                "--include-dashboard=false",
                "--labels=kind=head",
                "--num-cpus=1",
                "--object-store-memory=80000000",
                "--disable-usage-stats",
                f"--temp-dir={host.folder / 'ray'}",
                f"--autoscaling-config={config}",
                timeout_s=60.0,
            )
            assert started.returncode == 0, started.stdout + started.stderr
            host.environment = plain | {"RAY_ADDRESS": f"127.0.0.1:{HEAD_PORT}"}
            yield host
    except NoNamespaceError as exc:
        pytest.skip(str(exc))


def baton(host, *arguments):
    done = host.run(sys.executable, "-m", "baton.cli", *arguments, *FLEET, timeout_s=CALL_TIMEOUT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def count_spot_hosts(host):
    done = host.run(sys.executable, "-c", LIST_HOSTS, timeout_s=30.0)
    assert done.returncode == 0, done.stderr
    return sum(labels.get("tier") == "spot" for labels in json.loads(done.stdout.splitlines()[-1]))


def test_ray_starts_hosts_for_what_waits_and_keeps_those_in_use(host):
    assert count_spot_hosts(host) == 0
    settings = (
        "engine.dtype=float32",
        "engine.num_threads=1",
        "gateway.port=0",
        'ray.gateway_labels=["kind=head"]',
        'ray.workers.prefill.labels=["kind=head"]',
        'ray.workers.decode.labels=["tier=spot"]',
        "ray.timeout_s=90",
    )
    sets = [word for each in settings for word in ("--set", each)]
    baton(host, "up", "--insecure", *sets)
    assert count_spot_hosts(host) == 1
    time.sleep(2 * IDLE_S)
    members = {
        each.name: each
        for each in msgspec.json.decode(baton(host, "status", "--json"), type=FleetStatus).members
    }
    assert members["decode-0"].state == "ready"
    assert members["decode-0"].labels["tier"] == "spot"
    assert members["decode-0"].up_s > IDLE_S, "its host was not taken for idle"
    baton(host, "down")
    deadline = time.monotonic() + 60.0
    while count_spot_hosts(host):
        assert time.monotonic() < deadline, "the host that nothing uses is kept"
        time.sleep(0.5)
