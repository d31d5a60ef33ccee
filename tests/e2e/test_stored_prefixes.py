"""Workers as processes: what one computed and left in the store, another loads after its end."""

from __future__ import annotations

import json
import os
import time
import urllib.request
from typing import TYPE_CHECKING

import pytest

from baton.models import DEMO_MODEL_PATH
from baton.testing.fleet import Fleet
from tests.e2e.client import KEY
from tests.preloaded import start_preloaded

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from baton.testing.fleet import FleetProcess

TEXT = "the prefill worker computes the prompt and the decode worker answers it. " * 12
WAIT_S = 20.0
BLOCK_SIZE = 64
"""The store's, and a multiple of the engine's."""


@pytest.fixture(name="fleet")
def fleet_fixture(tmp_path: Path) -> Iterator[Fleet]:
    environment = dict(os.environ, BATON_CLUSTER_KEY=KEY.key.secret.hex())
    with Fleet(tmp_path, environment, start=start_preloaded) as fleet:
        yield fleet
        assert set(fleet.stop().values()) <= {0, -9}


def start(fleet: Fleet, name: str, folder: Path) -> tuple[FleetProcess, FleetProcess]:
    """A worker with a store in `folder`, and a gateway in front of it."""
    settings = {
        "engine.dtype": "float32",
        "engine.num_threads": 1,
        "worker.model": str(DEMO_MODEL_PATH),
        "worker.served_model_name": "demo",
        "store.tiers": ["file"],
        "store.options.file.directory": str(folder),
    }
    worker = fleet.start_worker(name, "both", settings)
    worker.wait_ready()
    return worker, fleet.start_gateway([], [], both=[worker], settings={})


def chat(gateway: FleetProcess, messages: list[dict]) -> tuple[dict, int, int]:
    """The message, how many tokens of the prompt were cached, and of how many KV was computed."""
    body = {"model": "demo", "messages": messages, "temperature": 0, "max_tokens": 96}
    request = urllib.request.Request(
        f"{gateway.url}/v1/chat/completions",
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


def test_a_conversation_goes_on_at_a_worker_that_never_saw_it(fleet: Fleet, tmp_path: Path) -> None:
    store = tmp_path / "kv"
    first, gateway = start(fleet, "first", store)
    talk = [{"role": "user", "content": TEXT}]
    answer, cached, num_computed = chat(gateway, talk)
    assert cached == 0
    deadline = time.monotonic() + WAIT_S
    while count_entries(store) < num_computed // BLOCK_SIZE:
        assert time.monotonic() < deadline, f"{count_entries(store)} entries were kept"
        time.sleep(0.05)
    first.stop()
    _, gateway = start(fleet, "second", store)
    again, cached, _ = chat(gateway, talk)
    assert again == answer
    assert cached > 100
    talk += [{"role": "assistant", "content": answer["content"]}, {"role": "user", "content": "on"}]
    _, cached_of_second_turn, _ = chat(gateway, talk)
    assert cached_of_second_turn > cached
