"""A follow-up turn goes to a worker that is idle, which loads it from a tier that both use."""

from __future__ import annotations

import json
import os
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from baton.clock import MachineClock
from baton.handoff.pool_mode.store_access import open_keyed_store
from baton.models import DEMO_MODEL_PATH
from baton.testing.fleet import Fleet
from tests.e2e.client import KEY
from tests.preloaded import start_preloaded

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from baton.testing.fleet import FleetProcess

SENTENCE = "the prefill worker computes the prompt and the decode worker answers it. "
WAIT_S = 20.0
NUM_STORED = 600
"""Tokens that the conversation's first turn leaves, at least."""


@pytest.fixture(name="fleet")
def fleet_fixture(tmp_path: Path) -> Iterator[Fleet]:
    environment = dict(os.environ, BATON_CLUSTER_KEY=KEY.key.secret.hex())
    with Fleet(tmp_path, environment, start=start_preloaded) as fleet:
        yield fleet
        assert set(fleet.stop().values()) <= {0, -9}


def get(gateway: FleetProcess, path: str) -> str:
    with urllib.request.urlopen(f"{gateway.url}{path}", timeout=30) as reply:
        return reply.read().decode()


def post(gateway: FleetProcess, path: str, messages: list[dict]) -> tuple[dict, str | None]:
    body = {"model": "demo", "messages": messages, "max_tokens": 24, "temperature": 0}
    request = urllib.request.Request(
        f"{gateway.url}{path}", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as reply:
        return json.load(reply), reply.headers["x-request-id"]


def chat(gateway: FleetProcess, messages: list[dict]) -> tuple[dict, dict]:
    """The answer, and its trace."""
    answer, request_id = post(gateway, "/v1/chat/completions", messages)
    return answer, json.loads(get(gateway, f"/debug/requests/{request_id}"))


def metric(gateway: FleetProcess, name: str) -> float:
    lines = get(gateway, "/metrics").splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, f"it did not happen within {WAIT_S} s"
        time.sleep(0.02)


def prefilling(gateway: FleetProcess, worker: str) -> bool:
    listed = json.loads(get(gateway, "/debug/workers"))["workers"]
    given = {each["worker"]: each["given"] for each in listed}[worker]
    return given is not None and given["num_prefills"] > 0


def test_a_follow_up_turn_is_loaded_where_there_is_time(fleet: Fleet, tmp_path: Path) -> None:
    store = tmp_path / "store"
    settings = {
        "engine.dtype": "float32",
        "engine.num_threads": 1,
        "worker.model": str(DEMO_MODEL_PATH),
        "worker.served_model_name": "demo",
        "store.tiers": ["host", "file"],
        # Each has memory of its own above the folder: no entry fits, so that all are in the lower.
        "store.options.host.capacity_bytes": 4096,
        "store.options.file.directory": str(store),
    }
    workers = [fleet.start_worker(name, "both", settings) for name in ("one", "two")]
    for worker in workers:
        worker.wait_ready()
    cost = {"router.policy": "cost", "router.options.cost.split_prompts": False}
    gateway = fleet.start_gateway([], [], both=workers, settings=cost)
    talk = [{"role": "user", "content": f"a conversation. {SENTENCE * 30}"}]
    first, trace = chat(gateway, talk)
    busy = trace["gateway"]["peer"]
    idle = "two" if busy == "one" else "one"
    talk.append({"role": "assistant", "content": first["choices"][0]["message"]["content"]})
    long = [*talk, {"role": "user", "content": SENTENCE * 240}]
    talk.append({"role": "user", "content": "and then?"})
    until(lambda: metric(gateway, "baton_router_stored_blocks") * 64 >= NUM_STORED)

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(chat, gateway, long)  # to where its beginning is cached
        until(lambda: prefilling(gateway, busy))
        explained, _ = post(gateway, "/debug/route", talk)
        answer, trace = chat(gateway, talk)
        assert not running.done(), "the worker was not busy for long enough"
        _, trace_of_long = running.result()
    assert trace_of_long["gateway"]["peer"] == busy

    alone = {each["decode"]: each for each in explained["candidates"] if each["prefill"] is None}
    assert alone[busy]["figures"]["queue_s"] > alone[idle]["figures"]["load_s"] > 0
    assert alone[idle]["is_chosen"]
    assert set(explained["stored_tokens"]) == {busy, idle}
    num_stored = alone[idle]["figures"]["stored_tokens"]
    assert NUM_STORED <= num_stored <= min(explained["stored_tokens"].values())

    assert trace["gateway"]["peer"] == idle
    assert trace["decode"]["num_loaded_tokens"] == num_stored
    assert any(f"({num_stored:.0f} tokens stored)" in line for line in trace["placement"])
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == num_stored
    predicted, actual = (
        f'baton_router_cached_tokens_total{{kind="{kind}"}}' for kind in ("predicted", "actual")
    )
    until(lambda: metric(gateway, predicted) == metric(gateway, actual) > num_stored)
    apart = fleet.start_gateway([], [], both=[w for w in workers if w.name == busy], settings={})
    assert chat(apart, talk)[0]["choices"][0]["message"] == answer["choices"][0]["message"]

    assert metric(gateway, "baton_router_stored_blocks") > 0

    options = {"file": {"directory": str(store)}}
    with closing(
        open_keyed_store(("file",), options, key=KEY.key, clock=MachineClock())
    ) as other_user:

        def is_gone() -> bool:
            """As if it needed the room; answers that just ended are kept still."""
            for entry in other_user.entries():
                other_user.discard(entry.name)
            return metric(gateway, "baton_router_stored_blocks") == 0

        until(is_gone)
    assert post(gateway, "/debug/route", talk)[0]["stored_tokens"] == {}
