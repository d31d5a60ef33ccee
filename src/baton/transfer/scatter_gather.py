"""Which bytes of an array one part of a transfer moves, and those bytes as lists of buffers.

A part's bytes are in place in the region if its runs are long, and in a staging buffer if they are
short. Both sides walk the same order (page by page, in each page span by span), each over its own
memory.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Final

import numpy as np

from baton.errors import ProtocolError
from baton.kv.copies import CopyGroup, PageCopies, apply_copies
from baton.kv.runs import MAX_FEW, merge_few, merge_runs, merge_spans
from baton.transfer.region import are_pages_inside, are_spans_inside, view_pages

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from baton.transfer.interface import PageArray

MAX_PAYLOAD_BYTES: Final = 1 << 30
"""Of one part: what a peer may announce."""
MAX_PART_BYTES: Final = 64 << 20
MAX_PART_PAGES: Final = 65_536
"""A frame of so many packed indices is a quarter of the largest one."""
MIN_RUN_BYTES: Final = 4096
"""Shorter runs are cheaper to copy to a staging buffer than to pass to the kernel one by one."""
MAX_BUFFERS: Final = 64
"""Far below IOV_MAX (1,024): a batch is cut anew after each system call that takes part of it."""
STAGING_BYTES: Final = 1 << 20
MAX_COPIED_BYTES: Final = 256 << 10
"""A write of short runs and at most this size is copied when it is submitted, in one piece."""

_PACKED: Final = np.dtype("<u4")
_SPAN: Final = struct.Struct("<II")
_PAGE_OUTSIDE: Final = "a part names a page outside the region"
_SPAN_OUTSIDE: Final = "a part names a span that is empty or leaves its page"


class Geometry:
    """Each of `pages`, int64 `[n]`, in turn; in each page every span in turn. Never changed.

    `starts` and `lengths`, int64 `[s]`, are bytes inside a page. The order is that of the payload.
    """

    __slots__ = ("bytes_per_page", "lengths", "num_bytes", "pages", "starts")

    def __init__(
        self, pages: NDArray[np.int64], starts: NDArray[np.int64], lengths: NDArray[np.int64]
    ) -> None:
        self.pages, self.starts, self.lengths = pages, starts, lengths
        # A reduction costs 2 us whatever the length.
        self.bytes_per_page = int(lengths[0]) if len(lengths) == 1 else int(lengths.sum())
        self.num_bytes = len(pages) * self.bytes_per_page

    def joined(self) -> Geometry:
        """The same bytes in the same order, adjacent spans merged."""
        if len(self.starts) == 1:
            return self
        lengths, starts = merge_runs(self.lengths, self.starts)
        return Geometry(self.pages, starts, lengths)

    def take_pages(self, first: int, num_pages: int) -> Geometry:
        """The part from page number `first` on."""
        return Geometry(self.pages[first : first + num_pages], self.starts, self.lengths)


def source_of(group: CopyGroup) -> Geometry:
    """What a group reads."""
    return Geometry(group.src_pages, group.spans[:, 0], group.spans[:, 2])


def target_of(group: CopyGroup) -> Geometry:
    """What a group writes."""
    return Geometry(group.dst_pages, group.spans[:, 1], group.spans[:, 2])


def cut_parts(groups: tuple[CopyGroup, ...], max_bytes: int = MAX_PART_BYTES) -> list[CopyGroup]:
    """Cut a transfer so that each part's frame and payload stay within their bounds.

    All pages of all groups, in order, in parts of about `max_bytes` or one page at least.
    """
    parts: list[CopyGroup] = []
    for group in groups:
        if group.num_bytes <= max_bytes and 0 < len(group.src_pages) <= MAX_PART_PAGES:
            parts.append(group)  # itself, with all that was derived from it
        else:
            parts += _cut_group(group, max_bytes)
    return parts


def _cut_group(group: CopyGroup, max_bytes: int) -> Iterator[CopyGroup]:
    bytes_per_page = max(1, group.num_bytes // max(1, len(group.src_pages)))
    num_pages = max(1, min(MAX_PART_PAGES, max_bytes // bytes_per_page))
    for first in range(0, len(group.src_pages), num_pages):
        pages = slice(first, first + num_pages)
        yield CopyGroup(group.src_pages[pages], group.dst_pages[pages], group.spans)


def unpack_geometry(packed_pages: bytes, packed_spans: bytes, array: PageArray) -> Geometry:
    """What a peer's part names, known to lie inside `array`: pages u32 `[n]`, spans u32 `[s, 2]`.

    Spans are `(start, num_bytes)` inside a page, and may repeat bytes.

    Raises:
        ProtocolError: it does not, or is too large.
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
    """Of one span of one page: numbers are faster than arrays of one."""
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
    """Offsets in the region and lengths of all runs: int64 `[r]` each."""
    bases = array.offset_bytes + geometry.pages * array.page_bytes
    offsets = (bases[:, None] + geometry.starts[None, :]).reshape(-1)
    lengths = np.broadcast_to(geometry.lengths, (len(bases), len(geometry.lengths))).reshape(-1)
    lengths, offsets = merge_runs(lengths, offsets)
    return offsets, lengths


def compute_copy_runs(group: CopyGroup, source: PageArray, target: PageArray) -> NDArray[np.int64]:
    """All spans of all pages, in order, those merged that are adjacent on both sides.

    Returns:
        int64 `[r, 3]`: offsets in the source's and in the target's region, and bytes.
    """
    pieces = np.empty((len(group.src_pages), len(group.spans), 3), np.int64)
    for side, pages, array in ((0, group.src_pages, source), (1, group.dst_pages, target)):
        firsts = array.offset_bytes + pages * array.page_bytes
        pieces[:, :, side] = firsts[:, None] + group.spans[:, side]
    pieces[:, :, 2] = group.spans[:, 2]
    return merge_spans(pieces.reshape(-1, 3))


def is_direct(geometry: Geometry) -> bool:
    """Whether the runs of a joined geometry are long enough to be used in place."""
    return geometry.bytes_per_page >= MIN_RUN_BYTES * len(geometry.starts)


def sole_batch(geometry: Geometry, memory: memoryview, array: PageArray) -> list[memoryview] | None:
    """All bytes of `geometry`, in place, if one system call takes them there; else None."""
    if len(geometry.pages) * len(geometry.starts) > MAX_BUFFERS:
        return None
    geometry = geometry.joined()
    return _view_runs(geometry, memory, array) if is_direct(geometry) else None


def read_sole_batch(
    geometry: Geometry, memory: memoryview, array: PageArray
) -> list[memoryview] | None:
    """Like `sole_batch`, of bytes to be sent: a few short runs are copied; else None."""
    geometry = geometry.joined()
    if is_direct(geometry):
        is_few = len(geometry.pages) * len(geometry.starts) <= MAX_BUFFERS
        return _view_runs(geometry, memory, array) if is_few else None
    if not 0 < geometry.num_bytes <= MAX_COPIED_BYTES:
        return None
    return [_gather(geometry, view_pages(memory, array)).reshape(-1).data]


def read_batches(
    geometry: Geometry, memory: memoryview, array: PageArray
) -> Iterator[list[memoryview]]:
    """The bytes of a local array that `geometry` names, to be sent.

    Buffers view the region itself, or a staged copy that is made when the batch is asked for.
    """
    geometry = geometry.joined()
    if is_direct(geometry):
        yield from _cut_runs(geometry, memory, array)
        return
    pages = view_pages(memory, array)
    for part in _stageable_parts(geometry):
        yield [_gather(part, pages).reshape(-1).data]


def write_batches(
    geometry: Geometry, memory: memoryview, array: PageArray
) -> Iterator[list[memoryview]]:
    """Where received bytes go. A batch must be full before the next one is asked for.

    Staged bytes are put in place then: an abandoned stream writes nothing more.
    """
    geometry = geometry.joined()
    if is_direct(geometry):
        yield from _cut_runs(geometry, memory, array)
        return
    pages = view_pages(memory, array)
    for part in _stageable_parts(geometry):
        staging = np.empty((len(part.pages), part.bytes_per_page), np.uint8)
        yield [staging.reshape(-1).data]
        _scatter(part, staging, pages)


def discard_batches(num_bytes: int) -> Iterator[list[memoryview]]:
    """Scratch buffers for bytes to be dropped."""
    scratch = memoryview(bytearray(min(num_bytes, STAGING_BYTES)))
    while num_bytes > 0:
        buffer = scratch[: min(num_bytes, len(scratch))]
        yield [buffer]
        num_bytes -= len(buffer)


def _view_runs(geometry: Geometry, memory: memoryview, array: PageArray) -> list[memoryview]:
    return [memory[start:end] for start, end in _find_ranges(geometry, array)]


def _cut_runs(
    geometry: Geometry, memory: memoryview, array: PageArray
) -> Iterator[list[memoryview]]:
    ranges = _find_ranges(geometry, array)
    for first in range(0, len(ranges), MAX_BUFFERS):
        yield [memory[start:end] for start, end in ranges[first : first + MAX_BUFFERS]]


def _find_ranges(geometry: Geometry, array: PageArray) -> list[tuple[int, int]]:
    """Where in the region each run begins and ends."""
    num_pieces = len(geometry.pages) * len(geometry.starts)
    if num_pieces > MAX_FEW:
        offsets, sizes = compute_runs(geometry, array)
        return list(zip(offsets.tolist(), (offsets + sizes).tolist(), strict=True))
    base, page_bytes = array.offset_bytes, array.page_bytes
    if len(geometry.starts) == 1:
        base += int(geometry.starts[0])
        if num_pieces == 1:
            start = base + int(geometry.pages[0]) * page_bytes
            return [(start, start + geometry.num_bytes)]
        starts = [base + page * page_bytes for page in geometry.pages.tolist()]
        lengths = [geometry.bytes_per_page] * num_pieces
    else:
        pages = geometry.pages.tolist()
        spans = geometry.starts.tolist()
        starts = [base + page * page_bytes + at for page in pages for at in spans]
        lengths = geometry.lengths.tolist() * len(pages)
    runs = merge_few(zip(starts, starts, lengths, strict=True))
    return [(start, start + length) for start, _, length in runs]


def _stageable_parts(geometry: Geometry) -> list[Geometry]:
    if 0 < geometry.num_bytes <= STAGING_BYTES:
        return [geometry]
    num_pages = max(1, STAGING_BYTES // geometry.bytes_per_page)
    firsts = range(0, len(geometry.pages), num_pages)
    return [geometry.take_pages(first, num_pages) for first in firsts]


def _gather(part: Geometry, pages: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """A part's bytes in payload order, uint8 `[n, bytes_per_page]`. Indices are in bounds."""
    if len(part.starts) == 1:
        start = int(part.starts[0])
        if part.bytes_per_page == pages.shape[1]:
            return pages[part.pages]
        return pages[part.pages, start : start + part.bytes_per_page]
    staging = np.empty((len(part.pages), part.bytes_per_page), np.uint8)
    spans = np.stack((part.starts, _packed_starts(part), part.lengths), axis=1)
    _copy(CopyGroup(part.pages, np.arange(len(part.pages)), spans), pages, staging)
    return staging


def _scatter(part: Geometry, staging: NDArray[np.uint8], pages: NDArray[np.uint8]) -> None:
    """Put what `_gather` gives into its place. Indices are in bounds."""
    if len(part.starts) == 1:
        start = int(part.starts[0])
        pages[part.pages, start : start + part.bytes_per_page] = staging
        return
    spans = np.stack((_packed_starts(part), part.starts, part.lengths), axis=1)
    _copy(CopyGroup(np.arange(len(part.pages)), part.pages, spans), staging, pages)


def _copy(group: CopyGroup, source: NDArray[np.uint8], target: NDArray[np.uint8]) -> None:
    # Checked when the part was submitted, or received.
    group.fits.add((*source.shape, *target.shape))
    apply_copies(PageCopies(0, (group,)), source, target)


def _packed_starts(geometry: Geometry) -> NDArray[np.int64]:
    return np.cumsum(geometry.lengths) - geometry.lengths
