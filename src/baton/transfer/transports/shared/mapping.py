"""A peer's pages in this process' address space."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

from baton.transfer.region import map_peer_memory, view_pages

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from baton.transfer.interface import PageArray


MADV_POPULATE_WRITE: Final = 23
"""From Linux's mman.h; Python's mmap does not name it yet."""
PREFAULT_BYTES: Final = 8 * 1024 * 1024
"""About 2 ms of work."""


class PeerPages:
    """Owns the mapping of a memfd that a peer handed over. Owner thread: the transport's."""

    def __init__(self, fd: int, arrays: Sequence[PageArray]) -> None:
        """Map the memory and close `fd`, also on failure.

        Raises:
            TransferError: the memory is not what `arrays` claim.
        """
        try:
            self._mapping = map_peer_memory(fd, arrays)
        finally:
            os.close(fd)
        self._views = [view_pages(self._mapping, array) for array in arrays]
        self._num_faulted_bytes = 0

    def view(self, array: int) -> NDArray[np.uint8]:
        """One array, uint8 `[num_pages, page_bytes]`, writable; not to be kept."""
        return self._views[array]

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
