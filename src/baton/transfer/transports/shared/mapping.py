"""A peer's pages in this process' address space."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

from baton.errors import ProtocolError, TransferError
from baton.kv.copies import apply_copies
from baton.transfer.devices.attaching import attach_extent
from baton.transfer.devices.coherence import compute_written
from baton.transfer.devices.extents import ExtentMapping
from baton.transfer.region import map_peer_memory, view_pages

if TYPE_CHECKING:
    import mmap
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from baton.kv.copies import PageCopies
    from baton.transfer.devices.options import DeviceOptions
    from baton.transfer.interface import PageArray
    from baton.transfer.transports.shared.wire import Attached


MADV_POPULATE_WRITE: Final = 23
"""From Linux's mman.h; Python's mmap does not name it yet."""
PREFAULT_BYTES: Final = 8 * 1024 * 1024
"""About 2 ms of work."""


class PeerPages:
    """Owns the mapping of a peer's region. Owner thread: the transport's."""

    def __init__(self, mapping: mmap.mmap, arrays: Sequence[PageArray]) -> None:
        self._mapping, self._arrays = mapping, arrays
        self._views = [view_pages(self._mapping, array) for array in arrays]
        self._num_faulted_bytes = 0

    def view(self, array: int) -> NDArray[np.uint8]:
        """One array, uint8 `[num_pages, page_bytes]`, writable; not to be kept."""
        return self._views[array]

    def store(self, copies: PageCopies, source: NDArray[np.uint8]) -> None:
        """Copy checked pages of `source` in, so far that the peer can see them.

        Raises:
            TransferError: the memory behind the mapping is not what it was.
        """
        if not isinstance(self._mapping, ExtentMapping):
            apply_copies(copies, source, self.view(copies.layer))
            return
        self._mapping.check_size()
        apply_copies(copies, source, self.view(copies.layer))
        self._mapping.flush_ranges(*compute_written(copies, self._arrays[copies.layer]))

    def load(self, copies: PageCopies, target: NDArray[np.uint8]) -> None:
        """Copy checked pages of the peer out into `target`.

        Raises:
            TransferError: the memory behind the mapping is not what it was.
        """
        if isinstance(self._mapping, ExtentMapping):
            self._mapping.check_size()
        apply_copies(copies, self.view(copies.layer), target)

    def prefault(self) -> bool:
        """Enter the next slice into this process's page table; whether there was one.

        What was not entered when it is first written costs a page fault for each 4 KiB, in the
        middle of a handoff: a first write took eight times as long as a later one
        (benchmarks/bench_page_faults.py). The peer committed the memory, so for one that is only
        read nothing else happens here either.
        """
        start = self._num_faulted_bytes
        if start >= len(self._mapping):
            return False
        length = min(PREFAULT_BYTES, len(self._mapping) - start)
        try:
            self._mapping.madvise(MADV_POPULATE_WRITE, start, length)
        except OSError:  # a kernel before 5.14: pages fault in as they are written
            length = len(self._mapping) - start
        self._num_faulted_bytes = start + length
        return True

    def unmap(self) -> bool:
        """Give the mapping up; whether it is proved gone (nobody kept a view)."""
        self._views.clear()
        try:
            self._mapping.close()
        except BufferError:
            return False
        return True


def map_attached(attached: Attached, fd: int | None, device: DeviceOptions | None) -> PeerPages:
    """Map what a peer granted, a memfd or an extent; `fd` is closed, also on failure.

    Raises:
        ProtocolError: it granted neither, or both.
        TransferError: the memory is not what the arrays claim, or lies where this side has none.
    """
    try:
        match fd, attached.extent:
            case int(), None:
                return PeerPages(map_peer_memory(fd, attached.arrays), attached.arrays)
            case None, bytes():
                return PeerPages(_attach(attached.extent, attached.arrays, device), attached.arrays)
            case _:
                raise ProtocolError("the peer granted a region, and not one memory with it")
    finally:
        if fd is not None:
            os.close(fd)


def _attach(
    extent: bytes, arrays: Sequence[PageArray], device: DeviceOptions | None
) -> ExtentMapping:
    if device is None:
        raise TransferError(
            "the peer's memory lies in a device, and this worker has none: give both the same "
            "transfer.options.shared.device"
        )
    return attach_extent(device, extent, arrays)
