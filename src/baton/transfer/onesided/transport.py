"""The contract, for any library that moves bytes one-sidedly.

The owner cannot stop a posted transfer of a peer. It asks (`CloseGrant`, `GrantClosed`), and
believes nothing but an answer, or the end of the engine that served the peer; where the peer's
process has a hand of its own in this memory, its death.
"""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar, assert_never

from baton.errors import ProtocolError, TransferError
from baton.ids import Epoch, RegionHandle, TicketId
from baton.net.endpoints import Dialer, Listener, open_peer_process
from baton.transfer.endpoints import open_dialer, open_listener
from baton.transfer.grant_messages import (
    MAX_BODY_BYTES,
    MAX_GRANT_PAGES,
    CloseGrant,
    GrantClosed,
    GrantNotOpen,
    GrantOpened,
    MemoryReleased,
    NotAttached,
    QueryGrant,
    pack_pages,
)
from baton.transfer.grants import GrantLedger, WriterId, check_grant_pages
from baton.transfer.interface import (
    Arrived,
    Capabilities,
    GrantQuiescent,
    RegionDescriptor,
    RemoteId,
    TransferId,
)
from baton.transfer.messages import encode
from baton.transfer.onesided.remote import OneSidedRemote
from baton.transfer.onesided.wire import (
    Attached,
    TransfersActive,
    TransfersIdle,
    WriteNotification,
    decode_attach,
    decode_from_peer,
)
from baton.transfer.reactor import Reactor
from baton.transfer.region import check_arrays, check_copies, check_notification

if TYPE_CHECKING:
    from collections.abc import Callable

    from baton.clock import Clock
    from baton.net.channel import Channel
    from baton.net.connection import Connection
    from baton.transfer.interface import (
        PagedRegion,
        PageRead,
        PageWrite,
        TransferEvent,
        TransportContext,
        WriteGrant,
    )
    from baton.transfer.onesided.session import Library, OneSidedSession

MIN_INTERVAL_S: Final = 50e-6
MAX_INTERVAL_S: Final = 1e-3
POLLS_PER_AGE: Final = 32
"""What has been under way for t is looked at again after t / 32: late by 3 % at most."""

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
        self._is_set = False
        reactor.watch(self._fd, self._expired)

    def activate(self) -> None:
        """Something began, or came to an end: look again soon."""
        self._since = self._clock.now()
        if self._is_set:
            self._set(MIN_INTERVAL_S)

    def pace(self, *, is_under_way: bool) -> None:
        """Set the timer if there is something to wait for, and it is not set yet."""
        if not is_under_way:
            if self._is_set:
                self._set(0.0)
            return
        if not self._is_set:
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
            self._is_set = False

    def _set(self, delay_s: float) -> None:
        """Expire once after so long, or never (0)."""
        spec = _Spec(0, 0, 0, int(delay_s * 1e9))
        _libc.timerfd_settime(self._fd, 0, ctypes.byref(spec), None)
        self._is_set = delay_s > 0


MAX_FINAL_STEPS: Final = 64


class OneSidedInbound:
    """One peer that may write into, or read, this side's memory. Owner thread: the transport's.

    With the connection ends the engine that served it. Where the peer has a hand of its own in
    this memory (`peer_process_writes`), this outlives the connection until the peer's process is
    dead. `on_over` is called once, when nothing of it can land any more.
    """

    def __init__(
        self,
        writer: WriterId,
        connection: Connection,
        session: OneSidedSession[Any],
        *,
        ledger: GrantLedger,
        reactor: Reactor,
        on_over: Callable[[WriterId], None],
    ) -> None:
        self._writer, self._connection, self._session = writer, connection, session
        self._ledger, self._reactor, self._on_over = ledger, reactor, on_over
        self._process = (
            open_peer_process(connection.channel.socket) if session.peer_process_writes else None
        )
        if self._process is not None:
            reactor.watch(self._process, self._process_ended)
        self.is_active = False
        """The peer's transfers are under way, as far as it says."""

    def send_attached(self, region: PagedRegion, metadata: bytes, grants: list[WriteGrant]) -> None:
        """Send the memory's description and the grants that are already open."""
        self._connection.cancel_deadline()
        self._connection.set_handlers(self._read, self._disconnected)
        self._connection.send_body(encode(Attached(region.arrays, metadata)))
        for grant in grants:
            self.send_grant_opened(grant)

    def send_grant_opened(self, grant: WriteGrant) -> None:
        """The peer may write into this grant from now on."""
        self._connection.send_body(encode(GrantOpened(grant.id, pack_pages(grant.pages))))

    def send_close_grant(self, grant: TicketId) -> None:
        """The peer must start no other write into this grant, and report when none is in flight."""
        self._connection.send_body(encode(CloseGrant(grant)))

    def serve(self) -> None:
        """Give the library its turn."""
        try:
            self._session.serve()
        except TransferError as exc:
            self._connection.fail(exc)

    def close(self) -> None:
        """Stop serving and watching: nothing is known of this peer from now on. Idempotent."""
        self.is_active = False
        self._connection.close()
        self._session.close()
        if self._process is not None:
            self._reactor.unwatch(self._process)
            os.close(self._process)
            self._process = None

    def _read(self, channel: Channel) -> None:
        for body in channel.receive_bodies():
            match decode_from_peer(body):
                case WriteNotification(grant, notification):
                    if self._ledger.admits(self._writer, TicketId(grant)):
                        self._reactor.report(Arrived(TicketId(grant), notification))
                case QueryGrant(grant):
                    self._answer(TicketId(grant))
                case GrantClosed(grant):
                    self._ledger.confirm_closed(self._writer, TicketId(grant))
                case TransfersActive() | TransfersIdle() as message:
                    self.is_active = isinstance(message, TransfersActive)
                case MemoryReleased():
                    self._finish()
                    return
                case unknown:
                    assert_never(unknown)

    def _answer(self, grant: TicketId) -> None:
        """If the grant was opened, `GrantOpened` is on its way already: nothing else to say."""
        if not self._ledger.admits(self._writer, grant):
            self._connection.send_body(encode(GrantNotOpen(grant)))

    def _disconnected(self, error: TransferError) -> None:
        del error  # that the peer is out of reach does not tell whether its own hand still writes
        self.is_active = False
        self._session.close()
        if not self._session.peer_process_writes or not self._ledger.disconnect(self._writer):
            self._finish()

    def _process_ended(self) -> None:
        """The process is dead. What it sent before still counts."""
        for _ in range(MAX_FINAL_STEPS):
            if not self._connection.is_open:
                break
            self._connection.step()
        self._finish()

    def _finish(self) -> None:
        self.close()
        self._ledger.release(self._writer)
        self._on_over(self._writer)


MAX_PEERS: Final = 64
"""Peers of this side's regions that have an engine here, or had one and may still store."""

MAX_REASON_CHARS: Final = 256

M = TypeVar("M")


class OneSidedTransport(Generic[M]):
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
        advertise_host: str | None,
    ) -> None:
        self.kind = kind
        self.capabilities = Capabilities(
            memory=library.memory,
            same_host_only=library.reach == "host",
            reads=True,
            late_writes=True,
        )
        self._library, self._context = library, context
        self._process = os.getpid()
        self._advertise_host = advertise_host
        self._reactor = Reactor(context.clock)
        self._pacer = Pacer(self._reactor, context.clock)
        self.readiness_fd: int | None = self._reactor.fd
        self._dialer = Dialer(self._reactor, context.key, kind, timeout_s=connect_timeout_s)
        self._regions: dict[RegionHandle, PagedRegion] = {}
        self._ledger = GrantLedger()
        self._inbound: dict[WriterId, OneSidedInbound] = {}
        self._remotes: dict[RemoteId, OneSidedRemote[M]] = {}
        self._leaving: list[OneSidedRemote[M]] = []
        self._listener: Listener | None = None
        self._endpoint = ""
        self._num_remotes = self._num_transfers = self._num_writers = 0

    def expose(self, region: PagedRegion) -> RegionDescriptor:
        """See `Transport`. The first call starts the library once: it takes a while, and may fail.

        Raises:
            TransferError: this kind of memory cannot be exposed, the library does not work here,
                or a listener cannot be opened.
        """
        if region.kind not in self.capabilities.memory:
            raise TransferError(f"{self.kind} cannot expose {region.kind} memory")
        needs_descriptor = "host" not in self.capabilities.memory
        if needs_descriptor and region.kind == "shared" and region.fd is None:
            raise TransferError(
                f"{self.kind} needs memory with a descriptor of its own; this region lies in a "
                f"device: take {self.kind} out of transfer.transports"
            )
        check_arrays(region.arrays)
        if self._listener is None:
            self._library.open_session().close()
            self._listen()
        self._regions[region.handle] = region
        return RegionDescriptor(
            self.kind, region.handle, self._context.epoch, region.arrays, self._endpoint
        )

    def attach(self, descriptor: RegionDescriptor) -> RemoteId:
        """See `Transport`."""
        if descriptor.transport != self.kind:
            raise TransferError(f"a {descriptor.transport} descriptor was given to {self.kind}")
        check_arrays(descriptor.arrays)
        sock, address = open_dialer(self._library.reach, descriptor.endpoint)
        self._num_remotes += 1
        remote = OneSidedRemote(
            RemoteId(self._num_remotes),
            descriptor,
            self._context.epoch,
            library=self._library,
            reactor=self._reactor,
        )
        self._remotes[remote.id] = remote
        try:
            remote.set_connection(self._dialer.dial(sock, address, remote.send_attach, remote.lose))
        except TransferError as exc:
            remote.lose(exc)
        return remote.id

    def detach(self, remote: RemoteId) -> None:
        """See `Transport`."""
        known = self._remotes.pop(remote, None)
        if known is not None:
            known.detach()
            self._leaving = [each for each in (*self._leaving, known) if not each.is_gone]

    def open_grant(self, grant: WriteGrant) -> None:
        """See `Transport`."""
        region = self._find_region(grant.region)
        check_grant_pages(grant.pages, region.arrays)
        if len(grant.pages) > MAX_GRANT_PAGES:
            raise TransferError(f"a grant of more than {MAX_GRANT_PAGES} pages")
        for writer in self._ledger.open_grant(grant):
            self._inbound[writer].send_grant_opened(grant)

    def close_grant(self, grant: TicketId) -> None:
        """See `Transport`."""
        for writer in self._ledger.close_grant(grant):
            self._inbound[writer].send_close_grant(grant)
        for quiescent in self._ledger.take_quiescent():
            self._reactor.report(GrantQuiescent(quiescent))

    def submit(self, write: PageWrite) -> TransferId:
        """See `Transport`."""
        self._check_process()
        remote, region = self._find_remote(write.remote), self._find_region(write.region)
        check_copies(write.copies, region.arrays, remote.descriptor.arrays)
        check_notification(write.notification)
        transfer = self._new_transfer()
        remote.submit(transfer, write, region)
        self._pace()
        return transfer

    def read(self, read: PageRead) -> TransferId:
        """See `Transport`."""
        self._check_process()
        remote, region = self._find_remote(read.remote), self._find_region(read.region)
        check_copies(read.copies, remote.descriptor.arrays, region.arrays)
        transfer = self._new_transfer()
        remote.read(transfer, read.copies, region)
        self._pace()
        return transfer

    def poll(self) -> list[TransferEvent]:
        """See `Transport`."""
        self._check_process()
        for remote in list(self._remotes.values()):
            if remote.is_active:
                remote.advance()
        for inbound in list(self._inbound.values()):
            if inbound.is_active:
                inbound.serve()
        events = self._reactor.poll()
        if self.readiness_fd is not None:
            if events:
                self._pacer.activate()
            self._pace()
        return [*events, *map(GrantQuiescent, self._ledger.take_quiescent())]

    def close(self) -> None:
        """See `Transport`."""
        if self.readiness_fd is None or self._process != os.getpid():
            return
        for remote in (*self._remotes.values(), *self._leaving):
            remote.close()
        if self._listener is not None:
            self._listener.close()
        for inbound in self._inbound.values():
            inbound.close()
        self._inbound.clear()
        self._pacer.close()
        self._reactor.close()
        self.readiness_fd = None

    def _check_process(self) -> None:
        if self._process != os.getpid():
            raise TransferError(f"this {self.kind} transport belongs to the parent process")

    def _pace(self) -> None:
        """Be polled again soon if a library here has something to do that wakes nobody."""
        moving = any(remote.is_active for remote in self._remotes.values())
        served = any(inbound.is_active for inbound in self._inbound.values())
        self._pacer.pace(is_under_way=moving or served)

    def _listen(self) -> None:
        sock, self._endpoint = open_listener(
            self._library.reach, self._context.bind_host, self._advertise_host
        )
        self._listener = Listener(
            sock, self._reactor, self._context.key, self.kind, on_peer=self._accept_peer
        )

    def _accept_peer(self, connection: Connection) -> None:
        """A peer proved itself: its first message names the region that it wants."""
        connection.channel.allow_bodies(MAX_BODY_BYTES)
        connection.set_handlers(
            partial(self._admit, connection), lambda _: self._forget(connection)
        )

    def _admit(self, connection: Connection, channel: Channel) -> None:
        body = channel.receive_body()
        if body is None:
            return
        attach = decode_attach(body)
        region = self._regions.get(RegionHandle(attach.region))
        if region is None:
            connection.send_body(encode(NotAttached("no such region")))
            return
        if self._ledger.num_writers >= MAX_PEERS:
            raise ProtocolError("too many peers hold this memory")
        try:
            session, metadata = self._get_metadata(region)
        except TransferError as exc:
            connection.send_body(encode(NotAttached(str(exc)[:MAX_REASON_CHARS])))
            return
        self._num_writers += 1
        writer = WriterId(self._num_writers)
        inbound = OneSidedInbound(
            writer,
            connection,
            session,
            ledger=self._ledger,
            reactor=self._reactor,
            on_over=partial(self._peer_over, connection),
        )
        self._inbound[writer] = inbound
        grants = self._ledger.add_writer(writer, Epoch(attach.epoch), region.handle)
        inbound.send_attached(region, metadata, grants)

    def _get_metadata(self, region: PagedRegion) -> tuple[OneSidedSession[M], bytes]:
        session = self._library.open_session()
        try:
            return session, session.get_metadata(region)
        except TransferError:
            session.close()
            raise

    def _peer_over(self, connection: Connection, writer: WriterId) -> None:
        self._forget(connection)
        self._inbound.pop(writer, None)

    def _forget(self, connection: Connection) -> None:
        if self._listener is not None:
            self._listener.forget(connection)

    def _new_transfer(self) -> TransferId:
        self._num_transfers += 1
        return TransferId(self._num_transfers)

    def _find_remote(self, id_: RemoteId) -> OneSidedRemote[M]:
        remote = self._remotes.get(id_)
        if remote is None or remote.is_attaching:
            raise TransferError("this remote is not attached")
        return remote

    def _find_region(self, handle: RegionHandle) -> PagedRegion:
        region = self._regions.get(handle)
        if region is None:
            raise TransferError("this region was not exposed")
        return region
