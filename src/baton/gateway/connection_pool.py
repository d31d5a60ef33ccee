"""Connections to one worker: kept for the next request, made where none is idle."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import ssl
from typing import TYPE_CHECKING, Final

from baton.auth.certificates import IdentityRole
from baton.gateway.errors import WorkerUnreachableError
from baton.gateway.http_client import Connection, TlsConnection
from baton.net.host_names import merge_errors, name_of

if TYPE_CHECKING:
    from yarl import URL

    from baton.net.host_names import HostName
    from baton.net.tls import ClusterTls

KEEP_ALIVE_S: Final = 3.0
"""Below what workers keep (75 s; vLLM's server and any other uvicorn: 5 s), so that it is we who
close an idle connection: one that they close as it is used costs the request."""

OWN_LACKS: Final = frozenset({
    errno.EMFILE,
    errno.ENFILE,
    errno.ENOBUFS,
    errno.ENOMEM,
    errno.EADDRNOTAVAIL,
})
"""What this host lacks: open files, memory, ports. It is no fault of the worker."""

NOT_PROVED: Final = (
    "it has another cluster key, or an identity of another authority. Compare what `baton key "
    "fingerprint` prints on its host and on this one (with identities: their ca.crt), give it this "
    'gateway\'s key and start it again. security.tls must be the same, too (http:// is for "off")'
)

KEEPALIVE: Final = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
)
"""A worker's kernel answers these probes however busy its process is: a connection on which nothing
arrives ends 4 s after its worker's host is lost."""


class ConnectionPool:
    """Of one worker's `origin`, of which nothing else is used. Owner: the event loop's thread.

    With https, both sides prove by `tls` that they are of this cluster, and the other one that it
    is a worker. What is decrypted goes into `buffer`, which every pool of this loop may share.
    """

    def __init__(
        self, origin: URL, tls: ClusterTls, connect_timeout_s: float, *, buffer: memoryview
    ) -> None:
        self._tls, self._connect_timeout_s = tls, connect_timeout_s
        self._name, self._loop = str(origin), asyncio.get_running_loop()
        self._is_tls = origin.scheme == "https"
        self._host, self._port = origin.host or "", origin.port or 0
        self._host_name = name_of(self._host)
        self._buffer = buffer
        self.version_and_host = b" HTTP/1.1\r\nhost: " + _host_of(origin)
        """Of a request's head, what follows its path."""
        self._idle_since: dict[Connection, float] = {}
        self._open: set[Connection] = set()
        self._num_reads_before = 0
        self._making: set[asyncio.Future[Connection]] = set()
        self._timer: asyncio.TimerHandle | None = None

    def take_idle(self) -> Connection | None:
        """The connection that was used last, if one is idle: others may then go.

        One that was made with an identity before the current one is closed: its worker may trust
        that no longer.
        """
        context = self._tls.requesting if self._is_tls else None
        while self._idle_since:
            connection, _ = self._idle_since.popitem()
            if connection.made_with is not context:
                connection.close()
            elif connection.is_open:
                return connection
        return None

    def is_current(self, connection: Connection) -> bool:
        """Whether a connection was made with the current identity."""
        return connection.made_with is (self._tls.requesting if self._is_tls else None)

    async def connect(self) -> Connection:
        """Make another one.

        A connection that is being made is never cancelled: it is finished, then closed if not
        needed. uvloop 0.23 keeps the TLS state (120 KB) of each that is cancelled in its handshake
        until exit: clients that leave at that moment could fill the memory.

        Raises:
            WorkerUnreachableError: there is no worker of this cluster.
        """
        making = asyncio.ensure_future(self._make())
        self._making.add(making)
        making.add_done_callback(self._making.discard)
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                return await asyncio.shield(making)
        except TimeoutError as exc:
            making.add_done_callback(_close_unused)
            raise WorkerUnreachableError(
                f"{self._name} did not answer in time", is_late=True
            ) from exc
        except asyncio.CancelledError:
            making.add_done_callback(_close_unused)
            raise

    @property
    def is_unused(self) -> bool:
        """Whether no connection is open, or being made."""
        return not self._open and not self._making

    @property
    def num_reads(self) -> int:
        """How many times something was received, on any connection."""
        return self._num_reads_before + sum(connection.num_reads for connection in self._open)

    def close(self) -> None:
        """Close every connection."""
        if self._timer is not None:
            self._timer.cancel()
        for connection in tuple(self._open):
            connection.close()

    async def _make(self) -> Connection:
        """Connect, however long that takes."""
        try:
            if self._host_name is None:
                return await self._connect_to(self._host)
            return await self._connect_by_name(self._host_name)
        except ssl.SSLError as exc:
            raise WorkerUnreachableError(
                f"{self._name} did not prove that it is of this cluster ({exc}): {NOT_PROVED}",
                is_untrusted=not isinstance(exc, ssl.SSLEOFError),  # it may just have ended
            ) from exc
        except OSError as exc:
            raise WorkerUnreachableError(
                f"{self._name} cannot be reached: {_reason(exc)}",
                is_refused=isinstance(exc, ConnectionRefusedError | ConnectionResetError),
                is_late=exc.errno in OWN_LACKS,
            ) from exc

    async def _connect_by_name(self, name: HostName) -> Connection:
        # TLS proves who is there, also at an address that the name had before.
        found, errors = await name.find(self._connect_timeout_s, may_be_old=self._is_tls)
        is_old = bool(errors)
        for address in found:
            try:
                return await self._connect_to(address)
            except OSError as exc:
                if isinstance(exc, ssl.SSLError) and not is_old:
                    raise
                errors.append(exc)
        own = [each for each in errors if each.errno in OWN_LACKS]
        raise own[0] if own else merge_errors(errors)

    async def _connect_to(self, address: str) -> Connection:
        loop, port = self._loop, self._port
        context = self._tls.requesting if self._is_tls else None

        transport: asyncio.Transport
        connection: Connection
        if context is not None:
            transport, connection = await loop.create_connection(
                lambda: TlsConnection(
                    self._name, context, self._keep, self._forget, buffer=self._buffer
                ),
                address,
                port,
                ssl=context,
                server_hostname=IdentityRole.WORKER.dns_name,
                ssl_handshake_timeout=self._connect_timeout_s,
            )
        else:
            transport, connection = await loop.create_connection(
                lambda: Connection(self._name, None, self._keep, self._forget), address, port
            )
        if connection.is_open:
            self._open.add(connection)
            for level, option, value in KEEPALIVE:
                transport.get_extra_info("socket").setsockopt(level, option, value)
        return connection

    def _keep(self, connection: Connection) -> None:
        loop = self._loop
        self._idle_since[connection] = loop.time()
        if self._timer is None:
            self._timer = loop.call_later(KEEP_ALIVE_S, self._close_idle)

    def _close_idle(self) -> None:
        """Close what has been idle for long; look again when the next one may be."""
        loop = self._loop
        now = loop.time()
        for connection, since in tuple(self._idle_since.items()):
            if now - since < KEEP_ALIVE_S:
                self._timer = loop.call_at(since + KEEP_ALIVE_S, self._close_idle)
                return
            del self._idle_since[connection]
            connection.close()
        self._timer = None

    def _forget(self, connection: Connection) -> None:
        if connection in self._open:
            self._open.remove(connection)
            self._num_reads_before += connection.num_reads
        self._idle_since.pop(connection, None)


def _close_unused(making: asyncio.Future[Connection]) -> None:
    if not making.cancelled() and making.exception() is None:
        making.result().close()


def _host_of(origin: URL) -> bytes:
    default = {"http": 80, "https": 443}.get(origin.scheme)
    authority = origin.host_subcomponent if origin.port == default else origin.authority
    return (authority or "").encode("ascii")


def _reason(error: OSError) -> str:
    if error.errno and not isinstance(error, socket.gaierror):
        return os.strerror(error.errno)
    return error.strerror or str(error)
