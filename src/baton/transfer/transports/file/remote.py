"""The writing end: one peer's region, reached through its folder."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Final, Literal, assert_never

import msgspec
import numpy as np

from baton.errors import ProtocolError, TransferError
from baton.ids import Epoch, new_region_handle
from baton.kv.copies import CopyGroup
from baton.net.framing import encode
from baton.transfer.base_transport import ConnectedRemote, Reactor, refused_to_attach
from baton.transfer.interface import WriteCompleted, WriteFailed
from baton.transfer.messages import MAX_BODY_BYTES, NotAttached
from baton.transfer.scatter_gather import Geometry, cut_parts, read_batches
from baton.transfer.transports.file.spool import (
    OutgoingPartFile,
    find_spool,
    is_aligned,
    remove_file,
)
from baton.transfer.transports.file.wire import (
    MAX_PART_FILES,
    Attach,
    Attached,
    PartFile,
    PartLanded,
    PartRefused,
    WriteAbandoned,
    decode_from_receiver,
    part_file_name,
)

if TYPE_CHECKING:
    from pathlib import Path

    from baton.net.channel import Channel
    from baton.net.connection import Connection
    from baton.transfer.interface import (
        PagedRegion,
        PageWrite,
        RegionDescriptor,
        RemoteId,
        TransferId,
    )

PART_FILE_BYTES: Final = 16 << 20
"""Small enough that the peer reads one while the next is written."""

_EMPTY_GROUP: Final = CopyGroup(
    np.empty(0, np.int64), np.empty(0, np.int64), np.empty((0, 3), np.int64)
)


@dataclass(eq=False, slots=True)
class _PendingWrite:
    """A checked write that has not ended."""

    transfer: TransferId
    write: PageWrite
    region: PagedRegion
    unwritten: deque[CopyGroup]
    num_unanswered: int = 0
    error: TransferError | None = None


@dataclass(frozen=True, slots=True)
class _OutgoingPart:
    """The part file that is being written."""

    pending: _PendingWrite
    part: CopyGroup
    number: int
    file: OutgoingPartFile


@dataclass(frozen=True, slots=True)
class _AnnouncedPart:
    """A part file that the receiver knows of and has not answered."""

    pending: _PendingWrite
    num_bytes: int


class FileRemote(ConnectedRemote):
    """See `BaseRemote`. Writes are carried out in order, a slice of one part file in each step."""

    def __init__(
        self,
        id_: RemoteId,
        descriptor: RegionDescriptor,
        reactor: Reactor,
        *,
        epoch: Epoch,
        directory: Path,
        options: FileOptions,
    ) -> None:
        super().__init__(id_, descriptor, reactor)
        self._epoch, self._directory, self._options = epoch, directory, options
        self._link = bytes(new_region_handle())
        self._spool: Path | None = None
        self._queue: deque[_PendingWrite] = deque()
        self._pending_writes: set[_PendingWrite] = set()
        self._outgoing: _OutgoingPart | None = None
        self._announced: dict[int, _AnnouncedPart] = {}
        self._next_number = 0

    def send_attach(self, connection: Connection) -> None:
        """Both ends have proved themselves: ask for the region."""
        connection.set_handlers(self._read, self.lose)
        connection.channel.allow_bodies(MAX_BODY_BYTES)
        connection.send_body(encode(Attach(self._epoch, self.descriptor.handle, self._link)))

    def submit(self, transfer: TransferId, write: PageWrite, region: PagedRegion) -> None:
        """Begin a checked write, as soon as those before it were written."""
        if self._loss is not None or self._connection is None:
            self._reactor.report(WriteFailed(transfer, self._loss or _not_attached()))
            return
        parts = [part for part in cut_parts(write.copies.groups, PART_FILE_BYTES) if part.num_bytes]
        pending = _PendingWrite(transfer, write, region, deque(parts or [_EMPTY_GROUP]))
        self._queue.append(pending)
        self._pending_writes.add(pending)
        self._connection.step_soon()

    def _end(self, error: TransferError) -> None:
        super()._end(error)
        if self._connection is not None:
            self._connection.close()
        self._withdraw_outgoing()
        if self._spool is not None:
            for number in self._announced:
                remove_file(self._spool / part_file_name(self._link, number))
        for pending in sorted(self._pending_writes, key=lambda each: each.transfer):
            self._reactor.report(WriteFailed(pending.transfer, error))
        self._announced.clear()
        self._queue.clear()
        self._pending_writes.clear()

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
        num_unread_bytes = sum(announced.num_bytes for announced in self._announced.values())
        return bool(self._queue) and (
            not self._announced
            or (
                len(self._announced) < MAX_PART_FILES
                and num_unread_bytes + PART_FILE_BYTES <= self._options.max_unread_bytes
            )
        )

    def _work(self, spool: Path) -> None:
        """Write one slice. A part file that cannot be written fails its write, and no other."""
        if not self._can_work:
            return
        pending = self._outgoing.pending if self._outgoing is not None else self._queue[0]
        try:
            if self._outgoing is None:
                self._outgoing = self._open(pending, spool)
            if self._outgoing.file.write_slice():
                outgoing, self._outgoing = self._outgoing, None
                self._announce(outgoing)
        except TransferError as exc:
            self._outgoing = None
            self._abandon(pending, exc)

    def _open(self, pending: _PendingWrite, spool: Path) -> _OutgoingPart:
        part, number = pending.unwritten[0], self._next_number
        array = pending.region.arrays[pending.write.copies.layer]
        geometry = Geometry(part.src_pages, part.spans[:, 0], part.spans[:, 2])
        file = OutgoingPartFile(
            spool / part_file_name(self._link, number),
            read_batches(geometry, pending.region.memory, array),
            direct=self._options.direct and is_aligned(geometry, pending.region.memory, array),
            sync=self._options.sync == "data",
        )
        self._next_number += 1
        return _OutgoingPart(pending, part, number, file)

    def _announce(self, outgoing: _OutgoingPart) -> None:
        pending, part = outgoing.pending, outgoing.part
        pending.unwritten.popleft()
        if not pending.unwritten:
            self._queue.popleft()
        pending.num_unanswered += 1
        self._announced[outgoing.number] = _AnnouncedPart(pending, part.num_bytes)
        part_file = PartFile(
            outgoing.number,
            pending.write.grant,
            pending.write.copies.layer,
            *part.packed_targets,
            None if pending.unwritten else pending.write.notification,
        )
        self._send(part_file)

    def _abandon(self, pending: _PendingWrite, error: TransferError) -> None:
        pending.error = pending.error or error
        pending.unwritten.clear()
        self._queue.popleft()
        self._send(WriteAbandoned())
        self._settle(pending)

    def _send(self, message: PartFile | WriteAbandoned) -> None:
        if self._connection is not None:
            self._connection.send_body(encode(message))

    def _take(self, body: bytes) -> None:
        match decode_from_receiver(body):
            case Attached(arrays, spool, proof) if self._spool is None:
                self._check_arrays(arrays)
                self._spool = find_spool(self._directory, spool, proof)
                self._set_attached()
            case NotAttached(reason) if self._spool is None:
                raise refused_to_attach(reason)
            case PartLanded() | PartRefused() as answer if answer.number in self._announced:
                self._answered(answer)
            case Attached() | NotAttached() | PartLanded() | PartRefused():
                raise ProtocolError("the peer answered what was not asked")
            case unknown:
                assert_never(unknown)

    def _answered(self, answer: PartLanded | PartRefused) -> None:
        pending = self._announced.pop(answer.number).pending
        pending.num_unanswered -= 1
        if isinstance(answer, PartRefused):
            error = TransferError(f"the peer refused the write: {answer.reason}")
            pending.error = pending.error or error
            if pending.unwritten:  # it is the first in the queue: some of it was announced
                self._withdraw_outgoing()
                self._abandon(pending, error)
        self._settle(pending)

    def _withdraw_outgoing(self) -> None:
        if self._outgoing is not None:
            self._outgoing.file.close()
            self._outgoing = None

    def _settle(self, pending: _PendingWrite) -> None:
        """Report a write once nothing of it is unwritten or unanswered."""
        if pending.unwritten or pending.num_unanswered or pending not in self._pending_writes:
            return
        self._pending_writes.discard(pending)
        if pending.error is not None:
            self._reactor.report(WriteFailed(pending.transfer, pending.error))
        else:
            num_bytes = pending.write.copies.num_bytes
            self._reactor.report(WriteCompleted(pending.transfer, num_bytes))


def _not_attached() -> TransferError:
    return TransferError("this remote is not attached")


class FileOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Options of the `file` transport.

    `directory`: where both workers find the part files; the path may differ between them.
    `direct`: go around the page cache (O_DIRECT) where the filesystem can, for pages that begin and
    end on multiples of 4,096 bytes.
    `sync`: `data` has each part file on the device before the peer is notified; needed where the
    two hosts' views of the filesystem meet on the device alone. `none` is enough on one host.
    `stale_after_s`: age from which a folder whose owner is dead is removed, when a worker starts.
    `max_unread_bytes`: part files of one peer that wait to be read; more wait to be written.
    `advertise_host`: the address that peers are sent, where the bound one is none (`0.0.0.0`).
    `connect_timeout_s`: from the start of connecting until the peer's region may be written.
    `max_connections`: of peers to this worker at once; what exceeds them is refused.
    """

    directory: str
    direct: bool = False
    sync: Literal["none", "data"] = "none"
    stale_after_s: Annotated[float, msgspec.Meta(ge=0)] = 60.0
    max_unread_bytes: Annotated[int, msgspec.Meta(ge=1)] = 256 << 20
    advertise_host: str | None = None
    connect_timeout_s: Annotated[float, msgspec.Meta(gt=0)] = 5.0
    max_connections: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)] = 4096
