"""A fleet on a real Ray cluster of three hosts, each with its own network, processes and memory.

`make test-ray` installs Ray and runs this file alone. Without Ray, root or iproute2 it is skipped;
the pure parts are in tests/unit/launch/ray.
"""

import importlib.util
import os
import secrets
import shutil
import signal
import sys
import time
import tomllib
from pathlib import Path

import msgspec
import pytest

from baton.launch.fleet import FleetStatus
from baton.testing.network_namespaces import NoNamespaceError
from tests.greedy_load import GreedyLoad
from tests.ray.chaos_faults import BY_NAME
from tests.ray.chaos_fleet import (
    FLEET,
    LABELS,
    MAX_TOKENS,
    NUM_CLIENTS,
    PROMPTS,
    SETTINGS,
    ChaosFleet,
    up_words,
)
from tests.ray.chaos_play import play
from tests.ray.hosts import ray_cluster

if importlib.util.find_spec("ray") is None:
    pytest.skip("Ray is not installed: make test-ray", allow_module_level=True)

KEY = secrets.token_hex(32)
UP_TIMEOUT_S = 90.0
CALL_TIMEOUT_S = 60.0
MOVED_TIMEOUT_S = 45.0


def baton(cluster, *arguments):
    """Run `baton` on the head's host."""
    words = (sys.executable, "-m", "baton.cli", *arguments)
    return cluster.head.run(*words, timeout_s=CALL_TIMEOUT_S)


@pytest.fixture(scope="module")
def cluster():
    for program in ("nsenter", "unshare", "ip"):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed")
    try:
        with ray_cluster(LABELS) as opened:
            opened.start_ray()
            opened.head.environment["RAY_ADDRESS"] = opened.address
            opened.head.environment["BATON_CLUSTER_KEY"] = KEY
            yield opened
    except NoNamespaceError as exc:
        pytest.skip(str(exc))


def up(cluster, *arguments, environment=None, fleet=FLEET):
    words = ("up", "--on", "ray", "--fleet", fleet, "--insecure", *arguments)
    host = cluster.head
    before = host.environment
    host.environment = before | (environment or {})
    try:
        return host.run(sys.executable, "-m", "baton.cli", *words, timeout_s=UP_TIMEOUT_S)
    finally:
        host.environment = before


def settings(*assignments):
    return [word for assignment in assignments for word in ("--set", assignment)]


@pytest.fixture(scope="module")
def fleet(cluster):
    running = ChaosFleet(cluster, "", KEY)
    done = running.call(*up_words(FLEET, "gateway.port=0", *SETTINGS))
    assert done.returncode == 0, done.stdout + done.stderr
    running.url = next(word for word in done.stdout.split() if word.startswith("http://"))
    return running


@pytest.fixture(scope="module")
def load(fleet):
    load = GreedyLoad(fleet.url, PROMPTS, MAX_TOKENS, known=fleet.known, num_clients=NUM_CLIENTS)
    load.learn()
    return load


def wait_until(condition, timeout_s=MOVED_TIMEOUT_S):
    begun = time.monotonic()
    while not condition():
        assert time.monotonic() - begun < timeout_s, "it does not come about"
        time.sleep(0.1)
    return time.monotonic() - begun


def test_ray_without_tokens_is_refused(cluster):
    done = up(cluster, environment={"RAY_AUTH_MODE": "disabled"})
    assert done.returncode == 2
    assert "RAY_AUTH_MODE=token" in done.stderr
    assert "--insecure-ray" in done.stderr


def test_a_wrong_token_is_refused_in_time(cluster, tmp_path):
    wrong = tmp_path / "token"
    wrong.write_text(secrets.token_hex(32))
    wrong.chmod(0o600)
    done = up(cluster, "--timeout", "8", environment={"RAY_AUTH_TOKEN_PATH": str(wrong)})
    assert done.returncode == 1
    assert "RAY_AUTH_TOKEN_PATH" in done.stderr
    assert "oken" in done.stderr.partition("cannot connect")[2].partition("\n")[0]


def test_labels_that_no_host_has_are_named(cluster):
    done = up(
        cluster,
        "--timeout",
        "5",
        *settings('ray.workers.decode.labels=["rack=r9"]'),
        fleet="nowhere",
    )
    assert done.returncode == 1
    assert "decode-0: labels rack=r9" in done.stderr
    assert "host=h2, kind=worker, rack=r2" in done.stderr
    left = baton(cluster, "status", "--on", "ray", "--fleet", "nowhere")
    assert "no fleet 'nowhere' runs" in left.stderr


def test_workers_are_where_their_labels_are(fleet, load):
    status = fleet.status()
    assert {name: member.state for name, member in status.items()} == dict.fromkeys(
        ("gateway-0", "prefill-0", "decode-0", "decode-1"), "ready"
    )
    hosts = {name: member.labels["host"] for name, member in status.items()}
    assert (hosts["gateway-0"], hosts["prefill-0"]) == ("h1", "h1")
    assert {hosts["decode-0"], hosts["decode-1"]} == {"h2", "h3"}
    assert not load.failures


def test_the_key_is_in_no_command_line_and_no_file(fleet):
    lines = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
    assert any(b"baton.cli\0worker" in line for line in lines), "the workers' lines are seen"
    assert not any(KEY.encode() in line for line in lines)
    folder = fleet.cluster.head.folder.parent
    files = [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
    assert any(path.name == "gcs_server.out" for path in files), "Ray's logs are among them"
    assert not [path for path in files if KEY.encode() in path.read_bytes()]


def test_the_same_name_is_refused_while_it_runs(fleet):
    done = up(fleet.cluster)
    assert done.returncode == 2
    assert f"the fleet '{FLEET}' runs already" in done.stderr


def test_logs(fleet):
    assert "baton." in fleet.command("logs", "decode-0", "--lines", "50")


def test_scaling_under_load(fleet, load):
    before = load.num_answers
    with load.running():
        assert "decode-2: ready" in fleet.command("scale", "--decode", "3")
        assert len(fleet.read_members()) == 4
        drained = fleet.command("drain", "decode-2")
    assert "decode-2: exit code 0" in drained
    assert "decode-2" not in fleet.status()
    assert len(fleet.read_members()) == 3
    assert load.num_answers > before
    assert not load.failures


def test_a_role_is_changed_by_one_command_until_that_has_ended(fleet):
    """Also one that is killed, and so could give nothing back."""
    words = ("scale", "--on", "ray", "--fleet", FLEET, "--decode")
    first = fleet.cluster.head.start(sys.executable, "-m", "baton.cli", *words, "3")
    assert "starting" in first.stdout.readline()
    refused = fleet.call(*words, "1")
    assert refused.returncode == 1
    assert "another command" in refused.stderr
    children = Path(f"/proc/{first.pid}/task/{first.pid}/children").read_text("ascii")
    os.kill(int(children), signal.SIGKILL)  # else only the nsenter around it ends
    first.communicate(timeout=CALL_TIMEOUT_S)
    fleet.command("scale", "--decode", "2")
    assert len(fleet.status()) == 4


@pytest.mark.parametrize("name", ["worker-killed", "slow-links", "host-killed"])
def test_a_fault_of_the_table(fleet, name):
    """Those that are soon over; `benchmarks/bench_ray.py all` plays each."""
    result = play(fleet, BY_NAME[name])
    assert not result.problems


def test_down(fleet):
    lines = fleet.command("down")
    assert "gateway-0: exit code 0" in lines
    left = fleet.call("status", "--on", "ray", "--fleet", FLEET)
    assert f"no fleet '{FLEET}' runs" in left.stderr
    wait_until(lambda: not has_workers(FLEET), 10.0)


def test_a_planned_fleet_starts_as_planned(cluster, tmp_path):
    """On the two hosts that are left: a pair on each."""
    name = "planned"
    output = tmp_path / "fleet.toml"
    sizes = ("--prefill", "2", "--decode", "2")
    given = settings(
        "engine.dtype=float32", "engine.num_threads=1", "gateway.port=0",
        "ray.workers.prefill.cpus=0.5", "ray.workers.decode.cpus=0.5",
    )  # fmt: skip
    done = baton(
        cluster, "plan", "--on", "ray", *sizes, "--spread", "host", *given, "--output", str(output)
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "decode-0 (same_host)" in done.stdout
    done = up(cluster, "--near", "--config", str(output), fleet=name)
    assert (done.returncode, "leave out one of them" in done.stderr) == (2, True)
    done = up(cluster, "--config", str(output), fleet=name)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " is on h" not in done.stderr, "all are where they were planned"
    hosts = hosts_of(cluster, name)
    assert hosts["prefill-0"] == hosts["decode-0"] != hosts["prefill-1"] == hosts["decode-1"]
    planned = tomllib.loads(output.read_text())["fleet"]["assignments"]
    assert {each: path.rpartition("/")[2] for each, path in planned.items()} == {
        each: host for each, host in hosts.items() if each != "gateway-0"
    }
    used = set(hosts.values()) - {cluster.head.labels["host"]}
    lost = next(each for each in cluster.hosts if each.labels["host"] in used)
    lost.cut_power()
    others = {each.labels["host"] for each in cluster.hosts} - {lost.labels["host"]}
    wait_until(lambda: set(hosts_of(cluster, name).values()) <= others)
    done = baton(cluster, "down", "--on", "ray", "--fleet", name)
    assert done.returncode == 0, done.stderr


def hosts_of(cluster, fleet):
    """The host's label of each process; None: it does not serve now, or is not known."""
    done = baton(cluster, "status", "--json", "--on", "ray", "--fleet", fleet)
    if not done.stdout:
        return {"status": None}
    members = msgspec.json.decode(done.stdout, type=FleetStatus).members
    return {
        each.name: each.labels.get("host") if each.state == "ready" else None for each in members
    }


def has_workers(fleet):
    """Whether a process of a fleet is left on any host."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if f"ray-{fleet}-".encode() in path.read_bytes():
                return True
        except OSError:
            continue
    return False
