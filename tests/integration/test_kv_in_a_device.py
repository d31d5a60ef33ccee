"""Workers whose KV lies in one device: the same answers, and room that runs out."""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from baton.telemetry.trace import summarize
from baton.transfer.devices.table import TABLE_BYTES, Extent, read_table
from tests.integration import worker_process
from tests.integration.test_worker_legs import Pair, asking, prompt, read_trace
from tests.integration.worker_process import ENGINE_OPTIONS, starting
from tests.preloaded import TORCH, PreloadedProcess

if TYPE_CHECKING:
    from collections.abc import Generator

pytest.importorskip("torch")

MIB = 1 << 20


@pytest.fixture
def device() -> Generator[Path]:
    with tempfile.NamedTemporaryFile(dir="/dev/shm") as file:
        file.truncate(64 * MIB)
        yield Path(file.name)


def options_of(device: Path) -> dict[str, Any]:
    options = {"shared": {"device": {"path": str(device)}}}
    return {"transfer": {"transports": ["shared"], "options": options}}


def extents_of(device: Path) -> dict[int, Extent]:
    with device.open("rb") as file:
        return {extent.pid: extent for extent in read_table(file.read(TABLE_BYTES)).extents}


def test_a_handoff_within_a_device_gives_what_one_worker_gives(device: Path) -> None:
    options = options_of(device)

    async def hand_over(pair: Pair) -> None:
        body = {"prompt": prompt()}
        _, text = pair.ticket()
        async with asking() as ask:
            prefill, decode = await asyncio.gather(
                ask(pair.prefill, body, text), ask(pair.decode, body, text)
            )
            alone = await ask(pair.prefill, body | {"id": "alone"})
        assert (prefill.status, decode.status) == (200, 200)
        assert decode.json()["choices"][0]["text"] == alone.json()["choices"][0]["text"]
        got = await read_trace(pair.decode, "req-test")
        summary = summarize(None, got, await read_trace(pair.prefill, "req-test"))
        assert got.num_received_tokens == prefill.json()["prompt_tokens"]
        assert (summary.transport, summary.fallbacks) == ("shared", ())

    with (
        starting("p0", role="prefill", **options) as prefill,
        starting("d0", role="decode", **options) as decode,
    ):
        prefill.wait_until_ready()
        decode.wait_until_ready()
        pids = {prefill.popen.pid, decode.popen.pid}
        extents = extents_of(device)
        assert extents.keys() == pids
        asyncio.run(hand_over(Pair(prefill, decode)))
        # A third one, as large, finds no room, and says who has it.
        engine = {**ENGINE_OPTIONS, "num_blocks": 2048}
        given = json.dumps({"name": "third", "engine_options": engine, **options})
        with tempfile.TemporaryFile() as stderr:
            third = PreloadedProcess(TORCH, worker_process.__name__, [given], os.environ, stderr)
            assert third.wait(60) != 0
            assert third.stdout is not None
            third.stdout.close()
            stderr.seek(0)
            said = stderr.read().decode()
        assert "has no room for" in said
        assert all(f"by pid {pid} (" in said for pid in pids)
    with device.open("rb") as file:  # the dead ones' bytes are still there, KV among them
        file.seek(TABLE_BYTES)
        assert any(file.read())
