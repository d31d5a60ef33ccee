"""The receiving end of one `file` connection: reads part files into place."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, assert_never

from baton.errors import ProtocolError
from baton.ids import TicketId
from baton.transfer.messages import encode
from baton.transfer.scatter_gather import unpack_target, write_batches
from baton.transfer.transports.file.part_file import IncomingPartFile, is_aligned
from baton.transfer.transports.file.wire import (
    MAX_PART_FILES,
    PartFile,
    PartLanded,
    PartRefused,
    WriteAbandoned,
    decode_from_writer,
    part_file_name,
)

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from baton.ids import Epoch
    from baton.net.channel import Channel
    from baton.net.connection import Connection
    from baton.transfer.interface import PagedRegion
    from baton.transfer.scatter_gather import Geometry
    from baton.transfer.transports.file.spool import Spool


class Admission(Protocol):
    """What a connection asks its transport."""

    def find_refusal(
        self, grant: TicketId, writer: Epoch, region: PagedRegion, pages: NDArray[np.int64]
    ) -> str | None:
        """Why this writer may not write there, or None: it may."""
        ...

    def arrived(self, grant: TicketId, notification: bytes) -> None:
        """A whole write is in place."""
        ...


@dataclass(frozen=True, slots=True)
class FileWriter:
    """Who is at the other end: which life of a worker, and how its part files' names begin."""

    epoch: Epoch
    link: bytes


class FileInbound:
    """Takes one writer's part files for one region, in order. Owner thread: the transport's."""

    def __init__(
        self,
        connection: Connection,
        writer: FileWriter,
        region: PagedRegion,
        *,
        spool: Spool,
        direct: bool,
        admission: Admission,
    ) -> None:
        self._connection, self._writer, self._region = connection, writer, region
        self._spool, self._direct, self._admission = spool, direct, admission
        self._waiting: deque[PartFile | WriteAbandoned] = deque()
        self._part_file: PartFile | None = None
        self._incoming: IncomingPartFile | None = None
        self._last_number = -1
        self._refusal: str | None = None

    def read(self, channel: Channel) -> None:
        """Hear what has been said, then bring one slice to its place.

        Raises:
            PeerLostError: the connection is broken or at its end.
            ProtocolError: the writer did what no honest writer does.
        """
        for body in channel.receive_bodies():
            self._waiting.append(decode_from_writer(body))
        if len(self._waiting) > 2 * MAX_PART_FILES:
            raise ProtocolError("a writer announced more part files than it may")
        self._work()
        if self._part_file is not None or self._waiting:
            self._connection.step_soon()

    def refuse_grant(self, grant: TicketId) -> None:
        """The grant was closed: what is in mid-flight for it lands nowhere."""
        if self._part_file is not None and self._part_file.grant == grant:
            self._finish("the grant was closed")

    def close(self) -> None:
        """The writer is gone: so are its part files."""
        if self._incoming is not None:
            self._incoming.close()
            self._incoming = None
        self._part_file = None
        self._waiting.clear()
        self._spool.remove(self._writer.link)

    def _work(self) -> None:
        if self._part_file is None and self._waiting:
            match self._waiting.popleft():
                case PartFile() as part_file:
                    self._begin(part_file)
                case WriteAbandoned():
                    self._refusal = None
                case unknown:
                    assert_never(unknown)
        if self._incoming is not None and self._incoming.read_slice():
            self._finish(None)

    def _begin(self, part_file: PartFile) -> None:
        if part_file.number <= self._last_number:
            raise ProtocolError("a part file's number came twice, or out of order")
        self._last_number = part_file.number
        if part_file.array >= len(self._region.arrays):
            raise ProtocolError(
                f"a part file names array {part_file.array}, which the region lacks"
            )
        array = self._region.arrays[part_file.array]
        geometry = unpack_target(part_file.dst_pages, part_file.spans, array)
        self._part_file = part_file
        self._incoming = self._open(part_file, geometry)
        refusal = self._refusal or self._admission.find_refusal(
            TicketId(part_file.grant), self._writer.epoch, self._region, geometry.pages
        )
        if refusal is not None:
            self._finish(refusal)

    def _open(self, part_file: PartFile, geometry: Geometry) -> IncomingPartFile:
        array, memory = self._region.arrays[part_file.array], self._region.memory
        return IncomingPartFile(
            self._spool.path / part_file_name(self._writer.link, part_file.number),
            geometry.num_bytes,
            write_batches(geometry, memory, array),
            direct=self._direct and is_aligned(geometry, memory, array),
        )

    def _finish(self, refusal: str | None) -> None:
        part_file, self._part_file = self._part_file, None
        if part_file is None:
            return
        if self._incoming is not None:
            self._incoming.close()
            self._incoming = None
        self._refusal = refusal if part_file.notification is None else None
        if refusal is not None:
            self._connection.send_body(encode(PartRefused(part_file.number, refusal)))
            return
        if part_file.notification is not None:
            self._admission.arrived(TicketId(part_file.grant), part_file.notification)
        self._connection.send_body(encode(PartLanded(part_file.number)))
