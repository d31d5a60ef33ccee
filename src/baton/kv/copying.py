"""Page copies, carried out in this process's memory."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

import numpy as np

from baton.errors import ProtocolError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from baton.kv.copies import CopyGroup, PageCopies

_GATHER_BYTES: Final = 1 << 20
PART_BYTES: Final = 512 << 10
"""What is copied and then looked at in one go: 128 to 512 KiB are equally fast, and a
part takes some ten calls."""
_SHORT_RUN_BYTES: Final = 4096
_MANY_RUNS: Final = 32
"""So many runs that are so short on average are cheaper to gather and scatter (15 us, then two
copies) than to copy one by one (0.7 us each, then one copy)."""


def apply_copies(
    copies: PageCopies, src_pages: NDArray[np.uint8], dst_pages: NDArray[np.uint8]
) -> None:
    """Carry out copies between two arrays of pages in this process's memory.

    Both are uint8 `[num_blocks, page_bytes]` of one of `copies.layers`, bytes of a page adjacent.
    They do not overlap.

    Raises:
        ProtocolError: a page or a span is out of bounds; the groups before it were copied.
    """
    apply_layer_copies(copies, (src_pages,), (dst_pages,))


def apply_layer_copies(
    copies: PageCopies,
    sources: Sequence[NDArray[np.uint8]],
    targets: Sequence[NDArray[np.uint8]],
) -> None:
    """`apply_copies` of several layers: from each of `sources` into its place in `targets`."""
    for group in copies.groups:
        _copy_group(group, sources, targets)


def apply_copies_in_parts(
    copies: PageCopies,
    sources: Sequence[NDArray[np.uint8]],
    targets: Sequence[NDArray[np.uint8]],
    *,
    read: Callable[[range, list[int]], None] | None = None,
    written: Callable[[range, list[int]], None] | None = None,
) -> None:
    """Like `apply_layer_copies`, part by part: then `read` and `written` get layers and pages.

    Those of the source, and those of the destination. A part is small enough to be in the
    processor's second-level cache then, except where pages are cut or are larger than that. It is
    of several layers, or of some pages of one.
    """
    layers = copies.layers
    for group in copies.groups:
        page_bytes = targets[0].shape[1]
        num_layers = PART_BYTES // max(1, group.num_bytes)
        if num_layers or not group.moves_whole_pages(sources[0].shape[1], page_bytes):
            num_layers = max(1, num_layers)
            for first in range(0, len(layers), num_layers):
                some = slice(first, first + num_layers)
                _copy_group(group, sources[some], targets[some])
                _report_part(group, layers[some], read, written)
            continue
        step = max(1, PART_BYTES // page_bytes)
        parts = [group.take(first, step) for first in range(0, len(group.src_pages), step)]
        for layer, src_pages, dst_pages in zip(layers, sources, targets, strict=True):
            for part in parts:
                _copy_group(part, (src_pages,), (dst_pages,))
                _report_part(part, range(layer, layer + 1), read, written)


def _report_part(
    group: CopyGroup,
    layers: range,
    read: Callable[[range, list[int]], None] | None,
    written: Callable[[range, list[int]], None] | None,
) -> None:
    if read is not None:
        read(layers, group.src_pages.tolist())
    if written is not None:
        written(layers, group.dst_pages.tolist())


def _copy_group(
    group: CopyGroup, sources: Sequence[NDArray[np.uint8]], targets: Sequence[NDArray[np.uint8]]
) -> None:
    alike: dict[tuple[int, ...], list[tuple[NDArray[np.uint8], NDArray[np.uint8]]]] = {}
    for src_pages, dst_pages in zip(sources, targets, strict=True):
        sizes = *src_pages.shape, *dst_pages.shape
        alike.setdefault(sizes, []).append((src_pages, dst_pages))
    for sizes, pairs in alike.items():
        if sizes not in group.fits:
            _check_group(group, *pairs[0])
        if group.moves_whole_pages(sizes[1], sizes[3]):
            _copy_pages(group, pairs)
        elif group.slices is not None:
            for src_pages, dst_pages in pairs:
                for source, target in group.slices:
                    dst_pages[target] = src_pages[source]
        else:
            for src_pages, dst_pages in pairs:
                _copy_spans(group, src_pages, dst_pages)


def _check_group(
    group: CopyGroup, src_pages: NDArray[np.uint8], dst_pages: NDArray[np.uint8]
) -> None:
    _check_pages(group.src_pages, src_pages)
    _check_pages(group.dst_pages, dst_pages)
    _check_spans(group.spans[:, 0] + group.spans[:, 2], src_pages)
    _check_spans(group.spans[:, 1] + group.spans[:, 2], dst_pages)


def _check_pages(pages: NDArray[np.int64], array: NDArray[np.uint8]) -> None:
    # Page ids may come from a peer, and numpy takes a negative one for a page from the end.
    if len(pages) == 1:
        low = high = int(pages[0])
    else:
        low, high = (int(pages.min()), int(pages.max())) if len(pages) else (0, -1)
    if low < 0 or high >= len(array):
        raise ProtocolError(f"pages {low} to {high} where there are {len(array)}")


def _check_spans(span_ends: NDArray[np.int64], array: NDArray[np.uint8]) -> None:
    if len(span_ends) and int(span_ends.max()) > array.shape[1]:
        raise ProtocolError(f"a span ends at byte {span_ends.max()} of {array.shape[1]}")


def _copy_pages(
    group: CopyGroup, pairs: Sequence[tuple[NDArray[np.uint8], NDArray[np.uint8]]]
) -> None:
    if (pair := group.pair) is not None:
        for src_pages, dst_pages in pairs:
            dst_pages[pair.dst_page] = src_pages[pair.src_page]
        return
    num_runs = group.num_runs
    if num_runs >= _MANY_RUNS and group.num_bytes <= _SHORT_RUN_BYTES * num_runs:
        for src_pages, dst_pages in pairs:
            _copy_tiny_pages(group, src_pages, dst_pages)
    elif num_runs == len(group.src_pages):
        runs = group.runs
        for src_pages, dst_pages in pairs:
            for src, dst, _ in runs:
                dst_pages[dst] = src_pages[src]
    else:
        runs = group.runs
        for src_pages, dst_pages in pairs:
            for src, dst, length in runs:
                dst_pages[dst : dst + length] = src_pages[src : src + length]


def _copy_tiny_pages(
    group: CopyGroup, src_pages: NDArray[np.uint8], dst_pages: NDArray[np.uint8]
) -> None:
    page_bytes = src_pages.shape[1]
    row = np.dtype((np.void, page_bytes))
    src_rows, dst_rows = src_pages.view(row)[:, 0], dst_pages.view(row)[:, 0]
    step = max(1, _GATHER_BYTES // page_bytes)
    for at in range(0, len(group.src_pages), step):
        some = slice(at, at + step)
        dst_rows[group.dst_pages[some]] = src_rows[group.src_pages[some]]


def _copy_spans(
    group: CopyGroup, src_pages: NDArray[np.uint8], dst_pages: NDArray[np.uint8]
) -> None:
    """Copy pages as rows of the largest unit of which every offset and length is a multiple."""
    unit = int(np.gcd.reduce(group.spans, axis=None, initial=src_pages.shape[1]))
    unit = math.gcd(unit, dst_pages.shape[1])
    row = np.dtype((np.void, unit))
    src_rows, dst_rows = src_pages.view(row), dst_pages.view(row)
    starts = group.spans[:, :2] // unit
    lengths = group.spans[:, 2] // unit
    within = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    src_index, dst_index = (np.repeat(starts[:, side], lengths) + within for side in (0, 1))
    # numpy gathers into a temporary array first: keep it in the cache.
    step = max(1, _GATHER_BYTES // (len(within) * unit))
    for at in range(0, len(group.src_pages), step):
        some = slice(at, at + step)
        gathered = src_rows[group.src_pages[some, None], src_index]
        dst_rows[group.dst_pages[some, None], dst_index] = gathered
