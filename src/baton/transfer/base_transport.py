"""What every transport has in common: regions, remotes, transfers, and connections to peers.

`BaseTransport` keeps this side's regions and the remotes that it attached to, and checks every
request before a transport sees it. `ConnectedTransport` adds what all but one of them need: peers
prove the cluster key over a connection of Baton's, and the first message on it names a region.
A transport adds the rest in a few hooks (below each class's public methods) and in its own
subclass of `BaseRemote`.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, Generic, Protocol, TypeAlias, TypeVar

from baton.errors import PeerLostError, PeerUnreachableError, ProtocolError, TransferError
from baton.ids import RegionHandle
from baton.net.connection import Connection, EventReactor
from baton.net.endpoints import MAX_UNPROVED, Dialer, Listener
from baton.net.framing import encode
from baton.telemetry.log_limit import LimitedLog
from baton.transfer.interface import (
    Capabilities,
    PageArray,
    PagedRegion,
    PageRead,
    PageWrite,
    RegionDescriptor,
    RemoteAttached,
    RemoteId,
    RemoteLost,
    TransferEvent,
    TransferId,
    TransportContext,
)
from baton.transfer.messages import MAX_BODY_BYTES, NotAttached
from baton.transfer.region import check_arrays, check_copies, check_notification

if TYPE_CHECKING:
    import socket
    from collections.abc import Sequence

    from baton.net.channel import Channel
    from baton.transfer.endpoints import Address

_log = logging.getLogger(__name__)

Reactor: TypeAlias = EventReactor[TransferEvent]


class BaseRemote:
    """A peer's region as this side sees it: attaching, then attached, then lost or detached.

    Owner thread: the transport's.
    """

    def __init__(self, id_: RemoteId, descriptor: RegionDescriptor, reactor: Reactor) -> None:
        self.id, self.descriptor = id_, descriptor
        self.is_attaching = True
        """Neither attached nor lost yet."""
        self._reactor = reactor
        self._loss: TransferError | None = None

    def submit(self, transfer: TransferId, write: PageWrite, region: PagedRegion) -> None:
        """Start a checked write from `region`; to a lost peer, report that it failed."""
        raise NotImplementedError

    def lose(self, error: TransferError) -> None:
        """The peer is gone: report it and every unfinished transfer, once."""
        if self._loss is None:
            self._reactor.report(RemoteLost(self.id, error))
            self._end(error)

    def detach(self) -> None:
        """This side is done with the peer: unfinished transfers fail."""
        if self._loss is None:
            self._end(PeerLostError("the remote was detached"))

    def close(self) -> None:
        """Detach, because the transport is closed."""
        self.detach()

    def _end(self, error: TransferError) -> None:
        """Release what belongs to the peer and report every unfinished transfer as failed.

        A transport's own `_end` calls this one first.
        """
        self._loss, self.is_attaching = error, False

    def _check_arrays(self, arrays: Sequence[PageArray]) -> None:
        """Refuse a region that is not the one described.

        Raises:
            ProtocolError: the arrays differ from the descriptor's.
        """
        if arrays != self.descriptor.arrays:
            raise ProtocolError("the peer's region differs from its descriptor")

    def _set_attached(self) -> None:
        self.is_attaching = False
        self._reactor.report(RemoteAttached(self.id))


class ConnectedRemote(BaseRemote):
    """A remote that is reached over one connection."""

    _connection: Connection | None = None

    def set_connection(self, connection: Connection) -> None:
        """The connection that is being opened: closed with this remote."""
        self._connection = connection

    def send_attach(self, connection: Connection) -> None:
        """Both ends are authenticated: ask for the region."""
        raise NotImplementedError

    def _set_attached(self) -> None:
        if self._connection is not None:
            self._connection.cancel_deadline()
        super()._set_attached()


def refused_to_attach(reason: str) -> PeerUnreachableError:
    """The error for `NotAttached`."""
    return PeerUnreachableError(f"the peer refused to attach: {reason}")


R = TypeVar("R", bound=BaseRemote)


class BaseTransport(Generic[R]):
    """See `Transport`: what does not depend on how bytes move. Owner thread: who calls `poll`."""

    kind: str
    capabilities: Capabilities

    def __init__(self, context: TransportContext) -> None:
        self._context = context
        self._reactor = Reactor(context.clock)
        self.readiness_fd: int | None = self._reactor.fd
        self._regions: dict[RegionHandle, PagedRegion] = {}
        self._remotes: dict[RemoteId, R] = {}
        self._endpoint: str | None = None
        self._num_remotes = self._num_transfers = 0

    def expose(self, region: PagedRegion) -> RegionDescriptor:
        """See `Transport`."""
        if region.kind not in self.capabilities.memory:
            raise TransferError(f"{self.kind} cannot expose {region.kind} memory")
        check_arrays(region.arrays)
        if self._endpoint is None:
            self._endpoint = self._listen()
        self._regions[region.handle] = region
        return RegionDescriptor(
            self.kind, region.handle, self._context.epoch, region.arrays, self._endpoint
        )

    def attach(self, descriptor: RegionDescriptor) -> RemoteId:
        """See `Transport`."""
        if descriptor.transport != self.kind:
            raise TransferError(f"a {descriptor.transport} descriptor was given to {self.kind}")
        check_arrays(descriptor.arrays)
        self._num_remotes += 1
        remote = self._make_remote(RemoteId(self._num_remotes), descriptor)
        self._remotes[remote.id] = remote
        try:
            self._connect(remote)
        except TransferError as exc:
            remote.lose(exc)
        return remote.id

    def detach(self, remote: RemoteId) -> None:
        """See `Transport`."""
        known = self._remotes.pop(remote, None)
        if known is not None:
            known.detach()

    def submit(self, write: PageWrite) -> TransferId:
        """See `Transport`."""
        remote, region = self._find_remote(write.remote), self._find_region(write.region)
        copies, sources, targets = write.copies, region.arrays, remote.descriptor.arrays
        check_copies(copies, sources, targets, multi_array=self.capabilities.multi_array)
        check_notification(write.notification)
        if write.late_notification is not None and not self.capabilities.late_notifications:
            raise TransferError(f"{self.kind} takes no notification that is made in the copy")
        self._num_transfers += 1
        transfer = TransferId(self._num_transfers)
        remote.submit(transfer, write, region)
        return transfer

    def poll(self) -> list[TransferEvent]:
        """See `Transport`."""
        return self._reactor.poll()

    def close(self) -> None:
        """See `Transport`."""
        if self.readiness_fd is None:
            return
        for remote in self._remotes.values():
            remote.close()
        self._release()
        self._reactor.close()
        self.readiness_fd = None

    def _listen(self) -> str:
        """With the first region: become reachable; the endpoint for peers.

        Raises:
            TransferError: that is not possible.
        """
        raise NotImplementedError

    def _make_remote(self, id_: RemoteId, descriptor: RegionDescriptor) -> R:
        """A remote that is not being connected to yet.

        Raises:
            TransferError: the descriptor's endpoint is none of this transport's.
        """
        raise NotImplementedError

    def _connect(self, remote: R) -> None:
        """Begin to connect; `remote` reports how it ends.

        Raises:
            TransferError: the peer cannot be reached: the remote is lost.
        """
        raise NotImplementedError

    def _release(self) -> None:
        """Close what this transport owns besides its remotes."""
        raise NotImplementedError

    def _check_read(self, read: PageRead) -> tuple[TransferId, R, PagedRegion]:
        """A new transfer for a checked read, the remote to read from and the region to read into.

        Raises:
            TransferError: see `ReadsPages.read`.
        """
        remote, region = self._find_remote(read.remote), self._find_region(read.region)
        multi_array = self.capabilities.multi_array
        check_copies(read.copies, remote.descriptor.arrays, region.arrays, multi_array=multi_array)
        self._num_transfers += 1
        return TransferId(self._num_transfers), remote, region

    def _find_remote(self, id_: RemoteId) -> R:
        remote = self._remotes.get(id_)
        if remote is None or remote.is_attaching:
            raise TransferError("this remote is not attached")
        return remote

    def _find_region(self, handle: RegionHandle) -> PagedRegion:
        region = self._regions.get(handle)
        if region is None:
            raise TransferError("this region was not exposed")
        return region


class AttachRequest(Protocol):
    """The first message of a peer that connected."""

    @property
    def epoch(self) -> str:
        """The peer's epoch."""
        ...

    @property
    def region(self) -> bytes:
        """The region that it attaches to."""
        ...


A = TypeVar("A", bound=AttachRequest)


class ConnectedTransport(BaseTransport[R], Generic[R, A]):
    """A transport whose peers connect to its listener; `A` is their `Attach` message."""

    def __init__(
        self,
        context: TransportContext,
        *,
        connect_timeout_s: float,
        max_connections: int,
    ) -> None:
        super().__init__(context)
        self._max_connections = max_connections
        self._log = LimitedLog(_log, context.clock)
        self._dialer = Dialer(
            self._reactor, context.credentials, self.kind, timeout_s=connect_timeout_s
        )
        self._listener: Listener | None = None

    def _listen(self) -> str:
        sock, endpoint = self._open_listener()
        self._listener = Listener(
            sock,
            self._reactor,
            self._context.credentials,
            self.kind,
            on_peer=self._accept_peer,
            max_connections=self._max_connections + MAX_UNPROVED,  # some of them to be refused
        )
        return endpoint

    def _dial(self, remote: ConnectedRemote, sock: socket.socket, address: Address) -> None:
        remote.set_connection(self._dialer.dial(sock, address, remote.send_attach, remote.lose))

    def _release(self) -> None:
        if self._listener is not None:
            self._listener.close()

    def _accept_peer(self, connection: Connection) -> None:
        """A peer is authenticated: its first message names the region that it wants."""
        connection.channel.allow_bodies(MAX_BODY_BYTES)
        connection.set_handlers(
            partial(self._receive_attach, connection), partial(self._disconnected, connection)
        )

    def _receive_attach(self, connection: Connection, channel: Channel) -> None:
        body = channel.receive_body()
        if body is None:
            return
        attach = self._decode_attach(body)
        region = self._regions.get(RegionHandle(attach.region))
        if region is None:
            connection.send_body(encode(NotAttached("no such region")))
        elif self._listener is not None and self._listener.num_peers > self._max_connections:
            self._refuse(
                connection,
                "connections",
                f"{self._max_connections} connections of {self.kind} are open, which is the most "
                f"({self.kind}.max_connections)",
            )
        else:
            self._admit(connection, attach, region)

    def _refuse(self, connection: Connection, subject: str, reason: str) -> None:
        self._log.warning(subject, f"refused a peer: {reason}")
        connection.send_body(encode(NotAttached(reason)))

    def _disconnected(self, connection: Connection, error: TransferError) -> None:
        """A peer's connection is over: the dialing side reports why."""
        del error
        if self._listener is not None:
            self._listener.forget(connection)

    def _open_listener(self) -> tuple[socket.socket, str]:
        """A bound socket, and the endpoint for peers.

        Raises:
            TransferError: it cannot be bound.
        """
        raise NotImplementedError

    def _decode_attach(self, body: bytes) -> A:
        """The peer's first message.

        Raises:
            ProtocolError: it is something else.
        """
        raise NotImplementedError

    def _admit(self, connection: Connection, attach: A, region: PagedRegion) -> None:
        """Answer a peer that attaches to `region`, cancel its deadline and set its handlers.

        Raises:
            ProtocolError: it is not admitted: its connection ends.
        """
        raise NotImplementedError
