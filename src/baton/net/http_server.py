"""An HTTP server of Baton's: its socket, and bounds on what clients may hold of it.

uvicorn has no bound on a request's head, on how long its head or body takes, or on connections.
Here a place that a new connection needs is taken from the one that has waited longest without a
whole request, first from its own address; what is refused is answered in OpenAI's form, counted
and logged.
"""

from __future__ import annotations

import errno
import logging
import resource
import socket
import ssl
from collections import Counter
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from http import HTTPStatus
from itertools import chain
from typing import TYPE_CHECKING, Final, cast
from urllib.parse import unquote

import msgspec
import uvicorn
from prometheus_client import Counter as PrometheusCounter
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.protocols.utils import get_remote_addr

from baton.errors import AuthenticationError, ConfigError
from baton.net.tls import TlsTransport
from baton.protocol.worker_http import ErrorBody, ErrorDetail
from baton.telemetry.log_limit import LimitedLog

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from prometheus_client import CollectorRegistry
    from starlette.types import ASGIApp
    from uvicorn.protocols.http.httptools_impl import RequestResponseCycle
    from uvicorn.server import ServerState

    from baton.clock import Clock
    from baton.net.tls import HttpTls

BACKLOG: Final = 2048
KEEP_ALIVE_S: Final = 75
DESCRIPTORS_PER_CONNECTION: Final = 3
"""A client's, and one to each of two workers."""
RESERVED_DESCRIPTORS: Final = 128
HEADER_OVERHEAD_BYTES: Final = 4
UNKNOWN_ADDRESS: Final = "unknown"
NO_TLS: Final = "this port speaks TLS: write https:// in place of http://"

log = logging.getLogger(__name__)


class Refusal(StrEnum):
    """Why the server closed a connection that was not at its end."""

    HEAD_TOO_LARGE = "head_too_large"
    HEAD_TIMEOUT = "head_timeout"
    BODY_TIMEOUT = "body_timeout"
    TOO_MANY_CONNECTIONS = "too_many_connections"
    MALFORMED = "malformed"
    NOT_TRUSTED = "not_trusted"
    NOT_ALLOWED = "not_allowed"


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpLimits:
    """What clients may hold. Durations in seconds.

    `min_body_bytes` of a body must come in each `body_window_s`, as long as it is awaited.
    """

    max_head_bytes: int = 64 * 1024
    head_timeout_s: float = 10.0
    body_window_s: float = 10.0
    min_body_bytes: int = 64 * 1024
    max_connections: int = 4096
    max_connections_per_address: int = 1024


WORKER_LIMITS: Final = HttpLimits(max_connections_per_address=4096)
"""One gateway may be all the clients that a worker has."""


def allow_descriptors(limits: HttpLimits) -> HttpLimits:
    """Raise this process's limit on open files; `limits` with no more connections than then fit.

    A process that cannot open another file neither accepts nor reaches a worker, and the event loop
    closes new connections without a word.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = limits.max_connections * DESCRIPTORS_PER_CONNECTION + RESERVED_DESCRIPTORS
    if 0 <= soft < wanted:  # RLIM_INFINITY is -1
        soft = wanted if hard < 0 else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if not 0 <= soft < wanted:
        return limits
    fitting = max(1, (soft - RESERVED_DESCRIPTORS) // DESCRIPTORS_PER_CONNECTION)
    log.warning(
        "at most %d connections at once, not %d: this process may open %d files; raise ulimit -n",
        *(fitting, limits.max_connections, soft),
    )
    return replace(limits, max_connections=fitting)


class Connections:
    """The connections of one server. Owner: its event loop's thread.

    With `tls`, clients prove who they are before anything of theirs is read.
    """

    def __init__(
        self,
        limits: HttpLimits,
        clock: Clock,
        on_refused: Callable[[Refusal], None],
        tls: HttpTls | None = None,
    ) -> None:
        self.limits, self.tls = limits, tls
        self._log, self._on_refused = LimitedLog(log, clock), on_refused
        # The longest wait first. One that was served before is likely to be an honest client's.
        self._new: dict[BoundedHttpProtocol, None] = {}
        self._idle: dict[BoundedHttpProtocol, None] = {}
        self._num_of: Counter[str] = Counter()

    @property
    def num_open(self) -> int:
        """All of them."""
        return self._num_of.total()

    def admit(self, connection: BoundedHttpProtocol) -> bool:
        """Count a new connection; whether there is a place for it, perhaps another's."""
        address, limits = connection.address, self.limits
        waiting = chain(self._new, self._idle)
        is_own_full = self._num_of[address] >= limits.max_connections_per_address
        is_full = is_own_full or self.num_open >= limits.max_connections
        self._num_of[address] += 1
        if not is_full:
            return True
        victim = next(
            (other for other in waiting if not is_own_full or other.address == address), None
        )
        if victim is None:
            return False
        victim.refuse(Refusal.TOO_MANY_CONNECTIONS, "its place was needed; it had no request")
        return True

    def wait(self, connection: BoundedHttpProtocol) -> None:
        """A connection awaits a request from now on."""
        (self._idle if connection.was_served else self._new)[connection] = None

    def serve(self, connection: BoundedHttpProtocol) -> None:
        """A connection has a whole head."""
        self._new.pop(connection, None)
        self._idle.pop(connection, None)

    def leave(self, connection: BoundedHttpProtocol) -> None:
        """A connection that was counted is over."""
        self.serve(connection)
        self._num_of[connection.address] -= 1
        if self._num_of[connection.address] <= 0:
            del self._num_of[connection.address]

    def report(self, refusal: Refusal, address: str, reason: str) -> None:
        """A connection was refused."""
        self._on_refused(refusal)
        self._log.warning(refusal, f"closed a connection from {address}: {reason}")


class BoundedHttpProtocol(HttpToolsProtocol):
    """One connection of a client, with the bounds of `Connections`."""

    def __init__(
        self,
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, object],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        table: Connections,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._table, self._limits = table, table.limits
        self.address = UNKNOWN_ADDRESS
        self.was_served = False
        self._timer: asyncio.TimerHandle | None = None
        self._num_head_bytes = 0
        self._num_body_bytes = 0
        self._is_in_head = False
        self._refusal: tuple[Refusal, str] | None = None
        self._tls: TlsTransport | None = None

    # The connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """See `asyncio.Protocol`."""
        peer = get_remote_addr(transport)
        self.address = peer[0] if peer else UNKNOWN_ADDRESS
        if self._table.tls is None:
            super().connection_made(transport)
        else:
            self.transport = self._tls = TlsTransport(transport, self._table.tls.listening)
        if self._table.admit(self):
            self._await_head()
        else:
            self.refuse(Refusal.TOO_MANY_CONNECTIONS, "no connection waits that could be closed")

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        self._stop_timer()
        self._table.leave(self)
        if self._tls is None or self._tls.is_established:
            super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        if self.transport.is_closing():
            return
        if self._tls is None:
            self._receive(data)
            return
        was_established = self._tls.is_established
        try:
            parts = self._tls.decrypt(data)
        except ssl.SSLError as exc:
            if exc.reason == "HTTP_REQUEST":
                self._tls.send_plain(_answer(Refusal.MALFORMED, NO_TLS))
            self.refuse(Refusal.NOT_TRUSTED, f"its TLS handshake failed: {exc}")
            return
        if self._tls.is_established and not was_established:
            super().connection_made(self._tls)
        for part in parts:
            self._receive(part)

    def _receive(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if self._timer is None and not self._is_answering:
            self._await_head()
        super().data_received(data)
        if self._is_in_head:
            self._num_head_bytes += len(data)
            if self._num_head_bytes > self._limits.max_head_bytes:
                self.refuse(Refusal.HEAD_TOO_LARGE, self._head_bound)

    def refuse(self, refusal: Refusal, reason: str) -> None:
        """Close the connection, with an answer where none has begun."""
        if self.transport.is_closing():
            return
        self._stop_timer()
        self._table.report(refusal, self.address, reason)
        if self._tls is not None and not self._tls.is_established:
            self.transport.close()
            return
        cycle = cast("RequestResponseCycle | None", self.cycle)  # None before the first request
        if not self._is_answering:
            can_answer = refusal is not Refusal.BODY_TIMEOUT  # of a request that was answered
        else:
            can_answer = cycle is not None and not cycle.response_started
        if can_answer:
            self.transport.write(_answer(refusal, reason))
        self.transport.close()
        if cycle is not None and not cycle.response_complete:
            cycle.disconnected = True
            cycle.message_event.set()

    def send_400_response(self, msg: str) -> None:
        """See `HttpToolsProtocol`: what it could not parse, or a callback of this class refused."""
        refusal, reason = self._refusal or (Refusal.MALFORMED, msg)
        self.refuse(refusal, reason)

    # The parser

    def on_message_begin(self) -> None:
        """See `HttpToolsProtocol`."""
        super().on_message_begin()
        self._is_in_head = True
        self._num_head_bytes = 0

    def on_url(self, url: bytes) -> None:
        """See `HttpToolsProtocol`."""
        self._count_head(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """See `HttpToolsProtocol`."""
        self._count_head(len(name) + len(value) + HEADER_OVERHEAD_BYTES)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """See `HttpToolsProtocol`."""
        self._is_in_head = False
        if self._tls is not None and self._table.tls is not None:
            path = unquote(self.url.partition(b"?")[0].decode("ascii", "replace"))
            method = self.parser.get_method().decode("ascii")
            try:
                self._table.tls.check_request(self._tls.peer_certificate, method, path)
            except AuthenticationError as exc:
                self._refusal = Refusal.NOT_ALLOWED, str(exc)
                raise ValueError(exc) from exc  # ends the parser; see `send_400_response`
        self._table.serve(self)
        self._stop_timer()
        super().on_headers_complete()
        self._num_body_bytes = 0
        self._timer = self.loop.call_later(self._limits.body_window_s, self._check_body, 0)

    def on_body(self, body: bytes) -> None:
        """See `HttpToolsProtocol`."""
        self._num_body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        """See `HttpToolsProtocol`."""
        self._stop_timer()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """See `HttpToolsProtocol`."""
        super().on_response_complete()
        self.was_served = True
        if not self.transport.is_closing() and not self._is_answering:
            self._table.wait(self)
            if self._is_in_head:
                self._await_head()

    # Within

    @property
    def _is_answering(self) -> bool:
        cycle = cast("RequestResponseCycle | None", self.cycle)
        return cycle is not None and not cycle.response_complete

    def _await_head(self) -> None:
        self._table.wait(self)
        self._stop_timer()
        timeout_s = self._limits.head_timeout_s
        self._timer = self.loop.call_later(timeout_s, self._end_waiting)

    def _end_waiting(self) -> None:
        limit_s = self._limits.head_timeout_s
        self.refuse(Refusal.HEAD_TIMEOUT, f"no whole request head within {limit_s:g} s")

    def _check_body(self, num_before: int) -> None:
        limits, num_bytes = self._limits, self._num_body_bytes
        if not self.flow.read_paused and num_bytes - num_before < limits.min_body_bytes:
            self.refuse(
                Refusal.BODY_TIMEOUT,
                f"{num_bytes - num_before} bytes of a body within {limits.body_window_s:g} s, "
                f"at least {limits.min_body_bytes} must come",
            )
            return
        self._timer = self.loop.call_later(limits.body_window_s, self._check_body, num_bytes)

    def _count_head(self, num_bytes: int) -> None:
        self._num_head_bytes += num_bytes
        if self._num_head_bytes > self._limits.max_head_bytes:
            self._refusal = Refusal.HEAD_TOO_LARGE, self._head_bound
            raise ValueError(self._head_bound)  # ends the parser; see `send_400_response`

    @property
    def _head_bound(self) -> str:
        return f"the request's head has more than {self._limits.max_head_bytes} bytes"

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


_STATUSES: Final = {
    Refusal.HEAD_TOO_LARGE: HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
    Refusal.HEAD_TIMEOUT: HTTPStatus.REQUEST_TIMEOUT,
    Refusal.BODY_TIMEOUT: HTTPStatus.REQUEST_TIMEOUT,
    Refusal.TOO_MANY_CONNECTIONS: HTTPStatus.SERVICE_UNAVAILABLE,
    Refusal.MALFORMED: HTTPStatus.BAD_REQUEST,
    Refusal.NOT_TRUSTED: HTTPStatus.UNAUTHORIZED,
    Refusal.NOT_ALLOWED: HTTPStatus.FORBIDDEN,
}


def _answer(refusal: Refusal, reason: str) -> bytes:
    status = _STATUSES[refusal]
    is_ours = refusal is Refusal.TOO_MANY_CONNECTIONS
    kind = "overloaded_error" if is_ours else "invalid_request_error"
    body = msgspec.json.encode(ErrorBody(ErrorDetail(reason, kind, code=refusal)))
    retry = "retry-after: 1\r\n" if is_ours else ""
    head = (
        f"HTTP/1.1 {status.value} {status.phrase}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\n{retry}connection: close\r\n\r\n"
    )
    return head.encode() + body


def make_server_config(
    app: ASGIApp, connections: Connections, *, drain_timeout_s: int
) -> uvicorn.Config:
    """Uvicorn's settings for one of Baton's servers; it runs in whatever loop there is."""
    return uvicorn.Config(
        app,
        http=bounded_protocol(connections),
        ws="none",
        lifespan="off",
        interface="asgi3",
        access_log=False,
        log_config=None,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=drain_timeout_s,
    )


def count_refusals(registry: CollectorRegistry, prefix: str) -> Callable[[Refusal], None]:
    """For `Connections`: counts by reason."""
    counter = PrometheusCounter(
        f"{prefix}_refused_connections",
        "Connections that were closed for what they held, or for want of a place.",
        ("reason",),
        registry=registry,
    )
    children = {refusal: counter.labels(refusal) for refusal in Refusal}
    return lambda refusal: children[refusal].inc()


def bounded_protocol(connections: Connections) -> type[asyncio.Protocol]:
    """For `uvicorn.Config(http=...)`."""
    return cast("type[asyncio.Protocol]", partial(BoundedHttpProtocol, table=connections))


def bind(host: str, port: int) -> socket.socket:
    """A bound TCP socket that does not block; `port` 0 takes a free one.

    Raises:
        ConfigError: the port is taken, or the address is not this machine's.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With the protocol's number, by which asyncio knows where to set TCP_NODELAY.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.settimeout(0)
    try:
        listener.bind((host, port))
    except OSError as exc:
        listener.close()
        raise _explain(exc, host, port) from exc
    return listener


def start_listening(listener: socket.socket) -> None:
    """Accept connections from now on.

    Raises:
        ConfigError: another process took the port in the meantime.
    """
    host, port = listener.getsockname()[:2]
    try:
        listener.listen(BACKLOG)
    except OSError as exc:
        raise _explain(exc, host, port) from exc


def _explain(exc: OSError, host: str, port: int) -> ConfigError:
    """What to do about a port that cannot be had."""
    where = f"{host}:{port}"
    if exc.errno == errno.EADDRINUSE:
        return ConfigError(
            f"{where} is taken by another process; stop that one, choose another --port, or let "
            "the system choose with --port 0"
        )
    return ConfigError(f"cannot listen on {where}: {exc.strerror or exc}")


def url_of(listener: socket.socket, host: str, *, is_tls: bool = False) -> str:
    """The URL under which a bound socket is reached; `host` as the operator wrote it."""
    shown = f"[{host}]" if ":" in host else host
    return f"{'https' if is_tls else 'http'}://{shown}:{listener.getsockname()[1]}"
