"""One request and its response: ASGI's `receive` and `send`, as uvicorn's cycle does it, leaner.

No copy of a body that came at once, no event object, and one pattern less for each header. What
ASGI has no message for is here for applications that run on this server alone: `on_disconnect`,
which needs no task that waits for it, and `write`, which needs none for each part of a body. A
stream may send its parts with those of others (`multiplex`).
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from math import inf
from typing import TYPE_CHECKING, Final

from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from baton.protocol.worker_http import MULTIPLEX_HEADER

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from starlette.types import ASGIApp, Message, Scope
    from uvicorn.protocols.http.flow_control import FlowControl

    from baton.net.multiplex import Multiplex, Multiplexes
    from baton.net.turn_writes import TurnWrites

HIGH_WATER_BYTES: Final = 64 << 10
"""Of a body that the application has not taken: then no more is read from the connection."""
BODILESS: Final = frozenset({HTTPStatus.NO_CONTENT, HTTPStatus.NOT_MODIFIED})
INTERNAL_ERROR: Final = b"Internal Server Error"
SMALL_BYTES: Final = 4 << 10
"""Smaller parts of streams are written together with those of others, at the turn's end."""
EVENT_STREAM: Final = b"text/event-stream"
EXTENSION: Final = "baton.exchange"
"""The name by which an application finds the exchange in its scope's extensions."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ResponsePath:
    """Where a connection's responses go; `on_done` is called when one is complete.

    A client that earlier responses wait for must take `min_taken_bytes` of them in each
    `take_timeout_s`.
    """

    loop: asyncio.AbstractEventLoop
    transport: asyncio.Transport
    flow: FlowControl
    default_headers: list[tuple[bytes, bytes]]
    on_done: Callable[[], None]
    min_taken_bytes: int
    take_timeout_s: float
    multiplexes: Multiplexes
    turn_writes: TurnWrites


class HttpExchange:
    """Owner: the event loop's thread.

    `on_disconnect` is called once, if the client leaves before the response is complete,
    `on_shutdown` if the server ends before that.
    `wanted_multiplex`: where the client would have a stream's parts, and its number there.
    `is_gateway`: a gateway has proved over this connection that it is one. `peer_certificate`: in
    DER, what the client has proved to be its own, where both sides show one.
    """

    def __init__(
        self,
        path: ResponsePath,
        *,
        is_head: bool,
        keep_alive: bool,
        expects_continue: bool,
        is_gateway: bool = False,
        peer_certificate: bytes | None = None,
    ) -> None:
        self._path, self.transport, self._flow = path, path.transport, path.flow
        self._writers = path.turn_writes.writers
        self._is_head, self.keep_alive = is_head, keep_alive
        self._waits_for_continue, self.is_gateway = expects_continue, is_gateway
        self.peer_certificate = peer_certificate
        self.on_disconnect: Callable[[], None] | None = None
        self.on_shutdown: Callable[[], None] | None = None
        self.multiplexes = path.multiplexes
        self.wanted_multiplex: tuple[Multiplex, int] | None = None
        self._multiplex: Multiplex | None = None
        self._number = 0
        self.disconnected = self.response_started = self.response_complete = False
        self.more_body = True
        self._parts: list[bytes] = []
        self._num_waiting_bytes = 0
        self._has_news = False
        self._news: asyncio.Event | None = None
        self._is_chunked = False
        self._num_left_bytes = 0
        self.held_back: list[bytes] = []

    # For the connection

    def add_body(self, part: bytes) -> None:
        """A part of the request's body arrived."""
        self._parts.append(part)
        self._num_waiting_bytes += len(part)
        if self._num_waiting_bytes > HIGH_WATER_BYTES:
            self._flow.pause_reading()
        self._has_news = True
        if self._news is not None:
            self._news.set()

    def end_body(self) -> None:
        """The request's body is complete."""
        self.more_body = False
        self._has_news = True
        if self._news is not None:
            self._news.set()

    def disconnect(self) -> None:
        """The client left, or is not served any more."""
        if self.response_complete:
            return
        self.disconnected = True
        if self._multiplex is not None:
            self._multiplex.end(self._number)
        self._wake()
        callback, self.on_disconnect = self.on_disconnect, None
        if callback is not None:
            callback()

    async def run(self, app: ASGIApp, scope: Scope) -> None:
        """Have the application serve the request; it is answered, whatever happens."""
        try:
            await app(scope, self.receive, self.send)
            if not self.response_complete and not self.disconnected:
                log.error("the application returned before its response was complete")
                await self._give_up()
        except Exception:
            log.exception("the application failed")
            await self._give_up()
        except asyncio.CancelledError:
            await self._give_up()
            raise
        finally:
            self.on_disconnect = self.on_shutdown = None

    # ASGI

    async def receive(self) -> Message:
        """The next part of the request's body; after its end, waits until the client leaves."""
        if self._waits_for_continue and not self.transport.is_closing():
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            self._waits_for_continue = False
        if not (self._has_news or self.disconnected or self.response_complete):
            self._flow.resume_reading()
            if self._news is None:
                self._news = asyncio.Event()
            await self._news.wait()
            self._news.clear()
        self._has_news = False
        if self.disconnected or self.response_complete:
            return {"type": "http.disconnect"}
        parts, self._parts, self._num_waiting_bytes = self._parts, [], 0
        body = parts[0] if len(parts) == 1 else b"".join(parts)
        return {"type": "http.request", "body": body, "more_body": self.more_body}

    async def send(self, message: Message) -> None:
        """Send the response's head, or a part of its body; returns once the client takes more.

        A part is written before that is awaited: who is cancelled meanwhile has sent it. What ends
        the response is written once the client takes it.
        """
        is_part = message.get("more_body", False)
        ends = self.response_started and not is_part
        if ends and self._flow.write_paused and not self.disconnected:
            await (self._flow.drain() if self._is_chunked else self._drain_or_abort())
        if self.disconnected:
            return
        if self.response_complete:
            raise RuntimeError("the response is complete already")
        if not self.response_started:
            if message["type"] != "http.response.start":
                raise RuntimeError(f"{message['type']} came before the response's start")
            self._start(message["status"], message.get("headers", ()))
        elif message["type"] != "http.response.body":
            raise RuntimeError(f"{message['type']} came after the response's start")
        else:
            self._send_body(message.get("body", b""), is_last=not is_part)
            if is_part and self._flow.write_paused:
                await self._flow.drain()
            elif self._multiplex is not None and self._multiplex.is_full:
                await self._multiplex.drain()

    # For applications that run on this server alone

    def write(self, body: bytes) -> bool:
        """Send a part of a body that has begun and goes on; whether the client takes more now."""
        if not self.disconnected:
            is_plain = not (self.held_back or self._is_head or self._multiplex)
            num_bytes = len(body)
            if self._is_chunked and is_plain and 0 < num_bytes < SMALL_BYTES:
                self.held_back = [b"%x\r\n%b\r\n" % (num_bytes, body)]
                if not self._writers:
                    self._path.loop.call_soon(self._path.turn_writes.flush)
                self._writers.append(self)
            else:
                self._send_body(body, is_last=False)
        return not self._flow.write_paused

    async def drain(self) -> None:
        """Return when the client takes more."""
        await self._flow.drain()

    # For its multiplex

    def leave_multiplex(self) -> None:
        """See `MultiplexedAnswer`."""
        self._multiplex = None

    def abort(self) -> None:
        """See `MultiplexedAnswer`: the client sees that its answer is not complete."""
        self._multiplex = None
        self.transport.abort()

    # Within

    async def _drain_or_abort(self) -> None:
        """Return when the client takes more, or has lost its connection since it takes too little.

        For responses that are at hand as a whole: behind earlier ones that are not read, each would
        keep its connection's place. A stream may wait for its client longer.
        """
        path, num_left = self._path, inf
        while self._flow.write_paused and not self.disconnected:
            num_before, num_left = num_left, self.transport.get_write_buffer_size()
            if num_before - num_left < path.min_taken_bytes:
                self.transport.abort()
                await self._flow.drain()
                return
            with suppress(TimeoutError):
                async with asyncio.timeout(path.take_timeout_s):
                    await self._flow.drain()

    def _wake(self) -> None:
        self._has_news = True
        if self._news is not None:
            self._news.set()

    def _start(self, status: int, headers: Iterable[tuple[bytes, bytes]]) -> None:
        self.response_started, self._waits_for_continue = True, False
        has_length = is_closed = False
        lines = [*self._path.default_headers, *headers]
        for name, value in lines:
            if name == b"content-length":
                has_length, self._num_left_bytes = True, int(value)
            elif name == b"connection" and b"close" in value.lower():
                is_closed, self.keep_alive = True, False
            elif name == b"transfer-encoding":
                raise RuntimeError("how the body is transferred is the server's matter")
        if not self.keep_alive and not is_closed:
            lines.append((b"connection", b"close"))
        if not has_length and not self._is_head and status not in BODILESS:
            self._is_chunked = True
            lines.append((b"transfer-encoding", b"chunked"))
            if self.wanted_multiplex is not None and _is_stream(lines):
                self._begin_multiplexed(*self.wanted_multiplex, lines)
        head = b"".join([b"%b: %b\r\n" % line for line in lines])
        if head.count(b"\n") != len(lines) or head.count(b"\r") != len(lines):
            raise RuntimeError("a header of the response has a line break")
        # Each write is a system call: what follows at once goes with it.
        self.held_back = [b"%b%b\r\n" % (STATUS_LINE[status], head)]
        if not self._writers:
            self._path.loop.call_soon(self._path.turn_writes.flush)
        self._writers.append(self)

    def _begin_multiplexed(
        self, multiplex: Multiplex, number: int, lines: list[tuple[bytes, bytes]]
    ) -> None:
        if multiplex.begin(number, self):
            self._multiplex, self._number = multiplex, number
            lines.append((MULTIPLEX_HEADER.encode(), multiplex.id))

    def _send_body(self, body: bytes, *, is_last: bool) -> None:
        if self._multiplex is not None:
            self._multiplex.send(self._number, body)
            if not is_last:
                return
            body = b""
            self._multiplex.end(self._number)
        data = body
        if self._is_head:
            self._num_left_bytes, data = 0, b""
        elif self._is_chunked:
            end = b"0\r\n\r\n" if is_last else b""
            data = b"%x\r\n%b\r\n%b" % (len(body), body, end) if body else end
        else:
            self._num_left_bytes -= len(body)
            if self._num_left_bytes < 0:
                raise RuntimeError("the response is longer than was announced")
        if self.held_back:
            self.held_back.append(data)
            if is_last or len(data) >= SMALL_BYTES:
                self._flush()
        elif data:
            self.transport.write(data)
        if is_last:
            self._end()

    def _flush(self) -> None:
        held_back, self.held_back = self.held_back, []
        if held_back and not self.disconnected:
            self.transport.write(b"".join(held_back))

    def _end(self) -> None:
        if self._num_left_bytes:
            raise RuntimeError("the response is shorter than was announced")
        self.response_complete = True
        self._wake()
        if not self.keep_alive:
            self.transport.close()
        self._path.on_done()

    async def _give_up(self) -> None:
        """The application ended too early: answer that it failed, or cut the answer off."""
        if self.response_complete:
            return
        if self.response_started or self.disconnected:
            self._flush()
            if self._flow.write_paused:  # closed, it would wait for a client that takes nothing
                self.transport.abort()
            else:
                self.transport.close()
                self._path.on_done()
            return
        self.keep_alive = False
        length = (b"content-length", b"%d" % len(INTERNAL_ERROR))
        headers = [(b"content-type", b"text/plain; charset=utf-8"), length]
        await self.send({"type": "http.response.start", "status": 500, "headers": headers})
        await self.send({"type": "http.response.body", "body": INTERNAL_ERROR})


def _is_stream(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    return any(n == b"content-type" and value.startswith(EVENT_STREAM) for n, value in headers)
