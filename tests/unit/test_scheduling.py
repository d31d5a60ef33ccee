"""Tests of the same servers stay together, and all others by file."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.scheduling import group_of, rank_of

TESTS = Path(__file__).parents[1]
VLLM = "tests/e2e_vllm/test_processes.py::test_idle_servers_rest"
VLLM_FAULTS = "tests/chaos/test_vllm_faults.py::test_a_ticket_is_good_once"
CHAOS = "tests/chaos/test_random_faults.py::test_storm"
E2E = "tests/e2e/test_same_tokens.py::test_chat[tcp]"
SLOW = "tests/integration/test_bench_link.py::test_two_listening_ends"
UNIT = "tests/unit/kv/test_pool.py::TestPool::test_a"
IMPORTS_VLLM = "tests/unit/engines_vllm/test_connector.py::test_a"

SERVERS = """
import pathlib, pytest
from tests.scheduling import ServersOfGroups

def pytest_configure(config):
    if hasattr(config, "workerinput"):
        config.pluginmanager.register(ServersOfGroups())

@pytest.fixture(scope="session")
def standing_cluster():
    yield
    pathlib.Path("ended").touch()

@pytest.fixture(scope="session")
def depends_on_it(standing_cluster):
    yield
    assert not pathlib.Path("ended").exists()
"""
OF_ONE_GROUP = """
import pathlib
def test_starts_servers(standing_cluster): pass
def test_uses_them(depends_on_it): assert not pathlib.Path("ended").exists()
"""
OF_ANOTHER = """
import pathlib
def test_they_have_ended(): assert pathlib.Path("ended").exists()
"""


def test_tests_of_the_same_servers_are_one_group():
    assert group_of(VLLM) == group_of(VLLM_FAULTS) == group_of(IMPORTS_VLLM)
    assert len({group_of(nodeid) for nodeid in (VLLM, CHAOS, E2E, SLOW, UNIT)}) == 5


@pytest.mark.parametrize(("folder", "kind"), [("chaos", "ChaosCluster"), ("e2e", "WorkerCluster")])
def test_all_tests_that_want_a_folders_cluster_are_one_group(folder, kind):
    """Else the same workers would start once more in another process."""
    wants = re.compile(rf"^def test_\w+\(\s*cluster: {kind}\b", re.MULTILINE)
    files = [path for path in (TESTS / folder).glob("test_*.py") if wants.search(path.read_text())]
    assert len(files) > 3
    assert len({group_of(f"tests/{folder}/{path.name}::test_a") for path in files}) == 1


@pytest.mark.parametrize("nodeid", [SLOW, UNIT])
def test_others_are_grouped_by_file(nodeid):
    assert group_of(nodeid) == nodeid.partition("::")[0]


def test_the_longest_come_first():
    ordered = [VLLM, VLLM_FAULTS, CHAOS, E2E, SLOW, UNIT]
    backwards = ordered[::-1]
    assert sorted(backwards, key=rank_of) == ordered


@pytest.mark.parametrize(("processes", "status"), [("1", 0), ("0", 1)])
def test_servers_end_with_the_group_that_uses_them_in_a_process_of_xdist(
    tmp_path, processes, status
):
    """Without xdist they end with the session: tests are not sorted by group there."""
    (tmp_path / "pytest.ini").touch()
    (tmp_path / "below").mkdir()
    for name, text in {
        "conftest.py": SERVERS, "test_a.py": OF_ONE_GROUP, "test_b.py": OF_ANOTHER
    }.items():  # fmt: skip
        (tmp_path / "below" / name).write_text(text)
    environment = os.environ | {"PYTHONPATH": str(TESTS.parent)}
    environment |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    environment.pop("PYTEST_XDIST_WORKER", None)
    options = ("-q", "-p", "xdist.plugin", "-n", processes, "--dist", "loadscope")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == status, done.stdout + done.stderr
    assert ("1 failed, 2 passed" if status else "3 passed") in done.stdout
    assert (tmp_path / "ended").exists()
