"""`shared`: one host's memory; a peer stores into the owner's pages, or loads from them.

The receiver hands its memfd to writers that proved the key. It cannot stop a writer's hand, so it
asks (`Close`, `Closed`), and believes nothing but an answer or the death of the writer's process.
A reader is told of no window and keeps none waiting.
"""

from __future__ import annotations

import re
import secrets
import socket
from functools import partial
from typing import TYPE_CHECKING, Final

from baton.errors import ProtocolError, TransferError
from baton.ids import Epoch, RegionHandle
from baton.transfer.bounds import check_copies, check_notice
from baton.transfer.devices.coherence import settle_pages
from baton.transfer.devices.extents import find_extent
from baton.transfer.dialing import Dialer
from baton.transfer.interface import (
    Capabilities,
    RegionDescriptor,
    RemoteId,
    TransferId,
    WindowQuiescent,
)
from baton.transfer.ledger import WindowLedger, WriterId
from baton.transfer.listening import Listener
from baton.transfer.messages import encode
from baton.transfer.reactor import Reactor
from baton.transfer.region import check_arrays, view_pages
from baton.transfer.transports.shared.inbound import Inbound
from baton.transfer.transports.shared.remote import Remote
from baton.transfer.transports.shared.wire import Attach, decode_attach
from baton.transfer.window_messages import MAX_BODY_BYTES, MAX_WINDOW_PAGES, NotAttached
from baton.transfer.windows import check_window_pages

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from baton.ids import TicketId
    from baton.transfer.channel import Channel
    from baton.transfer.connection import Connection
    from baton.transfer.interface import (
        PagedRegion,
        PageRead,
        PageWrite,
        TransferEvent,
        TransportContext,
        Window,
    )
    from baton.transfer.transports.shared.options import SharedOptions

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
            lends=self._device is None,
            joins=True,
        )
        self._reactor = Reactor(context.clock)
        self.readiness_fd: int | None = self._reactor.fd
        self._dialer = Dialer(
            self._reactor, context.key, PURPOSE, timeout_s=options.connect_timeout_s
        )
        self._regions: dict[RegionHandle, PagedRegion] = {}
        self._views: dict[RegionHandle, list[NDArray[np.uint8]]] = {}
        self._ledger = WindowLedger()
        self._writers: dict[WriterId, Inbound] = {}
        self._remotes: dict[RemoteId, Remote] = {}
        self._leaving: list[Remote] = []
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
        remote = Remote(
            RemoteId(self._num_remotes),
            descriptor,
            self._reactor,
            introduce=self._introduce,
            device=self._device,
        )
        self._remotes[remote.id] = remote
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            remote.own(
                self._dialer.dial(sock, _address(descriptor.endpoint), remote.begin, remote.lose)
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

    def open_window(self, window: Window) -> None:
        """See `Transport`."""
        region = self._find_region(window.region)
        check_window_pages(window.pages, region.arrays)
        if len(window.pages) > MAX_WINDOW_PAGES:
            raise TransferError(f"a window of more than {MAX_WINDOW_PAGES} pages")
        settle_pages(region, window.pages, range(len(region.arrays)))
        for writer in self._ledger.open_window(window):
            self._writers[writer].tell_open(window)

    def close_window(self, window: TicketId) -> None:
        """See `Transport`."""
        for writer in self._ledger.close_window(window):
            self._writers[writer].ask_close(window)
        for quiescent in self._ledger.take_quiescent():
            self._reactor.report(WindowQuiescent(quiescent))

    def submit(self, write: PageWrite) -> TransferId:
        """See `Transport`."""
        remote, region = self._find_remote(write.remote), self._find_region(write.region)
        joins = self.capabilities.joins
        check_copies(write.copies, region.arrays, remote.descriptor.arrays, joins=joins)
        check_notice(write.notice)
        transfer = self._new_transfer()
        remote.heed()
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
        remote.heed()
        remote.read(transfer, read.copies, self._views[region.handle][read.copies.layer])
        return transfer

    def view(self, remote: RemoteId, array: int) -> NDArray[np.uint8]:
        """See `Transport`."""
        return self._find_remote(remote).view(array)

    def open_reader(self, reader: Epoch) -> int | None:
        """See `WatchesReaders`."""
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
        return [*events, *map(WindowQuiescent, self._ledger.take_quiescent())]

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
            sock, self._reactor, self._context.key, PURPOSE, on_peer=self._welcome
        )

    def _welcome(self, connection: Connection) -> None:
        """A writer proved itself: its first message says which region it wants."""
        connection.channel.allow_bodies(MAX_BODY_BYTES)
        connection.become(partial(self._admit, connection), lambda _: self._forget(connection))

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
        inbound = Inbound(
            writer,
            attach,
            connection,
            self._ledger,
            reactor=self._reactor,
            on_over=partial(self._writer_over, connection),
        )
        self._writers[writer] = inbound
        windows = self._ledger.add_writer(writer, Epoch(attach.epoch), region.handle)
        inbound.welcome(region, windows)

    def _writer_over(self, connection: Connection, writer: WriterId) -> None:
        self._forget(connection)
        self._writers.pop(writer, None)

    def _forget(self, connection: Connection) -> None:
        if self._listener is not None:
            self._listener.forget(connection)

    def _introduce(self, region: RegionHandle) -> Attach:
        mapped = (each.descriptor.handle for each in self._remotes.values() if each.is_mapped)
        is_only = region not in self._unproved and region not in mapped
        return Attach(self._context.epoch, region, self._holder, is_only)

    def _new_transfer(self) -> TransferId:
        self._num_transfers += 1
        return TransferId(self._num_transfers)

    def _find_remote(self, id_: RemoteId) -> Remote:
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
