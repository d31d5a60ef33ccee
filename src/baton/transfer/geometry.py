"""Which bytes of an array one part of a transfer names, as index arrays and packed for the wire."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from baton.errors import ProtocolError
from baton.transfer.bounds import are_pages_inside, are_spans_inside

if TYPE_CHECKING:
    from baton.transfer.interface import PageArray

MAX_PAYLOAD_BYTES: Final = 1 << 30
"""Of one part: what a peer may announce."""

_PACKED: Final = np.dtype("<u4")
_SPAN: Final = struct.Struct("<II")
_PAGE_OUTSIDE: Final = "a part names a page outside the region"
_SPAN_OUTSIDE: Final = "a part names a span that is empty or leaves its page"


_FEW_RUNS: Final = 16
"""Up to here, a loop is faster than numpy."""


class Geometry(msgspec.Struct, frozen=True, gc=False):
    """Each of `pages`, int64 `[n]`, in turn; in each page every span in turn.

    `starts` and `lengths`, int64 `[s]`, are bytes inside a page. The order is that of the payload.
    """

    pages: NDArray[np.int64]
    starts: NDArray[np.int64]
    lengths: NDArray[np.int64]

    @property
    def bytes_per_page(self) -> int:
        """Payload of one page."""
        # A reduction costs 2 us whatever the length.
        return int(self.lengths[0]) if len(self.lengths) == 1 else int(self.lengths.sum())

    @property
    def num_bytes(self) -> int:
        """Payload of all pages."""
        return len(self.pages) * self.bytes_per_page

    def joined(self) -> Geometry:
        """The same bytes in the same order, spans that touch made one."""
        if len(self.starts) == 1:
            return self
        starts, lengths = _join_neighbours(self.starts, self.lengths)
        return Geometry(self.pages, starts, lengths)

    def take_pages(self, first: int, num_pages: int) -> Geometry:
        """The part from page number `first` on."""
        return Geometry(self.pages[first : first + num_pages], self.starts, self.lengths)


def unpack_geometry(packed_pages: bytes, packed_spans: bytes, array: PageArray) -> Geometry:
    """What a peer's part names, known to lie inside `array`: pages u32 `[n]`, spans u32 `[s, 2]`.

    Spans are `(start, num_bytes)` inside a page, and may repeat bytes.

    Raises:
        ProtocolError: it does not, or is too large: no honest peer sends that.
    """
    if len(packed_pages) % 4 or len(packed_spans) % 8:
        raise ProtocolError("packed indices end in the middle of a number")
    if len(packed_pages) == _PACKED.itemsize and len(packed_spans) == _SPAN.size:
        return _unpack_one(packed_pages, packed_spans, array)
    pages = np.frombuffer(packed_pages, _PACKED).astype(np.int64)
    spans = np.frombuffer(packed_spans, _PACKED).astype(np.int64).reshape(-1, 2)
    geometry = Geometry(pages, spans[:, 0], spans[:, 1])
    if not are_pages_inside(pages, array.num_pages):
        raise ProtocolError(_PAGE_OUTSIDE)
    if not are_spans_inside(geometry.starts, geometry.lengths, array.page_bytes):
        raise ProtocolError(_SPAN_OUTSIDE)
    if geometry.num_bytes > MAX_PAYLOAD_BYTES:
        raise ProtocolError(f"a part of {geometry.num_bytes} bytes; at most {MAX_PAYLOAD_BYTES}")
    return geometry


def _unpack_one(packed_page: bytes, packed_span: bytes, array: PageArray) -> Geometry:
    """Of one span of one page: numbers are dealt with faster than arrays of one."""
    page, (start, length) = int.from_bytes(packed_page, "little"), _SPAN.unpack(packed_span)
    if page >= array.num_pages:
        raise ProtocolError(_PAGE_OUTSIDE)
    if not 0 < length <= array.page_bytes - start:
        raise ProtocolError(_SPAN_OUTSIDE)
    if length > MAX_PAYLOAD_BYTES:
        raise ProtocolError(f"a part of {length} bytes; at most {MAX_PAYLOAD_BYTES}")
    return Geometry(np.array([page]), np.array([start]), np.array([length]))


def unpack_target(packed_pages: bytes, packed_spans: bytes, array: PageArray) -> Geometry:
    """Like `unpack_geometry`, for bytes that are to be stored: spans together fit in a page.

    Raises:
        ProtocolError: they do not: then some would be stored twice.
    """
    geometry = unpack_geometry(packed_pages, packed_spans, array)
    if geometry.bytes_per_page > array.page_bytes:
        raise ProtocolError("the spans of a part are larger than the page that they go to")
    return geometry


def compute_runs(
    geometry: Geometry, array: PageArray
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Offsets in the region and lengths of all pieces, neighbours joined: int64 `[r]` each."""
    bases = array.offset_bytes + geometry.pages * array.page_bytes
    offsets = (bases[:, None] + geometry.starts[None, :]).reshape(-1)
    lengths = np.broadcast_to(geometry.lengths, (len(bases), len(geometry.lengths))).reshape(-1)
    return _join_neighbours(offsets, lengths)


def compute_bounds(geometry: Geometry, array: PageArray) -> tuple[list[int], list[int]]:
    """Where in the region each run begins and ends."""
    num_pieces = len(geometry.pages) * len(geometry.starts)
    if num_pieces == 1:
        page, start = int(geometry.pages[0]), int(geometry.starts[0])
        begin = array.offset_bytes + page * array.page_bytes + start
        return [begin], [begin + geometry.bytes_per_page]
    if num_pieces > _FEW_RUNS:
        offsets, lengths = compute_runs(geometry, array)
        return offsets.tolist(), (offsets + lengths).tolist()
    spans = list(zip(geometry.starts.tolist(), geometry.lengths.tolist(), strict=True))
    starts: list[int] = []
    ends: list[int] = []
    for page in geometry.pages.tolist():
        base = array.offset_bytes + page * array.page_bytes
        for start, length in spans:
            if ends and ends[-1] == base + start:
                ends[-1] += length
            else:
                starts.append(base + start)
                ends.append(base + start + length)
    return starts, ends


def _join_neighbours(
    offsets: NDArray[np.int64], lengths: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    if len(offsets) == 0:
        return offsets, lengths
    is_first = np.empty(len(offsets), np.bool_)
    is_first[0] = True
    np.not_equal(offsets[1:], offsets[:-1] + lengths[:-1], out=is_first[1:])
    firsts = np.flatnonzero(is_first)
    return offsets[firsts], np.add.reduceat(lengths, firsts)
