"""Parts of many streams over one connection: what all streams get at a time is one write.

A gateway that has opened such a connection names it in the head of a request. A stream whose answer
has the same header has its parts there, each in a frame:

    number uint32 | size uint32 (little-endian) | size bytes

Size 0: no more of this stream comes here. The rest, if only its end, is the body of its own answer,
whose connection a client that leaves closes as ever. Owner of all of this: the event loop's thread.
"""

from __future__ import annotations

import re
import secrets
import struct
from typing import TYPE_CHECKING, Final, Protocol

from baton.protocol.worker_http import MULTIPLEX_HEADER

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Awaitable, Callable, Iterable

FRAME: Final = struct.Struct("<II")
MAX_FRAME_BYTES: Final = 64 << 10
"""Of a frame's data."""
FLUSH_BYTES: Final = 16 << 10
"""What waits is written before the loop's turn ends, if it is more: a TLS record."""
_HEADER: Final = MULTIPLEX_HEADER.encode()
MAX_NUMBER: Final = 999_999_999
"""The last number of a stream: one connection has had as many then."""
_STREAM_REF: Final = re.compile(rb"([0-9a-f]{32})\.([0-9]{1,9})")


class MultiplexedAnswer(Protocol):
    """An answer whose parts go another way than its head."""

    def leave_multiplex(self) -> None:
        """From now on its parts go on its own connection."""

    def abort(self) -> None:
        """Its parts are lost."""


class Multiplex:
    """One gateway's connection. `write` sends a part, `drain` returns when more is taken.

    `write` returns whether more is taken now; `close` ends the connection.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        write: Callable[[bytes], bool],
        drain: Callable[[], Awaitable[None]],
        close: Callable[[], None],
    ) -> None:
        self.id = secrets.token_hex(16).encode()
        self._loop, self._write, self._drain, self._close = loop, write, drain, close
        self._answers: dict[int, MultiplexedAnswer] = {}
        self._frames: list[bytes] = []
        self._num_bytes = 0
        self._is_scheduled = self._is_ending = False
        self.is_full = False

    def begin(self, number: int, answer: MultiplexedAnswer) -> bool:
        """Whether this answer's parts can go here, as stream `number`."""
        if self._is_ending or number in self._answers:
            return False
        self._answers[number] = answer
        return True

    def send(self, number: int, data: bytes) -> None:
        """Send a part; with all others of this turn of the loop."""
        if len(data) > MAX_FRAME_BYTES:
            for start in range(0, len(data), MAX_FRAME_BYTES):
                self.send(number, data[start : start + MAX_FRAME_BYTES])
        elif data:
            self._add(number, data)

    def end(self, number: int) -> None:
        """Send no more of a stream."""
        if self._answers.pop(number, None) is not None:
            self._add(number, b"")
        self._close_if_unused()

    def leave(self, number: int) -> None:
        """Send the rest of a stream on its own connection; nothing if it has ended."""
        answer = self._answers.get(number)
        if answer is not None:
            answer.leave_multiplex()
            self.end(number)

    async def drain(self) -> None:
        """Return when the gateway takes more."""
        await self._drain()
        self.is_full = False

    def close_when_unused(self) -> None:
        """Take no more streams; the connection ends with the last one."""
        self._is_ending = True
        self._close_if_unused()

    def lose(self) -> None:
        """The connection is lost, and with it the streams: the gateway goes on with them anew."""
        self._is_ending = True
        answers, self._answers = self._answers, {}
        for answer in answers.values():
            answer.abort()

    def _add(self, number: int, data: bytes) -> None:
        self._frames.append(FRAME.pack(number, len(data)) + data)
        self._num_bytes += FRAME.size + len(data)
        if self._num_bytes >= FLUSH_BYTES:
            self._flush()
        elif not self._is_scheduled:
            self._is_scheduled = True
            self._loop.call_soon(self._flush_in_turn)

    def _flush_in_turn(self) -> None:
        self._is_scheduled = False
        self._flush()

    def _flush(self) -> None:
        if self._frames:
            frames, self._frames, self._num_bytes = self._frames, [], 0
            self.is_full = not self._write(b"".join(frames))

    def _close_if_unused(self) -> None:
        if self._is_ending and not self._answers:
            self._flush()
            self._close()


class Multiplexes:
    """All of one server: `by_id`."""

    def __init__(self) -> None:
        self.by_id: Final[dict[bytes, Multiplex]] = {}

    def add(self, multiplex: Multiplex) -> None:
        """Streams may go there from now on."""
        self.by_id[multiplex.id] = multiplex

    def remove(self, multiplex: Multiplex) -> None:
        """It is closed."""
        self.by_id.pop(multiplex.id, None)
        multiplex.lose()

    def find(self, headers: Iterable[tuple[bytes, bytes]]) -> tuple[Multiplex, int] | None:
        """Where a request with these headers wants its stream's parts, and under which number."""
        named = next((value for name, value in headers if name == _HEADER), b"")
        matched = _STREAM_REF.fullmatch(named)
        multiplex = None if matched is None else self.by_id.get(matched[1])
        return None if matched is None or multiplex is None else (multiplex, int(matched[2]))

    def leave(self, stream_ref: bytes) -> None:
        """Have a stream, named as in a request's head, go on on its own connection."""
        if (found := self.find([(_HEADER, stream_ref)])) is not None:
            found[0].leave(found[1])
