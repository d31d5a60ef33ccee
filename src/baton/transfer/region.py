"""Registered memory: allocate it, look at its pages, and check what a peer claims about its own.

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
from baton.transfer.interface import PageArray, PagedRegion

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

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

    Raises:
        TransferError: the sizes make no sense, or there is not that much memory.
    """
    arrays = place_arrays(shapes)
    try:
        memory = mmap.mmap(-1, compute_region_bytes(arrays), flags=mmap.MAP_PRIVATE)
    except OSError as exc:
        raise TransferError(f"cannot allocate the region: {exc}") from exc
    return PagedRegion(new_region_handle(), "host", memoryview(memory), arrays)


def allocate_shared_region(shapes: Sequence[tuple[int, int]]) -> PagedRegion:
    """Zeroed memory that a peer on this host can map: one array for each `(num_pages, page_bytes)`.

    All of it is committed here: running out of memory is an error now, not a SIGBUS later, and no
    first write to a page waits for the kernel (docs/benchmarks.md has the price).

    Raises:
        TransferError: the sizes make no sense, or there is not that much memory.
    """
    arrays = place_arrays(shapes)
    num_bytes = compute_region_bytes(arrays)
    fd = os.memfd_create("baton-region", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.posix_fallocate(fd, 0, num_bytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        memory = mmap.mmap(fd, num_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
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
    this process proves that nobody does. `protection` without `PROT_WRITE` makes it one through
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
        mapping = mmap.mmap(fd, num_bytes, flags=mmap.MAP_SHARED, prot=protection)
    except OSError as exc:
        raise TransferError(f"cannot map the peer's region: {exc}") from exc
    mapping.madvise(mmap.MADV_DONTFORK)
    return mapping


def view_pages(memory: memoryview | mmap.mmap, array: PageArray) -> NDArray[np.uint8]:
    """One array's pages as uint8 `[num_pages, page_bytes]`: a view, writable if `memory` is."""
    flat = np.frombuffer(
        memory, np.uint8, count=array.num_pages * array.page_bytes, offset=array.offset_bytes
    )
    return flat.reshape(array.num_pages, array.page_bytes)
