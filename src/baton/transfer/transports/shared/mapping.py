"""A peer's pages in this process' address space: once to be written, once to be looked at."""

from __future__ import annotations

import mmap
import os
from typing import TYPE_CHECKING, Final

from baton.errors import ProtocolError, TransferError
from baton.kv.copies import apply_copies
from baton.transfer.devices.extents import ExtentMapping, attach_extent, compute_written
from baton.transfer.region import map_peer_memory, view_pages

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from baton.kv.copies import PageCopies
    from baton.transfer.devices.backing import DeviceOptions
    from baton.transfer.interface import PageArray
    from baton.transfer.transports.shared.wire import Attached


MADV_POPULATE_READ: Final = 22
MADV_POPULATE_WRITE: Final = 23
"""From Linux's mman.h; Python's mmap does not name them yet."""
PREFAULT_BYTES: Final = 8 * 1024 * 1024
"""About 2 ms of work."""


class PeerPages:
    """Owns the mappings of a peer's region. Owner thread: the transport's.

    A memfd is mapped a second time to be looked at, without the right to write: a view that
    somebody keeps can neither change the peer's pages nor hold back the first mapping, whose end
    proves that this process writes no more.
    """

    def __init__(
        self, mapping: mmap.mmap, arrays: Sequence[PageArray], readable: mmap.mmap | None = None
    ) -> None:
        self._mapping, self._arrays = mapping, arrays
        self._own = _Mapping(mapping, arrays, MADV_POPULATE_WRITE)
        self._read_only = (
            None if readable is None else _Mapping(readable, arrays, MADV_POPULATE_READ)
        )
        self._was_viewed = False

    def view(self, array: int) -> NDArray[np.uint8]:
        """One array, uint8 `[num_pages, page_bytes]`, writable; not to be kept."""
        return self._own.views[array]

    def view_read_only(self, array: int) -> NDArray[np.uint8]:
        """The same pages, read-only; may be kept.

        Raises:
            TransferError: they lie in a device.
        """
        if self._read_only is None:
            raise TransferError("shared does not show pages in place that lie in a device")
        self._was_viewed = True
        return self._read_only.views[array]

    def store(self, copies: PageCopies, sources: Sequence[NDArray[np.uint8]]) -> None:
        """Copy checked pages of `sources`, one for each layer, in, so far that the peer sees them.

        Raises:
            TransferError: the memory behind the mapping is not what it was.
        """
        device = self._mapping if isinstance(self._mapping, ExtentMapping) else None
        if device is not None:
            device.check_size()
        for layer, source in zip(copies.layers, sources, strict=True):
            apply_copies(copies, source, self.view(layer))
            if device is not None:
                device.flush_ranges(*compute_written(copies, self._arrays[layer]))

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
        read nothing else happens here either. Pages to be viewed follow once somebody looked.
        """
        if self._own.prefault():
            return True
        return self._was_viewed and self._read_only is not None and self._read_only.prefault()

    def unmap(self) -> bool:
        """Give the memory up; whether it is proved that this process writes no more."""
        if self._read_only is not None:
            self._read_only.unmap()  # or its last viewer does
        return self._own.unmap()


class _Mapping:
    """One mapping, its arrays, and how much of it was entered into the page table."""

    def __init__(self, mapping: mmap.mmap, arrays: Sequence[PageArray], advice: int) -> None:
        self.views = [view_pages(mapping, array) for array in arrays]
        self._mapping, self._advice = mapping, advice
        self._num_faulted_bytes = 0

    def prefault(self) -> bool:
        """The next slice; whether there was one."""
        start = self._num_faulted_bytes
        if start >= len(self._mapping):
            return False
        length = min(PREFAULT_BYTES, len(self._mapping) - start)
        try:
            self._mapping.madvise(self._advice, start, length)
        except OSError:  # a kernel before 5.14: pages fault in as they are used
            length = len(self._mapping) - start
        self._num_faulted_bytes = start + length
        return True

    def unmap(self) -> bool:
        """Whether the mapping is proved gone: no view is left."""
        self.views.clear()
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
                arrays = attached.arrays
                readable = map_peer_memory(fd, arrays, mmap.PROT_READ)
                return PeerPages(map_peer_memory(fd, arrays), arrays, readable)
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
