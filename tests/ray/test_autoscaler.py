"""Ray's own autoscaler starts hosts for a fleet, and lets them go: its provider of fake hosts.

These are raylets beside the head's, with resources and labels of their own.
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
from tests.ray.hosts import HEAD_PORT, ray_cluster

if importlib.util.find_spec("ray") is None:
    pytest.skip("Ray is not installed: make test-ray", allow_module_level=True)

FLEET = "grown"
IDLE_S = 6.0
STARTED_S = 90.0
HEAD_ID = "f" * 51 + "00000"
"""Of the head, as the provider of fake hosts knows it."""
LIST_HOSTS = """
import json, ray
ray.init(address="auto", log_to_driver=False)
print(json.dumps([n["Labels"].get("kind") for n in ray.nodes() if n["Alive"]]))
"""


def scaler_config(address):
    """Hosts of the kind `spare` for one decode worker, or one prefill worker and more."""
    none: dict[str, object] = {name: {} for name in ("auth", "docker", "file_mounts")}
    kinds = ("", "head_", "worker_")
    lists = [f"{kind}setup_commands" for kind in kinds]
    lists += [f"{kind}start_ray_commands" for kind in kinds[1:]]
    lists += ["initialization_commands", "cluster_synced_files", "rsync_exclude", "rsync_filter"]
    none |= {name: [] for name in lists}
    return none | {
        "cluster_name": "fake",
        "max_workers": 4,
        "upscaling_speed": 1.0,
        "idle_timeout_minutes": IDLE_S / 60,
        "file_mounts_sync_continuously": False,
        "head_node_type": "ray.head.default",
        "provider": {
            "type": "external",  # "fake_multinode" needs a file that Ray's package lacks
            "module": "ray.autoscaler._private.fake_multi_node.node_provider.FakeMultiNodeProvider",
            "use_node_id_as_ip": True,
            "disable_node_updaters": True,
            "disable_launch_config_check": True,
            "launch_multiple": True,
            "head_node_id": HEAD_ID,
            "gcs_address": address,
        },
        "available_node_types": {
            "ray.head.default": {"resources": {"CPU": 2}, "node_config": {}, "max_workers": 0},
            "spare": {
                "resources": {"CPU": 2, "object_store_memory": 100_000_000},
                "labels": {"kind": "spare", "host": "spare"},
                "node_config": {},
                "min_workers": 0,
                "max_workers": 3,
            },
        },
    }


@pytest.fixture
def cluster():
    for program in ("nsenter", "unshare", "ip"):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed")
    try:
        with ray_cluster([{"kind": "head", "host": "h1"}]) as opened:
            head = opened.head
            config = head.folder / "scaler.json"
            config.write_text(json.dumps(scaler_config(f"{head.address}:{HEAD_PORT}")))
            head.environment |= {
                "RAY_FAKE_CLUSTER": "1",
                "RAY_enable_autoscaler_v2": "1",
                "RAY_CLOUD_INSTANCE_ID": HEAD_ID,
                "RAY_OVERRIDE_NODE_ID_FOR_TESTING": HEAD_ID,
                "AUTOSCALER_UPDATE_INTERVAL_S": "1",
            }
            opened.start_ray(f"--autoscaling-config={config}")
            for variable in ("RAY_OVERRIDE_NODE_ID_FOR_TESTING", "RAY_CLOUD_INSTANCE_ID"):
                del head.environment[variable]
            head.environment["RAY_ADDRESS"] = opened.address
            yield opened
    except NoNamespaceError as exc:
        pytest.skip(str(exc))


def baton(cluster, *words):
    words = (sys.executable, "-m", "baton.cli", *words, "--on", "ray", "--fleet", FLEET)
    done = cluster.head.run(*words, timeout_s=STARTED_S + 30)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def list_kinds(cluster):
    """The kinds of the hosts that Ray has now."""
    done = cluster.head.run(sys.executable, "-c", LIST_HOSTS, timeout_s=30.0)
    assert done.returncode == 0, done.stderr
    return sorted(json.loads(done.stdout.splitlines()[-1]))


def wait_for_kinds(cluster, *kinds):
    begun = time.monotonic()
    while (found := list_kinds(cluster)) != sorted(kinds):
        assert time.monotonic() - begun < STARTED_S, f"Ray has {found}"
        time.sleep(0.5)


def kinds_of_members(cluster):
    status = msgspec.json.decode(baton(cluster, "status", "--json"), type=FleetStatus)
    assert {each.state for each in status.members} == {"ready"}
    return {each.name: each.labels["kind"] for each in status.members}


def test_hosts_come_for_workers_and_go_with_them(cluster):
    """The prefill worker names no resources, as one on CPUs: its label alone asks for a host."""
    assert list_kinds(cluster) == ["head"]
    given = (
        "engine.dtype=float32", "engine.num_threads=1", "gateway.port=0",
        'ray.gateway_labels=["kind=head"]', 'ray.workers.prefill.labels=["kind=spare"]',
        "ray.workers.decode.cpus=1.5", 'ray.workers.decode.labels=["kind=spare"]',
    )  # fmt: skip
    settings = [word for each in given for word in ("--set", each)]
    baton(cluster, "up", "--insecure", "--timeout", f"{STARTED_S:g}", *settings)
    assert list_kinds(cluster) == ["head", "spare"]
    kinds = {"gateway-0": "head", "prefill-0": "spare", "decode-0": "spare"}
    assert kinds_of_members(cluster) == kinds

    cluster.head.environment["BATON_RAY__TIMEOUT_S"] = f"{STARTED_S:g}"
    baton(cluster, "scale", "--decode", "2")
    assert list_kinds(cluster) == ["head", "spare", "spare"], "the first one had no room"
    assert kinds_of_members(cluster) == kinds | {"decode-1": "spare"}

    baton(cluster, "scale", "--decode", "1")
    wait_for_kinds(cluster, "head", "spare")
    time.sleep(IDLE_S + 4.0)  # a host with a process of the fleet is not idle
    assert list_kinds(cluster) == ["head", "spare"]
    assert kinds_of_members(cluster) == kinds

    baton(cluster, "down")
    wait_for_kinds(cluster, "head")
