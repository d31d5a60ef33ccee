"""The transport over any library that moves bytes one-sidedly, and the owner's end of it.

When a grant closes, only a peer's answer, or the end of the session that served the peer, proves
that no transfer of the peer writes any more; where the peer's process writes into this memory by
itself, only the end of that process (`peer_writes.py`).
"""

from __future__ import annotations

import ctypes
import logging
import os
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar, assert_never

from baton.errors import PeerLostError, TransferError
from baton.ids import TicketId
from baton.net.endpoints import open_peer_process
from baton.net.framing import encode
from baton.transfer.endpoints import open_dialer, open_listener, parse_endpoint
from baton.transfer.grant_messages import GrantClosed, MemoryReleased, QueryGrant
from baton.transfer.interface import (
    Arrived,
    Capabilities,
    GrantQuiescent,
    PagedRegion,
    PageRead,
    PageWrite,
    RegionDescriptor,
    RemoteId,
    TransferEvent,
    TransferId,
    TransportContext,
)
from baton.transfer.onesided.remote import OneSidedRemote
from baton.transfer.onesided.wire import (
    Attach,
    Attached,
    TransfersActive,
    TransfersIdle,
    WriteNotification,
    decode_attach,
    decode_from_peer,
)
from baton.transfer.peer_writes import (
    MAX_REASON_CHARS,
    AdmittedWriter,
    PeerWritesTransport,
    WriterConnection,
)

if TYPE_CHECKING:
    import socket

    from baton.clock import Clock
    from baton.net.channel import Channel
    from baton.net.connection import Connection
    from baton.transfer.base_transport import Reactor
    from baton.transfer.onesided.session import Library, OneSidedSession

M = TypeVar("M")
logger: Final = logging.getLogger(__name__)

ANSWER_TIMEOUT_S: Final = 30.0
"""For `GrantClosed`, which comes when the writer's transfers into the grant are over: after its
latest notification, and longer than one transfer takes on a slow link."""
MIN_INTERVAL_S: Final = 50e-6
MAX_INTERVAL_S: Final = 1e-3
POLLS_PER_AGE: Final = 32
"""What has been under way for t is looked at again after t / 32: late by 3 % at most."""
MAX_STARTING: Final = min(max(2, len(os.sched_getaffinity(0))), 4)
"""Sessions that start at a time. More would share the cores, and all be late together."""

_CLOCK_MONOTONIC: Final = 1
_libc = ctypes.CDLL(None, use_errno=True)


class _Spec(ctypes.Structure):
    """struct itimerspec."""

    _fields_ = (
        ("interval_s", ctypes.c_long),
        ("interval_ns", ctypes.c_long),
        ("value_s", ctypes.c_long),
        ("value_ns", ctypes.c_long),
    )


class Pacer:
    """Makes its reactor ready from time to time while something is under way.

    Owner thread: the transport's. Python 3.11 has no `timerfd_create` of its own.
    """

    def __init__(self, reactor: Reactor, clock: Clock) -> None:
        self._reactor, self._clock = reactor, clock
        self._fd = _libc.timerfd_create(_CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
        if self._fd < 0:
            raise TransferError(f"cannot make a timer: {os.strerror(ctypes.get_errno())}")
        self._since = clock.now()
        self._delay_s = 0.0
        reactor.watch(self._fd, self._expired)

    @property
    def is_set(self) -> bool:
        """Whether the reactor will be ready without anything that arrives."""
        return self._delay_s > 0

    def activate(self) -> None:
        """Something began, or came to an end: look again soon."""
        self._since = self._clock.now()
        if self._delay_s > MIN_INTERVAL_S:
            self._set(MIN_INTERVAL_S)

    def pace(self, *, is_under_way: bool) -> None:
        """Set the timer if there is something to wait for, and it is not set yet."""
        if not is_under_way:
            if self.is_set:
                self._set(0.0)
            return
        if not self.is_set:
            age_s = self._clock.now() - self._since
            self._set(min(max(age_s / POLLS_PER_AGE, MIN_INTERVAL_S), MAX_INTERVAL_S))

    def close(self) -> None:
        """Release the timer; idempotent."""
        if self._fd >= 0:
            self._reactor.unwatch(self._fd)
            os.close(self._fd)
            self._fd = -1

    def _expired(self) -> None:
        with suppress(BlockingIOError):  # set anew since it expired
            os.read(self._fd, 8)
            self._delay_s = 0.0

    def _set(self, delay_s: float) -> None:
        """Expire once after so long, or never (0)."""
        spec = _Spec(0, 0, 0, int(delay_s * 1e9))
        _libc.timerfd_settime(self._fd, 0, ctypes.byref(spec), None)
        self._delay_s = delay_s


class OneSidedWriter(WriterConnection):
    """A peer that may write into, or read, this side's memory, and the session that serves it.

    The session ends with the connection. Where the peer's own process writes into this memory
    (`peer_process_writes`), that process has to end, too. Elsewhere the end of the session proves
    all, so that a peer which does not answer `CloseGrant` is disconnected: its host may be gone.
    """

    def __init__(
        self, writer: AdmittedWriter, session: OneSidedSession[Any], metadata: bytes
    ) -> None:
        is_watched = session.peer_process_writes
        super().__init__(
            writer, open_peer_process(writer.connection.channel.socket) if is_watched else None
        )
        self._session, self._metadata = session, metadata
        self.is_active = False
        """The peer's transfers are in progress, as far as it reports."""
        self._unanswered: dict[TicketId, None] = {}
        """Grants whose close was sent, the oldest first."""

    def send_close_grant(self, grant: TicketId) -> None:
        """See `WriterConnection`."""
        if not self._unanswered:
            self._expect_answer()  # first: a send that fails ends the connection and its timer
        self._unanswered[grant] = None
        super().send_close_grant(grant)

    def serve(self) -> None:
        """Give the library its turn."""
        try:
            self._session.serve()
        except TransferError as exc:
            self._connection.fail(exc)

    def close(self) -> None:
        """See `WriterConnection`."""
        self.is_active = False
        super().close()
        self._session.close()

    def _send_attached(self) -> None:
        self._connection.send_body(encode(Attached(self._region.arrays, self._metadata)))

    def _read(self, channel: Channel) -> None:
        for body in channel.receive_bodies():
            match decode_from_peer(body):
                case WriteNotification(grant, notification):
                    if self._ledger.admits(self._writer, TicketId(grant)):
                        if self._unanswered:
                            self._expect_answer()  # it lives, and may have much to write before
                        self._reactor.report(Arrived(TicketId(grant), notification))
                case TransfersActive() | TransfersIdle() as message:
                    self.is_active = isinstance(message, TransfersActive)
                case MemoryReleased() as message:
                    self._handle_grant_message(message)
                    return
                case GrantClosed(grant) as message:
                    self._handle_grant_message(message)
                    self._answered(TicketId(grant))
                case QueryGrant() as message:
                    self._handle_grant_message(message)
                case unknown:
                    assert_never(unknown)

    def _answered(self, grant: TicketId) -> None:
        was_oldest = grant == next(iter(self._unanswered))
        del self._unanswered[grant]
        if not self._unanswered:
            self._connection.cancel_deadline()
        elif was_oldest:
            self._expect_answer()

    def _expect_answer(self) -> None:
        if not self._session.peer_process_writes:
            self._connection.fail_after(ANSWER_TIMEOUT_S, "a writer's answer to close_grant")

    def _disconnected(self, error: TransferError) -> None:
        self.is_active = False
        self._session.close()
        if self._session.peer_process_writes:
            super()._disconnected(error)
            return
        if self._unanswered:
            logger.warning("a writer was lost that had grants to leave: %s", error)
        self._finish()


def _refuse_body(channel: Channel) -> None:
    if channel.receive_body() is not None:
        raise PeerLostError("it has detached")  # or sent what no honest peer sends now


class OneSidedTransport(PeerWritesTransport[OneSidedRemote[M], Attach, OneSidedWriter], Generic[M]):
    """See `Transport`. Owner thread: whoever calls `poll`; `submit` and `read` may copy.

    A forked child has copies of the library's sockets and must leave them alone: there, moving and
    polling raise, and closing does nothing.
    """

    def __init__(
        self,
        kind: str,
        library: Library[M],
        context: TransportContext,
        *,
        connect_timeout_s: float,
        max_connections: int,
        advertise_host: str | None,
    ) -> None:
        self.kind = kind
        super().__init__(
            context, connect_timeout_s=connect_timeout_s, max_connections=max_connections
        )
        self.capabilities = Capabilities(
            memory=library.memory,
            same_host_only=library.reach == "host",
            reads=True,
            late_writes=True,
            admits_writes=True,
            multi_array=library.multi_array,
        )
        self._library, self._advertise_host = library, advertise_host
        self._process = os.getpid()
        self._pacer = Pacer(self._reactor, context.clock)
        self._starting: dict[Connection, tuple[OneSidedSession[M], int | None]] = {}
        """Sessions of peers that attach, and what is readable once each has started."""
        self._waiting: dict[Connection, tuple[Attach, PagedRegion]] = {}
        """Peers that attach, whose session starts when an earlier one no longer does."""
        self._has_admitted = False
        """In this `poll`. A library that pins memory takes 0.25 s for a GiB, for each peer: more of
        them in a row would keep the thread from sending heartbeats."""

    def expose(self, region: PagedRegion) -> RegionDescriptor:
        """See `Transport`. The first call starts the library once: it takes a while, and may fail.

        Raises:
            TransferError: this kind of memory cannot be exposed, the library does not work here,
                or a listener cannot be opened.
        """
        needs_descriptor = "host" not in self.capabilities.memory
        if needs_descriptor and region.kind == "shared" and region.fd is None:
            raise TransferError(
                f"{self.kind} needs memory with a descriptor of its own; this region lies in a "
                f"device: take {self.kind} out of transfer.transports"
            )
        return super().expose(region)

    def submit(self, write: PageWrite) -> TransferId:
        """See `Transport`."""
        self._check_process()
        transfer = super().submit(write)
        self._pacer.activate()
        self._pace()
        return transfer

    def read(self, read: PageRead) -> TransferId:
        """See `ReadsPages`."""
        self._check_process()
        transfer, remote, region = self._check_read(read)
        remote.read(transfer, read.copies, region)
        self._pacer.activate()
        self._pace()
        return transfer

    def poll(self) -> list[TransferEvent]:
        """See `Transport`."""
        self._check_process()
        for remote in list(self._remotes.values()):
            if remote.is_active:
                remote.advance()
        for writer in list(self._writers.values()):
            if writer.is_active:
                writer.serve()
        self._has_admitted = False
        events = self._reactor.poll()
        if self._waiting:
            self._start_waiting()
        if self.readiness_fd is not None:
            if events:
                self._pacer.activate()
            self._pace()
        return [*events, *map(GrantQuiescent, self._ledger.take_quiescent())]

    def close(self) -> None:
        """See `Transport`."""
        if self._process == os.getpid():
            super().close()

    def _release(self) -> None:
        self._waiting.clear()
        super()._release()
        for connection in tuple(self._starting):
            self._take_started(connection).close()
        self._pacer.close()

    def _check_process(self) -> None:
        if self._process != os.getpid():
            raise TransferError(f"this {self.kind} transport belongs to the parent process")

    def _pace(self) -> None:
        """Be polled again soon if a library here has work for which no descriptor gets ready."""
        moving = any(remote.is_active for remote in self._remotes.values())
        served = any(writer.is_active for writer in self._writers.values())
        self._pacer.pace(is_under_way=moving or served)

    def _make_remote(self, id_: RemoteId, descriptor: RegionDescriptor) -> OneSidedRemote[M]:
        parse_endpoint(self._library.reach, descriptor.endpoint)
        return OneSidedRemote(
            id_, descriptor, self._reactor, epoch=self._context.epoch, library=self._library
        )

    def _connect(self, remote: OneSidedRemote[M]) -> None:
        self._dial(remote, *open_dialer(self._library.reach, remote.descriptor.endpoint))

    def _open_listener(self) -> tuple[socket.socket, str]:
        self._library.open_session().close()  # does it work here?
        return open_listener(self._library.reach, self._context.bind_host, self._advertise_host)

    def _decode_attach(self, body: bytes) -> Attach:
        return decode_attach(body)

    def _admit(self, connection: Connection, attach: Attach, region: PagedRegion) -> None:
        """As soon as a session has started: until then the thread serves its other peers."""
        connection.set_handlers(_refuse_body, partial(self._disconnected, connection))
        self._waiting[connection] = attach, region
        self._start_waiting()

    def _start_waiting(self) -> None:
        while self._waiting and len(self._starting) < MAX_STARTING:
            connection = next(iter(self._waiting))
            if self._has_admitted:
                connection.step_soon()  # so that there is a next `poll`
                return
            self._start(connection, *self._waiting.pop(connection))

    def _start(self, connection: Connection, attach: Attach, region: PagedRegion) -> None:
        try:
            session, fd = self._start_session(region)
        except TransferError as exc:
            self._refuse(connection, "attach", str(exc)[:MAX_REASON_CHARS])
            return
        self._starting[connection] = session, fd
        admit = partial(self._admit_started, connection, attach, region)
        if fd is None:
            admit()
        else:
            self._reactor.watch(fd, admit)

    def _admit_started(self, connection: Connection, attach: Attach, region: PagedRegion) -> None:
        """One in each `poll`; the descriptor of another's session is still readable in the next."""
        if not self._has_admitted:
            self._has_admitted = True
            super()._admit(connection, attach, region)

    def _start_session(self, region: PagedRegion) -> tuple[OneSidedSession[M], int | None]:
        session = self._library.open_session()
        try:
            return session, session.prepare(region)
        except TransferError:
            session.close()
            raise

    def _disconnected(self, connection: Connection, error: TransferError) -> None:
        if connection in self._starting or self._waiting.pop(connection, None) is not None:
            self._log.warning("attach", f"a peer left before its session had started: {error}")
        if connection in self._starting:
            self._take_started(connection).close()
        super()._disconnected(connection, error)

    def _take_started(self, connection: Connection) -> OneSidedSession[M]:
        session, fd = self._starting.pop(connection)
        if fd is not None:
            self._reactor.unwatch(fd)
        # Before `fd` is closed: the next session's, of the same number, could seem ready by it.
        self._start_waiting()
        return session

    def _make_writer(self, writer: AdmittedWriter, attach: Attach) -> OneSidedWriter:
        del attach
        session = self._take_started(writer.connection)
        try:
            return OneSidedWriter(writer, session, session.get_metadata(writer.region))
        except TransferError:
            session.close()
            raise
