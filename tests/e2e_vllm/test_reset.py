"""Weights that are replaced in a running server: KV from before is not used with them."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from baton.engines.transformers.random_model import make_random_model
from baton.engines.vllm.prefix_admission import IDLE_S
from tests.e2e_vllm.ahead import find_trained_kv, start_trained
from tests.e2e_vllm.client import (
    ask_one,
    check_same,
    get_text,
    make_prompts,
    post,
    read_info,
    wait_until,
)
from tests.e2e_vllm.cluster import SPEC

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from baton.testing.fleet import FleetProcess
    from tests.e2e_vllm.cluster import ClusterFactory

pytestmark = pytest.mark.vllm

ENTRY_TOKENS = 64
SOON_S = 20.0


@pytest.fixture(scope="module")
def trained(cluster_factory: ClusterFactory) -> Iterator[FleetProcess]:
    (server,) = cluster_factory.take("trained", start_trained)
    yield server
    cluster_factory.end(server)


def count_entries(folder: Path) -> int:
    return sum(len(path.name) == 64 and path.is_file() for path in folder.rglob("*"))


def wait_until_kept(folder: Path, num_entries: int) -> None:
    """The server, which was idle, is so for long enough to look at what it holds."""
    wait_until(lambda: count_entries(folder) >= num_entries, SOON_S, lambda: count_entries(folder))
    time.sleep(2 * IDLE_S)


def replace_weights(server: FleetProcess, model: Path) -> None:
    """As a trainer does: vLLM pauses, which ends with a reset of its caches."""
    status, answer = post(f"{server.url}/pause", {})
    assert status == 200, answer
    reload = {"method": "reload_weights", "kwargs": {"weights_path": str(model)}}
    status, answer = post(f"{server.url}/collective_rpc", reload)
    assert status == 200, answer
    status, answer = post(f"{server.url}/resume", {})
    assert status == 200, answer


def test_kv_of_other_weights_is_not_loaded(
    cluster_factory: ClusterFactory, trained: FleetProcess, tmp_path: Path
) -> None:
    other, folder = tmp_path / "other", find_trained_kv(cluster_factory)
    make_random_model(other, replace(SPEC, seed=1))
    (prompt,) = make_prompts(1, seed=66, shortest=400, longest=400)
    num_before = count_entries(folder)
    before = ask_one(trained, prompt)
    num_entries = (len(prompt) + len(before.tokens) - 1) // ENTRY_TOKENS
    wait_until_kept(folder, num_before + num_entries)
    reset_prefix_cache(trained)
    found = ask_one(trained, prompt)
    check_same([found], [before])
    assert found.num_cached == len(prompt) // ENTRY_TOKENS * ENTRY_TOKENS, "it came from the store"
    wait_until_kept(folder, num_before + num_entries)

    replace_weights(trained, other)
    after = ask_one(trained, prompt)
    assert after.num_cached == 0
    (url,) = read_info(trained)["control_urls"]
    assert "restart it" in json.loads(get_text(f"{url}/health"))["why_no_handoffs"]
    expected = ask_one(trained, prompt, cache_salt="seen by no cache")
    check_same([after], [expected])
    assert after != before
    # What it keeps from now on is its own, and is found.
    wait_until_kept(folder, num_before + 3 * num_entries)
    reset_prefix_cache(trained)
    again = ask_one(trained, prompt)
    check_same([again], [expected])
    assert again.num_cached == found.num_cached

    wait_until_kept(folder, num_before + 3 * num_entries)
    replace_weights(trained, cluster_factory.model)
    check_same([ask_one(trained, prompt)], [before])


def reset_prefix_cache(server: FleetProcess) -> None:
    """vLLM's own; not what Baton keeps. It is refused while blocks are being copied."""

    def is_reset() -> bool:
        return bool(post(f"{server.url}/reset_prefix_cache", {})[1]["success"])

    wait_until(is_reset, SOON_S)
