"""Registered memory: allocate it, view its pages, check bounds and what a peer claims of its own.

A `shared` region is a memfd: memory with no name, reached only by being handed its descriptor, and
gone with the last process that maps it (nothing is left behind by a kill). Its size is sealed, so
that a peer cannot cut it short under a mapping, which would be a SIGBUS here.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import stat
from typing import TYPE_CHECKING, Final

import numpy as np

from baton.errors import TransferError
from baton.ids import new_region_handle
from baton.transfer.huge_pages import advise_huge_pages, fill_with_huge_pages, map_shared
from baton.transfer.interface import MAX_NOTIFICATION_BYTES, PageArray, PagedRegion

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from baton.kv.copies import CopyGroup, PageCopies, PagePair

ARRAY_ALIGNMENT_BYTES: Final = 4096
MAX_ARRAYS: Final = 4096
MAX_PAGE_BYTES: Final = 1 << 30
MAX_PAGES: Final = (1 << 32) - 1
"""Page indices are 32-bit unsigned on the wire."""
MAX_REGION_BYTES: Final = 1 << 46

_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


def place_arrays(shapes: Sequence[tuple[int, int]]) -> tuple[PageArray, ...]:
    """Lay out one array for each `(num_pages, page_bytes)`, aligned to 4,096 bytes.

    Raises:
        TransferError: a count or a size that no region may have.
    """
    arrays: list[PageArray] = []
    offset = 0
    for num_pages, page_bytes in shapes:
        arrays.append(PageArray(offset, page_bytes, num_pages))
        offset += -(-num_pages * page_bytes // ARRAY_ALIGNMENT_BYTES) * ARRAY_ALIGNMENT_BYTES
    check_arrays(tuple(arrays))
    return tuple(arrays)


def compute_region_bytes(arrays: Sequence[PageArray]) -> int:
    """Bytes that a region must have to hold all arrays."""
    return max((a.offset_bytes + a.num_pages * a.page_bytes for a in arrays), default=0)


def check_arrays(arrays: Sequence[PageArray]) -> None:
    """Refuse arrays that no honest peer would describe. Arrays may share memory.

    Raises:
        TransferError: states which bound is broken.
    """
    if not 0 < len(arrays) <= MAX_ARRAYS:
        raise TransferError(f"a region of {len(arrays)} arrays; 1 to {MAX_ARRAYS} are possible")
    for index, array in enumerate(arrays):
        sane = (
            0 < array.page_bytes <= MAX_PAGE_BYTES
            and 0 < array.num_pages <= MAX_PAGES
            and 0 <= array.offset_bytes <= MAX_REGION_BYTES
            and array.offset_bytes % 64 == 0
        )
        if not sane or compute_region_bytes((array,)) > MAX_REGION_BYTES:
            raise TransferError(f"array {index} of the region makes no sense: {array}")


def allocate_host_region(shapes: Sequence[tuple[int, int]]) -> PagedRegion:
    """Zeroed private memory: one array for each `(num_pages, page_bytes)`.

    Huge pages are used where the kernel gives them.

    Raises:
        TransferError: the sizes make no sense, or there is not that much memory.
    """
    arrays = place_arrays(shapes)
    try:
        memory = mmap.mmap(-1, compute_region_bytes(arrays), flags=mmap.MAP_PRIVATE)
    except OSError as exc:
        raise TransferError(f"cannot allocate the region: {exc}") from exc
    advise_huge_pages(memory)
    return PagedRegion(new_region_handle(), "host", memoryview(memory), arrays)


def allocate_shared_region(shapes: Sequence[tuple[int, int]]) -> PagedRegion:
    """Zeroed memory that a peer on this host can map: one array for each `(num_pages, page_bytes)`.

    It consists of huge pages where the kernel gives them. All of it is committed here: running out
    of memory is an error now, not a SIGBUS later, and no first write to a page waits for the kernel
    (docs/benchmarks.md has the price).

    Raises:
        TransferError: the sizes make no sense, or there is not that much memory.
    """
    arrays = place_arrays(shapes)
    num_bytes = compute_region_bytes(arrays)
    fd = os.memfd_create("baton-region", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, num_bytes)
        fill_with_huge_pages(fd, num_bytes)
        os.posix_fallocate(fd, 0, num_bytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        memory = map_shared(fd, num_bytes, mmap.MAP_SHARED | mmap.MAP_POPULATE)
    except OSError as exc:
        os.close(fd)
        raise TransferError(f"cannot allocate the region: {exc}") from exc
    return PagedRegion(new_region_handle(), "shared", memoryview(memory), arrays, fd)


def release_region(region: PagedRegion) -> None:
    """Give a region's memory back; call it once, after every transport that exposes it is closed.

    Memory that somebody still views is given back when the last view goes.
    """
    mapping = region.memory.obj
    if region.fd is not None:
        os.close(region.fd)
    try:
        region.memory.release()
        if isinstance(mapping, mmap.mmap):
            mapping.close()
    except BufferError:
        return


def map_peer_memory(
    fd: int, arrays: Sequence[PageArray], protection: int = mmap.PROT_READ | mmap.PROT_WRITE
) -> mmap.mmap:
    """Map a region that a peer handed over, after checking that it is what `arrays` claim.

    The mapping is not inherited by a fork: only this process can write through it, so the death of
    this process proves that none does. `protection` without `PROT_WRITE` makes it one through
    which not even this process can.

    Raises:
        TransferError: not a memfd, not sealed against shrinking, too small, or not writable.
    """
    num_bytes = compute_region_bytes(arrays)
    try:
        status = os.fstat(fd)
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError as exc:
        raise TransferError(f"the peer handed over something that is no memfd: {exc}") from exc
    if not stat.S_ISREG(status.st_mode) or not seals & fcntl.F_SEAL_SHRINK:
        raise TransferError("the peer's region is not sealed against shrinking")
    if status.st_size < num_bytes:
        raise TransferError(
            f"the peer's region has {status.st_size} bytes, its description needs {num_bytes}"
        )
    try:
        mapping = map_shared(fd, num_bytes, protection=protection)
    except OSError as exc:
        raise TransferError(f"cannot map the peer's region: {exc}") from exc
    mapping.madvise(mmap.MADV_DONTFORK)
    return mapping


def find_run(indices: NDArray[np.int64]) -> slice | None:
    """Page indices that follow one another, as a slice: such pages need no copy to be together."""
    first, num_pages = int(indices[0]), len(indices)
    is_run = bool((indices == np.arange(first, first + num_pages)).all())
    return slice(first, first + num_pages) if is_run else None


def view_pages(memory: memoryview | mmap.mmap, array: PageArray) -> NDArray[np.uint8]:
    """One array's pages as uint8 `[num_pages, page_bytes]`: a view, writable if `memory` is."""
    flat = np.frombuffer(
        memory, np.uint8, count=array.num_pages * array.page_bytes, offset=array.offset_bytes
    )
    return flat.reshape(array.num_pages, array.page_bytes)


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

    A group that passed is not checked again between arrays of the same sizes: its indices never
    change, and every layer has the same.

    Raises:
        TransferError: an array, a page or a span is out of range, or index arrays do not match; or
            there are several arrays without `multi_array`.
    """
    num_layers, first = copies.num_layers, copies.layer
    if num_layers != 1 and not (multi_array and num_layers > 0):
        raise TransferError(f"a write of {num_layers} arrays, which is not supported here")
    stop = first + num_layers
    if first < 0 or stop > len(source) or stop > len(target):
        raise TransferError(
            f"there is no array {stop - 1}: the regions have {len(source)} and {len(target)}"
        )
    for layer in range(first, stop):
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
    """Refuse a notification that is too long for a receiver.

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
    return len(pages) == 0 or (
        # The ufuncs: `min` and `max` of an array add a call of Python each.
        int(np.minimum.reduce(pages)) >= 0 and int(np.maximum.reduce(pages)) < num_pages
    )


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
    if group.pair is not None:
        _check_pair(group.pair, source, target)
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


def _check_pair(pair: PagePair, source: PageArray, target: PageArray) -> None:
    """One page pair and span, without a call: the case of small transfers."""
    length = pair.num_bytes
    if not 0 <= pair.src_page < source.num_pages:
        raise TransferError(PAGE_OUTSIDE.format("source", source.num_pages))
    if not (pair.src_byte >= 0 and 0 < length <= source.page_bytes - pair.src_byte):
        raise TransferError(SPAN_OUTSIDE.format("source", source.page_bytes))
    if not 0 <= pair.dst_page < target.num_pages:
        raise TransferError(PAGE_OUTSIDE.format("destination", target.num_pages))
    if not (pair.dst_byte >= 0 and 0 < length <= target.page_bytes - pair.dst_byte):
        raise TransferError(SPAN_OUTSIDE.format("destination", target.page_bytes))
