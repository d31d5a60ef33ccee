"""The gateway's HTTP client against servers that misbehave, over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
import threading
from collections.abc import Awaitable, Callable

import pytest
import uvloop
from yarl import URL

from baton.gateway import connection_pool
from baton.gateway.errors import UpstreamError, WorkerLostError, WorkerUnreachableError
from baton.gateway.http_client import MAX_HEAD_BYTES, READ_BUFFER_BYTES
from baton.gateway.options import GatewayOptions, WorkerAddress
from baton.gateway.upstream import MAX_SMALL_ANSWER_BYTES, Upstream
from baton.ids import TicketId
from baton.net.http_server import bind
from baton.protocol.worker_http import Role, abort_path
from tests.integration.gateway_cluster import until
from tests.integration.scripted_worker import KEY

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"
CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class RawServer:
    """Runs `serve` on each request of each connection, until it closes the connection."""

    def __init__(self, serve: Serve) -> None:
        self.serve = serve
        self.heads: list[bytes] = []
        self.num_connections = self.num_closed = 0

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        try:
            while not writer.is_closing():
                head = await reader.readuntil(b"\r\n\r\n")
                self.heads.append(head)
                length = head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
                await reader.readexactly(int(length or b"0"))
                await self.serve(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.num_closed += 1
            writer.close()


def run(
    serve: Serve,
    scenario: Callable[[RawServer, Upstream, URL], Awaitable[None]],
    loop_factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop,
) -> None:
    async def main() -> None:
        handler = RawServer(serve)
        server = await asyncio.start_server(handler, "127.0.0.1", 0)
        url = URL(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1/completions")
        upstream = upstream_of(url)
        try:
            async with asyncio.timeout(30):
                await scenario(handler, upstream, url)
        finally:
            upstream.close()
            server.close()
            await until(lambda: handler.num_closed == handler.num_connections)

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(main())


def upstream_of(url: URL) -> Upstream:
    workers = (WorkerAddress(str(url.origin()), Role.BOTH),)
    options = GatewayOptions(addresses=workers, credentials=KEY, tls="off", connect_timeout_s=0.5)
    return Upstream(options)


def replying(*parts: bytes, closes: bool = False) -> Serve:
    async def serve(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for part in parts:
            writer.write(part)
            await writer.drain()
        if closes:
            writer.close()

    return serve


async def post(upstream: Upstream, url: URL, max_bytes: int = 1 << 20) -> bytes:
    answer = await upstream.post(url, b"{}")
    try:
        return await answer.read_whole(max_bytes)
    finally:
        answer.release()


@pytest.mark.parametrize(
    "parts",
    [
        (),
        (b"HTTP/1.1 200 OK\r\ncontent-le",),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n", b"12345"),
        (CHUNKED, b"5\r\n12345\r\n"),
        (CHUNKED, b"5\r\n123"),
    ],
)
def test_an_answer_that_is_cut_short_is_lost(parts):
    async def scenario(server: RawServer, upstream: Upstream, url: URL) -> None:
        with pytest.raises(WorkerLostError, match="before its answer was complete"):
            await post(upstream, url)

    run(replying(*parts, closes=True), scenario)


@pytest.mark.parametrize(
    "parts",
    [
        (b"SSH-2.0-OpenSSH_9.2\r\n",),
        (b"HTTP/1.1 200 OK\r\nno colon\r\n\r\n",),
        (CHUNKED, b"xyz\r\n12345\r\n"),
        (
            b"HTTP/1.1 101 Switching Protocols\r\nupgrade: h2c\r\nconnection: upgrade\r\n\r\n",
            b"PRI",
        ),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ncontent-length: 3\r\n\r\n{}",),
    ],
)
def test_what_is_no_http_is_no_answer(parts):
    async def scenario(server: RawServer, upstream: Upstream, url: URL) -> None:
        with pytest.raises(WorkerLostError):
            await post(upstream, url)
        await until(lambda: server.num_closed == 1)

    run(replying(*parts), scenario)


@pytest.mark.parametrize("start", [b"HTTP/1.1 200 OK\r\nx: ", CHUNKED + b"0\r\nx: "])
def test_a_head_has_a_bound_and_so_have_trailers(start):
    many = [b"a" * 4096] * (2 * MAX_HEAD_BYTES // 4096)

    async def scenario(server: RawServer, upstream: Upstream, url: URL) -> None:
        with pytest.raises(WorkerLostError, match=str(MAX_HEAD_BYTES)):
            await post(upstream, url)

    run(replying(start, *many), scenario)


def test_a_small_answer_has_a_bound():
    size = MAX_SMALL_ANSWER_BYTES + 1
    head = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % size

    async def scenario(server: RawServer, upstream: Upstream, url: URL) -> None:
        with pytest.raises(UpstreamError, match=f"more than {MAX_SMALL_ANSWER_BYTES} bytes"):
            await upstream.get(url, 5.0)
        await until(lambda: server.num_closed == 1)

    run(replying(head, b"x" * size), scenario)


def test_an_answer_without_a_length_ends_with_its_connection():
    async def scenario(server: RawServer, upstream: Upstream, url: URL) -> None:
        assert await post(upstream, url) == b"all of it"
        assert await post(upstream, url) == b"all of it"
        assert server.num_connections == 2

    run(replying(b"HTTP/1.1 200 OK\r\n\r\nall ", b"of it", closes=True), scenario)


def test_connections_are_used_again_and_closed_when_they_are_idle(monkeypatch):
    monkeypatch.setattr(connection_pool, "KEEP_ALIVE_S", 0.2)

    async def scenario(server: RawServer, upstream: Upstream, url: URL) -> None:
        for _ in range(3):
            assert await post(upstream, url) == b"{}"
        assert server.num_connections == 1
        await asyncio.gather(*(post(upstream, url) for _ in range(3)))
        assert server.num_connections == 3
        await until(lambda: server.num_closed == 3)

    run(replying(OK), scenario)


@pytest.mark.parametrize("head", [b"connection: close\r\n", b""])
def test_a_connection_that_was_closed_while_idle_is_not_used(head):
    answer = OK.replace(b"\r\ncontent", b"\r\n" + head + b"content", 1)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(answer)
        await writer.drain()
        await asyncio.sleep(0.05)
        writer.close()

    async def scenario(server: RawServer, upstream: Upstream, url: URL) -> None:
        for _ in range(3):
            assert await post(upstream, url) == b"{}"
            closed = server.num_connections
            await until(lambda closed=closed: server.num_closed == closed)
            await asyncio.sleep(0.01)
        assert server.num_connections == 3

    run(serve, scenario)


@pytest.mark.parametrize("sent", [b"", CHUNKED, CHUNKED + b"2\r\nab\r\n"])
def test_cancelling_closes_the_connection(sent):
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(sent)
        assert await reader.read(1) == b""  # until the client is gone
        writer.close()

    async def scenario(server: RawServer, upstream: Upstream, url: URL) -> None:
        asking = asyncio.create_task(post(upstream, url))
        await until(lambda: server.heads)
        await asyncio.sleep(0.05)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await until(lambda: server.num_closed == 1)

    run(serve, scenario)


def test_a_reader_that_is_slow_stops_its_worker():
    num_written = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_written
        writer.write(CHUNKED)
        for _ in range(600):
            writer.write(b"10000\r\n" + b"x" * 65536 + b"\r\n")
            await writer.drain()
            num_written += 65536
        writer.write(b"0\r\n\r\n")

    async def scenario(server: RawServer, upstream: Upstream, url: URL) -> None:
        answer = await upstream.post(url, b"{}")
        stopped_at = -1
        async with asyncio.timeout(60):
            while num_written != stopped_at:
                stopped_at = num_written
                await asyncio.sleep(0.2)
        assert stopped_at < 600 * 65536
        first = await answer.read()
        assert len(first) < 2 * READ_BUFFER_BYTES
        num_read = len(first)
        while data := await answer.read():
            num_read += len(data)
        assert num_read == 600 * 65536

    run(serve, scenario)


def test_a_large_body_arrives_whole_and_with_the_right_head():
    async def scenario(server: RawServer, upstream: Upstream, url: URL) -> None:
        body = b"y" * (8 << 20)
        answer = await upstream.post(url.with_query(a="b"), body, b"x-own: 1\r\n")
        assert await answer.read_whole(10) == b"{}"
        lines = server.heads[0].split(b"\r\n")
        assert lines[0] == b"POST /v1/completions?a=b HTTP/1.1"
        assert lines[1] == b"host: " + url.authority.encode()
        assert b"x-own: 1" in lines
        assert b"content-length: %d" % len(body) in lines
        assert b"content-type: application/json" in lines
        assert any(line.startswith(b"authorization: Bearer ") for line in lines)

    run(replying(OK), scenario)


def test_where_nothing_listens_the_reason_is_named():
    async def main() -> None:
        with contextlib.closing(bind("127.0.0.1", 0)) as free:
            url = URL(f"http://127.0.0.1:{free.getsockname()[1]}/health")
            with pytest.raises(WorkerUnreachableError, match="refused"):
                await upstream_of(url).get(url, 5.0)
        unknown = URL("http://no-such-host.invalid:1/health")
        with pytest.raises(WorkerUnreachableError, match="no-such-host"):
            await upstream_of(unknown).get(unknown, 5.0)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())


def test_an_answer_that_does_not_come_in_time_is_not_waited_for():
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert await reader.read(1) == b""
        writer.close()

    async def scenario(server: RawServer, upstream: Upstream, url: URL) -> None:
        with pytest.raises(WorkerUnreachableError, match="in time"):
            await upstream.get(url, 0.1)
        await until(lambda: server.num_closed == 1)

    run(serve, scenario)


def test_an_abort_that_is_refused_is_not_taken_for_delivered():
    refused = b'{"error": {"message": "its place was needed", "code": "too_many_connections"}}'
    head = b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: %d\r\n\r\n" % len(refused)

    async def scenario(server: RawServer, upstream: Upstream, url: URL) -> None:
        with pytest.raises(UpstreamError, match=r"503.*too_many_connections: its place was needed"):
            await upstream.abort(url.origin(), TicketId(bytes(16)), "its client left")

    run(replying(head + refused), scenario)


def test_many_aborts_of_one_worker_share_a_few_connections():
    async def scenario(server: RawServer, upstream: Upstream, url: URL) -> None:
        tickets = [TicketId(number.to_bytes(16, "big")) for number in range(100)]
        aborts = (upstream.abort(url.origin(), ticket, "its client left") for ticket in tickets)
        await asyncio.gather(*aborts)
        paths = sorted(head.split()[1].decode() for head in server.heads)
        assert paths == [abort_path(ticket) for ticket in tickets]
        assert server.num_connections == 16

    run(replying(b"HTTP/1.1 204 No Content\r\n\r\n"), scenario)


def test_what_is_known_of_an_origin_is_forgotten_once_no_connection_to_it_is_open(monkeypatch):
    monkeypatch.setattr(connection_pool, "KEEP_ALIVE_S", 0.05)

    async def scenario(server: RawServer, upstream: Upstream, url: URL) -> None:
        origin = url.origin()
        answer = await upstream.post(url, b"{}")
        await answer.read_whole(10)
        assert upstream.num_reads(url) == 1
        upstream.forget_unused(())
        assert upstream.num_reads(url) == 1, "its connection waits for the next request"
        await until(lambda: server.num_closed == 1)
        upstream.forget_unused({origin})
        assert upstream.num_reads(url) == 1
        upstream.forget_unused(())
        assert upstream.num_reads(url) == 0
        await (await upstream.post(url, b"{}")).read_whole(10)
        assert len(server.heads) == 2

    run(replying(OK), scenario)


def test_a_connection_for_which_this_host_lacks_a_descriptor_is_no_fault_of_the_worker() -> None:
    async def scenario(server: RawServer, upstream: Upstream, url: URL) -> None:
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
        try:
            with pytest.raises(WorkerUnreachableError, match="Too many open files") as refused:
                await upstream.post(url, b"{}")
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert refused.value.is_late
        assert not refused.value.is_refused
        assert not server.num_connections

    run(replying(OK), scenario)


def test_of_several_addresses_this_hosts_own_lack_counts_too(monkeypatch):
    def getaddrinfo(host, port, *_, **__):
        addresses = ("127.0.0.1", "127.0.0.2")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (each, 0)) for each in addresses]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)

    async def scenario(server: RawServer, upstream: Upstream, url: URL) -> None:
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
        try:
            with pytest.raises(WorkerUnreachableError) as refused:
                await upstream.post(url.with_host("two.test"), b"{}")
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert refused.value.is_late

    run(replying(OK), scenario)


def test_a_worker_whose_name_hangs_in_the_resolver_delays_no_other_worker(monkeypatch):
    """A lookup cannot be cancelled: it used to keep one of the few threads that all names share."""
    goes_on = threading.Event()

    def getaddrinfo(host, port, *_, **__):
        if host == "hangs.test":
            goes_on.wait(30)
            raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port or 0))]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)

    async def scenario(_: RawServer, upstream: Upstream, url: URL) -> None:
        probes = [upstream.get(url.with_host("hangs.test"), 0.01) for _ in range(40)]
        try:
            for each in await asyncio.gather(*probes, return_exceptions=True):
                assert isinstance(each, WorkerUnreachableError)
            assert await upstream.get(url.with_host("good.test"), 5.0) == (200, b"{}")
        finally:
            goes_on.set()

    # uvloop's lookups, of which two run at once, cannot be patched; asyncio has a few threads, too.
    run(replying(OK), scenario, asyncio.new_event_loop)
