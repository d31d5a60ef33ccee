"""The writing end: one peer's region, reached through its folder."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, assert_never

import numpy as np

from baton.errors import PeerLostError, PeerUnreachableError, ProtocolError, TransferError
from baton.ids import new_region_handle
from baton.kv.copies import CopyGroup
from baton.transfer.buffers import read_batches
from baton.transfer.geometry import Geometry
from baton.transfer.interface import Attached as AttachedEvent
from baton.transfer.interface import RemoteLost, WriteCompleted, WriteFailed
from baton.transfer.messages import encode
from baton.transfer.parts import cut_parts
from baton.transfer.transports.file.parcel import OutgoingParcel, is_aligned, remove_file
from baton.transfer.transports.file.spool import find_spool
from baton.transfer.transports.file.wire import (
    MAX_BODY_BYTES,
    MAX_PARCELS,
    Abandoned,
    Attach,
    Attached,
    Landed,
    NotAttached,
    Parcel,
    Refused,
    decode_from_receiver,
    parcel_name,
)

if TYPE_CHECKING:
    from pathlib import Path

    from baton.ids import Epoch
    from baton.transfer.channel import Channel
    from baton.transfer.connection import Connection
    from baton.transfer.interface import (
        PagedRegion,
        PageWrite,
        RegionDescriptor,
        RemoteId,
        TransferId,
    )
    from baton.transfer.reactor import Reactor
    from baton.transfer.transports.file.options import FileOptions

PARCEL_BYTES: Final = 16 << 20
"""Small enough that the peer reads one while the next is written."""

_NOTHING: Final = CopyGroup(
    np.empty(0, np.int64), np.empty(0, np.int64), np.empty((0, 3), np.int64)
)


@dataclass(eq=False, slots=True)
class _Writing:
    """A checked write that has not ended."""

    transfer: TransferId
    write: PageWrite
    region: PagedRegion
    unwritten: deque[CopyGroup]
    num_unanswered: int = 0
    error: TransferError | None = None


@dataclass(frozen=True, slots=True)
class _Outgoing:
    """The parcel that is being written."""

    writing: _Writing
    part: CopyGroup
    number: int
    file: OutgoingParcel


@dataclass(frozen=True, slots=True)
class _Told:
    """A parcel that the receiver knows of and has not answered."""

    writing: _Writing
    num_bytes: int


class Remote:
    """A peer's region as this writer sees it: attaching, attached or lost.

    Writes are carried out in order, a slice of one parcel with each step of the connection. Owner
    thread: the transport's.
    """

    def __init__(
        self,
        id_: RemoteId,
        descriptor: RegionDescriptor,
        epoch: Epoch,
        *,
        directory: Path,
        options: FileOptions,
        reactor: Reactor,
    ) -> None:
        self.id, self.descriptor = id_, descriptor
        self._epoch, self._reactor = epoch, reactor
        self._directory, self._options = directory, options
        self._link = bytes(new_region_handle())
        self._connection: Connection | None = None
        self._spool: Path | None = None
        self._queue: deque[_Writing] = deque()
        self._writings: set[_Writing] = set()
        self._outgoing: _Outgoing | None = None
        self._told: dict[int, _Told] = {}
        self._next_number = 0
        self._loss: TransferError | None = None

    @property
    def is_attaching(self) -> bool:
        """Neither attached nor lost yet."""
        return self._spool is None and self._loss is None

    def own(self, connection: Connection) -> None:
        """The connection that is being opened: closed with this remote."""
        self._connection = connection

    def begin(self, connection: Connection) -> None:
        """Both ends have proved themselves: ask for the region."""
        connection.become(self._read, self.lose)
        connection.channel.allow_bodies(MAX_BODY_BYTES)
        connection.send_body(encode(Attach(self._epoch, self.descriptor.handle, self._link)))

    def submit(self, transfer: TransferId, write: PageWrite, region: PagedRegion) -> None:
        """Begin a checked write, as soon as those before it were written."""
        if self._loss is not None or self._connection is None:
            self._reactor.report(WriteFailed(transfer, self._loss or _not_attached()))
            return
        parts = [part for part in cut_parts(write.copies.groups, PARCEL_BYTES) if part.num_bytes]
        writing = _Writing(transfer, write, region, deque(parts or [_NOTHING]))
        self._queue.append(writing)
        self._writings.add(writing)
        self._connection.step_soon()

    def lose(self, error: TransferError) -> None:
        """The peer is gone: report it and every unfinished write, once."""
        if self._loss is None:
            self._reactor.report(RemoteLost(self.id, error))
            self._end(error)

    def detach(self) -> None:
        """This side is done with the peer: unfinished writes fail."""
        if self._loss is None:
            self._end(PeerLostError("the remote was detached"))

    def _end(self, error: TransferError) -> None:
        self._loss = error
        if self._connection is not None:
            self._connection.close()
        self._withdraw_outgoing()
        if self._spool is not None:
            for number in self._told:
                remove_file(self._spool / parcel_name(self._link, number))
        for writing in sorted(self._writings, key=lambda each: each.transfer):
            self._reactor.report(WriteFailed(writing.transfer, error))
        self._told.clear()
        self._queue.clear()
        self._writings.clear()

    def _read(self, channel: Channel) -> None:
        for body in channel.receive_bodies():
            self._take(body)
        if self._connection is not None and self._spool is not None:
            self._work(self._spool)
            if self._can_work:
                self._connection.step_soon()

    @property
    def _can_work(self) -> bool:
        """Whether there is something to write, and the peer has read enough of what was written."""
        if self._outgoing is not None:
            return True
        num_unread_bytes = sum(told.num_bytes for told in self._told.values())
        return bool(self._queue) and (
            not self._told
            or (
                len(self._told) < MAX_PARCELS
                and num_unread_bytes + PARCEL_BYTES <= self._options.max_unread_bytes
            )
        )

    def _work(self, spool: Path) -> None:
        """Write one slice. A parcel that cannot be written fails its write, and no other."""
        if not self._can_work:
            return
        writing = self._outgoing.writing if self._outgoing is not None else self._queue[0]
        try:
            if self._outgoing is None:
                self._outgoing = self._open(writing, spool)
            if self._outgoing.file.write_slice():
                outgoing, self._outgoing = self._outgoing, None
                self._tell(outgoing)
        except TransferError as exc:
            self._outgoing = None
            self._abandon(writing, exc)

    def _open(self, writing: _Writing, spool: Path) -> _Outgoing:
        part, number = writing.unwritten[0], self._next_number
        array = writing.region.arrays[writing.write.copies.layer]
        geometry = Geometry(part.src_pages, part.spans[:, 0], part.spans[:, 2])
        file = OutgoingParcel(
            spool / parcel_name(self._link, number),
            read_batches(geometry, writing.region.memory, array),
            direct=self._options.direct and is_aligned(geometry, writing.region.memory, array),
            sync=self._options.sync == "data",
        )
        self._next_number += 1
        return _Outgoing(writing, part, number, file)

    def _tell(self, outgoing: _Outgoing) -> None:
        writing, part = outgoing.writing, outgoing.part
        writing.unwritten.popleft()
        if not writing.unwritten:
            self._queue.popleft()
        writing.num_unanswered += 1
        self._told[outgoing.number] = _Told(writing, part.num_bytes)
        parcel = Parcel(
            outgoing.number,
            writing.write.window,
            writing.write.copies.layer,
            *part.packed_targets,
            None if writing.unwritten else writing.write.notice,
        )
        self._say(parcel)

    def _abandon(self, writing: _Writing, error: TransferError) -> None:
        writing.error = writing.error or error
        writing.unwritten.clear()
        self._queue.popleft()
        self._say(Abandoned())
        self._settle(writing)

    def _say(self, message: Parcel | Abandoned) -> None:
        if self._connection is not None:
            self._connection.send_body(encode(message))

    def _take(self, body: bytes) -> None:
        match decode_from_receiver(body):
            case Attached(arrays, spool, proof) if self._spool is None:
                if arrays != self.descriptor.arrays:
                    raise ProtocolError("the peer's region is not what its description says")
                self._spool = find_spool(self._directory, spool, proof)
                if self._connection is not None:
                    self._connection.settle()
                self._reactor.report(AttachedEvent(self.id))
            case NotAttached(reason) if self._spool is None:
                raise PeerUnreachableError(f"the peer refused to attach: {reason}")
            case Landed() | Refused() as answer if answer.number in self._told:
                self._answered(answer)
            case Attached() | NotAttached() | Landed() | Refused():
                raise ProtocolError("the peer answered what was not asked")
            case unknown:
                assert_never(unknown)

    def _answered(self, answer: Landed | Refused) -> None:
        writing = self._told.pop(answer.number).writing
        writing.num_unanswered -= 1
        if isinstance(answer, Refused):
            error = TransferError(f"the peer refused the write: {answer.reason}")
            writing.error = writing.error or error
            if writing.unwritten:  # it is the first in the queue: some of it was told
                self._withdraw_outgoing()
                self._abandon(writing, error)
        self._settle(writing)

    def _withdraw_outgoing(self) -> None:
        if self._outgoing is not None:
            self._outgoing.file.close()
            self._outgoing = None

    def _settle(self, writing: _Writing) -> None:
        """Report a write once nothing of it is unwritten or unanswered."""
        if writing.unwritten or writing.num_unanswered or writing not in self._writings:
            return
        self._writings.discard(writing)
        if writing.error is not None:
            self._reactor.report(WriteFailed(writing.transfer, writing.error))
        else:
            num_bytes = writing.write.copies.num_bytes
            self._reactor.report(WriteCompleted(writing.transfer, num_bytes))


def _not_attached() -> TransferError:
    return TransferError("this remote is not attached")
