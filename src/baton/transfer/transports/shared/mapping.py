"""A peer's pages in this process' address space: once to be written, once to be looked at."""

from __future__ import annotations

import mmap
import os
from typing import TYPE_CHECKING, Final

from baton.transfer.region import map_peer_memory, view_pages

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from baton.transfer.interface import PageArray


MADV_POPULATE_READ: Final = 22
MADV_POPULATE_WRITE: Final = 23
"""From Linux's mman.h; Python's mmap does not name them yet."""
PREFAULT_BYTES: Final = 8 * 1024 * 1024
"""About 2 ms of work."""


class PeerPages:
    """Owns the mappings of a memfd that a peer handed over. Owner thread: the transport's.

    What is lent to others to look at is mapped a second time, without the right to write: a view
    that somebody keeps can neither change the peer's pages nor hold back the first mapping, whose
    end proves that this process writes no more.
    """

    def __init__(self, fd: int, arrays: Sequence[PageArray]) -> None:
        """Map the memory and close `fd`, also on failure.

        Raises:
            TransferError: the memory is not what `arrays` claim.
        """
        try:
            self._own = _Mapping(map_peer_memory(fd, arrays), arrays, MADV_POPULATE_WRITE)
            readable = map_peer_memory(fd, arrays, mmap.PROT_READ)
        finally:
            os.close(fd)
        self._lent = _Mapping(readable, arrays, MADV_POPULATE_READ)
        self._is_lent = False

    def view(self, array: int) -> NDArray[np.uint8]:
        """One array, uint8 `[num_pages, page_bytes]`, writable; not to be kept."""
        return self._own.views[array]

    def lend(self, array: int) -> NDArray[np.uint8]:
        """The same pages, read-only; may be kept."""
        self._is_lent = True
        return self._lent.views[array]

    def prefault(self) -> bool:
        """Enter the next slice into this process's page table; whether there was one.

        What was not entered when it is first written costs a page fault for each 4 KiB, in the
        middle of a handoff: a first write took eight times as long as a later one
        (benchmarks/bench_page_faults.py). The peer committed the memory, so for one that is only
        read nothing else happens here either. Pages to be lent follow once somebody looked.
        """
        return self._own.prefault() or (self._is_lent and self._lent.prefault())

    def unmap(self) -> bool:
        """Give the memory up; whether it is proved that this process writes no more."""
        self._lent.unmap()  # or its last viewer does
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
        """Whether the mapping is proved gone: nobody kept a view."""
        self.views.clear()
        try:
            self._mapping.close()
        except BufferError:
            return False
        return True
