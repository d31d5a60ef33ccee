"""Page bytes as lists of buffers for one system call each: in place if large, staged if small.

Both sides walk the same order (page by page, in each page span by span), each over its own memory.
The batches are made one at a time, when the socket is ready for them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from baton.kv.copies import CopyGroup, PageCopies, apply_copies
from baton.transfer.geometry import compute_bounds
from baton.transfer.region import view_pages

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from baton.transfer.geometry import Geometry
    from baton.transfer.interface import PageArray

MIN_RUN_BYTES: Final = 4096
"""Shorter pieces are cheaper to copy through a staging buffer than to hand to the kernel alone."""
MAX_BUFFERS: Final = 64
"""Far below IOV_MAX (1,024): a batch is cut anew after each system call that takes part of it."""
STAGING_BYTES: Final = 1 << 20


def sole_batch(geometry: Geometry, memory: memoryview, array: PageArray) -> list[memoryview] | None:
    """All bytes that `geometry` names, if one system call takes them where they lie; else None."""
    if len(geometry.pages) * len(geometry.starts) > MAX_BUFFERS:
        return None
    geometry = geometry.joined()
    if not _is_direct(geometry):
        return None
    starts, ends = compute_bounds(geometry, array)
    return [memory[start:end] for start, end in zip(starts, ends, strict=True)]


def read_batches(
    geometry: Geometry, memory: memoryview, array: PageArray
) -> Iterator[list[memoryview]]:
    """The bytes of a local array that `geometry` names, to be sent.

    Buffers view the region itself, or a staged copy that is made when its turn comes.
    """
    geometry = geometry.joined()
    if _is_direct(geometry):
        yield from _cut_runs(geometry, memory, array)
        return
    pages = view_pages(memory, array)
    for part in _stageable_parts(geometry):
        staging = np.empty((len(part.pages), part.bytes_per_page), np.uint8)
        apply_copies(_packing(part), pages, staging)
        yield [staging.reshape(-1).data]


def write_batches(
    geometry: Geometry, memory: memoryview, array: PageArray
) -> Iterator[list[memoryview]]:
    """Where received bytes go. A batch must be full before the next one is asked for.

    Staged bytes are put in place then: a stream that is abandoned writes nothing more.
    """
    geometry = geometry.joined()
    if _is_direct(geometry):
        yield from _cut_runs(geometry, memory, array)
        return
    pages = view_pages(memory, array)
    for part in _stageable_parts(geometry):
        staging = np.empty((len(part.pages), part.bytes_per_page), np.uint8)
        yield [staging.reshape(-1).data]
        apply_copies(_unpacking(part), staging, pages)


def discard_batches(num_bytes: int) -> Iterator[list[memoryview]]:
    """Somewhere to put bytes that nobody wants."""
    scratch = memoryview(bytearray(min(num_bytes, STAGING_BYTES)))
    while num_bytes > 0:
        buffer = scratch[: min(num_bytes, len(scratch))]
        yield [buffer]
        num_bytes -= len(buffer)


def _is_direct(geometry: Geometry) -> bool:
    return geometry.bytes_per_page >= MIN_RUN_BYTES * len(geometry.starts)


def _cut_runs(
    geometry: Geometry, memory: memoryview, array: PageArray
) -> Iterator[list[memoryview]]:
    starts, ends = compute_bounds(geometry, array)
    for first in range(0, len(starts), MAX_BUFFERS):
        some = slice(first, first + MAX_BUFFERS)
        yield [memory[start:end] for start, end in zip(starts[some], ends[some], strict=True)]


def _stageable_parts(geometry: Geometry) -> Iterator[Geometry]:
    num_pages = max(1, STAGING_BYTES // geometry.bytes_per_page)
    for first in range(0, len(geometry.pages), num_pages):
        yield geometry.take_pages(first, num_pages)


def _packing(geometry: Geometry) -> PageCopies:
    """The copies that put a part's bytes, in payload order, into a staging array of its own."""
    spans = np.stack((geometry.starts, _packed_starts(geometry), geometry.lengths), axis=1)
    rows = np.arange(len(geometry.pages))
    return PageCopies(0, (CopyGroup(geometry.pages, rows, spans),))


def _unpacking(geometry: Geometry) -> PageCopies:
    """The copies that bring a part's bytes from such a staging array to their places."""
    spans = np.stack((_packed_starts(geometry), geometry.starts, geometry.lengths), axis=1)
    rows = np.arange(len(geometry.pages))
    return PageCopies(0, (CopyGroup(rows, geometry.pages, spans),))


def _packed_starts(geometry: Geometry) -> NDArray[np.int64]:
    return np.cumsum(geometry.lengths) - geometry.lengths
