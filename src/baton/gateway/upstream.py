"""HTTP to workers, and the only place that knows aiohttp's exceptions."""

from __future__ import annotations

import asyncio
import io
import os
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Final, TypedDict

import aiohttp
import msgspec
from multidict import CIMultiDict

from baton.auth.certificates import IdentityRole
from baton.errors import UNDECODABLE
from baton.gateway.errors import UpstreamError, WorkerLostError, WorkerUnreachableError
from baton.net.tls import ClusterTls
from baton.protocol.worker_http import ErrorBody, ErrorDetail, abort_path

if TYPE_CHECKING:
    import ssl
    from collections.abc import Generator

    from aiohttp.client_proto import ResponseHandler
    from yarl import URL

    from baton.auth.key import ClusterKey
    from baton.gateway.options import GatewayOptions
    from baton.ids import TicketId

READ_BUFFER_BYTES: Final = 1 << 20
KEEP_ALIVE_S: Final = 3.0
"""Below what workers keep (75 s; vLLM's server and any other uvicorn: 5 s), so that it is we who
close an idle connection: one that they close as it is used costs the request."""

MAX_PLAIN_BODY_BYTES: Final = 1 << 20
"""aiohttp wants a larger body as a file, so that it can yield while writing it."""

MAX_SMALL_ANSWER_BYTES: Final = 1 << 20


class _Proof(TypedDict):
    ssl: ssl.SSLContext
    server_hostname: str


class FinishingConnector(aiohttp.TCPConnector):
    """Never cancels a connection that is being made: it is finished, then closed if not needed.

    uvloop 0.23 keeps the TLS state (120 KB) of each connection that is cancelled in its handshake
    until exit: clients that leave at that moment could fill the memory.
    """

    def __init__(self, connect_timeout_s: float) -> None:
        super().__init__(limit=0, keepalive_timeout=KEEP_ALIVE_S)
        self._connect_timeout_s = connect_timeout_s

    async def _wrap_create_connection(
        self,
        *args: Any,  # noqa: ANN401 - as they are in aiohttp
        **kwargs: Any,  # noqa: ANN401
    ) -> tuple[asyncio.Transport, ResponseHandler]:
        if kwargs.get("ssl"):
            kwargs["ssl_handshake_timeout"] = self._connect_timeout_s
        making = asyncio.ensure_future(super()._wrap_create_connection(*args, **kwargs))
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                return await asyncio.shield(making)
        except BaseException:
            making.add_done_callback(_close_unused)
            raise


def _close_unused(making: asyncio.Future[tuple[asyncio.Transport, ResponseHandler]]) -> None:
    if not making.cancelled() and making.exception() is None:
        transport, _ = making.result()
        transport.abort()


class Upstream:
    """One pool of connections to all workers. Owner: the event loop's thread."""

    def __init__(self, options: GatewayOptions) -> None:
        self._options = options
        self._authorization = "Bearer " + worker_token(options.credentials.key)
        self._tls = ClusterTls(options.credentials)
        self._session: aiohttp.ClientSession | None = None

    async def open(self) -> None:
        """Create the pool; connections are made when they are needed."""
        self._session = aiohttp.ClientSession(
            connector=FinishingConnector(self._options.connect_timeout_s),
            # The connector's own is the shorter one.
            timeout=aiohttp.ClientTimeout(
                total=None, sock_connect=2 * self._options.connect_timeout_s
            ),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            read_bufsize=READ_BUFFER_BYTES,
            skip_auto_headers=("accept", "accept-encoding", "user-agent"),
        )

    async def close(self) -> None:
        """Close every connection."""
        if self._session is not None:
            await self._session.close()

    def headers(self) -> CIMultiDict[str]:
        """What every request to a worker carries; the caller's own copy."""
        return CIMultiDict(authorization=self._authorization)

    async def post(
        self, url: URL, body: bytes, headers: CIMultiDict[str]
    ) -> aiohttp.ClientResponse:
        """Post JSON; returns when the answer's headers are here. No deadline of its own.

        The caller releases or closes the answer. Cancelling closes the connection, which
        cancels the request at the worker.

        Raises:
            WorkerUnreachableError: no connection.
            WorkerLostError: no answer on it.
        """
        headers["content-type"] = "application/json"
        with mapped_errors(url), ExitStack() as on_failure:
            data: bytes | io.BytesIO = body
            if len(body) > MAX_PLAIN_BODY_BYTES:
                data = on_failure.enter_context(io.BytesIO(body))
            response = await self._open_session.post(
                url, data=data, headers=headers, allow_redirects=False, **self._proof
            )
            on_failure.pop_all()
            return response

    async def get(self, url: URL, timeout_s: float) -> tuple[int, bytes]:
        """Fetch a small answer: its status and body.

        Raises:
            WorkerUnreachableError, WorkerLostError: as for `post`, or no answer in time.
            UpstreamError: the answer is not small.
        """
        with mapped_errors(url):
            async with (
                asyncio.timeout(timeout_s),
                self._open_session.get(
                    url, headers=self.headers(), allow_redirects=False, **self._proof
                ) as response,
            ):
                return response.status, await read_answer(response, MAX_SMALL_ANSWER_BYTES)

    async def ask(self, url: URL, body: bytes, timeout_s: float) -> tuple[int, bytes]:
        """Post JSON and fetch a small answer: its status and body.

        Raises:
            UpstreamError: as for `get`.
        """
        with mapped_errors(url):
            async with asyncio.timeout(timeout_s):
                response = await self.post(url, body, self.headers())
                try:
                    return response.status, await read_answer(response, MAX_SMALL_ANSWER_BYTES)
                finally:
                    response.release()

    async def abort(self, base_url: URL, ticket: TicketId, reason: str) -> None:
        """Notify a worker that a handoff is aborted.

        Raises:
            UpstreamError: it could not be notified.
        """
        url = base_url.with_path(abort_path(ticket))
        with mapped_errors(url):
            async with (
                asyncio.timeout(self._options.connect_timeout_s),
                self._open_session.post(
                    url, json={"reason": reason}, headers=self.headers(), **self._proof
                ),
            ):
                pass

    @property
    def _proof(self) -> _Proof:
        """What a connection is made with, and what its other end must be."""
        return {"ssl": self._tls.requesting, "server_hostname": IdentityRole.WORKER.dns_name}

    @property
    def _open_session(self) -> aiohttp.ClientSession:
        if self._session is None:
            raise RuntimeError("Upstream.open was not awaited")
        return self._session


def worker_token(key: ClusterKey) -> str:
    """What proves to a worker that a request comes from this cluster's gateway."""
    return key.sign("http", b"worker").hex()


async def read_answer(response: aiohttp.ClientResponse, max_bytes: int) -> bytes:
    """Read a whole body.

    Raises:
        WorkerLostError: it was cut off.
        UpstreamError: it is longer than `max_bytes`.
    """
    parts: list[bytes] = []
    num_bytes = 0
    with mapped_errors(response.url):
        while part := await response.content.readany():
            parts.append(part)
            num_bytes += len(part)
            if num_bytes > max_bytes:
                response.close()
                raise UpstreamError(f"{response.url.origin()} answered more than {max_bytes} bytes")
    return b"".join(parts)


_error_decoder = msgspec.json.Decoder(ErrorBody)


def read_error(body: bytes) -> ErrorDetail:
    """An OpenAI-shaped error; an empty one if `body` is no such thing."""
    try:
        return _error_decoder.decode(body).error
    except UNDECODABLE:
        return ErrorDetail()


@contextmanager
def mapped_errors(url: URL) -> Generator[None]:
    """Translate what aiohttp raises."""
    try:
        yield
    except aiohttp.ClientSSLError as exc:
        raise WorkerUnreachableError(
            f"{url.origin()} did not prove that it is of this cluster ({exc}): give it the "
            'gateway\'s BATON_CLUSTER_KEY, and the same security.tls (http:// is for "off")'
        ) from exc
    except aiohttp.ClientConnectorError as exc:
        reason = os.strerror(exc.errno) if exc.errno else exc.strerror
        raise WorkerUnreachableError(f"{url.origin()} cannot be reached: {reason}") from exc
    except (TimeoutError, aiohttp.ServerTimeoutError) as exc:
        raise WorkerUnreachableError(f"{url.origin()} did not answer in time") from exc
    except (aiohttp.ClientError, OSError) as exc:
        raise WorkerLostError(
            f"{url.origin()} closed the connection before its answer was complete"
        ) from exc
