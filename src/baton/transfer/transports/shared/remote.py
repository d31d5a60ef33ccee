"""The writing, or reading, end of `shared`: one peer's region, mapped here.

A memfd is mapped twice: once to be written, once read-only for views (`PeerPages`).
"""

from __future__ import annotations

import mmap
import os
from typing import TYPE_CHECKING, Final, assert_never

from baton.errors import BatonError, PeerLostError, ProtocolError, TransferError
from baton.kv.copies import PageCopies, apply_copies_in_parts, apply_layer_copies
from baton.net.connection import Connection, InboundPoller
from baton.net.framing import encode
from baton.transfer.base_transport import Reactor, refused_to_attach
from baton.transfer.devices.extents import ExtentMapping, attach_extent
from baton.transfer.grant_messages import GrantClosed
from baton.transfer.interface import ReadCompleted, ReadFailed, WriteFailed
from baton.transfer.messages import MAX_BODY_BYTES, NotAttached
from baton.transfer.peer_writes import PeerWritesRemote
from baton.transfer.region import check_array, check_notification, map_peer_memory, view_pages
from baton.transfer.transports.shared.wire import (
    Attached,
    WriteNotification,
    decode_first_from_receiver,
    decode_from_receiver,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from baton.ids import RegionHandle
    from baton.net.channel import Channel
    from baton.transfer.devices.backing import DeviceOptions
    from baton.transfer.interface import (
        PageArray,
        PagedRegion,
        PageRead,
        PageWrite,
        RegionDescriptor,
        RemoteId,
        TransferId,
    )
    from baton.transfer.transports.shared.wire import Attach

MADV_POPULATE_READ: Final = 22
MADV_POPULATE_WRITE: Final = 23
"""From Linux's mman.h; Python's mmap does not name them yet."""
PREFAULT_BYTES: Final = 8 * 1024 * 1024
"""About 2 ms of work."""


class PeerPages:
    """Owns the mappings of a peer's region. Owner thread: the transport's.

    A memfd is mapped a second time to be looked at, without the right to write: a view that
    somebody keeps can neither change the peer's pages nor hold back the first mapping, whose end
    proves that this process writes no more.
    """

    def __init__(
        self, mapping: mmap.mmap, arrays: Sequence[PageArray], readable: mmap.mmap | None = None
    ) -> None:
        self._device = mapping if isinstance(mapping, ExtentMapping) else None
        self._own = _Mapping(mapping, arrays, MADV_POPULATE_WRITE)
        self._read_only = (
            None if readable is None else _Mapping(readable, arrays, MADV_POPULATE_READ)
        )
        self._was_viewed = False

    def view_read_only(self, array: int) -> NDArray[np.uint8]:
        """The same pages, read-only; may be kept.

        Raises:
            TransferError: they lie in a device.
        """
        if self._read_only is None:
            raise TransferError("shared does not show pages in place that lie in a device")
        self._was_viewed = True
        return self._read_only.views[array]

    def store(
        self,
        copies: PageCopies,
        sources: Sequence[NDArray[np.uint8]],
        copied: Callable[[range, list[int]], None] | None,
    ) -> None:
        """Copy checked pages of `sources`, this side's arrays, in, so far that the peer sees them.

        `copied` as in `LateNotification.add_pages`.

        Raises:
            TransferError: the memory behind the mapping is not what it was.
        """
        if self._device is not None:
            self._device.check_size()
        some = slice(copies.layer, copies.layer + copies.num_layers)
        sources, targets = sources[some], self._own.views[some]
        if copied is None:
            apply_layer_copies(copies, sources, targets)
        else:
            apply_copies_in_parts(copies, sources, targets, read=copied)

    def load(
        self,
        copies: PageCopies,
        targets: Sequence[NDArray[np.uint8]],
        copied: Callable[[range, list[int]], None] | None,
    ) -> None:
        """Copy checked pages of the peer into `targets`, one for each layer; `copied`: `PageRead`.

        Raises:
            TransferError: the memory behind the mapping is not what it was.
        """
        if self._device is not None:
            self._device.check_size()
        sources = self._own.views[copies.layer : copies.layer + copies.num_layers]
        if copied is None:
            apply_layer_copies(copies, sources, targets)
        else:
            apply_copies_in_parts(copies, sources, targets, written=copied)

    def prefault(self) -> bool:
        """Enter the next slice into this process's page table; whether there was one.

        What was not entered when it is first written costs a page fault for each 4 KiB, in the
        middle of a handoff: a first write took eight times as long as a later one
        (benchmarks/bench_page_faults.py). The peer committed the memory, so for one that is only
        read nothing else happens here either. Pages to be viewed follow once somebody looked.
        """
        if self._own.prefault():
            return True
        return self._was_viewed and self._read_only is not None and self._read_only.prefault()

    def unmap(self) -> bool:
        """Give the memory up; whether it is proved that this process writes no more."""
        if self._read_only is not None:
            self._read_only.unmap()  # or its last viewer does
        return self._own.unmap()


class _Mapping:
    """One mapping, its arrays, and how much of it was entered into the page table."""

    def __init__(self, mapping: mmap.mmap, arrays: Sequence[PageArray], advice: int) -> None:
        self.views = [view_pages(mapping, array) for array in arrays]
        self._mapping, self._advice = mapping, advice
        self._num_faulted_bytes = 0

    def prefault(self) -> bool:
        """The next slice; whether there was one."""
        start = self._num_faulted_bytes
        if start >= len(self._mapping):
            return False
        length = min(PREFAULT_BYTES, len(self._mapping) - start)
        try:
            self._mapping.madvise(self._advice, start, length)
        except OSError:  # a kernel before 5.14: pages fault in as they are used
            length = len(self._mapping) - start
        self._num_faulted_bytes = start + length
        return True

    def unmap(self) -> bool:
        """Whether the mapping is proved gone: no view is left."""
        self.views.clear()
        try:
            self._mapping.close()
        except BufferError:
            return False
        return True


def map_attached(attached: Attached, fd: int | None, device: DeviceOptions | None) -> PeerPages:
    """Map what a peer granted, a memfd or an extent; `fd` is closed, also on failure.

    Raises:
        ProtocolError: it granted neither, or both.
        TransferError: the memory is not what the arrays claim, or lies where this side has none.
    """
    try:
        match fd, attached.extent:
            case int(), None:
                arrays = attached.arrays
                readable = map_peer_memory(fd, arrays, mmap.PROT_READ)
                return PeerPages(map_peer_memory(fd, arrays), arrays, readable)
            case None, bytes():
                return PeerPages(_attach(attached.extent, attached.arrays, device), attached.arrays)
            case _:
                raise ProtocolError("the peer granted a region, and not one memory with it")
    finally:
        if fd is not None:
            os.close(fd)


def _attach(
    extent: bytes, arrays: Sequence[PageArray], device: DeviceOptions | None
) -> ExtentMapping:
    if device is None:
        raise TransferError(
            "the peer's memory lies in a device, and this worker has none: give both the same "
            "transfer.options.shared.device"
        )
    return attach_extent(device, extent, arrays)


class SharedRemote(PeerWritesRemote):
    """See `BaseRemote`.

    A write is copied in one go, within `submit` or when its grant is opened: between two calls no
    store is in progress, so `GrantClosed` is true when it is sent. `local_views` are this side's
    pages, of each region and array.
    """

    def __init__(
        self,
        id_: RemoteId,
        descriptor: RegionDescriptor,
        reactor: Reactor,
        *,
        local_views: Mapping[RegionHandle, Sequence[NDArray[np.uint8]]],
        make_attach: Callable[[RegionHandle], Attach],
        device: DeviceOptions | None = None,
    ) -> None:
        super().__init__(id_, descriptor, reactor)
        self._local_views, self._make_attach, self._device = local_views, make_attach, device
        self._inbound_poller: InboundPoller | None = None
        self._pages: PeerPages | None = None
        self.is_mapped = False
        """Whether the peer's memory is, or may come to be, in this process' address space."""

    def send_attach(self, connection: Connection) -> None:
        """Both ends have proved themselves: ask for the region."""
        self._inbound_poller = InboundPoller(connection)
        connection.set_handlers(self._read_first, self.lose)
        connection.channel.allow_bodies(MAX_BODY_BYTES)
        attach = self._make_attach(self.descriptor.handle)
        self.is_mapped = True  # as good as: another one that attaches now is not the only one
        connection.send_body(encode(attach))

    def read(self, transfer: TransferId, read: PageRead, region: PagedRegion) -> None:
        """Copy checked pages of the peer into local ones, now; the event reports the result.

        The mapping outlives the peer's process, so a peer that was killed and not missed yet is
        read as it was when it died.
        """
        self._poll_inbound()
        if self._loss is not None:
            self._reactor.report(ReadFailed(transfer, self._loss))
            return
        if self._pages is None:
            raise TransferError("this remote is not attached yet")
        copies = read.copies
        first, stop = copies.layer, copies.layer + copies.num_layers
        targets = self._local_views[region.handle][first:stop]
        try:
            self._pages.load(copies, targets, read.copied)
        except TransferError as exc:
            self._reactor.report(ReadFailed(transfer, exc))
        else:
            self._reactor.report(ReadCompleted(transfer, copies.num_bytes))

    def view(self, array: int) -> NDArray[np.uint8]:
        """One array of the peer's pages, in place and read-only.

        Raises:
            PeerLostError: the peer is lost.
            TransferError: it is not attached yet, or has no such array.
        """
        if self._loss is not None:
            raise PeerLostError(f"the peer's pages are out of reach: {self._loss}")
        if self._pages is None:
            raise TransferError("this remote is not attached yet")
        check_array(array, self.descriptor.arrays)
        return self._pages.view_read_only(array)

    def prefault(self) -> bool:
        """Enter the next slice of the peer's memory into the page table; whether there was one."""
        return self._pages is not None and self._pages.prefault()

    def _poll_inbound(self) -> None:
        """Before a transfer: a grant may just have been opened or closed, or the peer be lost.

        Views of pages are taken after this: the traceback of a loss keeps the frames it passed.
        """
        if self._inbound_poller is not None and self._loss is None:
            self._inbound_poller.poll_inbound()

    def _release_memory(self, error: TransferError) -> bool:
        del error
        pages, self._pages = self._pages, None
        self.is_mapped = pages is not None and not pages.unmap()
        return not self.is_mapped

    def _start_write(self, transfer: TransferId, write: PageWrite, region: PagedRegion) -> None:
        """Store the pages, then send the notification: the system call orders the two."""
        copies, connection = write.copies, self._connection
        if self._pages is None or connection is None:
            raise TransferError("this remote is not attached yet")
        late, notification = write.late_notification, write.notification
        try:
            if late is None:
                self._pages.store(copies, self._local_views[region.handle], None)
            else:
                self._pages.store(copies, self._local_views[region.handle], late.add_pages)
                notification = late.finish()
                check_notification(notification)
        except TransferError as exc:
            self._reactor.report(WriteFailed(transfer, exc))
            return
        self._unsent[transfer] = copies.num_bytes
        body = encode(WriteNotification(write.grant, notification, copies.layer, copies.num_layers))
        if connection.channel.has_unsent:  # behind that; as many as there are writes may wait
            connection.send_batches(self._notification_batches(transfer, connection, body))
            return
        if connection.send_body(body):
            self._notification_sent(transfer)
        else:
            connection.send_batches(self._notification_batches(transfer, connection))

    def _notification_batches(
        self, transfer: TransferId, connection: Connection, body: bytes = b""
    ) -> Iterator[list[memoryview]]:
        yield [memoryview(connection.channel.seal(body))] if body else []
        self._notification_sent(transfer)

    def _read_first(self, channel: Channel) -> None:
        received = channel.receive_body_and_fd()
        if received is None or self._connection is None:
            return
        body, fd = received
        try:
            attached = self._decode_attached(body)
        except BatonError:
            if fd is not None:
                os.close(fd)
            raise
        self._pages = map_attached(attached, fd, self._device)
        self._connection.set_handlers(self._read, self.lose)
        self._set_attached()

    def _decode_attached(self, body: bytes) -> Attached:
        """The peer's first message.

        Raises:
            PeerUnreachableError: it refused to attach.
            ProtocolError: it is something else, or about another region.
        """
        match decode_first_from_receiver(body):
            case Attached(arrays) as attached:
                self._check_arrays(arrays)
                return attached
            case NotAttached(reason):
                raise refused_to_attach(reason)
            case unknown:
                assert_never(unknown)

    def _read(self, channel: Channel) -> None:
        for body in channel.receive_bodies():
            closing = self._grants.handle(decode_from_receiver(body))
            if closing is not None and self._connection is not None:
                self._connection.send_body(encode(GrantClosed(closing)))
                self._grants.mark_closed(closing)
