"""The connection by which all streams of one worker arrive (`baton.net.multiplex`)."""

from __future__ import annotations

import asyncio
import logging
from http import HTTPStatus
from typing import TYPE_CHECKING, Final

from baton.gateway.errors import UpstreamError, WorkerLostError
from baton.net.multiplex import FRAME, MAX_FRAME_BYTES, MAX_NUMBER
from baton.protocol.worker_http import MULTIPLEX_HEADER

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine

    from baton.gateway.http_client import Answer, Connection

IDLE_S: Final = 60.0
"""So long it is kept without a stream."""
HEAD_TIMEOUT_S: Final = 5.0
RETRY_S: Final = 5.0
"""After it could not be opened."""

log = logging.getLogger(__name__)


class MultiplexedStream:
    """One stream's place: `header` is the line by which the worker is asked for it."""

    __slots__ = ("_is_leaving", "_multiplex", "header", "number")

    def __init__(self, multiplex: MultiplexReader, number: int) -> None:
        self._multiplex, self.number = multiplex, number
        self._is_leaving = False
        self.header = b"%b: %b\r\n" % (MULTIPLEX_HEADER.encode(), self.stream_ref)

    @property
    def stream_ref(self) -> bytes:
        """The connection and the number, as the worker knows them."""
        return b"%b.%d" % (self._multiplex.id, self.number)

    def begin(self, answer: Answer) -> None:
        """What arrives for it goes to `answer`."""
        self._multiplex.answers[self.number] = answer

    def end(self) -> None:
        """What still arrives for it is dropped."""
        self._multiplex.end(self.number)

    def ask_to_leave(self) -> None:
        """Have the worker send the rest on the stream's own connection; asked once."""
        if not self._is_leaving:
            self._is_leaving = True
            self._multiplex.ask_to_leave(self.stream_ref)


class MultiplexReader:
    """An open one, with the worker's `id_`.

    `on_unused` is called when its last stream has ended; `ask_to_leave` with the reference of a
    stream that the worker is to send elsewhere.
    """

    def __init__(
        self,
        id_: bytes,
        connection: Connection,
        on_unused: Callable[[MultiplexReader], None],
        ask_to_leave: Callable[[bytes], None],
    ) -> None:
        self.id, self.connection, self.ask_to_leave = id_, connection, ask_to_leave
        self.answers: dict[int, Answer] = {}
        self._on_unused = on_unused
        self.num_streams = 0
        self._rest = b""

    def new_stream(self) -> MultiplexedStream:
        """A place for one more, of `MAX_NUMBER`."""
        self.num_streams += 1
        return MultiplexedStream(self, self.num_streams)

    def end(self, number: int) -> None:
        """A stream is not waited for any more."""
        self.answers.pop(number, None)
        if not self.answers:
            self._on_unused(self)

    def receive(self, data: bytes) -> bool:
        """Pass frames on; False where they are none."""
        if self._rest:
            data = self._rest + data
        at, num_bytes, answers = 0, len(data), self.answers
        while num_bytes - at >= FRAME.size:
            number, size = FRAME.unpack_from(data, at)
            end = at + FRAME.size + size
            if size > MAX_FRAME_BYTES:
                return False
            if end > num_bytes:
                break
            answer = answers.get(number)
            try:
                if answer is None:
                    pass
                elif size:
                    answer.receive(data[at + FRAME.size : end])
                else:
                    answer.leave_multiplex()
            except Exception:
                log.exception("a part of a stream could not be passed on")
                if answer is not None:
                    answer.lose("internal error in the gateway")
            at = end
        self._rest = data[at:]
        return True

    def lose(self, reason: str) -> None:
        """The connection is lost, and its streams."""
        answers, self.answers = self.answers, {}
        for answer in answers.values():
            answer.lose(reason)


class WorkerMultiplexes:
    """Those to one worker: opened by its first stream, which does not wait for it.

    `connect` gives a connection, `ask` asks on it for a multiplex, `leave` has the worker send the
    rest of a stream, given by its reference, elsewhere. `is_current`: whether a connection was made
    with this gateway's present identity.
    """

    def __init__(
        self,
        connect: Callable[[], Awaitable[Connection]],
        ask: Callable[[Connection], Answer],
        leave: Callable[[bytes], Awaitable[object]],
        is_current: Callable[[Connection], bool],
    ) -> None:
        self._connect, self._ask, self._leave = connect, ask, leave
        self._is_current, self._loop = is_current, asyncio.get_running_loop()
        self._current: MultiplexReader | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_opening = False
        self._retry_at = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def new_stream(self) -> MultiplexedStream | None:
        """A place for one more stream, if there is a connection for it."""
        current = self._current
        if current is not None:
            if current.num_streams < MAX_NUMBER and self._is_current(current.connection):
                return current.new_stream()
            self._current = None
            self._note_unused(current)
        if not self._is_opening and self._loop.time() >= self._retry_at:
            self._is_opening = True
            self._start(self._open())
        return None

    def _start(self, work: Coroutine[None, None, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _open(self) -> None:
        """Open one, and pass on what arrives by it until its end."""
        try:
            connection = await self._connect()
            answer = self._ask(connection)
            try:
                await self._read(connection, answer)
            finally:
                answer.release()
        except (UpstreamError, TimeoutError) as exc:
            log.debug("streams come on connections of their own: %r", exc)
            self._retry_at = self._loop.time() + RETRY_S
        finally:
            self._is_opening = False

    async def _read(self, connection: Connection, answer: Answer) -> None:
        async with asyncio.timeout(HEAD_TIMEOUT_S):
            await answer.wait_for_head()
        id_ = answer.headers.get(MULTIPLEX_HEADER.encode())
        if answer.status != HTTPStatus.OK or id_ is None:
            raise UpstreamError(f"{connection.origin} opened no multiplex: {answer.status}")
        multiplex = MultiplexReader(id_, connection, self._note_unused, self._ask_to_leave)
        self._current, self._is_opening = multiplex, False
        reason = f"{connection.origin} closed the connection of its streams"
        try:
            if await answer.push_to(multiplex.receive):
                reason = f"{connection.origin} sent frames that cannot be read"
        except WorkerLostError:
            pass
        finally:
            if self._current is multiplex:
                self._current = None
            multiplex.lose(reason)

    def _note_unused(self, multiplex: MultiplexReader) -> None:
        if multiplex.answers:
            return
        if multiplex is not self._current:
            multiplex.connection.close()
        elif self._timer is None:
            self._timer = self._loop.call_later(IDLE_S, self._close_unused)

    def _close_unused(self) -> None:
        self._timer, current = None, self._current
        if current is not None and not current.answers:
            self._current = None
            current.connection.close()

    def _ask_to_leave(self, stream_ref: bytes) -> None:
        self._start(self._send_leave(stream_ref))

    async def _send_leave(self, stream_ref: bytes) -> None:
        try:
            await self._leave(stream_ref)
        except UpstreamError as exc:
            log.info("a stream that is not read could not be slowed down: %s", exc)
