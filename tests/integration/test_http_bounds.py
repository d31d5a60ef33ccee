"""What strangers may hold of an HTTP server: heads, bodies, places; and that others are served."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import resource
import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import uvicorn
from prometheus_client import CollectorRegistry

from baton.clock import MachineClock
from baton.errors import ConfigError
from baton.net import http_protocol
from baton.net.http_limits import Connections, HttpLimits, allow_descriptors
from baton.net.http_server import bind, count_refusals, make_server_config, start_listening

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable

LIMITS = HttpLimits(
    max_head_bytes=4096,
    head_timeout_s=0.6,
    body_window_s=0.6,
    min_body_bytes=1000,
    max_connections=8,
    max_connections_per_address=6,
)
LARGE_BYTES = 32 << 20
"""More than sockets and readers hold."""
REQUEST = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
LARGE_REQUEST = REQUEST.replace(b"/", b"/large", 1)
OTHER_HOST = "127.0.0.2"


class Bounded:
    """A server that answers each request with the length of its body."""

    def __init__(self, port: int, registry: CollectorRegistry, connections: Connections) -> None:
        self.port, self._registry, self.connections = port, registry, connections
        self.end: Callable[[], Awaitable[None]]
        self._clients: list[Client] = []

    async def connect(self, sent: bytes = b"", host: str = "127.0.0.1") -> Client:
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", self.port, local_addr=(host, 0), limit=1 << 20
        )
        client = Client(reader, writer)
        self._clients.append(client)
        await client.send(sent)
        return client

    async def close(self) -> None:
        """Close what was opened."""
        for client in self._clients:
            client.writer.close()
            with contextlib.suppress(ConnectionError):
                await client.writer.wait_closed()

    def num_refused(self, reason: str) -> float:
        name = "test_refused_connections_total"
        return self._registry.get_sample_value(name, {"reason": reason}) or 0.0


class Client:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        with contextlib.suppress(ConnectionError):
            await self.writer.drain()

    async def read_answer(self) -> tuple[int, Any]:
        """Status and JSON body of the next answer; (0, None) if the server closed."""
        try:
            head = await asyncio.wait_for(self.reader.readuntil(b"\r\n\r\n"), 30)
        except (asyncio.IncompleteReadError, ConnectionError):
            return 0, None
        lines = head.decode().lower().split("\r\n")
        (length,) = [line[15:] for line in lines if line.startswith("content-length:")]
        assert sum(line.startswith("content-type:") for line in lines) == 1
        return int(lines[0].split()[1]), json.loads(await self.reader.readexactly(int(length)))

    async def ask(self) -> int:
        await self.send(REQUEST)
        status, _ = await self.read_answer()
        return status

    async def is_closed(self) -> bool:
        """Read to the end; a connection that stays open is a `TimeoutError`."""
        with contextlib.suppress(ConnectionError):
            await asyncio.wait_for(self.reader.read(), 30)
        return True


async def answer_with_length(scope: Any, receive: Any, send: Any) -> None:
    num_bytes = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        num_bytes += len(message.get("body", b""))
        if not message.get("more_body"):
            break
    body = json.dumps(num_bytes).encode().ljust(LARGE_BYTES if scope["path"] == "/large" else 0)
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def serving(limits: HttpLimits = LIMITS) -> AsyncGenerator[Bounded]:
    registry = CollectorRegistry()
    connections = Connections(limits, MachineClock(), count_refusals(registry, "test"))
    server = uvicorn.Server(make_server_config(answer_with_length, connections, drain_timeout_s=1))
    with contextlib.closing(bind("127.0.0.1", 0)) as listener:
        start_listening(listener)
        config = server.config
        config.load()
        server.lifespan = config.lifespan_class(config)
        await server.startup(sockets=[listener])
        try:
            bounded = Bounded(listener.getsockname()[1], registry, connections)
            bounded.end = partial(server.shutdown, sockets=[listener])
            yield bounded
        finally:
            await bounded.close()
            await server.shutdown(sockets=[listener])
        # A close is reported by the loop's next turns.
        await until(lambda: connections.num_open == 0)


def run(scenario: Callable[[Bounded], Awaitable[None]], limits: HttpLimits = LIMITS) -> None:
    async def whole() -> None:
        async with serving(limits) as server:
            await scenario(server)

    asyncio.run(whole())


@pytest.mark.parametrize(
    "head",
    [
        b"GET / HTTP/1.1\r\n" + b"".join(b"h%d: x\r\n" % n for n in range(1000)),
        b"GET / HTTP/1.1\r\nlong: " + b"x" * 6000,
        b"GET /" + b"x" * 6000,
        b"GET / HTTP/1.1\r\nlong: " + b"x" * 6000 + b"\r\n\r\n",
    ],
    ids=["many", "one", "path", "complete"],
)
def test_a_head_without_end_is_refused_with_the_reason(head: bytes) -> None:
    async def scenario(server: Bounded) -> None:
        client = await server.connect(head)
        status, body = await client.read_answer()
        assert status == 431
        assert body["error"]["code"] == "head_too_large"
        assert await client.is_closed()
        assert server.num_refused("head_too_large") == 1

    run(scenario)


def test_what_is_no_http_gets_an_answer_in_json() -> None:
    async def scenario(server: Bounded) -> None:
        client = await server.connect(b"\x00\x01\x02 nonsense\r\n\r\n")
        status, body = await client.read_answer()
        assert (status, body["error"]["code"]) == (400, "malformed")

    run(scenario)


def test_half_a_head_ends_in_time_however_slowly_it_grows() -> None:
    async def scenario(server: Bounded) -> None:
        client = await server.connect(b"GET / HTTP/1.1\r\n")
        since = time.monotonic()
        for _ in range(30):
            await client.send(b"x")
            await asyncio.sleep(0.05)
        assert (await client.read_answer())[0] in {408, 0}
        assert await client.is_closed()
        assert server.num_refused("head_timeout") == 1
        # A second request's head on a connection that was served has the same time.
        client = await server.connect()
        assert await client.ask() == 200
        await client.send(b"GET / HTTP/1.1\r\n")
        status, _ = await client.read_answer()
        assert status == 408
        assert time.monotonic() - since < 30

    run(scenario)


def test_a_body_must_move() -> None:
    async def scenario(server: Bounded) -> None:
        head = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 50000\r\n\r\n"
        slow = await server.connect(head)
        for _ in range(8):
            await slow.send(b"x")
            await asyncio.sleep(0.05)
        status, body = await slow.read_answer()
        assert (status, body["error"]["code"]) == (408, "body_timeout")
        steady = await server.connect(head)  # longer than a window, and each part is enough for one
        for _ in range(10):
            await steady.send(b"x" * 5000)
            await asyncio.sleep(0.1)
        assert await steady.read_answer() == (200, 50_000)
        assert server.num_refused("body_timeout") == 1

    run(scenario)


def test_who_waits_longest_without_a_request_gives_its_place_to_a_new_one() -> None:
    async def scenario(server: Bounded) -> None:
        kept = await server.connect()
        assert await kept.ask() == 200
        idle = [await server.connect() for _ in range(5)]  # six from this address: all it may have
        fresh = await server.connect()
        assert await fresh.ask() == 200
        assert await idle[0].is_closed()  # the oldest that has never asked
        others = [await server.connect(host=OTHER_HOST) for _ in range(2)]
        assert await kept.ask() == 200
        late = await server.connect(host=OTHER_HOST)  # nine in all
        assert await late.ask() == 200
        assert await idle[1].is_closed()
        assert [await other.ask() for other in others] == [200, 200]
        assert await kept.ask() == 200
        assert server.num_refused("too_many_connections") == 2

    run(scenario)


def test_who_does_not_take_an_answer_gives_no_place_to_a_new_connection() -> None:
    async def scenario(server: Bounded) -> None:
        slow = [await server.connect(LARGE_REQUEST) for _ in range(6)]  # all it may have
        connections = server.connections
        await until(lambda: len(connections._idle) == 6)
        for _ in range(3):
            refused = await server.connect()
            assert (await refused.read_answer())[0] == 503
            assert await refused.is_closed()
        await until(lambda: connections.num_open == 6)
        assert [await client.read_answer() for client in slow] == [(200, 0)] * 6
        fresh = await server.connect()
        assert await fresh.ask() == 200

    run(scenario)


@pytest.mark.parametrize("asked", [b"", b"connection: close\r\n"], ids=["idle", "close"])
def test_a_connection_that_was_closed_ends_though_nobody_reads(
    asked: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_protocol, "KEEP_ALIVE_S", 0.1)
    monkeypatch.setattr(http_protocol, "CLOSE_TIMEOUT_S", 0.1)

    async def scenario(server: Bounded) -> None:
        await server.connect(LARGE_REQUEST.replace(b"\r\n\r\n", b"\r\n" + asked + b"\r\n"))
        connections = server.connections
        await until(lambda: connections.num_open == 1 and not connections._new)
        await until(lambda: connections.num_open == 0)

    run(scenario)


def test_answers_that_wait_behind_others_which_nobody_reads_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http_protocol, "CLOSE_TIMEOUT_S", 0.1)

    async def scenario(server: Bounded) -> None:
        await server.connect(LARGE_REQUEST * 3)
        connections = server.connections
        await until(lambda: connections.num_open == 1 and not connections._new)
        await until(lambda: connections.num_open == 0)

    run(scenario)


@pytest.mark.parametrize("num_before", [0, 1])
def test_who_reads_slowly_gets_all_answers_after_which_its_connection_is_closed(
    num_before: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_protocol, "CLOSE_TIMEOUT_S", 1.0)

    async def scenario(server: Bounded) -> None:
        last = LARGE_REQUEST.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n")
        slow = await server.connect(LARGE_REQUEST * num_before + last)
        num_bytes = 0
        while part := await slow.reader.read(2 << 20):
            num_bytes += len(part)
            await asyncio.sleep(0.1)
        assert num_bytes > LARGE_BYTES * (num_before + 1)

    run(scenario)


def test_requests_that_run_keep_their_places(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(server: Bounded) -> None:
        head = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 10\r\n\r\n"
        running = [await server.connect(head) for _ in range(6)]
        connections = server.connections
        await until(lambda: connections.num_open == 6 and not connections._new)
        refused = await server.connect()
        status, body = await refused.read_answer()
        assert (status, body["error"]["type"]) == (503, "overloaded_error")
        assert await refused.is_closed()
        for client in running:
            await client.send(b"x" * 10)
            assert await client.read_answer() == (200, 10)
        again = await server.connect()
        assert await again.ask() == 200

    with caplog.at_level(logging.WARNING, "baton.net.http_server"):
        run(scenario)
    assert "closed a connection from 127.0.0.1" in caplog.text


def test_requests_in_one_packet_are_each_answered() -> None:
    async def scenario(server: Bounded) -> None:
        client = await server.connect(REQUEST * 3)
        assert [await client.read_answer() for _ in range(3)] == [(200, 0)] * 3
        await asyncio.sleep(2 * LIMITS.head_timeout_s)  # idle, not half a head: it stays
        assert await client.ask() == 200

    run(scenario)


H2C = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABk\r\n"
OFFER = b"POST / HTTP/1.1\r\nhost: x\r\n" + H2C + b"content-length: %d\r\n\r\n%b"


@pytest.mark.parametrize("num_bytes", [1 << 20, 90, 7], ids=["together", "apart", "split"])
def test_an_offer_of_an_upgrade_is_ignored_and_the_body_is_read(num_bytes: int) -> None:
    """What follows such a head was taken for the next request: here one that is served."""
    sent = OFFER % (len(REQUEST), REQUEST)
    sent += OFFER.replace(b"content-length: %d", b"transfer-encoding: chunked").replace(
        b"%b", b"4\r\nGET \r\n2\r\n/x\r\n0\r\n\r\n"
    )
    sent += REQUEST.replace(b"\r\n\r\n", b"\r\n" + H2C + b"\r\n")
    sent += OFFER.replace(b"connection: ", b"connection: close, ") % (3, b"abc")

    async def scenario(server: Bounded) -> None:
        client = await server.connect()
        for start in range(0, len(sent), num_bytes):
            await client.send(sent[start : start + num_bytes])
            await asyncio.sleep(0.002)
        answers = [await client.read_answer() for _ in range(4)]
        assert answers == [(200, len(REQUEST)), (200, 6), (200, 0), (200, 3)]
        assert await client.is_closed()

    run(scenario)


@pytest.mark.parametrize("offer", [b"", H2C], ids=["plain", "upgrade"])
def test_no_tunnel_is_opened(offer: bytes) -> None:
    async def scenario(server: Bounded) -> None:
        client = await server.connect(b"CONNECT x:1 HTTP/1.1\r\n" + offer + b"\r\n" + REQUEST)
        assert (await client.read_answer())[0] == 400
        assert await client.is_closed()

    run(scenario)


LONG = b"GET / HTTP/1.1\r\nhost: x\r\nlong: " + b"x" * 3000
LONG_PATH = b"GET /" + b"x" * 3000
LONG_BODY = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 5000\r\n\r\n" + b"x" * 5000


@pytest.mark.parametrize(
    ("first", "rest"),
    [
        (LONG + b"\r\na: b", b"\r\n\r\n"),
        (LONG_PATH, b"?a HTTP/1.1\r\nhost: x\r\n\r\n"),
        (LONG_BODY + REQUEST[:9], REQUEST[9:]),
        (REQUEST * 200 + REQUEST[:9], REQUEST[9:]),
    ],
    ids=["header", "path", "after a body", "after others"],
)
def test_a_head_below_the_bound_is_served_however_it_comes(first: bytes, rest: bytes) -> None:
    async def scenario(server: Bounded) -> None:
        client = await server.connect(first)
        await asyncio.sleep(0.05)
        await client.send(rest)
        for _ in range((first + rest).count(b"host: x")):
            assert (await client.read_answer())[0] == 200

    run(scenario)


def test_a_head_above_the_bound_is_refused_however_it_comes() -> None:
    async def scenario(server: Bounded) -> None:
        client = await server.connect(LONG_BODY + LONG)
        await asyncio.sleep(0.05)
        await client.send(b"x" * 1100)  # in two reads: more than the bound
        assert (await client.read_answer())[0] == 200
        assert (await client.read_answer())[0] == 431

    run(scenario)


def test_no_more_connections_than_files(monkeypatch: pytest.MonkeyPatch) -> None:
    limit = [256, 512]
    monkeypatch.setattr(resource, "getrlimit", lambda _: tuple(limit))
    monkeypatch.setattr(resource, "setrlimit", lambda _, new: limit.__setitem__(0, new[0]))
    assert allow_descriptors(HttpLimits(max_connections=4096)).max_connections == 128
    assert limit == [512, 512]
    limit[:] = [256, resource.RLIM_INFINITY]
    assert allow_descriptors(HttpLimits(max_connections=4096)).max_connections == 4096
    assert limit[0] == 4096 * 3 + 128
    for hard in (0, 130):
        limit[:] = [0, hard]
        with pytest.raises(ConfigError, match=f"may open {hard} files and needs 131: raise ulimit"):
            allow_descriptors(HttpLimits())


def test_a_server_that_ends_answers_what_was_on_its_way() -> None:
    """It closes idle connections a while after it stopped listening, not at once."""

    async def scenario(server: Bounded) -> None:
        idle, used, fresh = [await server.connect() for _ in range(3)]
        for client in (idle, used):
            assert await client.ask() == 200
        ending = asyncio.create_task(server.end())
        await until_refused(server)
        for client in (used, fresh):
            await client.send(REQUEST)
            head = await asyncio.wait_for(client.reader.readuntil(b"\r\n\r\n"), 30)
            assert head.startswith(b"HTTP/1.1 200")
            assert b"connection: close" in head
            assert await client.is_closed()
        assert await idle.is_closed()
        await ending

    run(scenario, replace(LIMITS, last_request_s=0.5))
    with pytest.raises((ConnectionError, EOFError)):  # without that time the second request fails
        run(scenario)


async def until_refused(server: Bounded) -> None:
    """Until the server listens no more."""
    async with asyncio.timeout(30):
        while True:
            try:
                (await server.connect()).writer.close()
            except ConnectionError:
                return
            await asyncio.sleep(0.01)
