"""One connection of a client to an HTTP server of Baton's: parser, timers, requests in turn.

uvicorn has no bound on a request's head, on how long its head or body takes, or on connections.
"""

from __future__ import annotations

import ssl
from collections import deque
from math import inf
from typing import TYPE_CHECKING, Final, NoReturn
from urllib.parse import unquote

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.protocols.utils import get_remote_addr

from baton.errors import AuthenticationError
from baton.net.http_exchange import EXTENSION, HttpExchange, ResponsePath
from baton.net.http_limits import Connections, Refusal, refusal_answer
from baton.net.tls import TlsTransport

if TYPE_CHECKING:
    import asyncio

    import uvicorn
    from starlette.types import Scope
    from uvicorn.protocols.http.flow_control import FlowControl
    from uvicorn.server import ServerState

KEEP_ALIVE_S: Final = 75
HEADER_OVERHEAD_BYTES: Final = 4
UNKNOWN_ADDRESS: Final = "unknown"
CLOSE_TIMEOUT_S: Final = 30.0
"""Of a connection that is closed, or whose answers fill its buffer, a client must take
`min_body_bytes` in each of these."""
NOT_HTTP: Final = "Invalid HTTP request received."
NO_TLS: Final = "this port speaks TLS: write https:// in place of http://"


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
        self._path: ResponsePath | None = None
        self._exchange: HttpExchange | None = None
        self._served: HttpExchange | None = None
        self._pipelined: deque[tuple[HttpExchange, Scope]] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._idle_timer: asyncio.TimerHandle | None = None
        self._idle_since = 0.0
        self._num_head_bytes = self._num_fed_bytes = 0
        self._num_body_bytes = 0
        self._offers_upgrade = False
        self._is_in_head = self._is_in_body = self._is_ending = False
        self._refusal: tuple[Refusal, str] | None = None
        self._tls: TlsTransport | None = None

    @property
    def peer_certificate(self) -> bytes | None:
        """In DER, what the client has proved to be its own, where both sides show one."""
        return None if self._tls is None else self._tls.peer_certificate

    # The connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """See `asyncio.Protocol`."""
        peer = get_remote_addr(transport)
        self.address = peer[0] if peer else UNKNOWN_ADDRESS
        if self._table.tls is None:
            self._open(transport)
        else:
            self.transport = self._tls = TlsTransport(transport, self._table.tls.listening)
        if self._table.admit(self):
            self._await_head()
        else:
            self.refuse(Refusal.TOO_MANY_CONNECTIONS, "no connection waits that could be closed")

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        del exc
        self._stop_timer()
        if self._idle_timer is not None:
            self._idle_timer.cancel()
            self._idle_timer = None
        self._table.leave(self)
        self.connections.discard(self)
        self.parser = None  # type: ignore[assignment]  # it refers to its callbacks
        for exchange in (self._exchange, self._served):
            if exchange is not None:
                exchange.disconnect()
        # The scope refers to its exchange, and that to what ends it here: without this, each
        # connection would be left to the garbage collector.
        self.scope = self.headers = None  # type: ignore[assignment]
        self._exchange = self._served = self._path = None
        self._pipelined.clear()
        flow: FlowControl | None = self.flow
        if flow is not None:  # None before TLS is established
            self.flow.resume_writing()
        self.transport.close()

    def shutdown(self) -> None:
        """See `HttpToolsProtocol`: the server's end; what is being answered is finished.

        Where a request may be on its way, the connection is closed after `last_request_s`.
        """
        self._is_ending = True
        exchange, last_request_s = self._exchange, self._limits.last_request_s
        if exchange is None or exchange.response_complete:
            self._close_soon()
        elif exchange.on_shutdown is not None:
            exchange.on_shutdown()
        elif not (exchange.response_started and last_request_s):
            exchange.keep_alive = False

    def _close_soon(self) -> None:
        if last_request_s := self._limits.last_request_s:
            self.loop.call_later(last_request_s, self._close_unused)
        else:
            self.transport.close()

    def _close_unused(self) -> None:
        if not (self._is_answering or self._is_in_head or self.transport.is_closing()):
            self.transport.close()

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
                self._tls.send_plain(refusal_answer(Refusal.MALFORMED, NO_TLS))
            self.refuse(Refusal.NOT_TRUSTED, f"its TLS handshake failed: {exc}")
            return
        if self._tls.is_established and not was_established:
            self._open(self._tls)
        for part in parts:
            self._receive(part)

    def _receive(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError:
            self.send_400_response(NOT_HTTP)
        except httptools.HttpParserUpgrade as exc:
            self._ignore_upgrade(memoryview(data)[exc.args[0] :])
        if self.transport.is_closing():
            return
        if self._is_in_head:
            # What callbacks do not count yet, too, such as half a header. Of these bytes they have
            # subtracted what came before the head.
            self._num_fed_bytes += len(data)
            if self._num_fed_bytes > self._limits.max_head_bytes:
                self.refuse(Refusal.HEAD_TOO_LARGE, self._head_bound)
                return
        else:
            self._num_fed_bytes = 0
        if self._timer is not None:
            return
        if self._is_in_body:
            self._await_body()
        elif not self._is_answering:
            self._await_head()

    def refuse(self, refusal: Refusal, reason: str) -> None:
        """Close the connection, with an answer where none has begun."""
        if self.transport.is_closing():
            return
        self._table.report(refusal, self.address, reason)
        if self._tls is not None and not self._tls.is_established:
            self._close()
            return
        exchange = self._served  # of requests that wait behind it, none is answered before it
        if exchange is None or exchange.response_complete:
            can_answer = refusal is not Refusal.BODY_TIMEOUT  # of a request that was answered
        else:
            can_answer = not exchange.response_started
        if can_answer:
            self.transport.write(refusal_answer(refusal, reason))
        self._close()
        if exchange is not None:
            exchange.disconnect()

    def send_400_response(self, msg: str) -> None:
        """See `HttpToolsProtocol`: what it could not parse, or a callback of this class refused."""
        refusal, reason = self._refusal or (Refusal.MALFORMED, msg)
        self.refuse(refusal, reason)

    # The parser

    def on_message_begin(self) -> None:
        """See `HttpToolsProtocol`."""
        super().on_message_begin()
        self._is_in_head, self._offers_upgrade = True, False
        self._num_head_bytes = 0

    def on_url(self, url: bytes) -> None:
        """See `HttpToolsProtocol`."""
        self._count_head(len(url))
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """See `HttpToolsProtocol`."""
        self._num_head_bytes += len(name) + len(value) + HEADER_OVERHEAD_BYTES
        if self._num_head_bytes > self._limits.max_head_bytes:
            self._refuse_head()
        name = name.lower()
        if name == b"expect" and value.lower() == b"100-continue":
            self.expect_100_continue = True
        elif name == b"upgrade":
            self._offers_upgrade = True
        self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        """See `HttpToolsProtocol`."""
        if self._offers_upgrade and self.parser.should_upgrade():
            return  # `_ignore_upgrade` has the head parsed again
        self._is_in_head, self._is_in_body, self._num_body_bytes = False, True, 0
        self._num_fed_bytes -= self._num_head_bytes
        method = self.parser.get_method().decode("ascii")
        scope = self._complete_scope(method)
        is_gateway = self._check_request(method, scope["path"])
        self._table.serve(self)
        if self._timer is not None:
            self._stop_timer()
        before = self._exchange
        assert self._path is not None  # noqa: S101 (for mypy: the connection is made)
        self._exchange = exchange = HttpExchange(
            self._path,
            is_head=method == "HEAD",
            keep_alive=(
                scope["http_version"] != "1.0"
                and self.parser.should_keep_alive()
                and not self._is_ending
            ),
            expects_continue=self.expect_100_continue,
            is_gateway=is_gateway,
            peer_certificate=None if self._tls is None else self._tls.peer_certificate,
        )
        if self._table.multiplexes.by_id:
            exchange.wanted_multiplex = self._table.multiplexes.find(self.headers)
        scope["extensions"] = {EXTENSION: exchange}
        if before is None or before.response_complete:
            self._start(exchange, scope)
        else:
            self.flow.pause_reading()
            self._pipelined.append((exchange, scope))

    def on_body(self, body: bytes) -> None:
        """See `HttpToolsProtocol`."""
        num_bytes = len(body)
        self._num_body_bytes += num_bytes
        self._num_fed_bytes -= num_bytes
        exchange = self._exchange
        if exchange is not None and not exchange.response_complete:
            exchange.add_body(body)

    def on_message_complete(self) -> None:
        """See `HttpToolsProtocol`."""
        if self._is_in_head:
            return  # of a request that offers an upgrade
        self._is_in_body = False
        if self._timer is not None:
            self._stop_timer()
        exchange = self._exchange
        if exchange is not None and not exchange.response_complete:
            exchange.end_body()

    def on_response_complete(self) -> None:
        """See `HttpToolsProtocol`."""
        self.server_state.total_requests += 1
        self.was_served = True
        if self.transport.is_closing():
            self._await_end()
            return
        self.flow.resume_reading()
        if self._pipelined:
            self._start(*self._pipelined.popleft())
            return
        if self._is_ending:
            self._close_soon()
            return
        self._table.wait(self)
        self._idle_since = self.loop.time()
        if self._idle_timer is None:
            self._idle_timer = self.loop.call_later(KEEP_ALIVE_S, self._close_idle)
        if self._is_in_head:
            self._await_head()

    # Within

    @property
    def _is_answering(self) -> bool:
        return self._exchange is not None and not self._exchange.response_complete

    def _ignore_upgrade(self, rest: memoryview) -> None:
        """Parse the head again without its offer, then `rest`, which begins with the body.

        httptools takes what follows an offer for another protocol. A server that keeps HTTP/1.1
        reads the body as usual (RFC 9110, 7.8), or it would be taken for the next request.
        """
        try:
            while self._is_in_head:  # not of CONNECT, which offers nothing
                head = self._head_without_upgrade()
                # The parser before reads no more, if the head has `connection: close`.
                self.parser = httptools.HttpRequestParser(self)
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
                self.parser.feed_data(head)
                try:
                    self.parser.feed_data(rest)
                except httptools.HttpParserUpgrade as exc:  # of the next request
                    rest = rest[exc.args[0] :]
                else:
                    return
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            pass
        self.send_400_response(NOT_HTTP)

    def _head_without_upgrade(self) -> bytes:
        method, version = self.parser.get_method(), self.parser.get_http_version().encode()
        lines = [b"%b %b HTTP/%b" % (method, self.url, version)]
        lines += [b"%b: %b" % header for header in self.headers if header[0] != b"upgrade"]
        return b"\r\n".join([*lines, b"", b""])

    def _complete_scope(self, method: str) -> Scope:
        scope: Scope = self.scope  # type: ignore[assignment]
        url = httptools.parse_url(self.url)
        path = url.path.decode("ascii")
        scope["method"] = method
        scope["http_version"] = self.parser.get_http_version()
        scope["path"] = unquote(path) if "%" in path else path
        scope["raw_path"] = url.path
        scope["query_string"] = url.query or b""
        return scope

    def _check_request(self, method: str, path: str) -> bool:
        """End the parser, where the client may not make this request: see `send_400_response`.

        Whether it is a gateway.
        """
        if self._tls is None or self._table.tls is None:
            return False
        try:
            return self._table.tls.check_request(self._tls.peer_certificate, method, path)
        except AuthenticationError as exc:
            self._refusal = Refusal.NOT_ALLOWED, str(exc)
            raise ValueError(exc) from exc

    def _open(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        headers, on_done = self.server_state.default_headers, self.on_response_complete
        self._path = ResponsePath(
            self.loop,
            transport,
            self.flow,
            headers,
            on_done,
            min_taken_bytes=self._limits.min_body_bytes,
            take_timeout_s=CLOSE_TIMEOUT_S,
            multiplexes=self._table.multiplexes,
            turn_writes=self._table.turn_writes,
        )

    def _start(self, exchange: HttpExchange, scope: Scope) -> None:
        self._served = exchange
        task = self.loop.create_task(exchange.run(self.app, scope))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    def _close_idle(self) -> None:
        """Close a connection without a request for long; one timer serves many requests."""
        left_s = self._idle_since + KEEP_ALIVE_S - self.loop.time()
        if self._is_answering or left_s > 0:
            self._idle_timer = self.loop.call_later(max(1.0, left_s), self._close_idle)
        elif not self.transport.is_closing():
            self._close()

    def _close(self) -> None:
        """Close it; what was sent and is not taken in time is lost."""
        self.transport.close()
        self._await_end()

    def _await_end(self, num_before: float = inf) -> None:
        """Of a connection that is closing: a client that takes little for long loses the rest."""
        self._stop_timer()
        num_left = self.transport.get_write_buffer_size()
        if num_before - num_left < self._limits.min_body_bytes:
            self.transport.abort()
        elif num_left:
            self._timer = self.loop.call_later(CLOSE_TIMEOUT_S, self._await_end, num_left)

    def _await_head(self) -> None:
        self._table.wait(self)
        self._stop_timer()
        timeout_s = self._limits.head_timeout_s
        self._timer = self.loop.call_later(timeout_s, self._end_waiting)

    def _await_body(self) -> None:
        window_s = self._limits.body_window_s
        self._timer = self.loop.call_later(window_s, self._check_body, 0)

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
            self._refuse_head()

    def _refuse_head(self) -> NoReturn:
        self._refusal = Refusal.HEAD_TOO_LARGE, self._head_bound
        raise ValueError(self._head_bound)  # ends the parser; see `send_400_response`

    @property
    def _head_bound(self) -> str:
        return f"the request's head has more than {self._limits.max_head_bytes} bytes"

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
