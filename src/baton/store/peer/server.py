"""Answers peers from this process's `host` tier, on a thread of its own."""

from __future__ import annotations

import logging
import os
import select
import socket
import threading
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol, assert_never

from baton import __version__
from baton.errors import ConfigError, ProtocolError, StoreError, StoreFullError
from baton.net.connection import EventReactor, count_moved_bytes
from baton.net.endpoints import Listener
from baton.net.framing import decode, encode
from baton.net.tls import TlsListener
from baton.store.entry_format import HEADER_BYTES
from baton.store.interface import NAME_BYTES, EntryName, PeerCounts, PutResult
from baton.store.peer.wire import (
    MAX_LISTED,
    MAX_REQUEST_BYTES,
    PURPOSE,
    Answer,
    Deleted,
    DeleteEntry,
    FindEntries,
    Found,
    ListedValue,
    ListEntries,
    Listing,
    Missing,
    NoRoom,
    PutEntry,
    ReadEntry,
    Refused,
    ReportStatus,
    Request,
    SendValue,
    Status,
    Stored,
    UseEntry,
    Value,
    cut_text,
    request_decoder,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from baton.clock import Clock
    from baton.net.channel import Channel
    from baton.net.connection import Connection
    from baton.store.capacity import StoredEntry
    from baton.store.interface import PeerAccess, Usage

logger = logging.getLogger(__name__)

STALL_S: Final = 5.0
"""A peer that neither takes nor sends a byte of a value for so long is not waited for."""
MAX_RECEIVED_BYTES: Final = 256 << 20
"""Of values that are on their way here, together; a larger single one is taken alone."""
MAX_STEPS: Final = 16
"""Reads of one connection before others get their turn."""
POLL_S: Final = 0.25
"""Timers of the reactor are looked at so often."""
STOP_TIMEOUT_S: Final = 5.0
KEEPALIVE: Final = (
    (socket.TCP_NODELAY, 1),
    (socket.TCP_KEEPIDLE, 30),
    (socket.TCP_KEEPINTVL, 10),
    (socket.TCP_KEEPCNT, 3),
)
"""A host that is gone is noticed though nothing is sent to it."""


class ServedEntries(Protocol):
    """What peers are answered from. From the server's thread, beside the owner's calls."""

    def holds(self, names: Sequence[EntryName]) -> list[bool]:
        """Which names are there."""
        ...

    def read_value(self, name: EntryName, *, is_use: bool) -> tuple[bytes, bytes] | None:
        """Header and body of an entry, which never change; None if it is not there.

        `is_use`: it counts as the entry's last use.
        """
        ...

    def put_value(self, name: EntryName, value: memoryview) -> PutResult:
        """Keep a value that came from a peer.

        Raises:
            StoreFullError: there is no room.
            StoreError: it was not put by a holder of the cluster's key.
        """
        ...

    def discard(self, name: EntryName) -> None:
        """See `Tier`."""
        ...

    def entries(self) -> list[StoredEntry]:
        """See `Tier`."""
        ...

    def usage(self) -> Usage:
        """See `Tier`."""
        ...


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Where it listens, and what peers may do: read, or write as well."""

    host: str
    port: int
    takes_entries: bool
    max_value_bytes: int


class EntryServer:
    """Owns a listener and a thread. `counts` is of all peers since the start; others read it."""

    def __init__(self, entries: ServedEntries, options: ServerOptions) -> None:
        self.entries, self.options = entries, options
        self.counts = PeerCounts()
        self.address = (options.host, options.port)
        """The bound one, once it was started."""
        self.received_bytes = 0
        """Of values on their way here."""
        self._wake_fd = -1
        self._thread: threading.Thread | None = None

    def start(self, access: PeerAccess, clock: Clock) -> None:
        """Listen, and answer from now on.

        Raises:
            ConfigError: the address cannot be bound.
        """
        options = self.options
        sock = _listen(options.host, options.port)
        self.address = sock.getsockname()[:2]
        if access.tls is not None:
            sock = TlsListener(sock, access.tls)
        reactor: EventReactor[None] = EventReactor(clock)
        listener = Listener(
            sock,
            reactor,
            access.credentials,
            PURPOSE,
            on_peer=lambda connection: _Peer(self, connection, listener).begin(),
        )
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(
            target=self._run, args=(reactor, listener), name="store-peers", daemon=True
        )
        self._thread.start()
        logger.info("store: peers reach this host tier at %s:%d", *self.address)

    def stop(self) -> None:
        """Close all connections and end the thread. Idempotent."""
        if self._thread is None:
            return
        os.eventfd_write(self._wake_fd, 1)
        self._thread.join(STOP_TIMEOUT_S)
        if self._thread.is_alive():
            logger.error("store: the thread that answers peers has not ended")
            return
        self._thread = None
        os.close(self._wake_fd)

    def _run(self, reactor: EventReactor[None], listener: Listener) -> None:
        poll = select.poll()
        poll.register(reactor.fd, select.POLLIN)
        poll.register(self._wake_fd, select.POLLIN)
        try:
            while True:
                ready = poll.poll(POLL_S * 1000)
                if any(fd == self._wake_fd for fd, _ in ready):
                    return
                reactor.poll()
        finally:
            listener.close()
            reactor.close()


class _Peer:
    """One peer's connection: a request, its answer, the next one. Owner: the server's thread."""

    def __init__(self, server: EntryServer, connection: Connection, listener: Listener) -> None:
        self._server, self._connection, self._listener = server, connection, listener
        self._name = EntryName(b"")
        self._value: bytearray | None = None
        self._num_received = 0

    def begin(self) -> None:
        connection = self._connection
        connection.cancel_deadline()
        connection.channel.allow_bodies(MAX_REQUEST_BYTES)
        connection.set_handlers(self._read, lambda _: self._end())

    def _end(self) -> None:
        self._drop_value()
        self._listener.forget(self._connection)

    def _drop_value(self) -> None:
        if self._value is not None:
            self._server.received_bytes -= len(self._value)
            self._value = None

    def _read(self, channel: Channel) -> None:
        for _ in range(MAX_STEPS):
            if self._value is not None:
                if not self._receive_value(channel, self._value):
                    return
                continue
            body = channel.receive_body()
            if body is None:
                return
            if channel.has_unsent:
                raise ProtocolError("the peer asks before it has taken the last answer")
            self._handle(decode(request_decoder, body), channel)

    def _handle(self, request: Request, channel: Channel) -> None:
        entries = self._server.entries
        match request:
            case FindEntries(names=names):
                if len(names) % NAME_BYTES:
                    raise ProtocolError(f"{len(names)} bytes of names")
                named = [
                    EntryName(names[at : at + NAME_BYTES])
                    for at in range(0, len(names), NAME_BYTES)
                ]
                self._send(Found(bytes(entries.holds(named))))
            case ReadEntry(name=name, max_bytes=max_bytes):
                value = entries.read_value(EntryName(name), is_use=False)
                self._send_value(value, max_bytes, channel)
            case UseEntry(name=name, max_bytes=max_bytes):
                value = entries.read_value(EntryName(name), is_use=True)
                self._send_value(value, max_bytes, channel)
            case PutEntry():
                self._begin_put(request, channel)
            case DeleteEntry(name=name):
                entries.discard(EntryName(name))
                self._send(Deleted())
            case ListEntries(after=after):
                self._send(_list_page(entries.entries(), after))
            case ReportStatus():
                usage = entries.usage()
                takes_entries = self._server.options.takes_entries
                sizes = usage.used_bytes, usage.capacity_bytes
                self._send(Status(cut_text(__version__), *sizes, takes_entries))
            case _:
                assert_never(request)

    def _send(self, answer: Answer) -> None:
        self._connection.send_body(encode(answer))

    def _send_value(
        self, value: tuple[bytes, bytes] | None, max_bytes: int, channel: Channel
    ) -> None:
        if value is None:
            self._send(Missing())
            return
        header, body = (memoryview(part) for part in value)
        header, body = header[:max_bytes], body[: max(0, max_bytes - len(header))]
        frame = encode(Value(len(header) + len(body)))
        connection, counts = self._connection, self._server.counts

        def batches() -> Iterator[list[memoryview]]:
            yield [memoryview(channel.seal(frame)), header, body]
            connection.cancel_deadline()
            counts.num_read += 1
            counts.read_bytes += len(body)

        self._await_progress(channel, "a peer that reads an entry")
        connection.send_batches(batches())
        connection.flush()

    def _begin_put(self, request: PutEntry, channel: Channel) -> None:
        server, name = self._server, EntryName(request.name)
        if not server.options.takes_entries:
            self._send(NoRoom("this tier takes no entries of others"))
            return
        if server.entries.holds((name,))[0]:
            self._send(Stored(is_new=False))
            return
        is_too_much = server.received_bytes + request.num_bytes > MAX_RECEIVED_BYTES
        if request.num_bytes > server.options.max_value_bytes:
            self._send(NoRoom(f"{server.options.max_value_bytes} bytes fit"))
        elif is_too_much and server.received_bytes:
            self._send(NoRoom(f"{server.received_bytes} bytes are on their way here already"))
        else:
            try:
                self._name, self._value = name, bytearray(request.num_bytes)
            except MemoryError:
                self._send(NoRoom(f"no memory for an entry of {request.num_bytes} bytes"))
                return
            server.received_bytes += request.num_bytes
            self._num_received = 0
            self._await_progress(channel, "a peer that writes an entry")
            channel.expect_bytes(request.num_bytes)
            self._send(SendValue())

    def _receive_value(self, channel: Channel, value: bytearray) -> bool:
        """Read what has come; False where no more has."""
        num_bytes = channel.receive_into([memoryview(value)[self._num_received :]])
        if num_bytes == 0:
            return False
        self._num_received += num_bytes
        channel.expect_bytes(len(value) - self._num_received)
        if self._num_received == len(value):
            self._connection.cancel_deadline()
            self._drop_value()
            self._send(self._put(value))
        return True

    def _put(self, value: bytearray) -> Answer:
        counts = self._server.counts
        try:
            result = self._server.entries.put_value(self._name, memoryview(value))
        except StoreFullError as exc:
            return NoRoom(cut_text(str(exc)))
        except StoreError as exc:
            return Refused(cut_text(str(exc)))
        if result is PutResult.STORED:
            counts.num_written += 1
            counts.written_bytes += len(value) - HEADER_BYTES
        return Stored(is_new=result is PutResult.STORED)

    def _await_progress(self, channel: Channel, what: str) -> None:
        self._connection.fail_unless_progress(STALL_S, what, lambda: count_moved_bytes(channel))


def _list_page(entries: list[StoredEntry], after: bytes) -> Listing:
    following = sorted(
        (entry for entry in entries if entry.name > after), key=lambda entry: entry.name
    )
    return Listing([ListedValue(e.name, e.num_bytes, e.used_at) for e in following[:MAX_LISTED]])


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, socket.SOCK_STREAM)
    except OSError as exc:
        raise ConfigError(f"store.options.host.listen: {host}: {exc}") from exc
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in KEEPALIVE:
        with suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, option, value)
    try:
        sock.bind(address)
    except OSError as exc:
        sock.close()
        raise ConfigError(
            f"store.options.host.listen: cannot listen on {host}:{port}: {exc.strerror}; each "
            "process with a host tier needs an address of its own"
        ) from exc
    return sock
