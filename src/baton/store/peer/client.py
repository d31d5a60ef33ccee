"""One peer's `host` tier, as `RemoteTier` asks it: blocking calls on authenticated connections."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Final, TypeVar

from baton.auth.session import TAG_BYTES
from baton.errors import AuthenticationError, BatonError, ProtocolError, StoreError, StoreFullError
from baton.net.channel import needs_sealing, skip_bytes
from baton.net.framing import (
    MAX_HANDSHAKE_BYTES,
    DialerHandshake,
    FrameDecoder,
    decode,
    encode,
    encode_frame,
)
from baton.net.tls import wrap_dialer
from baton.store.peer.addresses import parse_url
from baton.store.peer.wire import (
    MAX_ANSWER_BYTES,
    MAX_NAMES,
    PURPOSE,
    Answer,
    Deleted,
    DeleteEntry,
    FindEntries,
    Found,
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
    answer_decoder,
)
from baton.store.remote.client import RemoteValue, RequestRefusedError, ServerReport

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from baton.auth.session import Session
    from baton.store.interface import PeerAccess

A = TypeVar("A", bound=Answer)
T = TypeVar("T")

PRODUCT: Final = "baton"
WHY_REFUSED: Final = (
    "; both need the same cluster key, or certificates of one authority for the role worker, and "
    "the same security.tls"
)


class PeerClient:
    """See `RemoteClient`. As many connections as calls at once; idle ones are used again."""

    def __init__(self, url: str, access: PeerAccess, timeout_s: float) -> None:
        """Connect to nothing yet.

        Raises:
            ConfigError: the URL makes no sense.
        """
        self._address = parse_url(url)
        self._url, self._access, self._timeout_s = url, access, timeout_s
        self._lock = threading.Lock()
        self._idle: list[PeerConnection] = []
        self._open: set[PeerConnection] = set()

    def exists(self, keys: Sequence[str]) -> Sequence[bool]:
        """See `RemoteClient`: a round trip for each 4,096 names."""
        found: list[bool] = []
        for at in range(0, len(keys), MAX_NAMES):
            some = keys[at : at + MAX_NAMES]
            flags = self._ask(FindEntries(bytes.fromhex("".join(some))), Found).flags
            if len(flags) != len(some):
                raise StoreError(f"peer {self._url}: {len(flags)} answers to {len(some)} questions")
            found += map(bool, flags)
        return found

    def read(self, key: str, max_bytes: int) -> memoryview | None:
        return self._call(lambda c: c.fetch(ReadEntry(bytes.fromhex(key), max_bytes)))

    def use(self, key: str, max_bytes: int) -> memoryview | None:
        return self._call(lambda c: c.fetch(UseEntry(bytes.fromhex(key), max_bytes)))

    def put(self, key: str, value: bytes) -> bool:
        return self._call(lambda c: c.put(PutEntry(bytes.fromhex(key), len(value)), value))

    def delete(self, key: str) -> None:
        self._ask(DeleteEntry(bytes.fromhex(key)), Deleted)

    def list_values(self, max_values: int) -> list[RemoteValue]:
        """See `RemoteClient`: page by page, in the order of names."""
        found: list[RemoteValue] = []
        after = b""
        while len(found) < max_values:
            page = self._ask(ListEntries(after), Listing).entries
            if not page:
                break
            found += [RemoteValue(e.name.hex(), e.num_bytes, e.used_at) for e in page]
            if page[-1].name <= after:
                raise StoreError(f"peer {self._url}: the list of entries does not advance")
            after = page[-1].name
        return found[:max_values]

    def report(self) -> ServerReport:
        status = self._ask(ReportStatus(), Status)
        return ServerReport(
            product=PRODUCT,
            version=status.version,
            used_bytes=status.used_bytes,
            capacity_bytes=status.capacity_bytes,
            takes_entries=status.takes_entries,
        )

    def disconnect(self) -> None:
        """See `RemoteClient`: a call that waits for a socket is woken by its shutdown."""
        with self._lock:
            idle, self._idle = self._idle, []
            in_use = self._open.difference(idle)
            self._open.clear()
        for connection in idle:
            connection.close()
        for connection in in_use:
            connection.shut_down()

    def _ask(self, request: Request, expected: type[A]) -> A:
        return self._call(lambda connection: connection.ask(request, expected))

    def _call(self, work: Callable[[PeerConnection], T]) -> T:
        """What the peer answers. An idle connection that broke (the peer has restarted) is retried.

        Raises:
            StoreError: it cannot be reached, or makes no sense.
            StoreFullError, RequestRefusedError: it answers, and refuses.
        """
        with self._lock:
            connection = self._idle.pop() if self._idle else None
        if connection is not None:
            with suppress(_BrokenError):
                return self._work(connection, work)
        return self._work(self._connect(), work)

    def _work(self, connection: PeerConnection, work: Callable[[PeerConnection], T]) -> T:
        try:
            result = work(connection)
        except (StoreFullError, RequestRefusedError):
            self._give_back(connection)
            raise
        except (OSError, BatonError) as exc:
            was_open = self._close(connection)
            is_broken = was_open and isinstance(exc, ConnectionError)
            failure = _BrokenError if is_broken else StoreError
            raise failure(f"peer {self._url}: {exc}") from exc
        except BaseException:  # half of an answer may be left in it
            self._close(connection)
            raise
        self._give_back(connection)
        return result

    def _connect(self) -> PeerConnection:
        try:
            sock = socket.create_connection(self._address, self._timeout_s)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._access.tls is not None:
                sock = wrap_dialer(sock, self._access.tls)
        except (OSError, BatonError) as exc:
            raise StoreError(f"peer {self._url}: cannot connect: {exc}") from exc
        connection = PeerConnection(sock)
        with self._lock:
            self._open.add(connection)
        try:
            connection.prove(self._access)
        except (OSError, BatonError) as exc:
            self._close(connection)
            hint = "" if isinstance(exc, AuthenticationError) else WHY_REFUSED
            raise StoreError(f"peer {self._url}: {exc}{hint}") from exc
        return connection

    def _give_back(self, connection: PeerConnection) -> None:
        with self._lock:
            if connection in self._open:
                self._idle.append(connection)
                return
        connection.close()  # it was disconnected meanwhile

    def _close(self, connection: PeerConnection) -> bool:
        """Close one; True unless `disconnect` had removed it already."""
        with self._lock:
            was_open = connection in self._open
            self._open.discard(connection)
        connection.close()
        return was_open


class PeerConnection:
    """A blocking socket whose peer has proved that it is a worker. One request at a time."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._decoder = FrameDecoder(MAX_HANDSHAKE_BYTES)
        self._session: Session | None = None

    def prove(self, access: PeerAccess) -> None:
        """Prove who this is, and check who the peer is.

        Raises:
            AuthenticationError, ProtocolError: the peer is not to be trusted, or no such server.
            OSError: the connection broke, or nothing came in time.
        """
        handshake = DialerHandshake(access.credentials, PURPOSE)
        self._send(handshake.opening())
        self._send(handshake.reply(self._receive_body()))
        self._session = handshake.session if needs_sealing(self._socket) else None
        self._decoder.max_body_bytes = MAX_ANSWER_BYTES + TAG_BYTES

    def ask(self, request: Request, expected: type[A]) -> A:
        """The answer to one request.

        Raises:
            StoreFullError, RequestRefusedError: the peer refuses it.
            BatonError, OSError: there is none, or it is another one than expected.
        """
        self._send_body(request)
        return _narrow(self._receive_answer(), expected)

    def fetch(self, request: ReadEntry | UseEntry) -> memoryview | None:
        """A value, in memory of its own; None if it is not there. Raises: as `ask`."""
        self._send_body(request)
        answer = self._receive_answer()
        if isinstance(answer, Missing):
            return None
        num_bytes = _narrow(answer, Value).num_bytes
        if num_bytes > request.max_bytes:
            raise ProtocolError(f"a value of {num_bytes} bytes, at most {request.max_bytes} asked")
        value = memoryview(bytearray(num_bytes))
        self._receive_into(value)
        return value

    def put(self, request: PutEntry, value: bytes) -> bool:
        """Whether the value is new there. Raises: as `ask`."""
        self._send_body(request)
        answer = self._receive_answer()
        if isinstance(answer, SendValue):
            self._send(value)
            answer = self._receive_answer()
        return _narrow(answer, Stored).is_new

    def shut_down(self) -> None:
        """End it under a thread that may be using it, which closes it."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket; idempotent."""
        self._socket.close()

    def _send_body(self, request: Request) -> None:
        body = encode(request)
        self._send(encode_frame(body if self._session is None else self._session.seal(body)))

    def _receive_answer(self) -> Answer:
        body = self._receive_body()
        opened = body if self._session is None else self._session.open(body)
        answer: Answer = decode(answer_decoder, opened)
        return answer

    def _receive_body(self) -> bytes:
        while (num_missing := self._decoder.num_missing_bytes) > 0:
            piece = bytearray(num_missing)
            self._receive_into(memoryview(piece))
            self._decoder.feed(bytes(piece))
        body = self._decoder.take()
        if body is None:
            raise ProtocolError("half a frame")
        return body

    def _send(self, data: bytes) -> None:
        unsent = [memoryview(data)]
        while unsent:
            unsent = skip_bytes(unsent, self._socket.sendmsg(unsent))

    def _receive_into(self, into: memoryview) -> None:
        at = 0
        while at < len(into):
            num_bytes = self._socket.recvmsg_into([into[at:]])[0]
            if num_bytes == 0:
                raise ConnectionResetError("the peer closed the connection")
            at += num_bytes


class _BrokenError(StoreError):
    """The peer has closed the connection."""


def _narrow(answer: Answer, expected: type[A]) -> A:
    match answer:
        case NoRoom(reason=reason):
            raise StoreFullError(f"peer: {reason}")
        case Refused(reason=reason):
            raise RequestRefusedError(f"peer: {reason}")
        case _ if isinstance(answer, expected):
            return answer
        case _:
            raise ProtocolError(f"the peer answered with {type(answer).__name__}")
