"""The receiving end of one `tcp` connection: headers are checked, payloads land in place."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

from baton.errors import ProtocolError
from baton.transfer.channel import skip_bytes
from baton.transfer.messages import encode
from baton.transfer.transports.tcp.buffers import discard_batches, write_batches
from baton.transfer.transports.tcp.wire import (
    Data,
    Landed,
    Refused,
    decode_data,
    unpack_geometry,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np
    from numpy.typing import NDArray

    from baton.ids import Epoch, TicketId
    from baton.transfer.channel import Channel
    from baton.transfer.connection import Connection
    from baton.transfer.interface import PagedRegion

MAX_STEP_BYTES: Final = 8 << 20
"""Page bytes read before other connections get their turn."""


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


class Inbound:
    """Receives one writer's writes into one region. Owner thread: the transport's.

    A write's parts follow each other on the connection. Once a part is refused, so is the rest of
    its write; the writer hears of it when the last part is over.
    """

    def __init__(
        self, connection: Connection, writer: Epoch, region: PagedRegion, admission: Admission
    ) -> None:
        self.connection, self.region = connection, region
        self._writer, self._admission = writer, admission
        self._part: Data | None = None
        self._batches: Iterator[list[memoryview]] = iter(())
        self._batch: list[memoryview] = []
        self._num_missing_bytes = 0
        self._unfinished_sequence: int | None = None
        self._last_sequence = -1
        self._refusal: str | None = None

    def read(self, channel: Channel) -> None:
        """Take what has come, up to `MAX_STEP_BYTES`.

        Raises:
            PeerLostError: the connection is broken or at its end.
            ProtocolError: the writer sent what no honest writer sends.
        """
        budget = MAX_STEP_BYTES
        while budget > 0:
            if self._part is None:
                body = channel.receive_body()
                if body is None:
                    return
                self._begin_part(decode_data(body))
                budget -= len(body)
            else:
                num_bytes = channel.receive_into(self._batch)
                if num_bytes == 0:
                    return
                budget -= num_bytes
                self._take_payload(num_bytes)

    def refuse_window(self, window: TicketId) -> None:
        """The window was closed: what is in mid-flight for it lands nowhere."""
        if self._part is not None and self._part.window == window:
            self._refuse("the window was closed")

    def _begin_part(self, part: Data) -> None:
        self._check_order(part)
        if part.array >= len(self.region.arrays):
            raise ProtocolError(f"a part names array {part.array}, which the region lacks")
        array = self.region.arrays[part.array]
        geometry = unpack_geometry(part, array)
        self._part = part
        self._num_missing_bytes = geometry.num_bytes
        self._batches = write_batches(geometry, self.region.memory, array)
        if self._refusal is None:
            refusal = self._admission.find_refusal(
                TicketId(part.window), self._writer, self.region, geometry.pages
            )
        ...
