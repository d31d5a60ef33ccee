"""HTTP to workers: what every request to them carries, and small answers in time."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING, Final

import msgspec

from baton.errors import UNDECODABLE
from baton.gateway.connection_pool import ConnectionPool
from baton.gateway.errors import UpstreamError, WorkerUnreachableError
from baton.gateway.multiplexed_streams import WorkerMultiplexes
from baton.net.tls import ClusterTls
from baton.protocol.worker_http import (
    LEAVE_MULTIPLEX_PATH,
    MULTIPLEX_PATH,
    ErrorBody,
    ErrorDetail,
    abort_path,
)

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Collection

    from yarl import URL

    from baton.auth.key import ClusterKey
    from baton.gateway.http_client import Answer
    from baton.gateway.options import GatewayOptions
    from baton.ids import TicketId

MAX_SMALL_ANSWER_BYTES: Final = 1 << 20
BUFFER_BYTES: Final = 64 << 10
"""Of what TLS decrypts at a time: some of its records, which have 16 KiB at most."""

MOST_ROUTES: Final = 4096
MOST_ABORTS: Final = 16
"""To one origin at once, over connections that the next ones use again. Many handoffs may end
together: a connection for each would cost a handshake each, and more than their worker admits."""
JSON_AND_LENGTH: Final = b"content-type: application/json\r\ncontent-length: "


@dataclass(frozen=True, slots=True)
class PostRoute:
    """Where a URL's requests go, and how their heads begin: up to the body's length."""

    pool: ConnectionPool
    head: bytes
    multiplexes: WorkerMultiplexes

    def write_head(self, headers: bytes, body: bytes) -> bytes:
        """Of one request; `headers` are lines that each end with CR LF."""
        return b"%b%d\r\n%b\r\n" % (self.head, len(body), headers)


class Upstream:
    """Connections to all workers. Owner: the event loop's thread."""

    def __init__(self, options: GatewayOptions) -> None:
        self._connect_timeout_s = options.connect_timeout_s
        authorization = f"Bearer {worker_token(options.credentials.key)}".encode()
        self._common = b"\r\nauthorization: " + authorization + b"\r\n"
        self._tls = ClusterTls(options.credentials)
        self._buffer = memoryview(bytearray(BUFFER_BYTES))
        self._pools: dict[URL, ConnectionPool] = {}
        self._post_routes: dict[URL, PostRoute] = {}
        self._multiplexes: dict[ConnectionPool, WorkerMultiplexes] = {}
        self._aborts_of: dict[URL, asyncio.Semaphore] = {}

    def close(self) -> None:
        """Close every connection."""
        for pool in self._pools.values():
            pool.close()

    async def post(
        self, url: URL, body: bytes, headers: bytes = b"", *, multiplexes: bool = False
    ) -> Answer:
        """Post JSON; returns when the answer's headers are here. No deadline of its own.

        `headers` are lines that each end with CR LF. The caller releases the answer. Cancelling
        closes the connection, which cancels the request at the worker. `multiplexes`: a stream, of
        a worker that can send it together with others.

        Raises:
            WorkerUnreachableError: no connection.
            WorkerLostError: no answer on it.
        """
        route = self._post_route(url)
        connection = route.pool.take_idle() or await route.pool.connect()
        stream = route.multiplexes.new_stream() if multiplexes else None
        if stream is None:
            return await _answered(connection.send(route.write_head(headers, body), body))
        answer = connection.send(route.write_head(headers + stream.header, body), body)
        answer.expect_multiplexed(stream)
        return await _answered(answer)

    def try_post(self, url: URL, body: bytes, headers: bytes) -> Answer | None:
        """Post JSON on a connection that is idle; None where there is none.

        Returns at once; the caller releases the answer.
        """
        route = self._post_route(url)
        connection = route.pool.take_idle()
        return (
            None if connection is None else connection.send(route.write_head(headers, body), body)
        )

    async def get(
        self, url: URL, timeout_s: float, max_bytes: int = MAX_SMALL_ANSWER_BYTES
    ) -> tuple[int, bytes]:
        """Fetch an answer of bounded size: its status and body.

        Raises:
            WorkerUnreachableError, WorkerLostError: as for `post`, or no answer in time.
            UpstreamError: the answer is longer.
        """
        async with _answered_within(timeout_s, url):
            pool = self._pool_of(url)
            head = self._begin_head(pool, url, b"GET ") + b"\r\n"
            connection = pool.take_idle() or await pool.connect()
            return await _read_whole(await _answered(connection.send(head)), max_bytes)

    async def ask(self, url: URL, body: bytes, timeout_s: float) -> tuple[int, bytes]:
        """Post JSON and fetch a small answer: its status and body.

        Raises:
            UpstreamError: as for `get`.
        """
        async with _answered_within(timeout_s, url):
            return await _read_whole(await self.post(url, body), MAX_SMALL_ANSWER_BYTES)

    async def abort(self, base_url: URL, ticket: TicketId, reason: str) -> None:
        """Notify a worker that a handoff is aborted.

        Raises:
            UpstreamError: it could not be notified.
        """
        origin, url = base_url.origin(), base_url.with_path(abort_path(ticket))
        turns = self._aborts_of.setdefault(origin, asyncio.Semaphore(MOST_ABORTS))
        body = msgspec.json.encode({"reason": reason})
        async with _answered_within(self._connect_timeout_s, url), turns:
            status, reply = await _read_whole(await self.post(url, body), MAX_SMALL_ANSWER_BYTES)
        if status != HTTPStatus.NO_CONTENT:
            raise UpstreamError(f"{origin} answered {status} ({read_error(reply)})")

    def forget_unused(self, origins: Collection[URL]) -> None:
        """Forget all but these origins, once no connection to them is open."""
        dropped = {
            origin
            for origin, pool in self._pools.items()
            if pool.is_unused and origin not in origins
        }
        if dropped:
            self._pools = {at: pool for at, pool in self._pools.items() if at not in dropped}
            self._multiplexes = {p: self._multiplexes[p] for p in self._pools.values()}
            for origin in dropped:
                self._aborts_of.pop(origin, None)
            self._post_routes = {
                url: route
                for url, route in self._post_routes.items()
                if url.origin() not in dropped
            }

    def num_reads(self, url: URL) -> int:
        """How many times something was received from a worker: whoever sends is alive."""
        return self._pool_of(url).num_reads

    def _begin_head(self, pool: ConnectionPool, url: URL, method: bytes) -> bytes:
        path = url.raw_path_qs.encode("ascii")
        return b"".join((method, path, pool.version_and_host, self._common))

    def _post_route(self, url: URL) -> PostRoute:
        route = self._post_routes.get(url)
        if route is None:
            if len(self._post_routes) >= MOST_ROUTES:  # a ticket's paths are asked for once
                self._post_routes.clear()
            pool = self._pool_of(url)
            head = self._begin_head(pool, url, b"POST ") + JSON_AND_LENGTH
            route = PostRoute(pool, head, self._multiplexes[pool])
            self._post_routes[url] = route
        return route

    def _pool_of(self, url: URL) -> ConnectionPool:
        origin = url.origin()
        pool = self._pools.get(origin)
        if pool is None:
            pool = self._pools[origin] = ConnectionPool(
                origin, self._tls, self._connect_timeout_s, buffer=self._buffer
            )
            self._multiplexes[pool] = self._multiplexes_of(origin, pool)
        return pool

    def _multiplexes_of(self, origin: URL, pool: ConnectionPool) -> WorkerMultiplexes:
        ask = self._begin_head(pool, origin.with_path(MULTIPLEX_PATH), b"POST ") + JSON_AND_LENGTH
        leave = partial(self.ask, origin.with_path(LEAVE_MULTIPLEX_PATH))
        return WorkerMultiplexes(
            pool.connect,
            lambda connection: connection.send(ask + b"0\r\n\r\n"),
            lambda stream_ref: leave(stream_ref, self._connect_timeout_s),
            pool.is_current,
        )


def worker_token(key: ClusterKey) -> str:
    """What proves to a worker that a request comes from this cluster's gateway."""
    return key.sign("http", b"worker").hex()


async def _answered(answer: Answer) -> Answer:
    """The answer, once its head is here."""
    try:
        await answer.wait_for_head()
    except BaseException:
        answer.release()
        raise
    return answer


async def _read_whole(answer: Answer, max_bytes: int) -> tuple[int, bytes]:
    try:
        return answer.status, await answer.read_whole(max_bytes)
    finally:
        answer.release()


@asynccontextmanager
async def _answered_within(timeout_s: float, url: URL) -> AsyncGenerator[None]:
    try:
        async with asyncio.timeout(timeout_s):
            yield
    except TimeoutError as exc:
        raise WorkerUnreachableError(
            f"{url.origin()} did not answer in time", is_late=True
        ) from exc


_error_decoder = msgspec.json.Decoder(ErrorBody)


def read_error(body: bytes) -> ErrorDetail:
    """An OpenAI-shaped error; an empty one if `body` is no such thing."""
    try:
        return _error_decoder.decode(body).error
    except UNDECODABLE:
        return ErrorDetail()
