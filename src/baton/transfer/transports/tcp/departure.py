"""One write on its way out: its parts, each a frame and the page bytes behind it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from baton.kv.copies import CopyGroup
from baton.transfer.framing import encode_frame
from baton.transfer.messages import encode
from baton.transfer.transports.tcp.buffers import read_batches
from baton.transfer.transports.tcp.geometry import Geometry
from baton.transfer.transports.tcp.wire import Data, pack_indices

if TYPE_CHECKING:
    from collections.abc import Iterator

    from baton.transfer.interface import PagedRegion, PageWrite

MAX_PART_BYTES: Final = 64 << 20
MAX_PART_PAGES: Final = 65_536

_NO_PAGES: Final = np.empty(0, np.int64)
_NO_SPANS: Final = np.empty((0, 3), np.int64)


def departing_batches(
    write: PageWrite, region: PagedRegion, sequence: int
) -> Iterator[list[memoryview]]:
    """All buffers of a write that was checked, in the order of the wire, made as they are needed.

    The region's memory is read in place: it must not change until the receiver has answered.
    """
    array = region.arrays[write.copies.layer]
    parts = _cut_parts(write.copies.groups)
    for number, part in enumerate(parts, start=1):
        header = Data(
            sequence=sequence,
            window=write.window,
            array=write.copies.layer,
            dst_pages=pack_indices(part.dst_pages),
            spans=pack_indices(part.spans[:, 1:]),
            notice=write.notice if number == len(parts) else None,
        )
        payload = read_batches(
            Geometry(part.src_pages, part.spans[:, 0], part.spans[:, 2]), region.memory, array
        )
        yield [memoryview(encode_frame(encode(header))), *next(payload, [])]
        yield from payload


def _cut_parts(groups: tuple[CopyGroup, ...]) -> list[CopyGroup]:
    """Groups cut so that each part's frame and payload stay within their bounds; at least one."""
    parts = [part for group in groups for part in _cut_group(group)]
    return parts or [CopyGroup(_NO_PAGES, _NO_PAGES, _NO_SPANS)]


def _cut_group(group: CopyGroup) -> Iterator[CopyGroup]:
    bytes_per_page = max(1, int(group.spans[:, 2].sum()))
    num_pages = max(1, min(MAX_PART_PAGES, MAX_PART_BYTES // bytes_per_page))
    for first in range(0, len(group.src_pages), num_pages):
        pages = slice(first, first + num_pages)
        yield CopyGroup(group.src_pages[pages], group.dst_pages[pages], group.spans)
