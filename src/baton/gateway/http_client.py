"""HTTP/1.1 to one worker: one connection, one request at a time, the answer as it arrives.

A connection costs no task, and an answer no more than one wake-up for what arrives at once. The
parser is httptools', as on the server's side. Owner of everything here: the event loop's thread.

    send(head, body) ─► Answer ──wait_for_head──► status, headers ──read──► data … b"" at its end
                           └─ release: an answer that is not complete closes its connection, which
                              cancels the request at the worker
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

import httptools

from baton.gateway.errors import OK, UpstreamError, WorkerLostError
from baton.protocol.worker_http import MULTIPLEX_HEADER

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable

    from baton.gateway.multiplexed_streams import MultiplexedStream

READ_BUFFER_BYTES: Final = 1 << 20
"""Of one answer's data that is not taken: then no more is read from its connection."""
MOST_LATE_BYTES: Final = 16 << 20
"""Of one answer's data that arrive before its worker no longer sends them with others'."""
MAX_HEAD_BYTES: Final = 64 << 10
"""Of what comes without data: an answer's head, trailers, extensions of chunks."""
COPIED_BYTES: Final = 4096
"""Of a request's body: to copy so much costs less than a second buffer."""
MULTIPLEX: Final = MULTIPLEX_HEADER.encode()
BODY_LENGTH_HEADERS: Final = frozenset({b"content-length", b"transfer-encoding"})


class Answer:
    """What a worker answers to one request. `headers` have names in lower case.

    `on_end` is called once, when nothing more arrives until somebody reads: the answer is complete
    or lost, or has filled its buffer. `multiplexed`: where its parts may come, until they do not.
    """

    __slots__ = (
        "_connection",
        "_is_complete",
        "_loop",
        "_lost",
        "_num_bytes",
        "_own_parts",
        "_parts",
        "_sink",
        "_waiter",
        "headers",
        "multiplexed",
        "on_end",
        "status",
    )

    def __init__(
        self, connection: Connection, loop: asyncio.AbstractEventLoop, parts: list[bytes]
    ) -> None:
        self._loop = loop
        self.status = 0
        self.headers: dict[bytes, bytes] = {}
        self._connection: Connection | None = connection
        self._parts = parts  # the parser appends to it, until the answer is complete or lost
        self._own_parts: list[bytes] | None = None
        self.multiplexed: MultiplexedStream | None = None
        self._num_bytes = 0
        self._is_complete = False
        self._lost: str | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._sink: Callable[[bytes], bool] | None = None
        self.on_end: Callable[[], None] | None = None

    @property
    def is_complete(self) -> bool:
        """Whether all data are here."""
        return self._is_complete

    async def wait_for_head(self) -> None:
        """Return when status and headers are here.

        Raises:
            WorkerLostError: the connection broke.
        """
        while not self.status:
            await self._wait()

    async def read(self) -> bytes:
        """The next data, as much as is here; empty at the end of the answer.

        Raises:
            WorkerLostError: the connection broke; first, what came before was read.
        """
        while not self._parts:
            if self._is_complete:
                return b""
            await self._wait()
        return self._take()

    async def read_whole(self, max_bytes: int) -> bytes:
        """All data.

        Raises:
            WorkerLostError: the connection broke.
            UpstreamError: there is more than `max_bytes`.
        """
        if self._is_complete and len(whole := self.peek()) <= max_bytes:
            self._parts.clear()
            return whole
        parts: list[bytes] = []
        num_bytes = 0
        while part := await self.read():
            parts.append(part)
            num_bytes += len(part)
            if num_bytes > max_bytes:
                origin = self._origin
                self.release()
                raise UpstreamError(f"{origin} answered more than {max_bytes} bytes")
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def peek(self) -> bytes:
        """The data that are here; they stay to be read."""
        return b"".join(self._parts)

    async def push_to(self, sink: Callable[[bytes], bool]) -> bool:
        """Pass data to `sink` as they arrive, without a turn of this task for each.

        True: `sink` returned False, it has no room for more. False: that was all.

        Raises:
            WorkerLostError: the connection broke.
        """
        self._sink = sink
        try:
            while self._sink is sink:
                if self._parts and not sink(self._take()):
                    return True
                if self._is_complete:
                    return False
                await self._wait()
            return True
        finally:
            self._sink = None

    def release(self) -> None:
        """Nothing more is wanted of it; what is not complete is cancelled at the worker."""
        self.on_end = None
        if self.multiplexed is not None:
            self._forget_multiplex()
        connection, self._connection = self._connection, None
        self._parts.clear()
        if connection is not None:
            connection.cut(self)

    # For its connection

    def note_received(self, num_bytes: int) -> None:
        """`num_bytes` arrived: of the head, or the data that are in `parts` now. The hot path."""
        if self.multiplexed is not None:
            self._note_own(num_bytes)
            return
        parts, sink = self._parts, self._sink
        if not parts:
            pass
        elif sink is None:
            self._num_bytes += num_bytes
            if self._num_bytes >= READ_BUFFER_BYTES and self._connection is not None:
                self._connection.pause()
        else:
            data = parts[0] if len(parts) == 1 else b"".join(parts)
            parts.clear()
            if sink(data):
                return
            self._sink = None
        self._wake()

    def complete(self) -> None:
        """All that its connection brings is here; that one serves others."""
        if self.multiplexed is not None:
            self._connection, own = None, self._own_parts or []
            self._own_parts = own.copy()
            own.clear()
            return
        self._is_complete = True
        self._end()

    def lose(self, reason: str) -> None:
        """No more will come, on either of its connections."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.cut(self)
        if self.multiplexed is not None:
            if self._own_parts:
                self._own_parts.clear()  # of what comes before them, some may be lost
            self._forget_multiplex()
        self._lost = reason
        self._end()

    # For the multiplex that brings its parts

    def expect_multiplexed(self, stream: MultiplexedStream) -> None:
        """Its parts may come by `stream`: from it, until `leave_multiplex`."""
        if self._lost is None:
            self.multiplexed, self._own_parts, self._parts = stream, self._parts, []
            stream.begin(self)

    def receive(self, data: bytes) -> None:
        """A part of it arrived. The hot path."""
        sink = self._sink
        if sink is not None:
            if sink(data):
                return
            self._sink = None
        else:
            self._parts.append(data)
            self._num_bytes += len(data)
            if self._num_bytes >= READ_BUFFER_BYTES:
                self._have_it_leave()
        self._wake()

    def leave_multiplex(self) -> None:
        """What is still missing comes as its own body, or has come so."""
        self._forget_multiplex()
        if self._connection is None:
            self.complete()
        elif self._parts:
            if self._sink is not None and not self._sink(self._take()):
                self._sink = None
            self._wake()

    # Within

    @property
    def _origin(self) -> str:
        return self._connection.origin if self._connection is not None else "a worker"

    def _forget_multiplex(self) -> None:
        """Nothing more comes there: what came there precedes what came on its connection."""
        stream, self.multiplexed = self.multiplexed, None
        own, self._own_parts = self._own_parts, None
        if stream is None or own is None:
            return
        stream.end()
        own[:0] = self._parts
        self._parts = own

    def _have_it_leave(self) -> None:
        """Only its own connection can be read more slowly."""
        if self._num_bytes >= MOST_LATE_BYTES:
            self.lose(f"{self._origin} goes on to send what is not taken")
        elif self.multiplexed is not None:
            self.multiplexed.ask_to_leave()

    def _note_own(self, num_bytes: int) -> None:
        """Of its own connection: the head, or what follows the parts that come elsewhere."""
        if self._own_parts:
            self._num_bytes += num_bytes
            if self._num_bytes >= READ_BUFFER_BYTES and self._connection is not None:
                self._connection.pause()
        self._wake()

    def _end(self) -> None:
        self._connection = None
        parts = self._parts  # the connection's, for its next answer
        self._parts = parts.copy()
        parts.clear()
        if self._sink is not None and self._parts and not self._sink(self._take()):
            self._sink = None
        self._wake()

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)
        if self.on_end is not None and (
            self._is_complete or self._lost is not None or self._num_bytes >= READ_BUFFER_BYTES
        ):
            on_end, self.on_end = self.on_end, None
            on_end()

    def _take(self) -> bytes:
        parts = self._parts
        data = parts[0] if len(parts) == 1 else b"".join(parts)
        parts.clear()
        self._num_bytes = 0
        if self._connection is not None and self._connection.is_paused:
            self._connection.resume()
        return data

    async def _wait(self) -> None:
        if self._lost is not None:
            raise WorkerLostError(self._lost)
        self._waiter = self._loop.create_future()
        await self._waiter


class Connection(asyncio.BaseProtocol):
    """One connection to a worker, over TLS if it was `made_with` a context for that.

    `on_idle` is called when it can take the next request, `on_lost` at its end.
    """

    def __init__(
        self,
        origin: str,
        made_with: ssl.SSLContext | None,
        on_idle: Callable[[Connection], None],
        on_lost: Callable[[Connection], None],
    ) -> None:
        self.origin, self.made_with = origin, made_with
        self._loop = asyncio.get_running_loop()
        self._on_idle, self._on_lost = on_idle, on_lost
        self._transport: asyncio.Transport | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._answer: Answer | None = None
        self._headers: dict[bytes, bytes] = {}
        self._parts: list[bytes] = []
        self.on_body = self._parts.append  # for httptools, without a call of ours for each part
        self._num_head_bytes = 0
        self._has_ended = self._is_kept = False
        self.is_paused = False
        self.num_reads = 0

    def send(self, head: bytes, body: bytes = b"") -> Answer:
        """Send a request; one at a time. `head` ends with an empty line."""
        answer, transport = Answer(self, self._loop, self._parts), self._transport
        if transport is None or transport.is_closing():
            answer.lose(self._closed)
            return answer
        self._num_head_bytes, self._has_ended, self._answer = 0, False, answer
        if len(body) <= COPIED_BYTES:
            transport.write(head + body)
        else:
            transport.writelines((head, body))
        return answer

    @property
    def is_open(self) -> bool:
        """Whether the other side is there still."""
        return self._transport is not None and not self._transport.is_closing()

    @property
    def _closed(self) -> str:
        return f"{self.origin} closed the connection before its answer was complete"

    def cut(self, answer: Answer) -> None:
        """Close, if that is the answer which is under way."""
        if answer is self._answer:
            self._answer = None
            self.close()

    def close(self) -> None:
        """Close, whatever is under way."""
        if self._transport is not None:
            self._transport.abort()

    def pause(self) -> None:
        """Read no more: the answer has many data that are not taken."""
        if not self.is_paused and self._transport is not None:
            self.is_paused = True
            self._transport.pause_reading()

    def resume(self) -> None:
        """Read on, if the answer's data were too many."""
        if self.is_paused and self._transport is not None:
            self.is_paused = False
            self._transport.resume_reading()

    # asyncio's callbacks

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """See `asyncio.Protocol`."""
        self._transport = transport
        self._parser = httptools.HttpResponseParser(self)

    def eof_received(self) -> None:
        """See `asyncio.Protocol`: the transport closes itself."""

    def data_received(self, data: bytes | memoryview) -> None:
        """See `asyncio.Protocol`."""
        self.num_reads += 1
        answer, parser = self._answer, self._parser
        if answer is None or parser is None:  # nothing was asked, or it is not wanted any more
            self.close()
            return
        num_bytes = len(data)
        self._num_head_bytes += num_bytes
        try:
            parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as exc:
            self._break(f"{self.origin} answered what cannot be read: {exc}")
            return
        if self._has_ended:
            self._finish(answer)
        elif self._parts:
            self._num_head_bytes = 0
            answer.note_received(num_bytes)
        elif self._num_head_bytes > MAX_HEAD_BYTES:
            self._break(f"{self.origin} answered with a head of more than {MAX_HEAD_BYTES} bytes")
        else:
            answer.note_received(num_bytes)

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        answer, self._answer = self._answer, None
        self._transport = self._parser = None
        self._on_lost(self)
        if answer is None:
            return
        if exc is None and answer.status and BODY_LENGTH_HEADERS.isdisjoint(answer.headers):
            answer.complete()  # an answer without a length ends with its connection
            return
        answer.lose(self._closed)

    # httptools' callbacks

    def on_message_begin(self) -> None:
        """See `httptools.HttpResponseParser`."""
        if self._has_ended:
            raise ValueError("data after the end of an answer")
        self._headers = {}

    def on_header(self, name: bytes, value: bytes) -> None:
        """See `httptools.HttpResponseParser`."""
        self._headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        """See `httptools.HttpResponseParser`."""
        answer = self._answer
        if answer is not None and self._parser is not None:
            status = self._parser.get_status_code()
            if status >= OK:  # what comes before is no answer yet
                answer.status, answer.headers = status, self._headers
                if answer.multiplexed is not None and MULTIPLEX not in self._headers:
                    answer.leave_multiplex()
                self._is_kept = self._parser.should_keep_alive()

    def on_message_complete(self) -> None:
        """See `httptools.HttpResponseParser`."""
        if self._answer is not None and self._answer.status:
            self._has_ended = True

    # Within

    def _finish(self, answer: Answer) -> None:
        self._answer = None
        if self.is_paused:
            self.resume()
        transport = self._transport
        if transport is None or transport.is_closing():
            pass
        elif self._is_kept and not transport.get_write_buffer_size():
            self._on_idle(self)
        else:
            self.close()
        answer.complete()

    def _break(self, reason: str) -> None:
        answer, self._answer = self._answer, None
        self.close()
        if answer is None:
            return
        if self._has_ended:  # what is wrong came after it
            answer.complete()
        else:
            answer.lose(reason)


class TlsConnection(Connection, asyncio.BufferedProtocol):
    """One over TLS. What is decrypted goes into `buffer`, which others may share.

    To a protocol without a buffer uvloop passes bytes, for which it allocates 256 KiB each time:
    memory that this process's C library maps and unmaps (`process.LARGE_BYTES`).
    """

    def __init__(
        self,
        origin: str,
        made_with: ssl.SSLContext,
        on_idle: Callable[[Connection], None],
        on_lost: Callable[[Connection], None],
        *,
        buffer: memoryview,
    ) -> None:
        super().__init__(origin, made_with, on_idle, on_lost)
        self._buffer = buffer

    def get_buffer(self, sizehint: int) -> memoryview:
        """See `asyncio.BufferedProtocol`."""
        del sizehint
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        """See `asyncio.BufferedProtocol`: the parser copies what it keeps."""
        self.data_received(self._buffer[:nbytes])
