"""Workers as processes: what one computed and left in the store, another loads after its end."""

from __future__ import annotations

import json
import os
import time
import urllib.request
from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from baton.models import DEMO_MODEL_PATH
from baton.testing.fleet import Fleet
from tests.e2e.client import KEY
from tests.preloaded import start_preloaded
from tests.store_servers import S3_CREDENTIALS, RedisServer, S3Server

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from baton.testing.fleet import FleetProcess

TEXT = "the prefill worker computes the prompt and the decode worker answers it. " * 12
WAIT_S = 20.0
ANSWER_TOKENS = 96
"""With the prompt's, they fill a block of the store more than the prompt does."""
BLOCK_SIZE = 64
"""The store's, and a multiple of the engine's."""


@pytest.fixture(name="fleet")
def fleet_fixture(tmp_path: Path) -> Iterator[Fleet]:
    environment = dict(os.environ, BATON_CLUSTER_KEY=KEY.key.secret.hex(), **S3_CREDENTIALS)
    with Fleet(tmp_path, environment, start=start_preloaded) as fleet:
        yield fleet
        assert set(fleet.stop().values()) <= {0, -9}


def in_folder(folder: Path) -> dict[str, object]:
    return {"store.tiers": ["file"], "store.options.file.directory": str(folder)}


def start(fleet: Fleet, name: str, store: dict[str, object]) -> FleetProcess:
    """A worker with a store, which loads."""
    settings = store | {
        "engine.dtype": "float32",
        "engine.num_threads": 1,
        "worker.model": str(DEMO_MODEL_PATH),
        "worker.served_model_name": "demo",
    }
    return fleet.start_worker(name, "both", settings)


def chat(
    worker: FleetProcess, messages: list[dict], cache_salt: str = "", max_tokens: int = 24
) -> tuple[dict, int, int]:
    """The message, how many tokens of the prompt were cached, and of how many KV was computed."""
    body = {"model": "demo", "messages": messages, "temperature": 0, "max_tokens": max_tokens}
    if cache_salt:
        body["cache_salt"] = cache_salt
    request = urllib.request.Request(
        f"{worker.url}/v1/chat/completions",
        json.dumps(body | {"ignore_eos": True}).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as reply:
        answer = json.load(reply)
    usage = answer["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return answer["choices"][0]["message"], cached, usage["total_tokens"] - 1


def count_entries(folder: Path) -> int:
    return sum(len(path.name) == 64 for path in folder.rglob("*"))


def count_stored(worker: FleetProcess) -> int:
    """Entries that a worker has put into its store's last tier, and that are there."""
    with urllib.request.urlopen(f"{worker.url}/metrics", timeout=30) as reply:
        lines = reply.read().decode().splitlines()
    stored = [line for line in lines if line.startswith('baton_store_puts_total{result="stored')]
    return sum(int(float(line.split()[-1])) for line in stored if 'tier="host"' not in line)


@pytest.mark.every  # in Redis the same is kept, and by vLLM's servers in a folder
def test_a_conversation_goes_on_at_a_worker_that_never_saw_it(fleet: Fleet, tmp_path: Path) -> None:
    store = tmp_path / "kv"
    first = start(fleet, "first", in_folder(store)).wait_ready()
    talk = [{"role": "user", "content": TEXT}]
    answer, cached, num_computed = chat(first, talk, max_tokens=ANSWER_TOKENS)
    assert cached == 0
    deadline = time.monotonic() + WAIT_S
    while count_entries(store) < num_computed // BLOCK_SIZE:
        assert time.monotonic() < deadline, f"{count_entries(store)} entries were kept"
        time.sleep(0.05)
    first.stop()
    second = start(fleet, "second", in_folder(store)).wait_ready()
    again, cached, _ = chat(second, talk, max_tokens=ANSWER_TOKENS)
    assert again == answer
    assert cached > 100
    talk += [{"role": "assistant", "content": answer["content"]}, {"role": "user", "content": "on"}]
    _, cached_of_second_turn, _ = chat(second, talk)
    assert cached_of_second_turn > cached


def count_encoded(worker: FleetProcess) -> dict[str, float]:
    """Bytes of KV that a worker's store wrote or read, as computed, by encoding."""
    with urllib.request.urlopen(f"{worker.url}/metrics", timeout=30) as reply:
        lines = reply.read().decode().splitlines()
    found: dict[str, float] = {}
    for line in lines:
        if line.startswith("baton_encoding_bytes_total{") and 'form="raw"' in line:
            name = line.partition('encoding="')[2].partition('"')[0]
            found[name] = found.get(name, 0.0) + float(line.split()[-1])
    return found


def test_an_error_budget_chooses_the_encoding_and_without_one_kv_is_exact(
    fleet: Fleet, tmp_path: Path
) -> None:
    store, budget = in_folder(tmp_path / "kv"), {"store.error_budget": 0.02}
    talk = [{"role": "user", "content": TEXT}]
    first, second = (start(fleet, name, store | budget) for name in ("first", "second"))
    exact = start(fleet, "exact", store)
    for worker in (first, second, exact):
        worker.wait_ready()
    _, _, num_computed = chat(first, talk)
    deadline = time.monotonic() + WAIT_S
    while count_stored(first) < num_computed // BLOCK_SIZE:
        assert time.monotonic() < deadline, f"{count_stored(first)} entries were kept"
        time.sleep(0.05)
    assert [name for name, size in count_encoded(first).items() if size] == ["int8/1"]
    _, cached, _ = chat(second, talk)
    assert cached > 100
    assert list(count_encoded(second)) == ["int8/1"]
    _, cached, _ = chat(exact, talk)
    assert cached == 0
    assert list(count_encoded(exact)) == ["raw"]


def check_shared_through_server(fleet: Fleet, store: dict[str, object]) -> FleetProcess:
    """What one worker computed and left on a server, another loads: for the same tenant alone.

    Returns the second worker.
    """
    first = start(fleet, "first", store).wait_ready()
    talk = [{"role": "user", "content": TEXT}]
    answer, cached, num_computed = chat(first, talk, "tenant a")
    assert cached == 0
    deadline = time.monotonic() + WAIT_S
    while count_stored(first) < num_computed // BLOCK_SIZE:
        assert time.monotonic() < deadline, f"{count_stored(first)} entries were kept"
        time.sleep(0.05)
    first.stop()
    second = start(fleet, "second", store).wait_ready()
    again, cached, _ = chat(second, talk, "tenant a")
    assert again == answer
    assert cached > 100
    of_another, cached, _ = chat(second, talk, "tenant b")
    assert of_another == answer
    assert cached == 0
    return second


def is_available(worker: FleetProcess, tier: str) -> bool:
    with urllib.request.urlopen(f"{worker.url}/metrics", timeout=30) as reply:
        lines = reply.read().decode().splitlines()
    (line,) = (each for each in lines if each.startswith(f'baton_store_available{{tier="{tier}"}}'))
    return float(line.split()[-1]) == 1


def test_workers_share_what_they_keep_in_redis(fleet: Fleet, tmp_path: Path) -> None:
    with closing(RedisServer(tmp_path)) as server:
        store: dict[str, object] = {
            "store.tiers": ["host", "redis"],
            "store.options.redis.url": server.url,
            "store.options.redis.timeout_s": 2.0,
        }
        worker = check_shared_through_server(fleet, store)
        talk = [{"role": "user", "content": TEXT}]
        before, _, _ = chat(worker, talk)
        with server.stopped():  # requests go on without it
            for number in range(3):
                answer, _, _ = chat(worker, [{"role": "user", "content": f"{number} {TEXT}"}])
                assert answer["content"]
            again, _, _ = chat(worker, talk)
            assert again == before
            deadline = time.monotonic() + WAIT_S
            while is_available(worker, "redis"):
                assert time.monotonic() < deadline, "nobody noticed"
                time.sleep(0.05)


@pytest.mark.every
def test_workers_share_what_they_keep_in_a_bucket(fleet: Fleet) -> None:
    with closing(S3Server()) as server:
        options = server.options | {"timeout_s": 5.0}
        store = {f"store.options.object.{name}": value for name, value in options.items()}
        check_shared_through_server(fleet, store | {"store.tiers": ["object"]})
