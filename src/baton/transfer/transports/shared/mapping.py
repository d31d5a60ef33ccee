"""A peer's pages in this process' address space."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from baton.transfer.region import map_peer_memory, view_pages

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from baton.transfer.interface import PageArray


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

    def view(self, array: int) -> NDArray[np.uint8]:
        """One array, uint8 `[num_pages, page_bytes]`, writable; not to be kept."""
        return self._views[array]

    def unmap(self) -> bool:
        """Give the mapping up; whether it is proved gone (nobody kept a view)."""
        self._views.clear()
        try:
            self._mapping.close()
        except BufferError:
            return False
        return True
