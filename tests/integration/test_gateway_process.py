"""The gateway as a process of its own: status line, drain, signals, refusals."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
import time
from typing import TYPE_CHECKING

import aiohttp
import pytest

from baton.errors import ConfigError
from baton.net.http_server import bind
from tests.integration.gateway_cluster import STREAM, until, until_true
from tests.integration.scripted_worker import (
    ScriptedWorker,
    Visit,
    one_token_and_wait,
    say_abc,
    say_rest,
)

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path
    from typing import TextIO

DRAIN_TIMEOUT_S = 40.0
LEAVES_WITHIN_S = 0.8 * DRAIN_TIMEOUT_S
"""Where nothing is waited for: in less than the time that a drain may take, on any machine."""

PROGRAM = """
import sys
from pathlib import Path
from baton.auth.credentials import Credentials
from baton.auth.key import ClusterKey
from baton.gateway.options import GatewayOptions, WorkerAddress
from baton.gateway.process import run_gateway
from baton.protocol.worker_http import (Role)

url, drain_timeout_s, status_fd, management_port, *tls = sys.argv[1:]
run_gateway(GatewayOptions(
    addresses=(WorkerAddress(url, Role.BOTH),),
    credentials=Credentials.of(ClusterKey(b"k" * 32)),
    port=0,
    status_fd=int(status_fd),
    drain_timeout_s=float(drain_timeout_s),
    probe_interval_s=0.1,
    tls="off",
    management_port=int(management_port) if management_port else None,
    **dict(zip(("tls_certificate", "tls_key"), map(Path, tls))),
))
"""


class Gateway:
    """`pipe`: where it reports its status."""

    def __init__(self, process: asyncio.subprocess.Process, url: str, pipe: TextIO) -> None:
        self.process, self.url, self.pipe = process, url, pipe


@contextlib.asynccontextmanager
async def gateway_process(
    worker: ScriptedWorker,
    drain_timeout_s: float = DRAIN_TIMEOUT_S,
    management_port: str = "",
    tls: Sequence[Path] = (),
):
    reading, writing = os.pipe()
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PROGRAM, worker.url, str(drain_timeout_s), str(writing),
        management_port, *map(str, tls),
        pass_fds=(writing,),
    )  # fmt: skip
    os.close(writing)
    try:
        with os.fdopen(reading) as pipe:
            ready = json.loads(await asyncio.to_thread(pipe.readline))
            assert ready["event"] == "ready"
            yield Gateway(process, ready["url"], pipe)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


def run(scenario, **options) -> None:
    async def main():
        async with asyncio.timeout(30), aiohttp.ClientSession() as client:
            worker = ScriptedWorker("worker-0", "both", say_abc)
            async with worker.running(), gateway_process(worker, **options) as gateway:

                async def is_ready() -> bool:
                    async with client.get(gateway.url + "/ready") as response:
                        return response.status == 200

                await until_true(is_ready)
                await scenario(client, worker, gateway)

    asyncio.run(main())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_idle_gateway_leaves_at_once(number):
    async def scenario(client, worker, gateway):
        gateway.process.send_signal(number)
        began = time.monotonic()
        assert await gateway.process.wait() == 0
        assert time.monotonic() - began < LEAVES_WITHIN_S
        draining = {"event": "draining", "timeout_s": DRAIN_TIMEOUT_S, "preempted": None}
        assert json.loads(gateway.pipe.readline()) == draining

    run(scenario)


def test_a_stream_is_finished_before_the_end():
    gate = asyncio.Event()

    async def gated(visit: Visit):
        await visit.start_stream()
        await gate.wait()
        await say_rest(visit)

    async def scenario(client, worker, gateway):
        worker.script = gated
        async with client.post(gateway.url + "/v1/completions", json=STREAM) as response:
            assert response.status == 200
            gateway.process.send_signal(signal.SIGTERM)
            host, port = gateway.url.removeprefix("http://").split(":")

            async def refuses() -> bool:
                try:
                    _, writer = await asyncio.open_connection(host, int(port))
                except OSError:
                    return True
                writer.close()
                return False

            await until_true(refuses)
            gate.set()
            assert (await response.text()).endswith("[DONE]\n\n")
        assert await gateway.process.wait() == 0

    run(scenario)


def test_what_is_not_finished_in_time_is_told_so():
    async def scenario(client, worker, gateway):
        worker.script = one_token_and_wait
        async with client.post(gateway.url + "/v1/completions", json=STREAM) as response:
            assert response.status == 200
            gateway.process.send_signal(signal.SIGTERM)
            text = await response.text()
        assert "shutting down" in text
        assert text.endswith("data: [DONE]\n\n")
        assert await gateway.process.wait() == 0
        await until(lambda: worker.visits[0].left_at)

    run(scenario, drain_timeout_s=1.0)


def test_a_second_signal_is_obeyed_at_once():
    async def scenario(client, worker, gateway):
        worker.script = one_token_and_wait
        async with client.post(gateway.url + "/v1/completions", json=STREAM) as response:
            assert response.status == 200
            gateway.process.send_signal(signal.SIGTERM)
            await asyncio.sleep(0.3)
            assert gateway.process.returncode is None
            gateway.process.send_signal(signal.SIGTERM)
            began = time.monotonic()
            assert await gateway.process.wait() == 128 + signal.SIGTERM
            assert time.monotonic() - began < LEAVES_WITHIN_S
        await until(lambda: worker.visits[0].left_at)

    run(scenario)


def test_operators_have_a_listener_of_their_own():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    management = f"http://127.0.0.1:{port}"

    async def scenario():
        worker = ScriptedWorker("worker-0", "both", say_abc)
        async with (
            worker.running(),
            gateway_process(worker, management_port=str(port)) as gateway,
            aiohttp.ClientSession() as client,
        ):

            async def ask(url: str, path: str) -> int:
                async with client.get(url + path) as response:
                    return response.status

            for path in ("/metrics", "/debug/requests", "/debug/workers"):
                assert await ask(management, path) == 200
                assert await ask(gateway.url, path) == 404
            assert await ask(management, "/v1/models") == 404
            assert await ask(gateway.url, "/v1/models") == 200
            gateway.process.send_signal(signal.SIGTERM)
            assert await gateway.process.wait() == 0
            with pytest.raises(aiohttp.ClientConnectorError):
                await ask(management, "/metrics")

    asyncio.run(scenario())


def test_a_taken_port_is_named():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port} is taken"):
            bind("127.0.0.1", port)


def test_an_address_of_another_machine_is_named():
    with pytest.raises(ConfigError, match=r"cannot listen on 192\.0\.2\.1"):
        bind("192.0.2.1", 0)


def test_ipv6():
    with contextlib.closing(bind("::1", 0)) as listener:
        assert listener.family == socket.AF_INET6
