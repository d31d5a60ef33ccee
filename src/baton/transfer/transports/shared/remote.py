"""The writing, or reading, end: one peer's region, mapped here."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, assert_never

from baton.errors import PeerLostError, PeerUnreachableError, ProtocolError, TransferError
from baton.net.connection import InboundPoller
from baton.net.framing import encode_frame
from baton.transfer.grant_messages import (
    MAX_BODY_BYTES,
    GrantClosed,
    NotAttached,
    PeerGrants,
    Submitted,
    send_memory_released,
)
from baton.transfer.interface import (
    ReadCompleted,
    ReadFailed,
    RemoteAttached,
    RemoteLost,
    WriteCompleted,
    WriteFailed,
)
from baton.transfer.messages import encode
from baton.transfer.region import check_array
from baton.transfer.transports.shared.mapping import map_attached
from baton.transfer.transports.shared.wire import (
    Attached,
    WriteNotification,
    decode_first_from_receiver,
    decode_from_receiver,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from baton.ids import RegionHandle
    from baton.kv.copies import PageCopies
    from baton.net.channel import Channel
    from baton.net.connection import Connection
    from baton.transfer.devices.backing import DeviceOptions
    from baton.transfer.interface import (
        PageWrite,
        RegionDescriptor,
        RemoteId,
        TransferId,
    )
    from baton.transfer.reactor import Reactor
    from baton.transfer.transports.shared.mapping import PeerPages
    from baton.transfer.transports.shared.wire import Attach


class SharedRemote:
    """A peer's region as this writer sees it: attaching, attached or lost.

    A write is copied in one go, within `submit` or when its grant is heard of: between two calls
    no store is under way, so `GrantClosed` is true when it is said. Owner thread: the transport's.
    """

    def __init__(
        self,
        id_: RemoteId,
        descriptor: RegionDescriptor,
        reactor: Reactor,
        *,
        make_attach: Callable[[RegionHandle], Attach],
        device: DeviceOptions | None = None,
    ) -> None:
        self.id, self.descriptor = id_, descriptor
        self._device = device
        self._reactor, self._make_attach = reactor, make_attach
        self._connection: Connection | None = None
        self._inbound_poller: InboundPoller | None = None
        self._pages: PeerPages | None = None
        self._grants: PeerGrants[Sequence[NDArray[np.uint8]]] = PeerGrants(
            reactor, self._start_write
        )
        self._unsent: dict[TransferId, int] = {}
        self._loss: TransferError | None = None
        self._is_mapped = False

    @property
    def is_attaching(self) -> bool:
        """Neither attached nor lost yet."""
        return self._pages is None and self._loss is None

    @property
    def is_mapped(self) -> bool:
        """Whether the peer's memory is, or may come to be, in this process' address space."""
        return self._is_mapped

    def set_connection(self, connection: Connection) -> None:
        """The connection that is being opened: closed with this remote."""
        self._connection = connection

    def send_attach(self, connection: Connection) -> None:
        """Both ends have proved themselves: ask for the region."""
        self._inbound_poller = InboundPoller(connection)
        connection.set_handlers(self._read_first, self.lose)
        connection.channel.allow_bodies(MAX_BODY_BYTES)
        attach = self._make_attach(self.descriptor.handle)
        self._is_mapped = True  # as good as: another one that attaches now is not the only one
        connection.send_body(encode(attach))

    def poll_inbound(self) -> None:
        """Before a transfer: a grant may just have been opened, or closed, or the peer be gone."""
        if self._inbound_poller is not None and self._loss is None:
            self._inbound_poller.poll_inbound()

    def submit(
        self, transfer: TransferId, write: PageWrite, source: Sequence[NDArray[np.uint8]]
    ) -> None:
        """Copy a checked write, of these arrays of local pages, into the peer's; tell the peer."""
        if self._loss is not None:
            self._reactor.report(WriteFailed(transfer, self._loss))
            return
        self._grants.submit(Submitted(transfer, write, source), self._connection)

    def read(self, transfer: TransferId, copies: PageCopies, target: NDArray[np.uint8]) -> None:
        """Copy checked pages of the peer into local ones, now; the event says how it went.

        The mapping outlives the peer's process, so a peer that was killed and not missed yet is
        read as it was when it died.
        """
        if self._loss is not None:
            self._reactor.report(ReadFailed(transfer, self._loss))
            return
        if self._pages is None:
            raise TransferError("this remote is not attached yet")
        try:
            self._pages.load(copies, target)
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

    def lose(self, error: TransferError) -> None:
        """The peer is gone: report it and every write whose notification was not sent, once."""
        if self._loss is None:
            self._reactor.report(RemoteLost(self.id, error))
            self._end(error)

    def detach(self) -> None:
        """This side is done: unmap, and say so if that is true; unfinished writes fail."""
        if self._loss is not None:
            return
        was_unmapped = self._end(PeerLostError("the remote was detached"))
        send_memory_released(self._connection, is_released=was_unmapped)

    @property
    def is_gone(self) -> bool:
        """Nothing is left of it, not even an unfinished farewell."""
        return self._loss is not None and (self._connection is None or not self._connection.is_open)

    def close(self) -> None:
        """Detach, and do not wait for the peer to answer the farewell."""
        self.detach()
        if self._connection is not None:
            self._connection.close()

    def _end(self, error: TransferError) -> bool:
        """Forget the peer's memory; whether it is proved unmapped."""
        self._loss = error
        pages, self._pages = self._pages, None
        for transfer in self._unsent:
            self._reactor.report(WriteFailed(transfer, error))
        self._unsent.clear()
        self._grants.end(error)
        self._is_mapped = pages is not None and not pages.unmap()
        return not self._is_mapped

    def _start_write(self, submitted: Submitted[Sequence[NDArray[np.uint8]]]) -> None:
        """Store the pages, then send the notification: the system call comes after the stores."""
        transfer, write = submitted.transfer, submitted.write
        copies = write.copies
        if self._pages is None or self._connection is None:
            raise TransferError("this remote is not attached yet")
        try:
            self._pages.store(copies, submitted.source)
        except TransferError as exc:
            self._reactor.report(WriteFailed(transfer, exc))
            return
        self._unsent[transfer] = copies.num_bytes
        notification = WriteNotification(
            write.grant, write.notification, copies.layer, copies.num_layers
        )
        frame, connection = encode_frame(encode(notification)), self._connection
        if connection.channel.has_unsent:  # behind that; as many as there are writes may wait
            connection.send_batches(self._notification_batches(transfer, frame))
            return
        connection.send_raw(frame)
        if self._connection.channel.has_unsent:
            connection.send_batches(self._notification_batches(transfer, b""))
        else:
            self._write_sent(transfer)

    def _notification_batches(
        self, transfer: TransferId, frame: bytes
    ) -> Iterator[list[memoryview]]:
        yield [memoryview(frame)] if frame else []
        self._write_sent(transfer)

    def _write_sent(self, transfer: TransferId) -> None:
        """A write's notification has left; unless it was lost on the way, and that reported."""
        num_bytes = self._unsent.pop(transfer, None)
        if num_bytes is not None:
            self._reactor.report(WriteCompleted(transfer, num_bytes))

    def _read_first(self, channel: Channel) -> None:
        received = channel.receive_body_and_fd()
        if received is None or self._connection is None:
            return
        body, fd = received
        match decode_first_from_receiver(body):
            case Attached(arrays) as attached:
                if arrays != self.descriptor.arrays:
                    if fd is not None:
                        os.close(fd)
                    raise ProtocolError("the peer's region does not match its description")
                self._pages = map_attached(attached, fd, self._device)
                self._connection.cancel_deadline()
                self._connection.set_handlers(self._read, self.lose)
                self._reactor.report(RemoteAttached(self.id))
            case NotAttached(reason):
                raise PeerUnreachableError(f"the peer refused to attach: {reason}")
            case unknown:
                assert_never(unknown)

    def _read(self, channel: Channel) -> None:
        for body in channel.receive_bodies():
            closing = self._grants.handle(decode_from_receiver(body))
            if closing is not None and self._connection is not None:
                self._connection.send_body(encode(GrantClosed(closing)))
                self._grants.mark_closed(closing)
