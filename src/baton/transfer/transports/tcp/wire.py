"""What crosses a `tcp` connection after the handshake (docs/wire/transfer.md).

A `Data` frame is followed by its payload, raw: for each page in order, for each span in order, its
bytes. A write is one or more `Data` frames of one sequence number; the last one has the notice.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Final, TypeAlias

import msgspec
import numpy as np

from baton.errors import ProtocolError
from baton.transfer.bounds import are_pages_inside, are_spans_inside
from baton.transfer.interface import PageArray
from baton.transfer.messages import EpochText, IdBytes, NoticeBytes, Reason, decode
from baton.transfer.transports.tcp.geometry import Geometry

if TYPE_CHECKING:
    from numpy.typing import NDArray

MAX_BODY_BYTES: Final = 1 << 20
MAX_PAYLOAD_BYTES: Final = 1 << 30

Natural: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]


class Attach(msgspec.Struct, frozen=True, tag="attach"):
    """Writer → receiver, first: which life of a worker wants to write into which region."""

    epoch: EpochText
    region: IdBytes


class Attached(msgspec.Struct, frozen=True, tag="attached"):
    """Receiver → writer: go ahead; the region's arrays, to compare with the description."""

    arrays: tuple[PageArray, ...]


class NotAttached(msgspec.Struct, frozen=True, tag="not_attached"):
    """Receiver → writer: there is no such region here."""

    reason: Reason


class Data(msgspec.Struct, frozen=True, tag="data"):
    """Writer → receiver: one part of a write, with its payload behind it.

    `dst_pages` is packed u32 `[n]`; `spans` is packed u32 `[s, 2]` of `(dst_byte, num_bytes)`.
    `notice` is None in every part but the last one.
    """

    sequence: Natural
    window: IdBytes
    array: Natural
    dst_pages: bytes
    spans: bytes
    notice: NoticeBytes | None


class Landed(msgspec.Struct, frozen=True, tag="landed"):
    """Receiver → writer: all of this write is in place and its notice was taken."""

    sequence: Natural


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """Receiver → writer: some of this write was dropped."""

    sequence: Natural
    reason: Reason


FromReceiver: TypeAlias = Attached | NotAttached | Landed | Refused

_attach = msgspec.msgpack.Decoder(Attach)
_data = msgspec.msgpack.Decoder(Data)
_from_receiver: msgspec.msgpack.Decoder[FromReceiver] = msgspec.msgpack.Decoder(FromReceiver)
_PACKED: Final = np.dtype("<u4")


def decode_attach(body: bytes) -> Attach:
    """Read a writer's first message.

    Raises:
        ProtocolError: it is something else.
    """
    return decode(_attach, body)


def decode_data(body: bytes) -> Data:
    """Read a writer's later messages.

    Raises:
        ProtocolError: it is something else.
    """
    return decode(_data, body)


def decode_from_receiver(body: bytes) -> FromReceiver:
    """Read a receiver's message.

    Raises:
        ProtocolError: it is none of them.
    """
    return decode(_from_receiver, body)


def pack_indices(indices: NDArray[np.int64]) -> bytes:
    """Non-negative indices below 2**32, any shape, as packed little-endian u32."""
    return indices.astype(_PACKED).tobytes()


def unpack_geometry(data: Data, array: PageArray) -> Geometry:
    """Where a part wants to go, known to lie inside `array`.

    Raises:
        ProtocolError: it does not, or is too large: no honest writer sends that.
    """
    if len(data.dst_pages) % 4 or len(data.spans) % 8:
        raise ProtocolError("packed indices end in the middle of a number")
    pages = np.frombuffer(data.dst_pages, _PACKED).astype(np.int64)
    spans = np.frombuffer(data.spans, _PACKED).astype(np.int64).reshape(-1, 2)
    geometry = Geometry(pages, spans[:, 0], spans[:, 1])
    if not are_pages_inside(pages, array.num_pages):
        raise ProtocolError("a part names a page outside the region")
    if not are_spans_inside(geometry.starts, geometry.lengths, array.page_bytes):
        raise ProtocolError("a part names a span that is empty or leaves its page")
    if geometry.bytes_per_page > array.page_bytes or geometry.num_bytes > MAX_PAYLOAD_BYTES:
        raise ProtocolError(f"a part of {geometry.num_bytes} bytes; at most {MAX_PAYLOAD_BYTES}")
    return geometry
