"""A worker's life in one process: real sockets and signals, around a scripted engine."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import signal
from functools import partial
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest

from baton.auth.credentials import Credentials
from baton.auth.key import ClusterKey
from baton.clock import MachineClock
from baton.config.cluster_key import is_loopback
from baton.config.sections import PreemptionSection
from baton.engines.interface import FinishReason, NewToken
from baton.errors import ConfigError, EngineError
from baton.handoff.interface import SampledToken
from baton.net.http_server import bind, start_listening
from baton.net.preemption import PreemptionWatch
from baton.telemetry.process_status import StatusReporter
from baton.worker.fence import MembershipFence
from baton.worker.options import ProcessOptions, WorkerOptions
from baton.worker.process import ProcessLife
from baton.worker.worker import Worker, build_worker
from tests.unit.worker.scripted_engine import EPOCH, ScriptedEngine, until

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Generator

    from baton.engines.interface import GenerationRequest


def one_token(engine: ScriptedEngine, request: GenerationRequest) -> None:
    engine.sink([NewToken(request.id, SampledToken(9), 0)])


@contextlib.asynccontextmanager
async def living(
    engine: ScriptedEngine, **options: Any
) -> AsyncGenerator[tuple[str, asyncio.Task[None], Worker]]:
    """A worker that serves: its URL and the task that ends with it."""
    key = Credentials.of(ClusterKey(b"k" * 32))
    at = ProcessOptions(name="w0", tls="off", credentials=key, **options)
    fence = MembershipFence(at.announce_lease_s) if at.announce_to else None
    read_fd, write_fd = os.pipe()
    reporter = StatusReporter(write_fd)
    watch = PreemptionWatch(at.preemption, at.worker, MachineClock(), reporter)
    worker = build_worker(
        WorkerOptions(
            worker=at.worker,
            epoch=EPOCH,
            served_model_name="demo",
            fence=fence,
            credentials=key,
            describe_drain=watch.describe_health,
        ),
        engine,
        None,
        MachineClock(),
    )
    with bind("127.0.0.1", 0) as listener, os.fdopen(read_fd) as announced:
        life = ProcessLife(at, worker, EPOCH, reporter, watch=watch)
        running = asyncio.create_task(life.run(listener))
        try:
            ready = json.loads(await asyncio.to_thread(announced.readline))
            assert ready["event"] == "ready"
            watch.start()
            yield ready["url"], running, worker
        finally:
            os.close(write_fd)
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)


async def start_stream(session: aiohttp.ClientSession, url: str) -> aiohttp.ClientResponse:
    body = {"model": "demo", "prompt": "a", "stream": True}
    return await session.post(f"{url}/v1/completions", json=body)


async def read_end(reply: aiohttp.ClientResponse) -> tuple[str, str]:
    """The code of the last event's error, and the event after it."""
    *_, error, done, _ = (await reply.text()).split("\n\n")
    return json.loads(error.removeprefix("data: "))["error"]["code"], done


def test_drain_fails_what_takes_too_long() -> None:
    async def scenario() -> None:
        engine = ScriptedEngine(one_token)
        async with (
            living(engine, drain_timeout_s=0.05) as (url, running, _),
            aiohttp.ClientSession() as session,
        ):
            reply = await start_stream(session, url)
            os.kill(os.getpid(), signal.SIGTERM)
            assert await read_end(reply) == ("draining", "data: [DONE]")
            await asyncio.wait_for(running, 30)
            assert engine.cancelled == [engine.requests[0].id]

    asyncio.run(scenario())


def test_a_preemption_notice_drains_and_a_later_sigterm_ends_no_answer(tmp_path) -> None:
    async def scenario() -> None:
        engine, notice = ScriptedEngine(one_token), tmp_path / "w0"
        section = PreemptionSection(source="file", file=f"{tmp_path}/{{worker}}", interval_s=0.02)
        async with (
            living(engine, preemption=section) as (url, running, worker),
            aiohttp.ClientSession() as session,
        ):
            reply = await start_stream(session, url)
            notice.touch()
            await until(lambda: worker.engine_client.draining)
            async with session.get(f"{url}/health") as health:
                found = await health.json()
                assert (health.status, found["status"]) == (503, "draining")
                assert found["reason"].startswith("its machine will be taken (file: ")
                assert 0 < found["preempted_in_s"] <= section.notice_s
            os.kill(os.getpid(), signal.SIGTERM)  # as from a machine that ends
            await asyncio.sleep(0.1)
            assert not running.done()
            request = engine.requests[0].id
            engine.sink([NewToken(request, SampledToken(9), 0, FinishReason.LENGTH)])
            assert "error" not in await reply.text()
            await asyncio.wait_for(running, 30)
            assert not engine.cancelled

    asyncio.run(scenario())


@contextlib.contextmanager
def launched() -> Generator[None]:
    """This process is like a launcher's child: it would end with its parent."""
    set_death_signal, before = partial(ctypes.CDLL(None).prctl, 1), signal.getsignal(signal.SIGTERM)
    set_death_signal(signal.SIGKILL)
    try:
        yield
    finally:
        set_death_signal(0)
        signal.signal(signal.SIGTERM, before)


def test_a_launchers_sigterm_after_that_of_its_service_ends_no_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    left: list[int] = []
    monkeypatch.setattr(os, "_exit", left.append)

    async def scenario() -> None:
        engine = ScriptedEngine(one_token)
        async with (
            living(engine) as (url, running, worker),
            aiohttp.ClientSession() as session,
        ):
            reply = await start_stream(session, url)
            os.kill(os.getpid(), signal.SIGTERM)
            await until(lambda: worker.engine_client.draining)
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(0.05)
            request = engine.requests[0].id
            engine.sink([NewToken(request, SampledToken(9), 0, FinishReason.LENGTH)])
            assert "error" not in await reply.text()
            await asyncio.wait_for(running, 30)
        assert not left
        late = signal.getsignal(signal.SIGTERM)
        assert late == signal.SIG_IGN, "one that comes while the process ends in order"

    with launched():
        asyncio.run(scenario())


def test_a_worker_whose_engine_ended_ends_too() -> None:
    async def scenario() -> None:
        engine = ScriptedEngine(one_token)
        async with (
            living(engine) as (url, running, _),
            aiohttp.ClientSession() as session,
        ):
            reply = await start_stream(session, url)
            engine.alive = False
            assert await read_end(reply) == ("draining", "data: [DONE]")
            with pytest.raises(EngineError, match="ended by itself"):
                await asyncio.wait_for(running, 30)

    asyncio.run(scenario())


def test_a_body_that_is_too_large_is_answered_before_it_is_read() -> None:
    async def scenario() -> None:
        engine = ScriptedEngine(one_token)
        async with (
            living(engine) as (url, _, worker),
            aiohttp.ClientSession() as session,
        ):

            async def endless() -> AsyncGenerator[bytes]:
                while True:
                    yield b"x" * 65_536

            async with session.post(f"{url}/v1/completions", data=endless()) as reply:
                assert reply.status == 400  # of what fits this model's context, none is so long
                assert (await reply.json())["error"]["code"] == "context_length_exceeded"
            async with session.get(f"{url}/health") as health:
                assert health.status == 200
            assert worker.engine_client.num_open == 0

    asyncio.run(scenario())


def test_a_client_that_leaves_is_noticed_at_once() -> None:
    async def scenario() -> None:
        engine = ScriptedEngine(lambda _engine, _request: None)
        async with living(engine) as (url, _, _):
            host, port = url.removeprefix("http://").split(":")
            _, writer = await asyncio.open_connection(host, int(port))
            body = b'{"model":"demo","prompt":"a"}'
            head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n"
            writer.write(head.encode() + b"\r\n" + body)
            await until(lambda: engine.requests)
            left_at = MachineClock().now()
            writer.transport.abort()
            await until(lambda: engine.cancelled)
            assert MachineClock().now() - left_at < 0.1

    asyncio.run(scenario())


def test_ports_are_checked() -> None:
    with bind("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with bind("127.0.0.1", port) as second:
            start_listening(first)
            with pytest.raises(ConfigError, match=f"127.0.0.1:{port} is taken"):
                start_listening(second)
        with pytest.raises(ConfigError, match="is taken by another process"):
            bind("127.0.0.1", port)
    with pytest.raises(ConfigError, match=r"cannot listen on 203\.0\.113\.1"):
        bind("203.0.113.1", 0)
    with pytest.raises(ConfigError, match="cannot listen on"):
        bind("no such host", 0)


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True),
        ("127.1.2.3", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("example", False),
    ],
)
def test_loopback_is_known(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected
