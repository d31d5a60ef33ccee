"""A non-blocking stream socket that carries frames, and page bytes between them."""

from __future__ import annotations

import os
import socket
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Final, TypeAlias

from baton.auth.session import TAG_BYTES, Session
from baton.errors import PeerLostError, ProtocolError
from baton.net.framing import PREFIX_BYTES, FrameDecoder
from baton.net.tls import TlsSocket, WaitsForPeerError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from baton.auth.certificates import PeerIdentity

MAX_UNSENT_FRAMES_BYTES: Final = 4 << 20
RECEIVE_BYTES: Final = 65_536
WAKE_BYTES: Final = 512 << 10
"""Far more than a TLS record, of which OpenSSL may hold a part: what is awaited is on its way."""
MAX_RECEIVE_ROUNDS: Final = 16
MAX_SEND_ROUNDS: Final = 16
"""Socket calls in one `flush`: then others get their turn."""
AHEAD_BYTES: Final = 40 << 10
"""Page bytes among these are copied once more, which is cheaper than a second system call."""

Receive: TypeAlias = "Callable[[list[memoryview]], int]"
"""Fills buffers from the socket: how many bytes, 0 if there are none."""


class Channel:
    """Owns a connected (or connecting) socket. Every method returns at once.

    What is sent is a queue of *batches*: lists of buffers that leave with one system call. Buffers
    of pages are produced as the socket takes them, so a queued write holds no copy of its bytes.
    """

    def __init__(self, sock: socket.socket, max_body_bytes: int) -> None:
        self.socket = sock
        self._decoder = FrameDecoder(max_body_bytes)
        self._queue: deque[Iterator[list[memoryview]]] = deque()
        self.unsent: list[memoryview] = []
        """What is left of the batch that is being sent: others of that size may take its place."""
        self._num_unsent_frame_bytes = 0
        self.num_sent_bytes = self.num_received_bytes = 0
        self.waits_for_peer = False
        """Unsent bytes can leave only after something was read (a TLS handshake)."""
        self._received_fds: list[int] = []
        self._num_awaited_bytes = 1
        self.session: Session | None = None
        """Set once the peer has proved who it is, where frames are sealed (`needs_sealing`)."""
        self.peer: PeerIdentity | None = None
        """Set once the peer has proved who it is."""
        self.ahead: ReadAhead | None = None
        """Set where a read may take more than was asked for; never where descriptors arrive."""
        self.before_close: Callable[[], None] | None = None
        """Called once, while the socket is still open."""

    @property
    def has_unsent(self) -> bool:
        """Whether `flush` has something left to do."""
        return bool(self._queue)

    @property
    def has_buffered_input(self) -> bool:
        """Whether bytes were read from the kernel that no caller has received."""
        if self.ahead is not None and self.ahead.has_bytes:
            return True
        return isinstance(self.socket, TlsSocket) and self.socket.pending() > 0

    def allow_bodies(self, max_body_bytes: int) -> None:
        """Change the bound on frames: an authenticated peer may send larger ones."""
        self._decoder.max_body_bytes = max_body_bytes + (TAG_BYTES if self.session else 0)

    def seal(self, body: bytes) -> bytes:
        """The frame that is sent next: not for later, since frames are numbered."""
        if self.session is not None:
            body = self.session.seal(body)
        return len(body).to_bytes(PREFIX_BYTES, "little") + body

    def send_message(self, body: bytes, payload: Sequence[memoryview] = ()) -> None:
        """Queue a frame, with page bytes behind it, and send what the kernel takes.

        Raises:
            PeerLostError: the connection is broken, or the peer does not read.
        """
        num_bytes = 0 if payload else len(body)  # what waits in the pages themselves costs nothing
        if not self._queue:
            rest = self._send_at_once(body, payload)
            if not rest:
                return
            self._num_unsent_frame_bytes += num_bytes
            self._queue.append(self._counted_batches(rest, num_bytes))
        elif self._num_unsent_frame_bytes + num_bytes > MAX_UNSENT_FRAMES_BYTES:
            raise PeerLostError("the peer has stopped to read")
        else:
            self._num_unsent_frame_bytes += num_bytes
            self._queue.append(self._message_batches(body, payload, num_bytes))
        self.flush()

    def send_body_with_fd(self, body: bytes, fd: int) -> None:
        """Send one frame and a descriptor with it. Only while nothing else is unsent.

        Raises:
            PeerLostError: the connection is broken, or the peer does not read.
        """
        frame = self.seal(body)
        try:
            num_sent = socket.send_fds(self.socket, [frame], [fd])
        except OSError as exc:
            raise PeerLostError(f"the connection broke: {exc}") from exc
        if num_sent < len(frame):
            self._queue.append(self._counted_batches([memoryview(frame)[num_sent:]], 0))
            self.flush()

    def send_batches(self, batches: Iterator[list[memoryview]]) -> None:
        """Queue a stream of batches.

        The iterator advances when the kernel has taken the whole previous batch: its code after the
        last `yield` runs when all bytes were sent.
        """
        self._queue.append(batches)

    def flush(self) -> None:
        """Hand queued bytes to the kernel until it takes no more.

        Raises:
            PeerLostError: the connection is broken.
        """
        self.waits_for_peer = False
        for _ in range(MAX_SEND_ROUNDS):
            if not self.unsent and not self._load_batch():
                return
            try:
                num_sent = self.socket.sendmsg(self.unsent)
            except BlockingIOError as exc:
                self.waits_for_peer = isinstance(exc, WaitsForPeerError)
                return
            except OSError as exc:
                raise PeerLostError(f"the connection broke: {exc}") from exc
            self.num_sent_bytes += num_sent
            self.unsent = skip_bytes(self.unsent, num_sent)
        if not self.unsent:
            self._load_batch()

    def receive_bodies(self) -> list[bytes]:
        """Read what is there; whole frames' bodies. Only where no page bytes lie between frames.

        Raises:
            PeerLostError: the connection is broken or at its end.
            ProtocolError: a frame is too large.
        """
        for _ in range(MAX_RECEIVE_ROUNDS):
            data = self._receive(RECEIVE_BYTES)
            if data is None:
                break
            self._decoder.feed(data)
            if len(data) < RECEIVE_BYTES:
                break
        bodies: list[bytes] = []
        while (body := self._decoder.take()) is not None:
            bodies.append(self._open(body))
        return bodies

    def receive_body(self) -> bytes | None:
        """Read one frame and nothing behind it; None while it is incomplete.

        Raises:
            PeerLostError: the connection is broken or at its end.
            ProtocolError: the frame is too large.
        """
        if self.ahead is not None:
            there = self.ahead.peek(self._receive_into)
            if not there:
                return None
            body = self._decoder.cut(there)
            if body is not None:
                self.ahead.skip(PREFIX_BYTES + len(body))
                return self._open(body)
        while (num_missing := self._decoder.num_missing_bytes) > 0:
            if self.ahead is None:
                data = self._receive(num_missing)
            else:
                data = self.ahead.take(num_missing, self._receive_into)
            if data is None:
                return None
            self._decoder.feed(data)
        body = self._decoder.take()
        return None if body is None else self._open(body)

    def receive_body_and_fd(self) -> tuple[bytes, int | None] | None:
        """Like `receive_body`, and the descriptor that came along, which the caller must close.

        Raises:
            PeerLostError: the connection is broken or at its end.
            ProtocolError: the frame is too large, or has several descriptors.
        """
        while (num_missing := self._decoder.num_missing_bytes) > 0:
            try:
                data, fds, _, _ = socket.recv_fds(self.socket, num_missing, 1)
            except BlockingIOError:
                return None
            except OSError as exc:
                raise PeerLostError(f"the connection broke: {exc}") from exc
            self._received_fds += fds
            if len(self._received_fds) > 1:  # each read may bring one: a peer could take them all
                raise ProtocolError("a frame with several descriptors")
            if not data:
                raise PeerLostError("the peer closed the connection")
            self._decoder.feed(data)
        body = self._decoder.take()
        if body is None:
            return None
        return self._open(body), self._received_fds.pop() if self._received_fds else None

    def receive_into(self, buffers: list[memoryview]) -> int:
        """Read page bytes straight into place: how many, 0 when none are there yet.

        Raises:
            PeerLostError: the connection is broken or at its end.
        """
        if self.ahead is None:
            return self._receive_into(buffers)
        return self.ahead.place(buffers, self._receive_into)

    def _receive_into(self, buffers: list[memoryview]) -> int:
        try:
            num_bytes, _, _, _ = self.socket.recvmsg_into(buffers)
        except BlockingIOError:
            return 0
        except OSError as exc:
            raise PeerLostError(f"the connection broke: {exc}") from exc
        if num_bytes == 0:
            raise PeerLostError("the peer closed the connection")
        self.num_received_bytes += num_bytes
        return num_bytes

    def expect_bytes(self, num_bytes: int) -> None:
        """So many page bytes follow: of many, become readable only once `WAKE_BYTES` are there.

        Each wake-up costs tens of microseconds and would otherwise find one segment.
        """
        num_awaited_bytes = WAKE_BYTES if num_bytes >= 2 * WAKE_BYTES else 1
        if num_awaited_bytes != self._num_awaited_bytes:
            self._num_awaited_bytes = num_awaited_bytes
            with suppress(OSError):  # a broken socket fails at the next read
                self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, num_awaited_bytes)

    def close(self) -> None:
        """Close the socket and forget what was not sent; idempotent."""
        before_close, self.before_close = self.before_close, None
        if before_close is not None:
            before_close()
        self._queue.clear()
        self.unsent = []
        while self._received_fds:
            os.close(self._received_fds.pop())
        self.socket.close()

    def _receive(self, num_bytes: int) -> bytes | None:
        try:
            data = self.socket.recv(num_bytes)
        except BlockingIOError:
            return None
        except OSError as exc:
            raise PeerLostError(f"the connection broke: {exc}") from exc
        if not data:
            raise PeerLostError("the peer closed the connection")
        self.num_received_bytes += len(data)
        return data

    def _send_at_once(self, body: bytes, payload: Sequence[memoryview]) -> list[memoryview]:
        """Send a frame and what follows it, while nothing is unsent; what is left of them.

        Raises:
            PeerLostError: the connection is broken.
        """
        frame = self.seal(body)
        try:
            # For one buffer, send() is the cheaper call.
            if payload:
                num_sent = self.socket.sendmsg([memoryview(frame), *payload])
            else:
                num_sent = self.socket.send(frame)
        except BlockingIOError:
            num_sent = 0
        except OSError as exc:
            raise PeerLostError(f"the connection broke: {exc}") from exc
        self.num_sent_bytes += num_sent
        if num_sent == len(frame) and not payload:
            return []
        return skip_bytes([memoryview(frame), *payload], num_sent)

    def _load_batch(self) -> bool:
        """Fetch the next batch that has bytes; whether there is one."""
        while self._queue:
            batch = next(self._queue[0], None)
            if batch is None:
                self._queue.popleft()
            elif batch:
                self.unsent = batch
                return True
        return False

    def _open(self, body: bytes) -> bytes:
        return body if self.session is None else self.session.open(body)

    def _message_batches(
        self, body: bytes, payload: Sequence[memoryview], num_bytes: int
    ) -> Iterator[list[memoryview]]:
        yield [memoryview(self.seal(body)), *payload]
        self._num_unsent_frame_bytes -= num_bytes

    def _counted_batches(
        self, batch: list[memoryview], num_bytes: int
    ) -> Iterator[list[memoryview]]:
        yield batch
        self._num_unsent_frame_bytes -= num_bytes


def needs_sealing(sock: socket.socket) -> bool:
    """Whether bytes could be changed on their way, or come from another process than they seem."""
    return sock.family != socket.AF_UNIX and not isinstance(sock, TlsSocket)


def skip_bytes(buffers: list[memoryview], num_bytes: int) -> list[memoryview]:
    """What is left of a list of buffers after its first `num_bytes`."""
    for index, buffer in enumerate(buffers):
        if num_bytes < len(buffer):
            rest = buffers[index:]
            rest[0] = buffer[num_bytes:]
            return rest
        num_bytes -= len(buffer)
    return []


def make_zeros(num_bytes: int) -> list[memoryview]:
    """Buffers of `num_bytes` zeros; they share memory."""
    num_whole, rest = divmod(num_bytes, len(_ZEROS))
    return [_ZEROS] * num_whole + ([_ZEROS[:rest]] if rest else [])


_ZEROS: Final = memoryview(bytes(1 << 20))


class ReadAhead:
    """Bytes read from one socket beyond what was asked for: one call for a small transfer.

    A read that did not fill the space took all there was, so the next read is skipped once.
    """

    def __init__(self) -> None:
        self._space = memoryview(bytearray(AHEAD_BYTES))
        self._held = memoryview(b"")
        self._was_emptied = False

    @property
    def has_bytes(self) -> bool:
        """Whether there are bytes that the kernel does not signal again."""
        return bool(self._held)

    def peek(self, receive: Receive) -> memoryview:
        """The bytes at hand, not removed: valid until something is taken or skipped."""
        if not self._held:
            self._fill(receive)
        return self._held

    def skip(self, num_bytes: int) -> None:
        """Remove bytes that `peek` showed."""
        self._held = self._held[num_bytes:]

    def take(self, num_bytes: int, receive: Receive) -> bytes | None:
        """Up to `num_bytes` bytes; None if there are none."""
        if not self._held and not self._fill(receive):
            return None
        taken, self._held = self._held[:num_bytes], self._held[num_bytes:]
        return bytes(taken)

    def place(self, buffers: list[memoryview], receive: Receive) -> int:
        """Fill buffers with the next bytes: how many, 0 if there are none."""
        if not self._held:
            if self._was_emptied:
                self._was_emptied = False
                return 0
            return receive(buffers)
        num_placed = 0
        for buffer in buffers:
            length = min(len(buffer), len(self._held))
            buffer[:length], self._held = self._held[:length], self._held[length:]
            num_placed += length
        return num_placed

    def _fill(self, receive: Receive) -> bool:
        if self._was_emptied:
            self._was_emptied = False
            return False
        num_received = receive([self._space])
        self._held = self._space[:num_received]
        self._was_emptied = 0 < num_received < len(self._space)
        return num_received > 0
