"""What a server of Baton's answers, byte by byte, to one client after another."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest
import uvicorn

from baton.clock import MachineClock
from baton.net import http_protocol
from baton.net.http_exchange import EXTENSION, HttpExchange
from baton.net.http_limits import Connections, HttpLimits
from baton.net.http_server import bind, make_server_config, start_listening

HOST = b"host: x\r\n"
END = b"0\r\n\r\n"
WRITTEN = (3, 1, 9000, 5, 0, 2, 5000)
"""Sizes of parts."""


class App:
    """What it does depends on the path."""

    def __init__(self, connections: Connections) -> None:
        self.connections = connections
        self.gate = asyncio.Event()
        self.num_sent = 0
        self.exchange: HttpExchange | None = None  # of the latest request
        self.has_seen_disconnect = asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body = b""
        while (message := await receive())["type"] == "http.request":
            body += message["body"]
            if not message["more_body"]:
                break
        self.exchange = scope["extensions"][EXTENSION]
        await getattr(self, scope["path"].strip("/"))(body, receive, send)

    async def start(self, send: Any, *headers: tuple[bytes, bytes]) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": headers})

    async def echo(self, body: bytes, receive: Any, send: Any) -> None:
        await self.start(send, (b"content-length", b"%d" % len(body)))
        await send({"type": "http.response.body", "body": body})

    async def parts(self, body: bytes, receive: Any, send: Any) -> None:
        await self.start(send)
        await self.gate.wait()
        for part in (b"ab", b"", b"c"):
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body"})

    async def fails(self, body: bytes, receive: Any, send: Any) -> None:
        raise ValueError("before the response")

    async def breaks(self, body: bytes, receive: Any, send: Any) -> None:
        await self.start(send)
        await send({"type": "http.response.body", "body": b"ab", "more_body": True})
        raise ValueError("within the response")

    async def writes(self, body: bytes, receive: Any, send: Any) -> None:
        """Parts of all sizes in one turn of the event loop, by the way without a task."""
        await self.start(send)
        assert self.exchange is not None
        for number, num_bytes in enumerate(WRITTEN):
            assert self.exchange.write(b"%d" % number * num_bytes)
        if body != b"breaks":
            await send({"type": "http.response.body", "body": b"end"})

    async def returns(self, body: bytes, receive: Any, send: Any) -> None:
        await self.start(send)

    async def two_lines(self, body: bytes, receive: Any, send: Any) -> None:
        await self.start(send, (b"x-own", b"1\r\nset-cookie: 2"))

    async def too_long(self, body: bytes, receive: Any, send: Any) -> None:
        await self.start(send, (b"content-length", b"1"))
        await send({"type": "http.response.body", "body": b"ab"})

    async def floods(self, body: bytes, receive: Any, send: Any) -> None:
        await self.start(send)
        async with asyncio.timeout(0.5):
            await self.send_numbers(send)

    async def is_interrupted(self, body: bytes, receive: Any, send: Any) -> None:
        await self.start(send)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.5):
                await self.send_numbers(send)
        self.gate.set()
        await send({"type": "http.response.body"})

    async def send_numbers(self, send: Any) -> None:
        while True:
            self.num_sent += 1
            part = (b"%d" % self.num_sent).ljust(60_000)
            await send({"type": "http.response.body", "body": part, "more_body": True})
            await asyncio.sleep(0)

    async def waits(self, body: bytes, receive: Any, send: Any) -> None:
        assert (await receive())["type"] == "http.disconnect"
        self.has_seen_disconnect.set()


def run(scenario: Any) -> None:
    async def main() -> None:
        connections = Connections(HttpLimits(), MachineClock(), lambda _: None)
        app = App(connections)
        with contextlib.closing(bind("127.0.0.1", 0)) as listener:
            start_listening(listener)
            server = uvicorn.Server(make_server_config(app, connections, drain_timeout_s=1))
            running = asyncio.create_task(server.serve(sockets=[listener]))
            try:
                async with asyncio.timeout(30):
                    reader, writer = await asyncio.open_connection(
                        *listener.getsockname(), limit=1 << 17
                    )
                    await scenario(app, reader, writer)
                    writer.close()
            finally:
                server.should_exit = True
                await running

    asyncio.run(main())


def get(path: bytes, *lines: bytes, method: bytes = b"GET", version: bytes = b"1.1") -> bytes:
    head = b"%b /%b HTTP/%b\r\n%b" % (method, path, version, HOST)
    return head + b"".join(line + b"\r\n" for line in lines) + b"\r\n"


def post(path: bytes, body: bytes, *lines: bytes) -> bytes:
    return get(path, b"content-length: %d" % len(body), *lines, method=b"POST") + body


async def read_head(reader: asyncio.StreamReader) -> bytes:
    return (await reader.readuntil(b"\r\n\r\n")).lower()


def test_bodies_come_back_and_the_connection_stays():
    async def scenario(app: App, reader: Any, writer: Any) -> None:
        for body in (b"x", b"y" * 1_000_000, b""):
            writer.write(post(b"echo", body))
            assert b"content-length: %d" % len(body) in await read_head(reader)
            assert await reader.readexactly(len(body)) == body

    run(scenario)


def test_a_head_does_not_wait_for_a_body_that_comes_later():
    async def scenario(app: App, reader: Any, writer: Any) -> None:
        writer.write(get(b"parts"))
        assert b"transfer-encoding: chunked" in await read_head(reader)
        app.gate.set()
        assert await reader.readuntil(END) == b"2\r\nab\r\n1\r\nc\r\n" + END

    run(scenario)


def test_pipelined_requests_are_answered_in_turn():
    async def scenario(app: App, reader: Any, writer: Any) -> None:
        writer.write(get(b"parts") + post(b"echo", b"second") + post(b"echo", b"third"))
        await asyncio.sleep(0.05)
        app.gate.set()
        await reader.readuntil(END)
        for body in (b"second", b"third"):
            await read_head(reader)
            assert await reader.readexactly(len(body)) == body

    run(scenario)


def test_what_is_no_request_is_not_answered_within_the_answer_to_another():
    async def scenario(app: App, reader: Any, writer: Any) -> None:
        writer.write(get(b"parts"))
        await read_head(reader)
        writer.write(post(b"echo", b"second") + b"no request\r\n\r\n")
        assert await reader.read() == b""
        app.gate.set()

    run(scenario)


def test_to_head_only_the_head_is_answered():
    async def scenario(app: App, reader: Any, writer: Any) -> None:
        writer.write(get(b"echo", method=b"HEAD") + post(b"echo", b"z"))
        assert b"content-length: 0" in await read_head(reader)
        await read_head(reader)
        assert await reader.readexactly(1) == b"z"

    run(scenario)


def test_a_client_that_waits_for_100_is_told_to_go_on():
    async def scenario(app: App, reader: Any, writer: Any) -> None:
        whole = post(b"echo", b"body", b"expect: 100-continue")
        writer.write(whole[:-4])
        assert await read_head(reader) == b"http/1.1 100 continue\r\n\r\n"
        writer.write(whole[-4:])
        await read_head(reader)
        assert await reader.readexactly(4) == b"body"

    run(scenario)


@pytest.mark.parametrize(
    "request_", [get(b"echo", version=b"1.0"), get(b"echo", b"connection: close")]
)
def test_who_asks_for_it_gets_a_closed_connection(request_):
    async def scenario(app: App, reader: Any, writer: Any) -> None:
        writer.write(request_)
        assert b"connection: close" in await read_head(reader)
        assert await reader.read() == b""

    run(scenario)


@pytest.mark.parametrize("path", [b"fails", b"two_lines"])
def test_an_application_that_fails_is_answered_for(path):
    async def scenario(app: App, reader: Any, writer: Any) -> None:
        writer.write(get(path))
        answer = await reader.read()
        assert b"set-cookie" not in answer
        assert not answer or answer.startswith(b"HTTP/1.1 500 ")

    run(scenario)


@pytest.mark.parametrize("path", [b"breaks", b"returns", b"too_long"])
def test_a_response_that_breaks_off_is_cut(path):
    """So that no client takes it for a whole one."""

    async def scenario(app: App, reader: Any, writer: Any) -> None:
        writer.write(get(path))
        answer = await reader.read()
        assert not answer.endswith(END)
        assert not answer.endswith(b"\r\n\r\na")

    run(scenario)


@pytest.mark.parametrize("body", [b"ends", b"breaks"])
def test_parts_of_one_turn_arrive_in_order(body):
    """Small ones are written at its end, and with what was held back before."""

    async def scenario(app: App, reader: Any, writer: Any) -> None:
        writer.write(post(b"writes", body))
        await read_head(reader)
        parts = [b"%d" % number * size for number, size in enumerate(WRITTEN) if size]
        for part in [*parts, b"end"] if body == b"ends" else parts:
            assert int(await reader.readuntil(b"\r\n"), 16) == len(part)
            assert await reader.readexactly(len(part) + 2) == part + b"\r\n"
        if body == b"ends":
            assert await reader.readuntil(END) == END
        else:
            assert await reader.read() == b"", "cut"

    run(scenario)


def test_a_client_that_is_gone_costs_another_ones_part_nothing():
    async def scenario(app: App, reader: Any, writer: Any) -> None:
        _, other_writer = await asyncio.open_connection(*writer.get_extra_info("peername"))
        exchanges = []
        for each in (other_writer, writer):
            app.exchange = None
            each.write(get(b"parts"))
            while app.exchange is None:
                await asyncio.sleep(0.01)
            exchanges.append(app.exchange)
        gone, own = exchanges
        gone.transport.abort()
        assert not gone.disconnected, "it will be, in the next turn"
        for exchange in exchanges:
            exchange.write(b"part")
        await read_head(reader)
        assert await reader.readuntil(b"part\r\n") == b"4\r\npart\r\n"
        assert gone.disconnected
        assert not own.disconnected
        other_writer.close()

    run(scenario)


def test_an_application_learns_that_its_client_left():
    async def scenario(app: App, reader: Any, writer: Any) -> None:
        writer.write(get(b"waits"))
        await asyncio.sleep(0.05)
        writer.close()
        await app.has_seen_disconnect.wait()

    run(scenario)


def test_a_response_that_its_client_does_not_read_is_cut_with_its_connection():
    async def scenario(app: App, reader: Any, writer: Any) -> None:
        writer.write(get(b"floods"))
        await read_head(reader)
        assert app.connections.num_open == 1
        while app.connections.num_open:
            await asyncio.sleep(0.05)

    run(scenario)


def test_a_stream_waits_for_its_client_at_its_end(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(http_protocol, "CLOSE_TIMEOUT_S", 0.05)

    async def scenario(app: App, reader: Any, writer: Any) -> None:
        writer.write(get(b"is_interrupted"))
        await read_head(reader)
        await app.gate.wait()
        await asyncio.sleep(0.3)
        for _ in range(app.num_sent):
            await reader.readuntil(b"\r\n")
            await reader.readuntil(b"\r\n")
        assert await reader.readuntil(END) == END

    run(scenario)


def test_a_part_is_sent_though_who_waits_for_its_client_is_interrupted():
    async def scenario(app: App, reader: Any, writer: Any) -> None:
        writer.write(get(b"is_interrupted"))
        await read_head(reader)
        await app.gate.wait()
        for number in range(1, app.num_sent + 1):
            size, part = (await reader.readuntil(b"\r\n"), await reader.readuntil(b"\r\n"))
            assert (int(size, 16), int(part)) == (60_000, number)
        assert await reader.readuntil(END) == END

    run(scenario)
