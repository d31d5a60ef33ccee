"""What is counted of predictions: hits that were not predicted make up for nothing."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import subprocess
import sys
import threading
from typing import TYPE_CHECKING

from baton.config.sections import AlertsSection
from baton.events.blocks import (
    DEFAULT_MEDIUM,
    AllBlocksCleared,
    BlockStored,
    EventDomain,
    pack_ids,
)
from baton.gateway.alerts.observations import Observations
from baton.gateway.alerts.rules import AlertRules
from baton.gateway.metrics import GatewayMetrics
from baton.gateway.options import WorkerAddress
from baton.gateway.prefixes import Prefixes
from baton.gateway.request import parse_body
from baton.gateway.workers import Workers
from baton.ids import WorkerId
from baton.models import DEMO_MODEL_PATH
from baton.protocol.alerts import AlertName
from baton.protocol.worker_http import Role
from baton.router.prefix_index import PrefixIndex
from baton.testing.clocks import ManualClock
from baton.tokenizer.tokenizer import load_tokenizer
from tests.unit.gateway.test_workers import info

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_blocks_that_found_no_room_are_counted_once(caplog: pytest.LogCaptureFixture) -> None:
    metrics = GatewayMetrics()
    prefixes = Prefixes(Workers([], metrics), {}, ManualClock(), metrics.registry)
    refused = "baton_router_refused_blocks_total"
    assert metrics.registry.get_sample_value(refused) == 0
    worker = prefixes.follow("demo", WorkerId("w"))
    prefixes._models["demo"]._indexes[16] = PrefixIndex(max_blocks=2)
    hashes, ids = tuple(range(5)), pack_ids(range(80))
    stored = BlockStored(EventDomain("test"), hashes, None, ids, 16, DEFAULT_MEDIUM, 0)
    for _ in range(2):  # a server that is asked for it reports what it has once more
        worker.apply(stored)
        assert metrics.registry.get_sample_value(refused) == 3
    assert len(caplog.records) == 1
    # What follows them is not known either, so that it must be asked for.
    assert prefixes._models["demo"].incomplete == {"w"}
    worker.apply(AllBlocksCleared())
    assert not prefixes._models["demo"].incomplete
    prefixes.close()


def test_hits_that_were_not_predicted_do_not_hide_those_that_failed() -> None:
    metrics = GatewayMetrics()
    prefixes = Prefixes(Workers([], metrics), {}, ManualClock(), metrics.registry)
    for _ in range(10):
        prefixes.note_actual(5000, 0)
        prefixes.note_actual(0, 5000)
        prefixes.note_actual(100, 60)
    prefixes.close()

    def counted(kind: str) -> float | None:
        name = "baton_router_cached_tokens_total"
        return metrics.registry.get_sample_value(name, {"kind": kind})

    assert [counted(kind) for kind in ("predicted", "actual", "found")] == [51_000, 50_600, 600]
    rules = AlertRules(AlertsSection())
    rules.evaluate(Observations(), 0.0)
    seen = Observations(
        predicted_tokens=prefixes.num_predicted_tokens, found_tokens=prefixes.num_found_tokens
    )
    (condition,) = rules.evaluate(seen, 5.0)
    assert condition.alert == AlertName.PREFIX_PREDICTION


BODY = parse_body(b'{"model": "demo", "prompt": "a b"}')


def test_a_folder_that_cannot_be_looked_into_is_as_none_and_another_workers_is_read() -> None:
    """A name of 300 characters, of which the system says no more than of a folder of mode 0700."""
    metrics = GatewayMetrics()
    addresses = [WorkerAddress(f"http://127.0.0.1:{port}", Role.DECODE) for port in (1, 2)]
    workers = Workers(addresses, metrics)
    first, second = workers.all
    workers.register(first, info(worker="first", model="/" + "x" * 300))
    prefixes = Prefixes(workers, {}, ManualClock(), metrics.registry)

    async def main() -> None:
        for _ in range(2):
            assert await prefixes.find(BODY) is None
            prefixes.follow("demo", WorkerId("first"))
        assert "no worker on this machine" in prefixes.not_tokenized["demo"]
        workers.register(second, info(worker="second", model=str(DEMO_MODEL_PATH)))
        prefixes.follow("demo", WorkerId("second"))
        assert await prefixes.find(BODY) is not None

    asyncio.run(main())
    prefixes.close()


def test_a_tokenizer_that_could_not_be_opened_for_the_moment_is_read_again() -> None:
    metrics = GatewayMetrics()
    folders = {"demo": DEMO_MODEL_PATH}
    prefixes = Prefixes(Workers([], metrics), folders, ManualClock(), metrics.registry)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)

    async def main() -> None:
        lowest_free = os.dup(0)
        os.close(lowest_free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, limits[1]))
        try:
            assert await prefixes.find(BODY) is None
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert await prefixes.find(BODY) is not None

    asyncio.run(main())
    prefixes.close()


def test_a_tokenizer_in_which_the_library_panics_is_none(tmp_path: Path) -> None:
    content = json.loads((DEMO_MODEL_PATH / "tokenizer.json").read_bytes())
    content["normalizer"] = {"type": "Precompiled", "precompiled_charsmap": "AAAA"}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content), "utf-8")
    metrics = GatewayMetrics()
    prefixes = Prefixes(Workers([], metrics), {"demo": tmp_path}, ManualClock(), metrics.registry)

    async def main() -> None:
        for _ in range(2):
            assert await prefixes.find(BODY) is None
        assert "is not a tokenizer" in prefixes.not_tokenized["demo"]

    asyncio.run(main())
    prefixes.close()


THREADS = """
import os
from baton.config.environment import TOKENIZER_VARIABLES, change_environment
change_environment(TOKENIZER_VARIABLES)
from baton.models import DEMO_MODEL_PATH
from baton.tokenizer.tokenizer import load_tokenizer
before = len(os.listdir("/proc/self/task"))
load_tokenizer(DEMO_MODEL_PATH).encode("a b", add_special_tokens=True)
print(len(os.listdir("/proc/self/task")) - before)
"""


def test_tokenizing_starts_no_threads() -> None:
    done = subprocess.run([sys.executable, "-c", THREADS], capture_output=True, check=True)
    assert done.stdout == b"0\n"


def test_a_tokenizer_that_could_not_be_read_for_want_of_a_thread_is_read_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    metrics = GatewayMetrics()
    folders = {"demo": DEMO_MODEL_PATH}
    prefixes = Prefixes(Workers([], metrics), folders, ManualClock(), metrics.registry)

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    async def main() -> None:
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", refuse)
            for _ in range(3):
                assert await prefixes.find(BODY) is None
        assert "can't start new thread" in caplog.text
        assert len(caplog.records) == 1
        found = await prefixes.find(BODY)
        assert found is not None
        assert found.token_ids is not None
        expected = load_tokenizer(DEMO_MODEL_PATH).encode("a b", add_special_tokens=True)
        assert found.token_ids.tolist() == expected.tolist()

    asyncio.run(main())
    prefixes.close()
