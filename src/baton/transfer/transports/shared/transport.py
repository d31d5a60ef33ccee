"""`shared`: one host's memory; a peer stores into the owner's pages, or loads from them.

The owner sends its memfd to peers that are authenticated. When a grant closes, only a writer's
answer, its next `Attach` without the old mapping, or the end of its process proves that it writes
no more (`peer_writes.py`). A reader is sent no grant and keeps none waiting.
"""

from __future__ import annotations

import os
import secrets
from typing import TYPE_CHECKING, Annotated, assert_never

import msgspec

from baton.errors import TransferError
from baton.ids import Epoch, RegionHandle, TicketId
from baton.net.endpoints import open_peer_process
from baton.net.framing import encode
from baton.transfer.devices.backing import DeviceOptions
from baton.transfer.devices.extents import find_extent
from baton.transfer.endpoints import open_dialer, open_listener, parse_endpoint
from baton.transfer.grant_messages import GrantClosed, MemoryReleased, QueryGrant
from baton.transfer.interface import (
    Arrived,
    Capabilities,
    GrantQuiescent,
    PagedRegion,
    PageRead,
    RegionDescriptor,
    RemoteId,
    TransferEvent,
    TransferId,
    TransportContext,
)
from baton.transfer.peer_writes import AdmittedWriter, PeerWritesTransport, WriterConnection
from baton.transfer.region import view_pages
from baton.transfer.transports.shared.remote import SharedRemote
from baton.transfer.transports.shared.wire import (
    Attach,
    Attached,
    WriteNotification,
    decode_attach,
    decode_from_writer,
)

if TYPE_CHECKING:
    import socket

    import numpy as np
    from numpy.typing import NDArray

    from baton.net.channel import Channel
    from baton.net.connection import Connection


class SharedOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Options of the `shared` transport.

    `connect_timeout_s`: from the start of connecting until the peer's region may be written.
    `max_connections`: of peers to this worker at once, those included that are lost and may still
    have it mapped; what exceeds them is refused.
    `device`: where this host's engines have their regions, if not in memfds.
    """

    connect_timeout_s: Annotated[float, msgspec.Meta(gt=0)] = 5.0
    max_connections: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)] = 4096
    device: DeviceOptions | None = None


class SharedWriter(WriterConnection):
    """A peer that mapped this side's memory, until it is proved that it has no such mapping."""

    def __init__(self, writer: AdmittedWriter, attach: Attach) -> None:
        super().__init__(writer, open_peer_process(writer.connection.channel.socket))
        self._attach = attach

    def is_superseded_by(self, attach: Attach) -> bool:
        """Whether a later `Attach` proves that this mapping is gone."""
        mine = self._attach
        same = (attach.holder, attach.region) == (mine.holder, mine.region)
        return same and attach.is_only

    def open_process(self, epoch: Epoch) -> int | None:
        """A descriptor of the peer's process, if it is that incarnation and can be watched."""
        if self._attach.epoch != epoch or self._process is None:
            return None
        try:
            return os.dup(self._process)
        except OSError:  # no descriptor is left
            return None

    def _send_attached(self) -> None:
        region, extent = self._region, find_extent(self._region)
        if extent is not None:
            self._connection.send_body(encode(Attached(region.arrays, extent.extent.id)))
        elif region.fd is not None:
            self._connection.send_body_with_fd(encode(Attached(region.arrays)), region.fd)

    def _read(self, channel: Channel) -> None:
        for body in channel.receive_bodies():
            match decode_from_writer(body):
                case WriteNotification(grant, notification):
                    if self._ledger.admits(self._writer, TicketId(grant)):
                        self._reactor.report(Arrived(TicketId(grant), notification))
                case MemoryReleased() as message:
                    self._handle_grant_message(message)
                    return
                case QueryGrant() | GrantClosed() as message:
                    self._handle_grant_message(message)
                case unknown:
                    assert_never(unknown)


class SharedTransport(PeerWritesTransport[SharedRemote, Attach, SharedWriter]):
    """See `Transport`. Owner thread: whoever calls `poll`; `submit` and `read` copy the pages."""

    kind = "shared"

    def __init__(self, options: SharedOptions, context: TransportContext) -> None:
        super().__init__(
            context,
            connect_timeout_s=options.connect_timeout_s,
            max_connections=options.max_connections,
        )
        self._device = options.device
        self.capabilities = Capabilities(
            ("shared",),
            same_host_only=True,
            reads=True,
            views=self._device is None,
            multi_array=True,
            admits_writes=True,
            late_notifications=True,
        )
        self._views: dict[RegionHandle, list[NDArray[np.uint8]]] = {}
        self._holder = secrets.token_bytes(16)
        self._unproved: set[RegionHandle] = set()

    def expose(self, region: PagedRegion) -> RegionDescriptor:
        """See `Transport`."""
        if region.fd is None and find_extent(region) is None:
            raise TransferError(f"shared cannot expose {region.kind} memory without a descriptor")
        descriptor = super().expose(region)
        self._views[region.handle] = [view_pages(region.memory, array) for array in region.arrays]
        return descriptor

    def detach(self, remote: RemoteId) -> None:
        """See `Transport`."""
        known = self._remotes.get(remote)
        super().detach(remote)
        if known is not None and known.is_mapped:  # somebody kept a view
            self._unproved.add(known.descriptor.handle)

    def read(self, read: PageRead) -> TransferId:
        """See `ReadsPages`."""
        transfer, remote, region = self._check_read(read)
        remote.read(transfer, read, region)
        return transfer

    def view(self, remote: RemoteId, array: int) -> NDArray[np.uint8]:
        """See `ViewsPages`."""
        return self._find_remote(remote).view(array)

    def open_reader(self, reader: Epoch) -> int | None:
        """See `TracksReaders`."""
        for writer in self._writers.values():
            process = writer.open_process(reader)
            if process is not None:
                return process
        return None

    def poll(self) -> list[TransferEvent]:
        """See `Transport`."""
        events = self._reactor.poll()
        if not events:  # idle: one slice, of one of them
            any(remote.prefault() for remote in self._remotes.values())
        events += map(GrantQuiescent, self._ledger.take_quiescent())
        return events

    def _make_remote(self, id_: RemoteId, descriptor: RegionDescriptor) -> SharedRemote:
        parse_endpoint("host", descriptor.endpoint)
        return SharedRemote(
            id_,
            descriptor,
            self._reactor,
            local_views=self._views,
            make_attach=self._make_attach,
            device=self._device,
        )

    def _connect(self, remote: SharedRemote) -> None:
        self._dial(remote, *open_dialer("host", remote.descriptor.endpoint))

    def _make_attach(self, region: RegionHandle) -> Attach:
        mapped = (each.descriptor.handle for each in self._remotes.values() if each.is_mapped)
        is_only = region not in self._unproved and region not in mapped
        return Attach(self._context.epoch, region, self._holder, is_only)

    def _open_listener(self) -> tuple[socket.socket, str]:
        return open_listener("host", self._context.bind_host, None)

    def _decode_attach(self, body: bytes) -> Attach:
        return decode_attach(body)

    def _admit(self, connection: Connection, attach: Attach, region: PagedRegion) -> None:
        for earlier in tuple(self._writers.values()):
            if earlier.is_superseded_by(attach):
                earlier.finish()
        super()._admit(connection, attach, region)

    def _make_writer(self, writer: AdmittedWriter, attach: Attach) -> SharedWriter:
        return SharedWriter(writer, attach)

    def _release(self) -> None:
        super()._release()
        self._views.clear()
