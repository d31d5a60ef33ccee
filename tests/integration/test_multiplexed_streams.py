"""Streams of a worker that come over one connection, on real sockets."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest
import uvloop
from yarl import URL

from baton.clock import MachineClock
from baton.gateway import multiplexed_streams
from baton.gateway.errors import WorkerLostError
from baton.gateway.http_client import READ_BUFFER_BYTES, Answer
from baton.gateway.options import GatewayOptions, WorkerAddress
from baton.gateway.upstream import Upstream
from baton.net.http_exchange import EXTENSION
from baton.net.http_limits import WORKER_LIMITS, Connections
from baton.net.http_server import bind, serve_beside
from baton.net.multiplex import MAX_NUMBER
from baton.net.multiplex_server import MULTIPLEX_HANDLERS
from baton.net.tls import ClusterTls
from baton.protocol.worker_http import MULTIPLEX_HEADER, MULTIPLEX_PATH, Role
from tests.integration.gateway_cluster import until
from tests.integration.scripted_worker import KEY
from tests.integration.test_upstream import CHUNKED, RawServer, run

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

TIMEOUT_S = 30
LARGE, NUM_LARGE = b"x" * 50_000, 400
BY_MULTIPLEX = MULTIPLEX_HEADER.encode()
Events = Callable[[int], Awaitable[bytes]]


class Server:
    """A worker's HTTP server, whose streams are what `event` gives, until that is empty."""

    def __init__(self, event: Events) -> None:
        self.event = event
        self.multiplexes = self.num_large = 0
        self.num_left = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange, path = scope["extensions"][EXTENSION], scope["path"]
        if path in MULTIPLEX_HANDLERS:
            self.multiplexes += path == MULTIPLEX_PATH
            await MULTIPLEX_HANDLERS[path](exchange)
            return
        request = await receive()
        task = asyncio.current_task()
        exchange.on_disconnect = task.cancel
        try:
            await self._stream(send, request["body"])
        except asyncio.CancelledError:
            self.num_left += 1

    async def large(self, number: int) -> bytes:
        self.num_large += 1
        await asyncio.sleep(0)
        return LARGE if number < NUM_LARGE else b""

    async def _stream(self, send: Send, body: bytes) -> None:
        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        number = 0
        while event := await (self.event(number) if body == b"{}" else self.large(number)):
            await send({"type": "http.response.body", "body": event, "more_body": True})
            number += 1
        await send({"type": "http.response.body", "body": b"end"})


def serve(event: Events, scenario: Callable, *, is_tls: bool = False) -> None:
    async def main() -> None:
        server = Server(event)
        tls = ClusterTls(KEY) if is_tls else None
        table = Connections(WORKER_LIMITS, MachineClock(), lambda _: None, tls)
        listener = bind("127.0.0.1", 0)
        async with serve_beside(server, table, listener, "127.0.0.1") as http_url:
            url = URL(http_url).with_scheme("https" if is_tls else "http") / "v1/completions"
            addresses = (WorkerAddress(str(url.origin()), Role.BOTH),)
            kind = "control" if is_tls else "off"
            options = GatewayOptions(addresses=addresses, credentials=KEY, tls=kind)
            upstream = Upstream(options)
            try:
                async with asyncio.timeout(TIMEOUT_S):
                    await scenario(server, upstream, url)
            finally:
                upstream.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())


async def stream(upstream: Upstream, url: URL) -> Answer:
    return await upstream.post(url, b"{}", multiplexes=True)


async def read(answer: Answer) -> bytes:
    parts = []
    while part := await answer.read():
        parts.append(part)
    answer.release()
    return b"".join(parts)


async def multiplexed(upstream: Upstream, url: URL) -> Answer:
    """A stream by the multiplex, which the first one has opened."""
    while True:
        answer = await stream(upstream, url)
        if BY_MULTIPLEX in answer.headers:
            return answer
        answer.release()
        await asyncio.sleep(0.01)


async def three_events(number: int) -> bytes:
    await asyncio.sleep(0.005)
    return b"data: %d\n\n" % number if number < 3 else b""


THREE = b"data: 0\n\ndata: 1\n\ndata: 2\n\nend"


@pytest.mark.parametrize("is_tls", [False, True])
def test_all_streams_after_the_first_come_over_one_connection(is_tls):
    async def scenario(server: Server, upstream: Upstream, url: URL) -> None:
        first = await stream(upstream, url)
        assert BY_MULTIPLEX not in first.headers, "it does not wait for the multiplex"
        assert await read(first) == THREE
        ((pool, _),) = upstream._multiplexes.items()
        answers = [await multiplexed(upstream, url) for _ in range(20)]
        assert await asyncio.gather(*map(read, answers)) == [THREE] * 20
        assert server.multiplexes == 1
        assert len(pool._open) > 1, "the streams' own connections are kept for the next ones"
        again = await stream(upstream, url)
        assert BY_MULTIPLEX in again.headers
        assert await read(again) == THREE
        assert not server.num_left

    serve(three_events, scenario, is_tls=is_tls)


def test_a_request_that_is_no_stream_of_the_gateways_is_not_multiplexed():
    async def scenario(server: Server, upstream: Upstream, url: URL) -> None:
        await read(await multiplexed(upstream, url))
        plain = await upstream.post(url, b"{}")
        assert BY_MULTIPLEX not in plain.headers
        assert await read(plain) == THREE
        for slot in (b"0" * 32 + b".1", b"x", b"", b"0" * 1000):
            unknown = await upstream.post(url, b"{}", b"%b: %b\r\n" % (BY_MULTIPLEX, slot))
            assert BY_MULTIPLEX not in unknown.headers
            assert await read(unknown) == THREE

    serve(three_events, scenario)


@pytest.mark.parametrize("is_tls", [False, True])
def test_a_stream_that_is_not_read_is_slowed_down_alone(is_tls):
    """It leaves the multiplex, and its own connection is not read."""

    async def scenario(server: Server, upstream: Upstream, url: URL) -> None:
        (await multiplexed(upstream, url)).release()
        slow = await upstream.post(url, b"large", multiplexes=True)
        assert BY_MULTIPLEX in slow.headers
        stopped_at = -1
        while server.num_large != stopped_at:
            stopped_at = server.num_large
            await asyncio.sleep(0.3)
        assert stopped_at * len(LARGE) > READ_BUFFER_BYTES
        assert stopped_at < NUM_LARGE, "the worker was not slowed down"
        num_left = server.num_left
        assert await read(await multiplexed(upstream, url)) == THREE
        assert len(await read(slow)) == NUM_LARGE * len(LARGE) + len(b"end")
        assert await read(await multiplexed(upstream, url)) == THREE
        assert (server.multiplexes, server.num_left) == (1, num_left)

    serve(three_events, scenario, is_tls=is_tls)


async def endless(number: int) -> bytes:
    await asyncio.sleep(0.01)
    return b"data: %d\n\n" % number


def test_a_client_that_leaves_ends_its_stream_and_no_other():
    async def scenario(server: Server, upstream: Upstream, url: URL) -> None:
        answers = [await multiplexed(upstream, url) for _ in range(3)]
        num_before = server.num_left
        for answer in answers:
            assert await answer.read()
        answers[1].release()
        await until(lambda: server.num_left == num_before + 1)
        for answer in (answers[0], answers[2]):
            for _ in range(20):
                assert (await answer.read()).startswith(b"data: ")
            answer.release()
        await until(lambda: server.num_left == num_before + 3)

    serve(endless, scenario)


def test_a_fault_in_passing_on_one_stream_costs_no_other(caplog):
    async def scenario(server: Server, upstream: Upstream, url: URL) -> None:
        answers = [await multiplexed(upstream, url) for _ in range(2)]

        def fail(_: bytes) -> bool:
            raise ZeroDivisionError

        with pytest.raises(WorkerLostError, match="internal error"):
            await answers[0].push_to(fail)
        answers[0].release()
        for _ in range(5):
            assert (await answers[1].read()).startswith(b"data: ")
        answers[1].release()

    serve(endless, scenario)
    assert "a part of a stream could not be passed on" in caplog.text


def test_streams_of_a_multiplex_that_is_lost_are_lost_at_both_ends():
    async def scenario(server: Server, upstream: Upstream, url: URL) -> None:
        answers = [await multiplexed(upstream, url) for _ in range(3)]
        for answer in answers:
            assert await answer.read()
        num_before, ((_, own),) = server.num_left, upstream._multiplexes.items()
        lost = own._current
        lost.connection._transport.abort()
        for answer in answers:
            with pytest.raises(WorkerLostError, match="closed the connection of its streams"):
                await read(answer)
            answer.release()
        await until(lambda: server.num_left == num_before + 3)
        again = await multiplexed(upstream, url)
        assert again.headers[BY_MULTIPLEX] != lost.id
        assert await again.read()
        again.release()

    serve(endless, scenario)


def test_an_idle_multiplex_is_closed_and_one_of_an_old_identity_with_its_last_stream(monkeypatch):
    monkeypatch.setattr(multiplexed_streams, "IDLE_S", 0.2)

    async def scenario(server: Server, upstream: Upstream, url: URL) -> None:
        answer = await multiplexed(upstream, url)
        ((_, own),) = upstream._multiplexes.items()
        old = own._current
        own._is_current = lambda connection: connection is not old.connection
        fresh = await multiplexed(upstream, url)
        assert own._current is not old
        assert old.connection.is_open, "it has a stream still"
        assert await answer.read()
        answer.release()
        await until(lambda: not old.connection.is_open)
        assert await fresh.read()
        fresh.release()
        connection = own._current.connection
        await until(lambda: not connection.is_open)
        assert own._current is None
        assert server.multiplexes == 2

    serve(endless, scenario)


def test_a_multiplex_whose_numbers_are_used_up_is_followed_by_another():
    async def scenario(server: Server, upstream: Upstream, url: URL) -> None:
        (await multiplexed(upstream, url)).release()
        ((_, own),) = upstream._multiplexes.items()
        own._current.num_streams = MAX_NUMBER - 1
        last = await multiplexed(upstream, url)
        fresh = await multiplexed(upstream, url)
        assert last.headers[BY_MULTIPLEX] != fresh.headers[BY_MULTIPLEX]
        assert await asyncio.gather(read(last), read(fresh)) == [THREE] * 2
        assert server.multiplexes == 2

    serve(three_events, scenario)


def test_a_server_that_ends_finishes_its_streams_before_their_multiplex():
    async def main() -> None:
        num_events = 60

        async def event(number: int) -> bytes:
            await asyncio.sleep(0.01)
            return b"data: %d\n\n" % number if number < num_events else b""

        server = Server(event)
        table = Connections(WORKER_LIMITS, MachineClock(), lambda _: None)
        async with serve_beside(server, table, bind("127.0.0.1", 0), "127.0.0.1") as http_url:
            url = URL(http_url) / "v1/completions"
            addresses = (WorkerAddress(str(url.origin()), Role.BOTH),)
            upstream = Upstream(GatewayOptions(addresses=addresses, credentials=KEY, tls="off"))
            reading = asyncio.create_task(read(await multiplexed(upstream, url)))
            await asyncio.sleep(0.05)
            num_before = server.num_left
        assert (await reading).count(b"data: ") == num_events
        assert server.num_left == num_before
        ((_, own),) = upstream._multiplexes.items()
        await until(lambda: own._current is None)

    started = time.monotonic()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(asyncio.wait_for(main(), TIMEOUT_S))
    assert time.monotonic() - started < TIMEOUT_S


NOT_FOUND = b"HTTP/1.1 404 Not Found\r\ncontent-length: 2\r\n\r\n{}"
WHOLE = CHUNKED + b"5\r\n12345\r\n0\r\n\r\n"


@pytest.mark.parametrize("reply", [NOT_FOUND, b""])
def test_a_worker_that_opens_none_is_asked_once_in_a_while(monkeypatch, reply):
    """It answers that there is none, or nothing."""
    monkeypatch.setattr(multiplexed_streams, "HEAD_TIMEOUT_S", 0.03)

    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        is_multiplex = MULTIPLEX_PATH.encode() in heads()[-1]
        writer.write(reply if is_multiplex else WHOLE)

    heads: Callable[[], list[bytes]] = list

    async def scenario(server: RawServer, upstream: Upstream, url: URL) -> None:
        nonlocal heads
        heads = lambda: server.heads  # noqa: E731
        for _ in range(10):
            assert await read(await stream(upstream, url)) == b"12345"
            await asyncio.sleep(0.01)
        asked = [head for head in server.heads if MULTIPLEX_PATH.encode() in head]
        assert len(asked) == 1
        assert asked[0].startswith(b"POST ")
        assert not any(BY_MULTIPLEX in head for head in server.heads)

    run(answer, scenario)


def test_frames_that_cannot_be_read_end_the_streams_that_wait_for_some():
    ended = asyncio.Event()
    id_ = b"a" * 32

    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = server_of[0].heads[-1]
        if MULTIPLEX_PATH.encode() in head:
            writer.write(CHUNKED[:-2] + b"%b: %b\r\n\r\n" % (BY_MULTIPLEX, id_))
            await ended.wait()
            garbage = b"\xff" * 64
            writer.write(b"%x\r\n%b\r\n" % (len(garbage), garbage))
        elif BY_MULTIPLEX in head:
            writer.write(CHUNKED[:-2] + b"%b: %b\r\n\r\n" % (BY_MULTIPLEX, id_))
            ended.set()
        else:
            writer.write(WHOLE)
        await writer.drain()

    server_of: list[RawServer] = []

    async def scenario(server: RawServer, upstream: Upstream, url: URL) -> None:
        server_of.append(server)
        waiting = await multiplexed(upstream, url)
        with pytest.raises(WorkerLostError, match="frames that cannot be read"):
            await waiting.read()
        waiting.release()

    with suppress(asyncio.TimeoutError):
        run(answer, scenario)
