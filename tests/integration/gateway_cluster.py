"""A gateway with scripted workers, in one event loop."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import aiohttp
from prometheus_client import generate_latest

from baton.clock import MachineClock
from baton.gateway.options import GatewayOptions, WorkerAddress
from baton.gateway.process import open_gateway
from baton.net.http_limits import Connections, HttpLimits
from baton.net.http_server import bounded_protocol
from baton.protocol.worker_http import Role
from tests.integration.scripted_worker import (
    KEY,
    MODEL,
    Script,
    ScriptedWorker,
    Visit,
    prefill_at_once,
    say_abc,
    serving,
)

if TYPE_CHECKING:
    from baton.gateway.metrics import GatewayMetrics

JSON = {"content-type": "application/json"}
PROMPT = {"model": MODEL, "prompt": "hello", "max_tokens": 3}
STREAM = {**PROMPT, "stream": True}


@dataclass
class Cluster:
    """What a test talks to."""

    url: str
    client: aiohttp.ClientSession
    prefills: list[ScriptedWorker]
    decodes: list[ScriptedWorker]
    metrics: GatewayMetrics | None = None
    """Of a gateway in this process."""

    def post(self, body: object, path: str = "/v1/completions", **headers: str):
        return self.client.post(self.url + path, json=body, headers=headers)

    async def get_json(self, path: str):
        async with self.client.get(self.url + path) as response:
            return response.status, await response.json()

    async def metric(self, line_start: str) -> float:
        """The sum of all series whose lines begin so. Several hundred others are not written."""
        text = ""
        if self.metrics is not None and (name := re.match(r"\w+", line_start)):
            async with self.client.get(self.url + "/ready"):
                pass  # what answers before this one still count is counted
            named = self.metrics.registry.restricted_registry([name[0]])
            text = generate_latest(named).decode()  # type: ignore[no-untyped-call]
        if not text:
            async with self.client.get(self.url + "/metrics") as response:
                text = await response.text()
        values = [ln.rsplit(" ", 1)[1] for ln in text.splitlines() if ln.startswith(line_start)]
        assert values, f"no series starts with {line_start}"
        return sum(map(float, values))


def gateway_protocol() -> type[asyncio.Protocol]:
    """As the gateway's own server has it."""
    return bounded_protocol(Connections(HttpLimits(), MachineClock(), lambda _: None))


Scenario = Callable[[Cluster], Awaitable[None]]


def run(scenario: Scenario, **setup) -> None:
    """Run one scenario against a fresh cluster, 20 s at most."""

    async def main() -> None:
        async with asyncio.timeout(60), cluster(**setup) as running:
            await scenario(running)

    asyncio.run(main())


@contextlib.asynccontextmanager
async def cluster(
    *,
    prefills: int | list[ScriptedWorker] = 1,
    decodes: int | list[ScriptedWorker] = 1,
    boths: int = 0,
    wait: bool = True,
    **options,
) -> AsyncGenerator[Cluster]:
    prefill = workers_of("prefill", prefills, prefill_at_once)
    decode = workers_of("decode", decodes, say_abc)
    decode += [ScriptedWorker(f"worker-{i}", "both", say_abc) for i in range(boths)]
    workers = tuple(WorkerAddress(w.url, Role(w.listed_as)) for w in prefill + decode)
    settings = {"probe_interval_s": 0.1, "probe_timeout_s": 3.0, "connect_timeout_s": 3.0}
    settings["wait_for_worker_s"] = 0.3
    settings["tls"] = "off"  # what scripted workers speak
    gateway = GatewayOptions(addresses=workers, credentials=KEY, **{**settings, **options})
    async with contextlib.AsyncExitStack() as stack:
        for worker in prefill + decode:
            await stack.enter_async_context(worker.running())
        app = await stack.enter_async_context(open_gateway(gateway, MachineClock()))
        sock = socket.create_server(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{sock.getsockname()[1]}"
        await stack.enter_async_context(serving(app, sock, http=gateway_protocol()))
        client = await stack.enter_async_context(aiohttp.ClientSession())
        running = Cluster(url, client, prefill, decode, app.metrics)
        if wait:
            await until_up(running, len(workers))
        yield running


def workers_of(
    role: str, wanted: int | list[ScriptedWorker], script: Script
) -> list[ScriptedWorker]:
    """The workers that a test made itself, or so many of the usual ones."""
    if isinstance(wanted, list):
        return list(wanted)
    return [ScriptedWorker(f"{role}-{i}", role, script) for i in range(wanted)]


async def until_up(running: Cluster, num_workers: int) -> None:
    async def all_up() -> bool:
        return await running.metric("baton_gateway_worker_up{") == num_workers

    await until_true(all_up)


async def until_true(
    condition: Callable[[], Awaitable[bool]],
    within_s: float = 20.0,
    why: Callable[[], object] = lambda: "it did not come true in time",
) -> float:
    """Wait for a condition; the seconds it took."""
    began = time.monotonic()
    while not await condition():
        assert time.monotonic() - began < within_s, why()
        await asyncio.sleep(0.01)
    return time.monotonic() - began


async def until(
    condition: Callable[[], object], within_s: float = 20.0, **why: Callable[[], object]
) -> float:
    """Wait for a plain condition; the seconds it took."""

    async def asked() -> bool:
        return bool(condition())

    return await until_true(asked, within_s, **why)


def after_prefill(running: Cluster, script: Script) -> Script:
    """A decode worker's script that begins once prefill was asked, as a real one's answer does."""

    async def wait(visit: Visit) -> None:
        def is_asked() -> bool:
            asked = (each for worker in running.prefills for each in worker.visits)
            return any(each.ticket.id == visit.ticket.id for each in asked)

        await until(is_asked)
        await script(visit)

    return wait
