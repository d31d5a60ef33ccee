"""Clients that mean harm, against real processes: memory stays, others are served, it is counted.

Each attack is a function that sends what the security review sent (docs/security.md).
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias
from urllib.parse import urlsplit

import aiohttp
import pytest

from baton.testing.fleet import Fleet, FleetProcess
from tests.chaos.clients import CLIENT_TIMEOUT, ClientRequest, Prompts, Reply, ask
from tests.chaos.process_state import until
from tests.preloaded import start_preloaded

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    Attack: TypeAlias = Callable[[aiohttp.ClientSession, "Target"], Awaitable[None]]

MIB = 1 << 20
JSON = {"content-type": "application/json"}
MAX_GROWTH_MIB = 64
NORMAL_AGAIN_S = 5.0
HEAD = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
ENGINE: dict[str, object] = {
    "engine.dtype": "float32",
    "engine.num_threads": 1,
    "engine.num_blocks": 128,
}


@dataclass(frozen=True)
class Target:
    """A gateway with its two workers."""

    gateway: FleetProcess
    workers: tuple[FleetProcess, ...]

    @property
    def address(self) -> tuple[str, int]:
        parts = urlsplit(self.gateway.url)
        assert parts.hostname is not None
        assert parts.port is not None
        return parts.hostname, parts.port

    def read_rss_bytes(self) -> dict[str, int]:
        return {process.name: _read_rss_bytes(process) for process in (self.gateway, *self.workers)}


def _read_rss_bytes(process: FleetProcess) -> int:
    status = Path(f"/proc/{process.pid}/status").read_text()
    (line,) = [line for line in status.splitlines() if line.startswith("VmRSS:")]
    return int(line.split()[1]) * 1024


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    environment = dict(os.environ, BATON_CLUSTER_KEY=secrets.token_hex(32))
    with Fleet(tmp_path_factory.mktemp("logs"), environment, start=start_preloaded) as fleet:
        prefill = fleet.start_worker("prefill", "prefill", ENGINE)
        decode = fleet.start_worker("decode", "decode", ENGINE)
        workers = prefill.wait_ready(), decode.wait_ready()
        settings = {"gateway.max_inflight_requests": 8}
        yield Target(fleet.start_gateway([prefill], [decode], settings=settings), workers)
        fleet.stop()


async def post(session: aiohttp.ClientSession, target: Target, body: bytes) -> tuple[int, Any]:
    url = f"{target.gateway.url}/v1/completions"
    async with session.post(url, data=io.BytesIO(body), headers=JSON) as response:
        return response.status, await response.json()


async def long_names(session: aiohttp.ClientSession, target: Target) -> None:
    """Unknown models whose names were kept: six of them took 576 MiB."""
    for _ in range(12):
        body = json.dumps({"model": "\U0001f600" * (2 * MIB), "prompt": "a"}).encode()
        status, answer = await post(session, target, body)
        assert (status, answer["error"]["param"]) == (400, "model")
        assert len(str(answer)) < 1000


async def endless_heads(_: aiohttp.ClientSession, target: Target) -> None:
    """One connection with 32 MiB of headers took 351 MiB."""
    for _ in range(4):
        reader, writer = await asyncio.open_connection(*target.address)
        with contextlib.suppress(ConnectionError):
            writer.write(HEAD.encode())
            for n in range(32 * MIB // 4096):
                writer.write(f"h{n}: {'x' * 4080}\r\n".encode())
                await writer.drain()
        with contextlib.suppress(ConnectionError):
            assert b" 431 " in await reader.read() or not writer.is_closing()
        writer.close()


async def half_requests(_: aiohttp.ClientSession, target: Target) -> None:
    """A thousand of them left no place for anybody."""
    held = []
    for _ in range(1100):  # more than one address may have
        reader, writer = await asyncio.open_connection(*target.address)
        writer.write(HEAD.encode())
        held.append((reader, writer))
    await asyncio.sleep(1.0)
    for _, writer in held:
        writer.close()


async def stalled_bodies(_: aiohttp.ClientSession, target: Target) -> None:
    """They held every place of `max_inflight_requests`, which are eight here."""
    held = []
    for _ in range(20):
        reader, writer = await asyncio.open_connection(*target.address)
        writer.write((HEAD + "content-length: 1000000\r\n\r\n{").encode())
        held.append((reader, writer))
    await asyncio.sleep(1.0)
    for _, writer in held:
        writer.close()


async def millions_of_ids(session: aiohttp.ClientSession, target: Target) -> None:
    """One took a second of the event loop, and 2 GiB of a worker."""
    for listed in (b"1," * (14 * MIB) + b"1", b"[" + b"1," * (14 * MIB) + b"1]"):
        for _ in range(3):
            body = b'{"model":"demo","max_tokens":1,"prompt":[' + listed + b"]}"
            status, answer = await post(session, target, body)
            assert status == 400
            assert answer["error"]["code"] in {"context_length_exceeded", "too_many_prompts"}


async def millions_of_messages(session: aiohttp.ClientSession, target: Target) -> None:
    """A million took a second of the event loop."""
    message = b'{"role":"user","content":"a"}'
    body = b'{"model":"demo","messages":[' + b",".join([message] * 1_000_000) + b"]}"
    url = f"{target.gateway.url}/v1/chat/completions"
    for _ in range(3):
        async with session.post(url, data=io.BytesIO(body), headers=JSON) as response:
            assert response.status == 400
            assert (await response.json())["error"]["code"] == "too_many_messages"


async def long_texts(session: aiohttp.ClientSession, target: Target) -> None:
    """Twelve, whose clients left, held 5 GiB in each worker."""
    text = "one word after another " * (19 * MIB // 23)
    body = json.dumps({"model": "demo", "prompt": text, "max_tokens": 1}).encode()
    for _ in range(6):
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.5):
                status, answer = await post(session, target, body)
                assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")


async def nonsense(session: aiohttp.ClientSession, target: Target) -> None:
    """Bytes that are no text, deep nesting, wrong types, huge numbers: 400, never 500."""
    for body in (
        b'{"model":"\xff","prompt":"a"}',
        b'{"model":"demo","prompt":"a","cache_salt":"\xff"}',
        b'{"model":"demo","prompt":"a","vllm_xargs":{"x":"\xff"}}',
        b'{"model":"demo","prompt":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"model":"demo","prompt":"a","max_tokens":1e400}',
        b'{"model":"demo","prompt":"a","max_tokens":' + b"9" * 10_000 + b"}",
        b'{"model":"demo","prompt":"a","temperature":-1}',
        b'{"model":"demo","prompt":{"a":1}}',
        b'{"model":"demo","prompt":[4000000000]}',
        b'{"model":"demo","prompt":[-1]}',
        b'{"model":"demo","prompt":[[1],["a"]]}',
        b"[]",
        b"\x00",
        b"",
    ):
        status, answer = await post(session, target, body)
        assert status == 400, (body[:60], answer)
        assert set(answer["error"]) == {"message", "type", "param", "code"}
        assert len(str(answer)) < 2000


ATTACKS = (
    long_names,
    endless_heads,
    half_requests,
    stalled_bodies,
    millions_of_ids,
    millions_of_messages,
    long_texts,
    nonsense,
)
COUNTED = {
    endless_heads: "head_too_large",
    half_requests: "too_many_connections",
}


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__)
def test_others_are_served_and_nothing_is_left(target: Target, attack: Attack) -> None:
    asyncio.run(_attack(target, attack))


async def _attack(target: Target, attack: Attack) -> None:
    prompts = Prompts(7)
    prompt = prompts.make(40)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=CLIENT_TIMEOUT, connector=connector) as session:

        async def is_answered() -> Reply:
            return await ask(session, target.gateway.url, ClientRequest(prompt))

        expected = await is_answered()
        assert expected.error is None
        before = target.read_rss_bytes()
        refused = await read_refused(session, target)
        attacking = asyncio.create_task(attack(session, target))
        num_honest = 0
        while not attacking.done():
            assert await is_answered() == expected
            num_honest += 1
            await asyncio.sleep(0.05)
        await attacking
        assert num_honest > 0

        async def is_normal() -> bool:
            after = target.read_rss_bytes()
            grown.update({name: (after[name] - before[name]) // MIB for name in before})
            return max(grown.values()) <= MAX_GROWTH_MIB

        grown: dict[str, int] = {}
        try:
            await until("memory is as it was", is_normal, NORMAL_AGAIN_S)
        except AssertionError as exc:
            exc.add_note(f"grown by MiB: {grown}")
            raise
        assert await is_answered() == expected
        if attack in COUNTED:
            now = await read_refused(session, target)
            assert now[COUNTED[attack]] > refused[COUNTED[attack]]
            assert "closed a connection from 127.0.0.1" in target.gateway.log.read_text()


async def read_refused(session: aiohttp.ClientSession, target: Target) -> dict[str, float]:
    async with session.get(f"{target.gateway.url}/metrics") as response:
        lines = (await response.text()).splitlines()
    name = "baton_gateway_refused_connections_total{reason="
    rows = [line.removeprefix(name) for line in lines if line.startswith(name)]
    return {row.split('"')[1]: float(row.split()[-1]) for row in rows}
