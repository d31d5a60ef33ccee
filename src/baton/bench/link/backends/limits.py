"""Upper limits: memcpy by one thread, and one TCP connection, plain or tuned.

driver                                        owner
  | -- token --------------------------------> |  once
  | -- num_ranges, [at, num_bytes] … --------> |
  | -- the bytes ----------------------------> |  straight into place
  | <------------------------------ one byte - |
"""

from __future__ import annotations

import hmac
import operator
import secrets
import select
import socket
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeAlias

import msgspec
import numpy as np

from baton.errors import PeerLostError, PeerUnreachableError, TransferError
from baton.net.channel import skip_bytes
from baton.rig.backend import Backend, BackendContext, StopRequested, Traits
from baton.rig.pages import Direction, Move, allocate_pool, view_bytes

if TYPE_CHECKING:
    from numpy.typing import NDArray


class Memcpy(Backend):
    """See `Backend`. Both pools are the driver's: there is no owner."""

    def __init__(self, context: BackendContext) -> None:
        self.traits = Traits("memcpy", ("push",), "memcpy")
        self.region = allocate_pool(("host",), context.num_pages)
        self.target = allocate_pool(("host",), context.num_pages)

    def prepare(self, move: Move, direction: Direction) -> Callable[[], None]:
        """See `Backend`."""
        del direction
        source, target, ranges = view_bytes(self.region), view_bytes(self.target), move.ranges

        def copy() -> None:
            for src, dst, num_bytes in ranges.tolist():
                target[dst : dst + num_bytes] = source[src : src + num_bytes]

        return copy


CONNECT_TIMEOUT_S: Final = 5.0
MAX_VECTOR: Final = 1024
RECEIVE_VECTOR: Final = 64
"""Buffers of one `recvmsg_into`: more are never filled, and each costs time."""
HEADER_BYTES: Final = 8
TOKEN_BYTES: Final = 16
ACKNOWLEDGED: Final = b"k"
TUNED_BUFFER_BYTES: Final = 4 << 20
BUFFERS: Final = (
    (socket.SO_SNDBUF, Path("/proc/sys/net/core/wmem_max")),
    (socket.SO_RCVBUF, Path("/proc/sys/net/core/rmem_max")),
)

Wait: TypeAlias = Callable[[Callable[[], int]], int]
"""Repeats a call until it returns a number of bytes."""


class Address(msgspec.Struct, frozen=True):
    """Where the owner listens, and the token by which it knows the driver."""

    host: str
    port: int
    token: bytes


class SocketPair:
    """One connection: listen, dial, check the token."""

    def __init__(self, context: BackendContext, *, buffer_bytes: int | None = None) -> None:
        self._role, self._host = context.role, context.host
        self._buffer_bytes = buffer_bytes
        self._token = secrets.token_bytes(TOKEN_BYTES)
        self._listener: socket.socket | None = None
        self._stream: socket.socket | None = None

    @property
    def stream(self) -> socket.socket:
        """The connection.

        Raises:
            TransferError: there is none yet.
        """
        if self._stream is None:
            raise TransferError("the two sides are not connected")
        return self._stream

    def local_metadata(self) -> bytes:
        """Owner: listen, and return the address. Driver: nothing."""
        if self._role == "driver":
            return b""
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        self._listener = socket.create_server((self._host, 0), family=family, backlog=1)
        self._size_buffers(self._listener)  # before a connection: its window scale is fixed then
        port = self._listener.getsockname()[1]
        return msgspec.msgpack.encode(Address(self._host, port, self._token))

    def connect(self, metadata: bytes) -> None:
        """Driver: dial, send the token, wait for the acknowledgement.

        Raises:
            PeerUnreachableError: nothing answers there.
        """
        if self._role == "owner":
            return
        address = msgspec.msgpack.decode(metadata, type=Address)
        try:
            self._stream = socket.create_connection(
                (address.host, address.port), timeout=CONNECT_TIMEOUT_S
            )
            self._stream.sendall(address.token)
            if self._stream.recv(1) != ACKNOWLEDGED:
                raise PeerUnreachableError("the owner rejected the token")
        except OSError as exc:
            raise PeerUnreachableError(f"cannot reach the owner: {exc}") from exc
        self._tune(self._stream)

    def accept(self) -> socket.socket:
        """Owner: the driver's connection, which the first call accepts.

        Raises:
            PeerUnreachableError: the driver did not connect in time, or the token is wrong.
        """
        if self._stream is not None:
            return self._stream
        if self._listener is None:
            raise TransferError("the owner does not listen")
        self._listener.settimeout(CONNECT_TIMEOUT_S)
        try:
            stream, _ = self._listener.accept()
            stream.settimeout(CONNECT_TIMEOUT_S)
            token = stream.recv(TOKEN_BYTES, socket.MSG_WAITALL)
        except OSError as exc:
            raise PeerUnreachableError(f"the driver did not connect: {exc}") from exc
        if not hmac.compare_digest(token, self._token):
            raise PeerUnreachableError("a connection with a wrong token")
        self._listener.close()
        self._stream = stream
        self._tune(stream)
        stream.send(ACKNOWLEDGED)
        return stream

    def close(self) -> None:
        """Close the connection."""
        for each in (self._listener, self._stream):
            if each is not None:
                each.close()

    def _tune(self, stream: socket.socket) -> None:
        stream.settimeout(None)
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._size_buffers(stream)

    def _size_buffers(self, sock: socket.socket) -> None:
        asked = self._buffer_bytes
        for option, ceiling in BUFFERS:
            # A size above the limit would set the limit and end the kernel's own tuning.
            if asked is not None and asked <= _read_number(ceiling):
                sock.setsockopt(socket.SOL_SOCKET, option, asked)


class SocketBackend(Backend):
    """See `Backend`: `sendmsg` and `recvmsg_into`, one connection, one thread on either side.

    Plain: blocking calls and the system's buffers. `is_tuned`: busy polling, and buffers that hold
    several of loopback's 64 KiB segments from the start.
    """

    def __init__(self, context: BackendContext, *, is_tuned: bool) -> None:
        self.traits = Traits("TCP", ("push",), "tuned socket")
        self.region = self.target = allocate_pool(("host",), context.num_pages)
        self._pair = SocketPair(context, buffer_bytes=TUNED_BUFFER_BYTES if is_tuned else None)
        self._is_spinning = is_tuned
        self._wait: Wait = _spin if is_tuned else operator.call
        self._flags = socket.MSG_DONTWAIT if is_tuned else 0

    def local_metadata(self) -> bytes:
        """See `Backend`."""
        return self._pair.local_metadata()

    def connect(self, metadata: bytes) -> None:
        """See `Backend`."""
        self._pair.connect(metadata)

    def close(self) -> None:
        """See `Backend`."""
        self._pair.close()
        super().close()

    def prepare(self, move: Move, direction: Direction) -> Callable[[], None]:
        """See `Backend`."""
        del direction  # it has one
        ranges, memory = move.ranges, self.region.memory
        views = [memory[src : src + length] for src, _, length in ranges.tolist()]
        header = len(ranges).to_bytes(HEADER_BYTES, "little") + ranges[:, 1:].tobytes()
        stream, answer = self._pair.stream, memoryview(bytearray(1))

        def push() -> None:
            stream.sendall(header)
            for first in range(0, len(views), MAX_VECTOR):
                self._send(stream, views[first : first + MAX_VECTOR])
            self._receive(stream, [answer])

        return push

    def serve(self, stop: StopRequested) -> None:
        """See `Backend`."""
        stream, header = self._pair.accept(), memoryview(bytearray(HEADER_BYTES))
        for _ in _wait_messages(stream, stop, is_spinning=self._is_spinning):
            self._receive(stream, [header])
            ranges = np.empty((int.from_bytes(header, "little"), 2), np.int64)
            self._receive(stream, [ranges.data.cast("B")])
            self._receive(stream, self._places(ranges))
            stream.send(ACKNOWLEDGED)

    def _places(self, ranges: NDArray[np.int64]) -> list[memoryview]:
        memory = self.region.memory
        return [memory[at : at + num_bytes] for at, num_bytes in ranges.tolist()]

    def _send(self, stream: socket.socket, views: list[memoryview]) -> None:
        while views:
            send = partial(stream.sendmsg, views, (), self._flags)
            views = skip_bytes(views, self._wait(send))

    def _receive(self, stream: socket.socket, views: list[memoryview]) -> None:
        done = 0
        while done < len(views):
            some = views[done : done + RECEIVE_VECTOR]
            num_bytes = self._wait(partial(self._receive_some, stream, some))
            if num_bytes == 0:
                raise PeerLostError("the other process closed the connection")
            rest = skip_bytes(some, num_bytes)
            done += len(some) - len(rest)
            if rest:
                views[done] = rest[0]

    def _receive_some(self, stream: socket.socket, views: list[memoryview]) -> int:
        return stream.recvmsg_into(views, 0, self._flags)[0]


def plain_socket(context: BackendContext) -> SocketBackend:
    """Blocking calls, the system's buffers."""
    return SocketBackend(context, is_tuned=False)


def tuned_socket(context: BackendContext) -> SocketBackend:
    """Busy polling, large buffers."""
    return SocketBackend(context, is_tuned=True)


def _wait_messages(
    stream: socket.socket, stop: StopRequested, *, is_spinning: bool
) -> Iterator[None]:
    """Yield once for each message that begins to arrive, until the next command arrives."""
    fd, timeout_s = stream.fileno(), 0 if is_spinning else None
    while True:
        ready = select.select([fd, stop.fd], [], [], timeout_s)[0]
        if not ready:
            continue
        if fd in ready and stream.recv(1, socket.MSG_PEEK):
            yield
        elif stop():
            return
        else:
            raise PeerLostError("the other process closed the connection")


def _spin(action: Callable[[], int]) -> int:
    """Retry at once while the call would block."""
    while True:
        try:
            return action()
        except BlockingIOError:
            continue


def _read_number(path: Path) -> int:
    try:
        return int(path.read_text(encoding="ascii"))
    except OSError:  # some kernels show it in the first network namespace alone
        return 0
