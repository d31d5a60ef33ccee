"""`tcp`: pages over ordinary sockets, which the receiver puts in place.

So a closed grant is quiescent at once: bytes that still arrive for it are dropped.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

import msgspec

from baton.errors import TransferError
from baton.ids import Epoch, RegionHandle
from baton.net.endpoints import Dialer, Listener
from baton.net.tls import make_contexts
from baton.transfer.bounds import check_copies, check_notification
from baton.transfer.interface import (
    Arrived,
    Capabilities,
    GrantQuiescent,
    RegionDescriptor,
    RemoteId,
    TransferId,
)
from baton.transfer.messages import encode
from baton.transfer.page_set import PageSet, check_grant_pages
from baton.transfer.reactor import Reactor
from baton.transfer.region import check_arrays
from baton.transfer.transports.tcp.inbound import TcpInbound, WriteReassembly
from baton.transfer.transports.tcp.remote import TcpRemote
from baton.transfer.transports.tcp.sockets import (
    explain_small_buffers,
    fit_buffers,
    open_listener,
    open_stream,
    parse_endpoint,
)
from baton.transfer.transports.tcp.wire import (
    MAX_BODY_BYTES,
    Attached,
    NotAttached,
    decode_attach,
)

if TYPE_CHECKING:
    import socket

    import numpy as np
    from numpy.typing import NDArray

    from baton.ids import TicketId
    from baton.net.channel import Channel
    from baton.net.connection import Connection
    from baton.net.tls import TlsContexts
    from baton.transfer.interface import (
        PagedRegion,
        PageRead,
        PageWrite,
        TransferEvent,
        TransportContext,
        WriteGrant,
    )
    from baton.transfer.transports.tcp.sockets import TcpOptions

_log = logging.getLogger(__name__)

PURPOSE = "tcp"
TLS_SUFFIX = "/tls"
"""At the end of an endpoint where TLS is spoken."""


class TcpTransport:
    """See `Transport`. Its owner is the thread that calls `poll`."""

    kind = "tcp"
    capabilities = Capabilities(
        memory=("host", "shared"), same_host_only=False, reads=True, multi_array=True
    )

    def __init__(self, options: TcpOptions, context: TransportContext) -> None:
        self._options, self._context = options, context
        self._tls: TlsContexts | None = None
        if options.tls is not None:
            self._tls = make_contexts(options.tls.certificate, options.tls.key, options.tls.ca)
            self.capabilities = msgspec.structs.replace(type(self).capabilities, encrypted=True)
        self._reactor = Reactor(context.clock)
        self.readiness_fd: int | None = self._reactor.fd
        self._dialer = Dialer(
            self._reactor, context.key, PURPOSE, timeout_s=options.connect_timeout_s
        )
        self._regions: dict[RegionHandle, PagedRegion] = {}
        self._grants: dict[TicketId, tuple[WriteGrant, PageSet]] = {}
        self._remotes: dict[RemoteId, TcpRemote] = {}
        self._inbound: dict[Connection, TcpInbound] = {}
        # Of all streams of one remote of a peer; gone when the last of those is.
        self._reassemblies: WeakValueDictionary[
            tuple[bytes, str, RegionHandle], WriteReassembly
        ] = WeakValueDictionary()
        self._listener: Listener | None = None
        self._endpoint = ""
        self._num_remotes = self._num_transfers = 0

    def expose(self, region: PagedRegion) -> RegionDescriptor:
        """See `Transport`."""
        if region.kind not in self.capabilities.memory:
            raise TransferError(f"tcp cannot expose {region.kind} memory")
        check_arrays(region.arrays)
        if self._listener is None:
            self._endpoint, sock = self._open_listener()
            self._listener = Listener(
                sock, self._reactor, self._context.key, PURPOSE, on_peer=self._accept_peer
            )
        self._regions[region.handle] = region
        return RegionDescriptor(
            self.kind, region.handle, self._context.epoch, region.arrays, self._endpoint
        )

    def attach(self, descriptor: RegionDescriptor) -> RemoteId:
        """See `Transport`."""
        if descriptor.transport != self.kind:
            raise TransferError(f"a {descriptor.transport} descriptor was given to tcp")
        check_arrays(descriptor.arrays)
        address = self._parse_endpoint(descriptor.endpoint)
        self._num_remotes += 1
        remote = TcpRemote(
            RemoteId(self._num_remotes),
            descriptor,
            self._context.epoch,
            options=self._options,
            reactor=self._reactor,
        )
        self._remotes[remote.id] = remote
        try:
            for _ in range(self._options.streams):
                sock = self._open_stream(address)
                remote.set_connection(
                    self._dialer.dial(sock, address, remote.add_stream, remote.lose)
                )
        except TransferError as exc:
            remote.lose(exc)
        return remote.id

    def detach(self, remote: RemoteId) -> None:
        """See `Transport`."""
        known = self._remotes.pop(remote, None)
        if known is not None:
            known.detach()

    def open_grant(self, grant: WriteGrant) -> None:
        """See `Transport`."""
        if grant.id in self._grants:
            raise TransferError("this grant is open already")
        region = self._find_region(grant.region)
        check_grant_pages(grant.pages, region.arrays)
        self._grants[grant.id] = (grant, PageSet(grant.pages))

    def close_grant(self, grant: TicketId) -> None:
        """See `Transport`."""
        if self._grants.pop(grant, None) is None:
            return
        for inbound in self._inbound.values():
            inbound.refuse_grant(grant)
        self._reactor.report(GrantQuiescent(grant))

    def submit(self, write: PageWrite) -> TransferId:
        """See `Transport`."""
        remote, region = self._find_remote(write.remote), self._find_region(write.region)
        multi_array = self.capabilities.multi_array
        check_copies(write.copies, region.arrays, remote.descriptor.arrays, multi_array=multi_array)
        check_notification(write.notification)
        transfer = self._new_transfer()
        remote.submit(transfer, write, region)
        return transfer

    def read(self, read: PageRead) -> TransferId:
        """See `Transport`: the peer sends them, from where they lie."""
        remote, region = self._find_remote(read.remote), self._find_region(read.region)
        check_copies(read.copies, remote.descriptor.arrays, region.arrays)
        transfer = self._new_transfer()
        remote.read(transfer, read.copies, region)
        return transfer

    def poll(self) -> list[TransferEvent]:
        """See `Transport`."""
        return self._reactor.poll()

    def close(self) -> None:
        """See `Transport`."""
        for remote in self._remotes.values():
            remote.detach()
        if self._listener is not None:
            self._listener.close()
        self._inbound.clear()
        self._reactor.close()
        self.readiness_fd = None

    def find_refusal(
        self, grant: TicketId, writer: Epoch, region: PagedRegion, pages: NDArray[np.int64]
    ) -> str | None:
        """See `Admission`."""
        found = self._grants.get(grant)
        if found is None:
            return "the grant is not open"
        admitted, page_set = found
        if admitted.writer != writer or admitted.region != region.handle:
            return "the grant is for another writer or region"
        return None if page_set.covers(pages) else "a page is outside the grant"

    def arrived(self, grant: TicketId, notification: bytes) -> None:
        """See `Admission`."""
        self._reactor.report(Arrived(grant, notification))

    def _new_transfer(self) -> TransferId:
        self._num_transfers += 1
        return TransferId(self._num_transfers)

    def _find_remote(self, id_: RemoteId) -> TcpRemote:
        remote = self._remotes.get(id_)
        if remote is None or remote.is_attaching:
            raise TransferError("this remote is not attached")
        return remote

    def _find_region(self, handle: RegionHandle) -> PagedRegion:
        region = self._regions.get(handle)
        if region is None:
            raise TransferError("this region was not exposed")
        return region

    def _open_listener(self) -> tuple[str, socket.socket]:
        small = explain_small_buffers(self._options)
        if small is not None:
            _log.warning("%s", small)
        sock, endpoint = open_listener(self._context.bind_host, self._options)
        if self._tls is None:
            return endpoint, sock
        return endpoint + TLS_SUFFIX, self._tls.wrap_listener(sock)

    def _open_stream(self, address: tuple[str, int]) -> socket.socket:
        sock = open_stream(address, self._options)
        return sock if self._tls is None else self._tls.wrap_dialer(sock)

    def _parse_endpoint(self, endpoint: str) -> tuple[str, int]:
        is_tls = endpoint.endswith(TLS_SUFFIX)
        if is_tls and self._tls is None:
            raise TransferError(
                "the peer speaks TLS; this worker has no certificate (transfer.options.tcp.tls)"
            )
        if self._tls is not None and not is_tls:
            raise TransferError("the peer does not speak TLS, and this worker must")
        return parse_endpoint(endpoint.removesuffix(TLS_SUFFIX))

    def _accept_peer(self, connection: Connection) -> None:
        """A peer is authenticated: its first message names a region."""
        fit_buffers(connection.channel.socket, self._options)
        connection.channel.allow_bodies(MAX_BODY_BYTES)
        connection.set_handlers(partial(self._admit, connection), partial(self._forget, connection))

    def _admit(self, connection: Connection, channel: Channel) -> None:
        body = channel.receive_body()
        if body is None:
            return
        attach = decode_attach(body)
        region = self._regions.get(RegionHandle(attach.region))
        if region is None:
            connection.send_body(encode(NotAttached("no such region")))
            return
        link = (attach.link, attach.epoch, region.handle)
        inbound = TcpInbound(
            connection,
            Epoch(attach.epoch),
            region,
            reassembly=self._reassemblies.setdefault(link, WriteReassembly()),
            admission=self,
        )
        self._inbound[connection] = inbound
        connection.cancel_deadline()
        connection.set_handlers(inbound.read, partial(self._forget, connection))
        connection.send_body(encode(Attached(region.arrays)))

    def _forget(self, connection: Connection, error: TransferError) -> None:
        del error  # the dialing side reports it
        self._inbound.pop(connection, None)
        if self._listener is not None:
            self._listener.forget(connection)
