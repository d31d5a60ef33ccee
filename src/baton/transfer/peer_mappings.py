"""Peers' pages as further pages of one's own: the same index space, nothing copied.

    each array   | own pages | .. | pages of peer A | .. | pages of peer B | ..     never mapped
    page index   0           n     first of A             first of B

Each array of the region gets a range of addresses of its own, most of it with nothing behind. Own
pages are mapped at its start; an mapping maps the same array of a peer's region further on, at a
whole number of pages. So page `mapping.first + i` is the peer's page `i` in every array, whatever
the arrays' sizes are, and whoever gathers pages by index needs to know nothing of it.

PeerMappings cannot be written: a store into one ends this process and changes nothing of the
peer's. A mapping outlives the peer's process, and its connection.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from baton.errors import TransferError
from baton.transfer.region import view_pages

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from baton.transfer.interface import PageArray, PagedRegion

MIN_PEER_PAGES: Final = 1 << 16
PEER_PAGES_FACTOR: Final = 16
"""Room for the pages of that many peers as large as this one. Addresses cost nothing."""

PREFAULT_BYTES: Final = 32 * 1024 * 1024
"""About 2 ms of work."""

_RESERVED: Final = 0x4000 | mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # MAP_NORESERVE
_MAP_FIXED: Final = 0x10
_MREMAP_MAYMOVE_FIXED: Final = 3
_MADV_POPULATE_READ: Final = 22
_MADV_POPULATE_WRITE: Final = 23
_FAILED: Final = ctypes.c_void_p(-1).value


@dataclass(frozen=True, slots=True)
class PeerMapping:
    """A peer's pages `[0, num_pages)`, which are `[first, first + num_pages)` here."""

    first: int
    num_pages: int

    @property
    def stop(self) -> int:
        """The first page behind it."""
        return self.first + self.num_pages


class PeerMappings:
    """A region's pages with room for those of peers. One owner thread, but for `view`.

    Nothing is mapped, and nothing costs anything, before the first `attach`.
    """

    def __init__(self, region: PagedRegion) -> None:
        self._region = region
        self._arrays = region.arrays
        self._step = _compute_step(region.arrays)
        own = max(array.num_pages for array in region.arrays)
        self._first_free = -(-own // self._step) * self._step
        self._stop = self._first_free + max(MIN_PEER_PAGES, PEER_PAGES_FACTOR * own)
        self._attached: list[PeerMapping] = []
        self._ranges: list[tuple[int, int]] = []
        self._unfaulted: list[
            tuple[PeerMapping, int, int]
        ] = []  # start, bytes: not in the page table

    @property
    def is_open(self) -> bool:
        """Whether there was a first `attach`: from then on `view` shows pages."""
        return bool(self._ranges)

    def view(self, array: int) -> NDArray[np.uint8]:
        """One array with its peer_mappings, uint8 `[own and mapped pages, page_bytes]`.

        Only own pages may be written, and only pages of `PeerMapping`es that are attached be read.
        Valid until `close`.
        """
        start, num_bytes = self._ranges[array]
        memory = memoryview((ctypes.c_uint8 * num_bytes).from_address(start))
        page_bytes = self._arrays[array].page_bytes
        num_pages = num_bytes // page_bytes
        flat = np.frombuffer(memory, np.uint8, count=num_pages * page_bytes)
        return flat.reshape(num_pages, page_bytes)

    def attach(self, views: Sequence[NDArray[np.uint8]]) -> PeerMapping:
        """Map what the views (`Transport.view`, one for each array) show; they may go afterwards.

        Raises:
            TransferError: they are not pages of the same sizes, or there is no room.
        """
        sizes = [array.page_bytes for array in self._arrays]
        counts = {len(view) for view in views}
        if [view.shape[1] for view in views] != sizes or len(counts) != 1:
            raise TransferError("the peer's pages have other sizes: they cannot be attended over")
        if any(_address(view) % mmap.PAGESIZE for view in views):
            raise TransferError("the peer's arrays do not begin on a page of memory")
        mapping = self._find_room(counts.pop())
        if not self._ranges:
            self._open()
        self._attached.append(mapping)
        try:
            for array, view in enumerate(views):
                start = self._place(array, mapping.first)
                _map_alias(view, start)
                self._unfaulted.append((mapping, start, _round_up(view.nbytes)))
        except OSError as exc:
            self.detach(mapping)
            raise TransferError(f"cannot map the peer's pages: {exc}") from exc
        return mapping

    def detach(self, mapping: PeerMapping) -> None:
        """Unmap: no thread reads these pages here any more. Unknown ones are ignored."""
        if mapping in self._attached:
            self._attached.remove(mapping)
            self._unfaulted = [each for each in self._unfaulted if each[0] != mapping]
            for array in range(len(self._ranges)):
                num_bytes = _round_up(mapping.num_pages * self._arrays[array].page_bytes)
                _reserve(self._place(array, mapping.first), num_bytes)

    def prefault(self) -> bool:
        """Enter the next slice of what was attached into the page table; whether there was one.

        Else who looks at a page first waits for that: 13 ms of a step for 256 MiB of KV.
        """
        if not self._unfaulted:
            return False
        mapping, start, num_bytes = self._unfaulted.pop()
        slice_bytes = min(PREFAULT_BYTES, num_bytes)
        _libc.madvise(start, slice_bytes, _MADV_POPULATE_READ)  # best effort, as below
        if num_bytes > slice_bytes:
            self._unfaulted.append((mapping, start + slice_bytes, num_bytes - slice_bytes))
        return True

    def close(self) -> None:
        """Give all addresses back; no view is in use any more. Idempotent."""
        ranges, self._ranges = self._ranges, []
        self._attached.clear()
        self._unfaulted.clear()
        for start, num_bytes in ranges:
            _libc.munmap(start, num_bytes)

    def _find_room(self, num_pages: int) -> PeerMapping:
        """The first gap that is large enough."""
        first = self._first_free
        for mapping in sorted(self._attached, key=lambda each: each.first):
            if mapping.first - first >= num_pages:
                break
            first = -(-mapping.stop // self._step) * self._step
        if first + num_pages > self._stop:
            raise TransferError(f"no room to map {num_pages} more pages of peers")
        return PeerMapping(first, num_pages)

    def _open(self) -> None:
        try:
            for array in self._arrays:
                num_bytes = _round_up(self._stop * array.page_bytes) + mmap.PAGESIZE
                self._ranges.append((_reserve(None, num_bytes), num_bytes))
            for (start, _), array in zip(self._ranges, self._arrays, strict=True):
                own = view_pages(self._region.memory, array)
                _map_alias(own, start)
                # Best effort, as MAP_POPULATE: else each page costs a fault when it is first used.
                _libc.madvise(start, _round_up(own.nbytes), _MADV_POPULATE_WRITE)
        except OSError as exc:
            self.close()
            raise TransferError(f"cannot reserve addresses for peers' pages: {exc}") from exc

    def _place(self, array: int, page: int) -> int:
        return self._ranges[array][0] + page * self._arrays[array].page_bytes


def _compute_step(arrays: Sequence[PageArray]) -> int:
    """Pages of which a multiple begins on a page of memory, in every array."""
    return math.lcm(
        *(mmap.PAGESIZE // math.gcd(mmap.PAGESIZE, array.page_bytes) for array in arrays)
    )


def _round_up(num_bytes: int) -> int:
    return -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


def _address(view: NDArray[np.uint8]) -> int:
    address: int = view.__array_interface__["data"][0]
    return address


def _reserve(at: int | None, num_bytes: int) -> int:
    """Addresses with nothing behind; `at` replaces whatever is mapped there.

    Raises:
        OSError: the kernel refuses.
    """
    flags = _RESERVED if at is None else _RESERVED | _MAP_FIXED
    start = _libc.mmap(at, num_bytes, 0, flags, -1, 0)
    if start in {None, _FAILED}:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return int(start)


def _map_alias(view: NDArray[np.uint8], at: int) -> None:
    """Map the memory of a shared mapping a second time, with its protection and its advice.

    mremap(2): an old size of 0 leaves the old mapping as it is.

    Raises:
        OSError: the kernel refuses.
    """
    mapped = _libc.mremap(_address(view), 0, _round_up(view.nbytes), _MREMAP_MAYMOVE_FIXED, at)
    if mapped != at:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


_libc: Final = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
]
_libc.mremap.restype = ctypes.c_void_p
_libc.mremap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_void_p,
]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
