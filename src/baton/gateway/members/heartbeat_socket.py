"""Where a gateway receives heartbeats and renewals.

They are read when the leases are looked at, not when they arrive, and many with one system call
(recvmmsg): so many small datagrams cost no wake-up and no system call each, and whatever waits is
read before any worker is found silent.
"""

from __future__ import annotations

import ctypes
import socket
import struct
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

from baton.errors import ConfigError
from baton.protocol.heartbeats import HEARTBEAT_BYTES, MAX_RENEWAL_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence

BATCH: Final = 64
"""Datagrams of one system call."""
MAX_BATCHES: Final = 64
"""At once; the socket's buffer holds fewer datagrams."""
BUFFER_BYTES: Final = 1 << 20
"""Asked for; the kernel's limit (net.core.rmem_max) may be less."""
PLACE_BYTES: Final = MAX_RENEWAL_BYTES + 8
"""Of one datagram in the buffer: a longer one than a renewal is seen as such."""
NAME_BYTES: Final = 28
_IPV4: Final = struct.Struct("!2xH4s")
_IPV6: Final = struct.Struct("!2xHI16s")
_SCOPE: Final = struct.Struct("@I")

Address: TypeAlias = tuple[str, int] | tuple[str, int, int, int]

_libc = ctypes.CDLL(None, use_errno=True)


class Datagrams(NamedTuple):
    """What has arrived: those of at most `HEARTBEAT_BYTES`, and longer ones with their senders."""

    short: Sequence[bytes]
    long: Sequence[tuple[bytes, Address]]


class HeartbeatSocket:
    """Bound to `host` and the UDP port `port`. Owner: the event loop's thread.

    Raises:
        ConfigError: the port is taken, or the address is not this machine's.
    """

    def __init__(self, host: str, port: int) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_DGRAM)
        self._socket.settimeout(0)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
        try:
            self._socket.bind((host, port))
        except OSError as exc:
            self._socket.close()
            raise ConfigError(
                f"cannot receive heartbeats at UDP port {port} of {host}: {exc.strerror or exc}; "
                "choose another gateway.announce_port, whose UDP port is free too"
            ) from exc
        self._batch = _Batch()

    def close(self) -> None:
        """Close it."""
        self._socket.close()

    def read(self) -> Datagrams:
        """The datagrams that have arrived, up to a bound. Does not block."""
        short: list[bytes] = []
        long: list[tuple[bytes, Address]] = []
        for _ in range(MAX_BATCHES):
            lengths = self._batch.receive(self._socket.fileno())
            for place, length in enumerate(lengths):
                if length <= HEARTBEAT_BYTES:
                    short.append(self._batch.data(place, length))
                else:
                    long.append((self._batch.data(place, length), self._batch.sender(place)))
            if len(lengths) < BATCH:
                break
        return Datagrams(short, long)

    def send(self, datagram: bytes, to: Address) -> None:
        """Does not block; one that cannot be sent is lost, as any datagram."""
        with suppress(OSError):
            self._socket.sendto(datagram, to)


class _IoVec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


class _MessageHeader(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_void_p),
        ("name_length", ctypes.c_uint32),
        ("vectors", ctypes.POINTER(_IoVec)),
        ("num_vectors", ctypes.c_size_t),
        ("control", ctypes.c_void_p),
        ("control_length", ctypes.c_size_t),
        ("flags", ctypes.c_int),
    )


class _Message(ctypes.Structure):
    """`struct mmsghdr` of recvmmsg(2)."""

    _fields_ = (("header", _MessageHeader), ("length", ctypes.c_uint32))


class _Batch:
    """Memory for `BATCH` datagrams and their senders."""

    def __init__(self) -> None:
        self._data, self._names = bytearray(BATCH * PLACE_BYTES), bytearray(BATCH * NAME_BYTES)
        self._view = memoryview(self._data)
        data = ctypes.addressof(ctypes.c_char.from_buffer(self._data))
        names = ctypes.addressof(ctypes.c_char.from_buffer(self._names))
        self._vectors = (_IoVec * BATCH)()
        memory = bytearray(BATCH * ctypes.sizeof(_Message))
        self._messages = (_Message * BATCH).from_buffer(memory)
        for place in range(BATCH):
            self._vectors[place] = _IoVec(data + place * PLACE_BYTES, PLACE_BYTES)
            header = self._messages[place].header
            header.name, header.name_length = names + place * NAME_BYTES, NAME_BYTES
            header.vectors, header.num_vectors = ctypes.pointer(self._vectors[place]), 1
        words, size = memoryview(memory).cast("I"), ctypes.sizeof(_Message)
        self._lengths = words[_Message.length.offset // words.itemsize :: size // words.itemsize]

    def receive(self, fd: int) -> list[int]:
        """Fill it with what waits: the lengths of those datagrams. Empty: there is none."""
        num = _libc.recvmmsg(fd, self._messages, BATCH, socket.MSG_DONTWAIT, None)
        return self._lengths[:num].tolist() if num > 0 else []

    def data(self, place: int, length: int) -> bytes:
        """One of them."""
        begin = place * PLACE_BYTES
        return bytes(self._view[begin : begin + length])

    def sender(self, place: int) -> Address:
        """Who sent it: a `sockaddr_in` or `sockaddr_in6`."""
        begin = place * NAME_BYTES
        name = bytes(self._names[begin : begin + NAME_BYTES])
        if int.from_bytes(name[:2], sys.byteorder) == socket.AF_INET:
            port, host = _IPV4.unpack_from(name)
            return socket.inet_ntop(socket.AF_INET, host), port
        port, flow, host = _IPV6.unpack_from(name)
        (scope,) = _SCOPE.unpack_from(name, _IPV6.size)
        return socket.inet_ntop(socket.AF_INET6, host), port, flow, scope
