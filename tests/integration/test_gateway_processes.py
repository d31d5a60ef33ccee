"""Several gateway processes on one port: real processes, real signals."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import signal
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import aiohttp
import pytest

from baton.cli.main import run as run_cli
from baton.errors import ConfigError
from baton.gateway.options import GatewayOptions, WorkerAddress
from baton.net.http_server import bind_shared
from baton.net.parent_process import exit_with_parent
from baton.protocol.worker_http import Role
from tests.free_ports import find_free_ports
from tests.integration.gateway_cluster import STREAM, until, until_true
from tests.integration.scripted_worker import (
    KEY,
    ScriptedWorker,
    one_token_and_wait,
    say_abc,
    say_rest,
)

if TYPE_CHECKING:
    import socket
    from typing import TextIO

NUM_PROCESSES = 2
DRAIN_TIMEOUT_S = 2.0
"""As in `PROGRAM`."""

PROGRAM = """
import sys
from baton.auth.credentials import Credentials
from baton.auth.key import ClusterKey
from baton.errors import BatonError
from baton.gateway.options import GatewayOptions, WorkerAddress
from baton.gateway.process import run_gateway
from baton.protocol.worker_http import Role

url, num_processes, port, management_port, status_fd, *listen_fds = sys.argv[1:]
try:
    run_gateway(GatewayOptions(
        addresses=(WorkerAddress(url, Role.BOTH),),
        credentials=Credentials.of(ClusterKey(b"k" * 32)),
        port=int(port),
        processes=int(num_processes),
        management_port=int(management_port),
        status_fd=int(status_fd),
        listen_fds=tuple(map(int, listen_fds)),
        drain_timeout_s=2.0,
        probe_interval_s=0.1,
        tls="off",
    ))
except BatonError as exc:
    sys.exit(f"{type(exc).__name__}: {exc}")
"""


@dataclass
class Gateways:
    process: asyncio.subprocess.Process
    url: str
    management_port: int
    pipe: TextIO
    """Where the parent reports their status."""

    def pids(self) -> set[int]:
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        try:
            return {int(pid) for pid in children.read_text().split()}
        except FileNotFoundError:  # the parent has ended
            return set()

    async def metric(self, client: aiohttp.ClientSession, index: int, line_start: str) -> float:
        url = f"http://127.0.0.1:{self.management_port + index}/metrics"
        async with client.get(url) as response:
            lines = (await response.text()).splitlines()
        return sum(float(ln.rsplit(" ", 1)[1]) for ln in lines if ln.startswith(line_start))


async def start(
    worker: ScriptedWorker,
    port: int = 0,
    listeners: tuple[socket.socket, ...] = (),
    *,
    is_launched: bool = False,
) -> tuple[asyncio.subprocess.Process, int, int]:
    fds = tuple(each.fileno() for each in listeners)
    management_port = find_free_ports(NUM_PROCESSES)
    reading, writing = os.pipe()
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PROGRAM, worker.url, str(NUM_PROCESSES), str(port),
        str(management_port), str(writing), *map(str, fds),
        pass_fds=(writing, *fds), stderr=asyncio.subprocess.PIPE,
        preexec_fn=partial(exit_with_parent, os.getpid()) if is_launched else None,
    )  # fmt: skip
    os.close(writing)
    return process, reading, management_port


@contextlib.asynccontextmanager
async def running(
    worker: ScriptedWorker,
    listeners: tuple[socket.socket, ...] = (),
    *,
    is_launched: bool = False,
):
    process, reading, management_port = await start(worker, 0, listeners, is_launched=is_launched)
    try:
        with os.fdopen(reading) as pipe:
            line = await asyncio.to_thread(pipe.readline)
            assert line, (await process.stderr.read()).decode()
            yield Gateways(process, json.loads(line)["url"], management_port, pipe)
    finally:
        if process.returncode is None:
            process.kill()  # the processes end with their parent
        await process.wait()


def run(scenario, listeners: tuple[socket.socket, ...] = (), *, is_launched: bool = False) -> None:
    async def main() -> None:
        # Each request on a connection of its own: the kernel chooses a process for each.
        connector = aiohttp.TCPConnector(force_close=True)
        worker = ScriptedWorker("worker-0", "both", say_abc)
        async with (
            asyncio.timeout(40),
            aiohttp.ClientSession(connector=connector) as client,
            worker.running(),
            running(worker, listeners, is_launched=is_launched) as gateways,
        ):
            for index in range(NUM_PROCESSES):

                async def is_up(index: int = index) -> bool:
                    return await gateways.metric(client, index, "baton_gateway_worker_up{") == 1

                await until_true(is_up)
            await scenario(client, worker, gateways)

    asyncio.run(main())


async def ask(client: aiohttp.ClientSession, url: str) -> str:
    async with client.post(url + "/v1/completions", json=STREAM) as response:
        assert response.status == 200
        return await response.text()


def served(gateways: Gateways, client: aiohttp.ClientSession, index: int):
    name = 'baton_gateway_requests_total{code="200",mode="colocated"'
    return gateways.metric(client, index, name)


def test_every_process_serves_and_counts_its_own_requests():
    async def scenario(client, worker, gateways):
        num_asked = 0
        while True:
            assert (await ask(client, gateways.url)).endswith("[DONE]\n\n")
            num_asked += 1
            counts = [await served(gateways, client, i) for i in range(NUM_PROCESSES)]
            if all(counts):
                break
            assert num_asked < 200, counts
        assert sum(counts) == num_asked == len(worker.visits)

    run(scenario)


def test_a_process_that_ends_is_replaced_and_the_others_go_on():
    async def scenario(client, worker, gateways):
        before = gateways.pids()
        assert len(before) == NUM_PROCESSES
        victim = min(before)
        os.kill(victim, signal.SIGKILL)
        for _ in range(20):  # what waits for the one that is gone is served by the next
            await ask(client, gateways.url)
        await until(lambda: len(gateways.pids() - {victim}) == NUM_PROCESSES)
        assert len(before & gateways.pids()) == NUM_PROCESSES - 1

    run(scenario)


def test_processes_that_end_again_and_again_end_the_gateway():
    async def scenario(client, worker, gateways):
        async def ended() -> bool:
            for pid in gateways.pids():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            return gateways.process.returncode is not None

        await until_true(ended, within_s=30.0)
        assert gateways.process.returncode == 1
        assert "MemberFailedError" in (await gateways.process.stderr.read()).decode()

    run(scenario)


@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.every)]
)
def test_a_signal_ends_all_once_they_have_drained(number):
    async def scenario(client, worker, gateways):
        pids = gateways.pids()
        gateways.process.send_signal(number)
        assert await gateways.process.wait() == 0
        assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
        reported = json.loads(gateways.pipe.readline())
        assert reported["event"] == "draining"
        assert reported["timeout_s"] > DRAIN_TIMEOUT_S, "the parent kills later than at this"
        # The processes report to nobody once they are ready: their parent does.
        assert b"cannot report" not in await gateways.process.stderr.read()
        with pytest.raises(aiohttp.ClientError):
            await ask(client, gateways.url)

    run(scenario)


def test_a_second_signal_ends_all_at_once():
    async def scenario(client, worker, gateways):
        worker.script = one_token_and_wait
        async with client.post(gateways.url + "/v1/completions", json=STREAM) as response:
            await response.content.readany()
            gateways.process.send_signal(signal.SIGTERM)
            await asyncio.sleep(0.2)
            assert gateways.process.returncode is None, "it drains"
            gateways.process.send_signal(signal.SIGTERM)
            async with asyncio.timeout(1.5):
                await gateways.process.wait()

    run(scenario)


def test_a_stop_of_the_whole_service_cuts_no_stream():
    """Each process gets SIGTERM, and another one from its parent: here also from a launcher."""

    async def scenario(client, worker, gateways):
        rest = asyncio.Event()

        async def say_rest_later(visit):
            await visit.start_stream()
            await rest.wait()
            await say_rest(visit)

        worker.script = say_rest_later
        async with client.post(gateways.url + "/v1/completions", json=STREAM) as response:
            for pid in (*gateways.pids(), gateways.process.pid):
                os.kill(pid, signal.SIGTERM)
            await asyncio.sleep(0.2)
            gateways.process.send_signal(signal.SIGTERM)
            await asyncio.sleep(0.1)
            rest.set()
            assert (await response.text()).endswith("data: [DONE]\n\n")
        assert await gateways.process.wait() == 0

    run(scenario, is_launched=True)


def test_a_process_that_cannot_be_started_now_is_tried_again_and_the_others_go_on():
    async def scenario(client, worker, gateways):
        victim, other = gateways.pids()
        parent, limit = gateways.process.pid, resource.RLIMIT_NOFILE
        soft, hard = resource.prlimit(parent, limit)
        resource.prlimit(parent, limit, (3, hard))  # no descriptor is left for a pipe
        os.kill(victim, signal.SIGKILL)
        while b"cannot be started (Too many open files)" not in (
            line := await gateways.process.stderr.readline()
        ):
            assert line, "the gateway has ended"
        assert gateways.pids() == {other}
        resource.prlimit(parent, limit, (soft, hard))
        await until(lambda: len(gateways.pids() - {victim}) == NUM_PROCESSES)
        assert other in gateways.pids()

    run(scenario)


def test_all_end_when_their_parent_is_killed():
    async def scenario(client, worker, gateways):
        pids = gateways.pids()
        gateways.process.kill()
        await until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))

    run(scenario)


def test_a_port_that_others_listen_on_is_refused():
    async def scenario(client, worker, gateways):
        port = int(gateways.url.rpartition(":")[2])
        second, reading, _ = await start(worker, port)
        os.close(reading)
        assert await second.wait() == 1
        assert f"127.0.0.1:{port} is taken" in (await second.stderr.read()).decode()

    run(scenario)


def test_other_processes_take_over_the_sockets_and_no_request_fails():
    """As a launcher does it, which holds the sockets: see `baton.launch.sockets`."""

    async def ask_until(client, url, ended):
        num_asked = 0
        while not ended.is_set():
            assert await ask(client, url)
            num_asked += 1
        return num_asked

    async def scenario(client, worker, old):
        ended = asyncio.Event()
        asking = asyncio.create_task(ask_until(client, old.url, ended))
        async with running(worker, listeners) as new:
            assert new.url == old.url
            old.process.send_signal(signal.SIGTERM)
            assert await old.process.wait() == 0
            for index in range(NUM_PROCESSES):

                async def is_used(index: int = index) -> bool:
                    return await served(new, client, index) > 0

                await until_true(is_used)
            ended.set()
            assert await asking > NUM_PROCESSES

    with contextlib.ExitStack() as opened:
        listeners = bind_shared("127.0.0.1", 0, NUM_PROCESSES)
        for each in listeners:
            opened.callback(each.close)
        run(scenario, listeners)


def test_metrics_of_all_must_be_reachable():
    with pytest.raises(ConfigError, match="--management-port"):
        GatewayOptions(
            addresses=(WorkerAddress("https://127.0.0.1:1", Role.BOTH),),
            credentials=KEY,
            processes=2,
        )


def test_a_launch_that_could_not_show_its_metrics_starts_nothing(
    capsys: pytest.CaptureFixture[str],
):
    assert run_cli(["up", "--gateways", "2"]) == 2
    assert "--management-port" in capsys.readouterr().err
