"""HTTP between gateway and workers: first of all each side proves that it holds the key."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import io
import socket
import ssl
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
import uvicorn
import uvloop
from yarl import URL

from baton.auth.certificates import IdentityRole
from baton.auth.credentials import Credentials
from baton.auth.key import ClusterKey
from baton.cli.main import run
from baton.clock import MachineClock
from baton.gateway.errors import WorkerUnreachableError
from baton.gateway.options import GatewayOptions, WorkerAddress
from baton.gateway.process import open_gateway
from baton.gateway.upstream import Upstream
from baton.net.cluster_client import ClusterClient, NoAnswerError
from baton.net.http_limits import Connections, HttpLimits, Refusal
from baton.net.http_server import bind, make_server_config, start_listening, url_of
from baton.net.tls import ClusterTls
from baton.protocol.worker_http import Role
from baton.testing.store_syscalls import others_frozen

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator
    from pathlib import Path

KEY, OTHER_KEY = Credentials.of(ClusterKey(b"k" * 32)), Credentials.of(ClusterKey(b"o" * 32))
LIMITS = HttpLimits(head_timeout_s=0.5, max_connections=8, max_connections_per_address=8)


def holder_of(key: Credentials) -> ssl.SSLContext:
    return ClusterTls(key).dialing


def anonymous() -> ssl.SSLContext:
    """Trusts everybody and shows nothing."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


class Server:
    """Answers each request with its body."""

    def __init__(self, key: Credentials) -> None:
        self.refused: list[Refusal] = []
        self.served: list[bytes] = []
        tls = ClusterTls(key)
        self.connections = Connections(LIMITS, MachineClock(), self.refused.append, tls)
        self.url, self.port = "", 0

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncGenerator[Server]:
        with contextlib.closing(bind("127.0.0.1", 0)) as listener:
            start_listening(listener)
            self.url = url_of(listener, "127.0.0.1", is_tls=True)
            self.port = listener.getsockname()[1]
            server = uvicorn.Server(
                make_server_config(self._serve, self.connections, drain_timeout_s=1)
            )
            running = asyncio.create_task(server.serve(sockets=[listener]))
            try:
                yield self
            finally:
                server.should_exit = True
                await running

    async def _serve(self, scope: Any, receive: Any, send: Any) -> None:
        del scope
        body = b""
        while (message := await receive()).get("more_body"):
            body += message["body"]
        body += message["body"]
        self.served.append(body)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": body})

    async def echo(self, body: bytes, context: ssl.SSLContext) -> bytes:
        connector = aiohttp.TCPConnector(ssl=context)
        async with (
            aiohttp.ClientSession(connector=connector) as session,
            session.post(self.url, data=io.BytesIO(body)) as response,
        ):
            return await response.read()

    async def until_left(self) -> None:
        async with asyncio.timeout(30):
            while self.connections.num_open:
                await asyncio.sleep(0.01)


def test_who_holds_the_key_is_served() -> None:
    async def main() -> None:
        async with Server(KEY).running() as server:
            bodies = [bytes([n]) * (1 + n * 100_000) for n in range(30)]
            ours = holder_of(KEY)
            # One after another: at most eight have a place at once.
            assert [await server.echo(body, ours) for body in bodies] == bodies
            await server.until_left()
            assert not server.refused

    asyncio.run(main())


@pytest.mark.parametrize("context", [anonymous(), holder_of(OTHER_KEY)])
def test_who_does_not_is_not_served(context: ssl.SSLContext) -> None:
    async def main() -> None:
        async with Server(KEY).running() as server:
            with pytest.raises(aiohttp.ClientError):
                await server.echo(b"let me in", context)
            assert await server.echo(b"ours", holder_of(KEY)) == b"ours"
            assert server.served == [b"ours"]
            await server.until_left()

    asyncio.run(main())


@pytest.mark.parametrize("sent", [b"GET / HTTP/1.1\r\nhost: x\r\n\r\n", b"\0" * 50, b"\x16\x03"])
def test_other_protocols_and_half_a_handshake_end_in_time(sent: bytes) -> None:
    async def main() -> None:
        async with Server(KEY).running() as server:
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(sent)
            async with asyncio.timeout(30):
                answer = await reader.read()
            assert b"HTTP" not in answer or answer.startswith(b"HTTP/1.1 400 ")
            assert server.refused in ([Refusal.NOT_TRUSTED], [Refusal.HEAD_TIMEOUT])
            writer.close()
            await server.until_left()
            assert not server.served

    asyncio.run(main())


def test_connections_without_a_handshake_take_nobodys_place() -> None:
    async def main() -> None:
        async with Server(KEY).running() as server:
            silent = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(20)]
            assert await server.echo(b"ours", holder_of(KEY)) == b"ours"
            assert Refusal.TOO_MANY_CONNECTIONS in server.refused
            for _, writer in silent:
                writer.close()
            await server.until_left()

    asyncio.run(main())


def test_a_client_that_ends_its_side_leaves_nothing_that_runs() -> None:
    async def main() -> None:
        async with Server(KEY).running() as server:
            for _ in range(3):
                _, writer = await asyncio.open_connection(
                    "127.0.0.1", server.port, ssl=holder_of(KEY)
                )
                writer.close()  # close_notify, then the end of the stream
            await server.until_left()
            assert await server.echo(b"ours", holder_of(KEY)) == b"ours"

    asyncio.run(main())


async def probe(url: str, until: list[Any]) -> str:
    """What a gateway with that worker says of it, once `until` has something."""
    worker = WorkerAddress(url, Role.BOTH)
    options = GatewayOptions(
        addresses=(worker,), credentials=KEY, probe_interval_s=0.05, probe_timeout_s=1.0
    )
    async with open_gateway(options, MachineClock()) as app, asyncio.timeout(30):
        while not until:
            await asyncio.sleep(0.02)
        await asyncio.sleep(0.3)  # some more probes
        return app._ready.why_not() or ""


def test_an_impostor_sees_nothing_of_the_gateways(caplog: pytest.LogCaptureFixture) -> None:
    """Whoever took a worker's port, with a certificate of another cluster's."""

    async def main() -> None:
        impostor = Server(OTHER_KEY)
        seen: list[int] = []

        async with impostor.running():
            admit = impostor.connections.admit

            def count(connection: Any) -> bool:
                seen.append(1)
                return admit(connection)

            impostor.connections.admit = count  # type: ignore[method-assign]
            state = await probe(impostor.url, seen)
        assert not impostor.served
        assert "did not prove that it is of this cluster" in state
        (logged,) = [each.getMessage() for each in caplog.records if "is not used" in each.message]
        assert logged.startswith(f"the worker at {impostor.url} is not used: ")
        assert "`baton key fingerprint`" in logged

    asyncio.run(main())


def test_an_impostor_without_tls_sees_a_greeting_and_no_more() -> None:
    async def main() -> None:
        received: list[bytes] = []

        async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            received.append(await reader.read(65_536))
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")
            received.append(await reader.read(65_536))
            writer.close()

        server = await asyncio.start_server(take, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            state = await probe(f"https://127.0.0.1:{port}", received)
        everything = b"".join(received)
        assert everything.startswith(b"\x16\x03")
        assert b"HTTP" not in everything
        assert b"earer" not in everything
        assert "did not prove that it is of this cluster" in state

    asyncio.run(main())


def test_files_for_programs_that_are_not_batons(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `vllm serve --ssl-certfile … --ssl-cert-reqs 2` gives them to uvicorn."""
    monkeypatch.setenv("BATON_CLUSTER_KEY", KEY.key.secret.hex())
    directory = tmp_path / "identity"
    assert run(["key", "issue", str(directory), "--role", "worker", "--name", "w"]) == 0
    certificate, key, authority = (directory / name for name in ("tls.crt", "tls.key", "ca.crt"))
    assert {path.stat().st_mode & 0o777 for path in (certificate, key, authority)} == {0o600}

    async def main() -> None:
        server = Server(KEY)
        with contextlib.closing(bind("127.0.0.1", 0)) as listener:
            start_listening(listener)
            server.url = url_of(listener, "127.0.0.1", is_tls=True)
            config = uvicorn.Config(
                server._serve,
                interface="asgi3",
                lifespan="off",
                log_config=None,
                ssl_certfile=certificate,
                ssl_keyfile=key,
                ssl_ca_certs=str(authority),
                ssl_cert_reqs=ssl.CERT_REQUIRED,
            )
            running = uvicorn.Server(config)
            task = asyncio.create_task(running.serve(sockets=[listener]))
            assert await server.echo(b"ours", holder_of(KEY)) == b"ours"
            for context in (anonymous(), holder_of(OTHER_KEY)):
                with pytest.raises(aiohttp.ClientError):
                    await server.echo(b"let me in", context)
            assert server.served == [b"ours"]
            running.should_exit = True
            await task

    asyncio.run(main())


def test_connections_that_are_given_up_in_their_handshake_leave_nothing() -> None:
    """As clients that leave do it, and workers that hang. uvloop kept 120 KB of each."""

    def count_tls_connections() -> int:
        gc.collect()
        return sum(type(each).__name__ == "SSLProtocol" for each in gc.get_objects())

    async def main() -> None:
        with contextlib.closing(bind("127.0.0.1", 0)) as silent:
            start_listening(silent)
            url = URL(url_of(silent, "127.0.0.1", is_tls=True)) / "v1/completions"
            workers = (WorkerAddress(str(url.origin()), Role.BOTH),)
            options = GatewayOptions(addresses=workers, credentials=KEY, connect_timeout_s=0.5)
            upstream = Upstream(options)
            try:
                most = 0
                for num_turns in (*range(40), None):
                    asking = asyncio.create_task(upstream.post(url, b"{}"))
                    for _ in range(num_turns or 0):
                        await asyncio.sleep(0)
                    if num_turns is None:
                        with pytest.raises(WorkerUnreachableError):
                            await asking
                    asking.cancel()
                    most = max(most, count_tls_connections())
                assert most > 0, "none was in its handshake"
                async with asyncio.timeout(30):
                    while count_tls_connections():
                        await asyncio.sleep(0.1)
            finally:
                upstream.close()

    with others_frozen(), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())


def test_a_worker_is_reached_at_its_last_address_while_its_name_is_not_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """There, a port that refuses does not prove that the worker has ended: it may have moved."""
    found = ["127.0.0.1"]

    def getaddrinfo(_: object, port: int | None, *__: object, **___: object) -> list[Any]:
        if not found:
            raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (each, port or 0)) for each in found]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)

    async def main() -> None:
        async with Server(KEY).running() as server:
            url = URL(server.url).with_host("worker-at-its-last-address.test")
            client = ClusterClient(
                str(url), IdentityRole.WORKER, ClusterTls(KEY), max_answer_bytes=100
            )
            workers = (WorkerAddress(str(url), Role.BOTH),)
            upstream = Upstream(GatewayOptions(addresses=workers, credentials=KEY))
            for _ in range(2):
                assert await upstream.ask(url / "x", b"{}", 5.0) == (200, b"{}")
                with pytest.raises(NoAnswerError, match="200 OK"):  # it is in chunks
                    await client.post("/x", b"{}", 5.0)
                upstream.close()
                client.close()
                found.clear()
            await server.until_left()
        with pytest.raises(WorkerUnreachableError, match="Temporary failure") as unreachable:
            await upstream.ask(url / "x", b"{}", 5.0)
        with pytest.raises(NoAnswerError, match="Temporary failure") as unanswered:
            await client.post("/x", b"{}", 5.0)
        assert not unreachable.value.is_refused
        assert not unanswered.value.is_refused

    asyncio.run(main())
