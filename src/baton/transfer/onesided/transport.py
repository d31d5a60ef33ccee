"""The contract, for any library that moves bytes one-sidedly.

The owner cannot stop a posted transfer of a peer. It asks (`CloseGrant`, `GrantClosed`), and
believes nothing but an answer, or the end of the engine that served the peer; where the peer's
process has a hand of its own in this memory, its death.
"""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING, Final, Generic, TypeVar

from baton.errors import ProtocolError, TransferError
from baton.ids import Epoch, RegionHandle
from baton.net.endpoints import Dialer, Listener
from baton.transfer.bounds import check_copies, check_notification
from baton.transfer.grant_ledger import GrantLedger, WriterId
from baton.transfer.grant_messages import MAX_BODY_BYTES, MAX_GRANT_PAGES, NotAttached
from baton.transfer.interface import (
    Capabilities,
    GrantQuiescent,
    RegionDescriptor,
    RemoteId,
    TransferId,
)
from baton.transfer.messages import encode
from baton.transfer.onesided.endpoints import open_dialer, open_listener
from baton.transfer.onesided.inbound import OneSidedInbound
from baton.transfer.onesided.pacer import Pacer
from baton.transfer.onesided.remote import OneSidedRemote
from baton.transfer.onesided.wire import decode_attach
from baton.transfer.page_set import check_grant_pages
from baton.transfer.reactor import Reactor
from baton.transfer.region import check_arrays

if TYPE_CHECKING:
    from baton.ids import TicketId
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
