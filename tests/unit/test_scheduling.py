"""Tests of the same servers stay together, and all others by file."""

import re
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


def test_tests_of_the_same_servers_are_one_group():
    assert group_of(VLLM) == group_of(VLLM_FAULTS)
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
