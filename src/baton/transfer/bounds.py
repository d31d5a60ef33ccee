"""Bounds of one write, checked for whole index arrays at once before a byte is touched."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from baton.errors import TransferError
from baton.transfer.interface import MAX_NOTIFICATION_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from baton.kv.copies import CopyGroup, PageCopies
    from baton.transfer.interface import PageArray

PAGE_OUTSIDE: Final = "a {} page is out of range: there are {}"
SPAN_OUTSIDE: Final = "a {} span is empty or leaves its {}-byte page"
MAX_SPANS: Final = 65_536
"""Spans of one page pair."""


def check_copies(
    copies: PageCopies,
    source: Sequence[PageArray],
    target: Sequence[PageArray],
    *,
    multi_array: bool = False,
) -> None:
    """Refuse copies that reach outside an array of either region.

    A group that passed is not looked at again between arrays of the same sizes: its indices never
    change, and the next layer has the same ones.

    Raises:
        TransferError: an array, a page or a span is out of range, or index arrays do not match; or
            there are several arrays, and not `joins`.
    """
    layers = copies.layers
    if copies.num_layers != 1 and not (multi_array and layers):
        raise TransferError(f"a write of {copies.num_layers} arrays, which is not taken here")
    if not 0 <= layers.start < layers.stop <= min(len(source), len(target)):
        raise TransferError(
            f"there is no array {layers[-1]}: the regions have {len(source)} and {len(target)}"
        )
    for layer in layers:
        src, dst = source[layer], target[layer]
        sizes = (src.num_pages, src.page_bytes, dst.num_pages, dst.page_bytes)
        for group in copies.groups:
            if sizes not in group.fits:
                _check_group(group, src, dst)
                group.fits.add(sizes)


def check_array(array: int, arrays: Sequence[PageArray]) -> None:
    """Refuse the number of an array that a region does not have.

    Raises:
        TransferError: it is negative or too large.
    """
    if not 0 <= array < len(arrays):
        raise TransferError(f"there is no array {array}: the region has {len(arrays)}")


def check_notification(notification: bytes) -> None:
    """Refuse a notification that no receiver would take.

    Raises:
        TransferError: longer than `MAX_NOTIFICATION_BYTES`.
    """
    if len(notification) > MAX_NOTIFICATION_BYTES:
        raise TransferError(
            f"a notification of {len(notification)} bytes; at most {MAX_NOTIFICATION_BYTES}"
        )


def are_pages_inside(pages: NDArray[np.int64], num_pages: int) -> bool:
    """Whether every index is in `[0, num_pages)`."""
    if len(pages) == 1:  # a reduction costs 2 us whatever the length
        return 0 <= int(pages[0]) < num_pages
    return len(pages) == 0 or (int(pages.min()) >= 0 and int(pages.max()) < num_pages)


def are_spans_inside(
    starts: NDArray[np.int64], num_bytes: NDArray[np.int64], page_bytes: int
) -> bool:
    """Whether every span holds at least a byte and lies in `[0, page_bytes)`."""
    if len(starts) == 1:
        start, length = int(starts[0]), int(num_bytes[0])
        return 0 <= start < page_bytes and 0 < length <= page_bytes - start
    return len(starts) == 0 or (
        int(starts.min()) >= 0
        and int(num_bytes.min()) > 0
        and int(num_bytes.max()) <= page_bytes  # before the sum, which could overflow
        and int((starts + num_bytes).max()) <= page_bytes
        and int(starts.max()) < page_bytes
    )


def _check_group(group: CopyGroup, source: PageArray, target: PageArray) -> None:
    if group.spans.shape[1:] != (3,) or len(group.spans) > MAX_SPANS:
        raise TransferError(f"spans of shape {group.spans.shape}; [s, 3] with s to {MAX_SPANS}")
    if len(group.src_pages) == len(group.dst_pages) == len(group.spans) == 1:
        _check_pair(group, source, target)
        return
    if len(group.spans) > 1 and int(group.spans[:, 2].sum()) > target.page_bytes:
        raise TransferError("destination spans overlap: they are larger than their page")
    if len(group.src_pages) != len(group.dst_pages):
        raise TransferError(
            f"{len(group.src_pages)} source pages for {len(group.dst_pages)} destination pages"
        )
    for side, pages, array, column in (
        ("source", group.src_pages, source, 0),
        ("destination", group.dst_pages, target, 1),
    ):
        if not are_pages_inside(pages, array.num_pages):
            raise TransferError(PAGE_OUTSIDE.format(side, array.num_pages))
        if not are_spans_inside(group.spans[:, column], group.spans[:, 2], array.page_bytes):
            raise TransferError(SPAN_OUTSIDE.format(side, array.page_bytes))


def _check_pair(group: CopyGroup, source: PageArray, target: PageArray) -> None:
    """Of one page pair and span, with as few calls as can be: small transfers are of these."""
    src_page, dst_page = int(group.src_pages[0]), int(group.dst_pages[0])
    src_byte, dst_byte, length = group.spans[0].tolist()
    for side, page, byte, array in (
        ("source", src_page, src_byte, source),
        ("destination", dst_page, dst_byte, target),
    ):
        if not 0 <= page < array.num_pages:
            raise TransferError(PAGE_OUTSIDE.format(side, array.num_pages))
        if not (byte >= 0 and 0 < length <= array.page_bytes - byte):
            raise TransferError(SPAN_OUTSIDE.format(side, array.page_bytes))
