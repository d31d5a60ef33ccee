"""`shared`: one host's memory; a peer stores into the owner's pages, or loads from them.

The receiver hands its memfd to writers that proved the key. It cannot stop a writer's hand, so it
asks (`CloseGrant`, `GrantClosed`), and believes nothing but an answer or the death of the writer's
process. A reader is sent no grant and keeps none waiting.
"""

from __future__ import annotations

import os
import re
import secrets
import socket
from functools import partial
from typing import TYPE_CHECKING, Annotated, Final, assert_never

import msgspec

from baton.errors import ProtocolError, TransferError
from baton.ids import Epoch, RegionHandle, TicketId
from baton.net.endpoints import Dialer, Listener, open_peer_process
from baton.transfer.devices.backing import DeviceOptions
from baton.transfer.devices.extents import find_extent, settle_pages
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
from baton.transfer.reactor import Reactor
from baton.transfer.region import check_arrays, check_copies, check_notification, view_pages
from baton.transfer.transports.shared.remote import SharedRemote
from baton.transfer.transports.shared.wire import (
    Attach,
    Attached,
    WriteNotification,
    decode_attach,
    decode_from_writer,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    from numpy.typing import NDArray

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


class SharedOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Options of the `shared` transport.

    `connect_timeout_s`: from the start of connecting until the peer's region may be written.
    `device`: where this host's engines have their regions, if not in memfds.
    """

    connect_timeout_s: Annotated[float, msgspec.Meta(gt=0)] = 5.0
    device: DeviceOptions | None = None


MAX_FINAL_STEPS: Final = 64


class SharedInbound:
    """One writer that has this side's memory. Owner thread: the transport's.

    It outlives its connection for as long as the writer's process might still store into a grant
    that it was told of: until it is dead, or attaches again and has let go of the old mapping.
    `on_over` is called once, then.
    """

    def __init__(
        self,
        writer: WriterId,
        attach: Attach,
        connection: Connection,
        ledger: GrantLedger,
        *,
        reactor: Reactor,
        on_over: Callable[[WriterId], None],
    ) -> None:
        self._writer, self._attach, self._connection = writer, attach, connection
        self._ledger, self._reactor, self._on_over = ledger, reactor, on_over
        self._region: PagedRegion | None = None
        self._process = open_peer_process(connection.channel.socket)
        if self._process is not None:
            reactor.watch(self._process, self.finish)  # it is dead

    def send_attached(self, region: PagedRegion, grants: list[WriteGrant]) -> None:
        """Send the memory and the grants that are already open."""
        self._region = region
        self._connection.cancel_deadline()
        self._connection.set_handlers(self._read, self._disconnected)
        extent = find_extent(region)
        if extent is not None:
            self._connection.send_body(encode(Attached(region.arrays, extent.extent.id)))
        elif region.fd is not None:
            self._connection.send_body_with_fd(encode(Attached(region.arrays)), region.fd)
        for grant in grants:
            self.send_grant_opened(grant)

    def send_grant_opened(self, grant: WriteGrant) -> None:
        """The writer may write into this grant from now on."""
        self._connection.send_body(encode(GrantOpened(grant.id, pack_pages(grant.pages))))

    def send_close_grant(self, grant: TicketId) -> None:
        """The writer must stop writing into this grant, and report it."""
        self._connection.send_body(encode(CloseGrant(grant)))

    def is_superseded_by(self, attach: Attach) -> bool:
        """Whether a later `Attach` proves that this mapping is gone."""
        mine = self._attach
        same = (attach.holder, attach.region) == (mine.holder, mine.region)
        return same and attach.is_only

    def open_process(self, epoch: Epoch) -> int | None:
        """A descriptor of the peer's process, if it is that life of a worker and can be watched."""
        if self._attach.epoch != epoch or self._process is None:
            return None
        return os.dup(self._process)

    def finish(self) -> None:
        """Proved: the writer stores nothing any more. What it sent before still counts."""
        for _ in range(MAX_FINAL_STEPS):
            if not self._connection.is_open:
                break
            self._connection.step()
        self._finish()

    def close(self) -> None:
        """Stop watching: nothing is known of this writer from now on. Idempotent."""
        self._connection.close()
        if self._process is not None:
            self._reactor.unwatch(self._process)
            os.close(self._process)
            self._process = None

    def _read(self, channel: Channel) -> None:
        for body in channel.receive_bodies():
            match decode_from_writer(body):
                case WriteNotification(grant, notification, layer, num_layers):
                    if self._ledger.admits(self._writer, TicketId(grant)):
                        self._settle(TicketId(grant), range(layer, layer + num_layers))
                        self._reactor.report(Arrived(TicketId(grant), notification))
                case QueryGrant(grant):
                    # If it was opened, `GrantOpened` is on its way already, in front of any answer.
                    if not self._ledger.admits(self._writer, TicketId(grant)):
                        self._connection.send_body(encode(GrantNotOpen(grant)))
                case GrantClosed(grant):
                    self._ledger.confirm_closed(self._writer, TicketId(grant))
                case MemoryReleased():
                    self._finish()
                    return
                case unknown:
                    assert_never(unknown)

    def _settle(self, grant: TicketId, layers: range) -> None:
        """Nothing old of what was written is read; a writer that lies of it fails by digest."""
        if self._region is not None and layers.stop <= len(self._region.arrays):
            settle_pages(self._region, self._ledger.pages_of(grant), layers)

    def _disconnected(self, error: TransferError) -> None:
        del error  # that the writer is out of reach does not tell whether it still writes
        if not self._ledger.disconnect(self._writer):
            self._finish()

    def _finish(self) -> None:
        self.close()
        self._ledger.release(self._writer)
        self._on_over(self._writer)


PURPOSE: Final = "shared"
MAX_WRITERS: Final = 512
"""Mappings that are out: connected, or lost and not proved gone."""

_ENDPOINT: Final = re.compile(r"baton-[0-9a-f]{32}")


class SharedTransport:
    """See `Transport`. Owner thread: whoever calls `poll`; `submit` and `read` copy the pages."""

    kind = "shared"

    def __init__(self, options: SharedOptions, context: TransportContext) -> None:
        self._context = context
        self._device = options.device
        # Where caches need care, nobody tells the owner when to write back what is to be read.
        can_read = self._device is None or self._device.flush != "libpmem"
        self.capabilities = Capabilities(
            ("shared",),
            same_host_only=True,
            reads=can_read,
            views=self._device is None,
            multi_array=True,
        )
        self._reactor = Reactor(context.clock)
        self.readiness_fd: int | None = self._reactor.fd
        self._dialer = Dialer(
            self._reactor, context.key, PURPOSE, timeout_s=options.connect_timeout_s
        )
        self._regions: dict[RegionHandle, PagedRegion] = {}
        self._views: dict[RegionHandle, list[NDArray[np.uint8]]] = {}
        self._ledger = GrantLedger()
        self._writers: dict[WriterId, SharedInbound] = {}
        self._remotes: dict[RemoteId, SharedRemote] = {}
        self._leaving: list[SharedRemote] = []
        self._holder = secrets.token_bytes(16)
        self._unproved: set[RegionHandle] = set()
        self._listener: Listener | None = None
        self._endpoint = ""
        self._num_remotes = self._num_transfers = self._num_writers = 0

    def expose(self, region: PagedRegion) -> RegionDescriptor:
        """See `Transport`."""
        if region.kind != "shared" or not _can_be_handed_over(region):
            raise TransferError(f"shared cannot expose {region.kind} memory without a descriptor")
        check_arrays(region.arrays)
        if self._listener is None:
            self._listen()
        self._regions[region.handle] = region
        self._views[region.handle] = [view_pages(region.memory, array) for array in region.arrays]
        return RegionDescriptor(
            self.kind, region.handle, self._context.epoch, region.arrays, self._endpoint
        )

    def attach(self, descriptor: RegionDescriptor) -> RemoteId:
        """See `Transport`."""
        if descriptor.transport != self.kind or not _ENDPOINT.fullmatch(descriptor.endpoint):
            raise TransferError("this is no descriptor of the shared transport")
        check_arrays(descriptor.arrays)
        self._num_remotes += 1
        remote = SharedRemote(
            RemoteId(self._num_remotes),
            descriptor,
            self._reactor,
            make_attach=self._make_attach,
            device=self._device,
        )
        self._remotes[remote.id] = remote
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            remote.set_connection(
                self._dialer.dial(
                    sock, _address(descriptor.endpoint), remote.send_attach, remote.lose
                )
            )
        except TransferError as exc:
            remote.lose(exc)
        return remote.id

    def detach(self, remote: RemoteId) -> None:
        """See `Transport`."""
        known = self._remotes.pop(remote, None)
        if known is not None:
            known.detach()
            if known.is_mapped:  # somebody kept a view
                self._unproved.add(known.descriptor.handle)
            self._leaving = [each for each in (*self._leaving, known) if not each.is_gone]

    def open_grant(self, grant: WriteGrant) -> None:
        """See `Transport`."""
        region = self._find_region(grant.region)
        check_grant_pages(grant.pages, region.arrays)
        if len(grant.pages) > MAX_GRANT_PAGES:
            raise TransferError(f"a grant of more than {MAX_GRANT_PAGES} pages")
        settle_pages(region, grant.pages, range(len(region.arrays)))
        for writer in self._ledger.open_grant(grant):
            self._writers[writer].send_grant_opened(grant)

    def close_grant(self, grant: TicketId) -> None:
        """See `Transport`."""
        for writer in self._ledger.close_grant(grant):
            self._writers[writer].send_close_grant(grant)
        for quiescent in self._ledger.take_quiescent():
            self._reactor.report(GrantQuiescent(quiescent))

    def submit(self, write: PageWrite) -> TransferId:
        """See `Transport`."""
        remote, region = self._find_remote(write.remote), self._find_region(write.region)
        multi_array = self.capabilities.multi_array
        check_copies(write.copies, region.arrays, remote.descriptor.arrays, multi_array=multi_array)
        check_notification(write.notification)
        transfer = self._new_transfer()
        remote.poll_inbound()
        layers = write.copies.layers
        remote.submit(transfer, write, self._views[region.handle][layers.start : layers.stop])
        return transfer

    def read(self, read: PageRead) -> TransferId:
        """See `Transport`."""
        if not self.capabilities.reads:
            raise TransferError("shared does not read memory whose caches need care (flush)")
        remote, region = self._find_remote(read.remote), self._find_region(read.region)
        check_copies(read.copies, remote.descriptor.arrays, region.arrays)
        transfer = self._new_transfer()
        remote.poll_inbound()
        remote.read(transfer, read.copies, self._views[region.handle][read.copies.layer])
        return transfer

    def view(self, remote: RemoteId, array: int) -> NDArray[np.uint8]:
        """See `Transport`."""
        return self._find_remote(remote).view(array)

    def open_reader(self, reader: Epoch) -> int | None:
        """See `TracksReaders`."""
        for inbound in self._writers.values():
            process = inbound.open_process(reader)
            if process is not None:
                return process
        return None

    def poll(self) -> list[TransferEvent]:
        """See `Transport`."""
        events = self._reactor.poll()
        if not events:  # idle: one slice, of one of them
            any(remote.prefault() for remote in self._remotes.values())
        return [*events, *map(GrantQuiescent, self._ledger.take_quiescent())]

    def close(self) -> None:
        """See `Transport`."""
        for remote in (*self._remotes.values(), *self._leaving):
            remote.close()
        if self._listener is not None:
            self._listener.close()
        for writer in self._writers.values():
            writer.close()
        self._writers.clear()
        self._views.clear()
        self._reactor.close()
        self.readiness_fd = None

    def _listen(self) -> None:
        endpoint = f"baton-{secrets.token_hex(16)}"
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.bind(_address(endpoint))
        except OSError as exc:
            sock.close()
            raise TransferError(f"cannot listen on a Unix socket: {exc}") from exc
        self._endpoint = endpoint
        self._listener = Listener(
            sock, self._reactor, self._context.key, PURPOSE, on_peer=self._accept_peer
        )

    def _accept_peer(self, connection: Connection) -> None:
        """A writer proved itself: its first message names the region that it wants."""
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
        for earlier in tuple(self._writers.values()):
            if earlier.is_superseded_by(attach):
                earlier.finish()
        if self._ledger.num_writers >= MAX_WRITERS:
            raise ProtocolError("too many writers hold this memory")
        self._num_writers += 1
        writer = WriterId(self._num_writers)
        inbound = SharedInbound(
            writer,
            attach,
            connection,
            self._ledger,
            reactor=self._reactor,
            on_over=partial(self._writer_over, connection),
        )
        self._writers[writer] = inbound
        grants = self._ledger.add_writer(writer, Epoch(attach.epoch), region.handle)
        inbound.send_attached(region, grants)

    def _writer_over(self, connection: Connection, writer: WriterId) -> None:
        self._forget(connection)
        self._writers.pop(writer, None)

    def _forget(self, connection: Connection) -> None:
        if self._listener is not None:
            self._listener.forget(connection)

    def _make_attach(self, region: RegionHandle) -> Attach:
        mapped = (each.descriptor.handle for each in self._remotes.values() if each.is_mapped)
        is_only = region not in self._unproved and region not in mapped
        return Attach(self._context.epoch, region, self._holder, is_only)

    def _new_transfer(self) -> TransferId:
        self._num_transfers += 1
        return TransferId(self._num_transfers)

    def _find_remote(self, id_: RemoteId) -> SharedRemote:
        remote = self._remotes.get(id_)
        if remote is None or remote.is_attaching:
            raise TransferError("this remote is not attached")
        return remote

    def _find_region(self, handle: RegionHandle) -> PagedRegion:
        region = self._regions.get(handle)
        if region is None:
            raise TransferError("this region was not exposed")
        return region


def _can_be_handed_over(region: PagedRegion) -> bool:
    return region.fd is not None or find_extent(region) is not None


def _address(endpoint: str) -> bytes:
    """The name in the abstract namespace: no file, gone with the socket."""
    return b"\0" + endpoint.encode()
