"""The receiving end of one `file` connection: parcels are checked, read into place, and removed."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, assert_never

from baton.errors import ProtocolError
from baton.ids import TicketId
from baton.transfer.buffers import write_batches
from baton.transfer.geometry import unpack_target
from baton.transfer.messages import encode
from baton.transfer.transports.file.parcel import IncomingParcel, is_aligned
from baton.transfer.transports.file.wire import (
    MAX_PARCELS,
    Abandoned,
    Landed,
    Parcel,
    Refused,
    decode_from_writer,
    parcel_name,
)

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from baton.ids import Epoch
    from baton.transfer.channel import Channel
    from baton.transfer.connection import Connection
    from baton.transfer.geometry import Geometry
    from baton.transfer.interface import PagedRegion
    from baton.transfer.transports.file.spool import Spool


class Admission(Protocol):
    """What a connection asks its transport."""

    def find_refusal(
        self, window: TicketId, writer: Epoch, region: PagedRegion, pages: NDArray[np.int64]
    ) -> str | None:
        """Why this writer may not write there, or None: it may."""
        ...

    def arrived(self, window: TicketId, notice: bytes) -> None:
        """A whole write is in place."""
        ...


@dataclass(frozen=True, slots=True)
class Writer:
    """Who is at the other end: which life of a worker, and how its parcels' names begin."""

    epoch: Epoch
    link: bytes


class Inbound:
    """Takes one writer's parcels for one region, in order. Owner thread: the transport's."""

    def __init__(
        self,
        connection: Connection,
        writer: Writer,
        region: PagedRegion,
        *,
        spool: Spool,
        direct: bool,
        admission: Admission,
    ) -> None:
        self._connection, self._writer, self._region = connection, writer, region
        self._spool, self._direct, self._admission = spool, direct, admission
        self._waiting: deque[Parcel | Abandoned] = deque()
        self._parcel: Parcel | None = None
        self._incoming: IncomingParcel | None = None
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
        if len(self._waiting) > 2 * MAX_PARCELS:
            raise ProtocolError("a writer tells of more parcels than it may")
        self._work()
        if self._parcel is not None or self._waiting:
            self._connection.step_soon()

    def refuse_window(self, window: TicketId) -> None:
        """The window was closed: what is in mid-flight for it lands nowhere."""
        if self._parcel is not None and self._parcel.window == window:
            self._finish("the window was closed")

    def close(self) -> None:
        """The writer is gone: so are its parcels."""
        if self._incoming is not None:
            self._incoming.close()
            self._incoming = None
        self._parcel = None
        self._waiting.clear()
        self._spool.remove(self._writer.link)

    def _work(self) -> None:
        if self._parcel is None and self._waiting:
            match self._waiting.popleft():
                case Parcel() as parcel:
                    self._begin(parcel)
                case Abandoned():
                    self._refusal = None
                case unknown:
                    assert_never(unknown)
        if self._incoming is not None and self._incoming.read_slice():
            self._finish(None)

    def _begin(self, parcel: Parcel) -> None:
        if parcel.number <= self._last_number:
            raise ProtocolError("a parcel's number came twice, or out of order")
        self._last_number = parcel.number
        if parcel.array >= len(self._region.arrays):
            raise ProtocolError(f"a parcel names array {parcel.array}, which the region lacks")
        array = self._region.arrays[parcel.array]
        geometry = unpack_target(parcel.dst_pages, parcel.spans, array)
        self._parcel = parcel
        self._incoming = self._open(parcel, geometry)
        refusal = self._refusal or self._admission.find_refusal(
            TicketId(parcel.window), self._writer.epoch, self._region, geometry.pages
        )
        if refusal is not None:
            self._finish(refusal)

    def _open(self, parcel: Parcel, geometry: Geometry) -> IncomingParcel:
        array, memory = self._region.arrays[parcel.array], self._region.memory
        return IncomingParcel(
            self._spool.path / parcel_name(self._writer.link, parcel.number),
            geometry.num_bytes,
            write_batches(geometry, memory, array),
            direct=self._direct and is_aligned(geometry, memory, array),
        )

    def _finish(self, refusal: str | None) -> None:
        parcel, self._parcel = self._parcel, None
        if parcel is None:
            return
        if self._incoming is not None:
            self._incoming.close()
            self._incoming = None
        self._refusal = refusal if parcel.notice is None else None
        if refusal is not None:
            self._connection.send_body(encode(Refused(parcel.number, refusal)))
            return
        if parcel.notice is not None:
            self._admission.arrived(TicketId(parcel.window), parcel.notice)
        self._connection.send_body(encode(Landed(parcel.number)))
