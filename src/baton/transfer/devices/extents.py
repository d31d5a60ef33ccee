"""An extent of a device in this process' address space, held for as long as it is mapped."""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING, Self

from baton.errors import TransferError
from baton.transfer.devices.flushing import coalesce

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from baton.transfer.devices.backing import Backing
    from baton.transfer.devices.flushing import Flusher
    from baton.transfer.devices.locks import RangeLocks
    from baton.transfer.devices.table import Extent
    from baton.transfer.interface import PagedRegion


class ExtentMapping(mmap.mmap):
    """One extent in this process' address space; the extent is held for as long as this lives.

    Whoever views it keeps it alive, so nobody else gets the bytes before the last view is gone.
    """

    extent: Extent
    flusher: Flusher | None
    _locks: RangeLocks
    _is_file: bool

    @classmethod
    def of(
        cls, backing: Backing, extent: Extent, locks: RangeLocks, flusher: Flusher | None
    ) -> Self:
        """Map an extent that `locks` hold.

        Raises:
            TransferError: the device has no such bytes, or the kernel refuses.
        """
        try:
            mapping = cls(backing.fd, extent.num_bytes, flags=mmap.MAP_SHARED, offset=extent.start)
        except (OSError, ValueError) as exc:
            raise TransferError(f"cannot map an extent of {backing.path}: {exc}") from exc
        mapping.extent, mapping.flusher, mapping._locks = extent, flusher, locks
        mapping._is_file = backing.kind == "file"
        return mapping

    def __del__(self) -> None:
        self._let_go()

    def close(self) -> None:
        """Unmap, then let go of the extent.

        Raises:
            BufferError: somebody views it.
        """
        super().close()
        self._let_go()

    def check_size(self) -> None:
        """Look whether the memory is still there: touching what a file has lost is a SIGBUS.

        Raises:
            TransferError: the file was cut short.
        """
        if self._is_file and self.size() < self.extent.end:
            raise TransferError("the file behind the region was cut short while it was mapped")

    def flush_ranges(self, starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> None:
        """Write these bytes back (and drop them from the caches, if the flusher evicts).

        Ranges are int64 `[r]`, in any order; without a flusher nothing is done.

        Raises:
            TransferError: the kernel could not.
        """
        if self.flusher is not None and len(starts):
            self.flusher.flush(self, *coalesce(starts, lengths, self.flusher.unit_bytes))

    def _let_go(self) -> None:
        if hasattr(self, "_locks"):
            self._locks.close()


def find_extent(region: PagedRegion) -> ExtentMapping | None:
    """The extent that a region lies in; None if it lies elsewhere."""
    mapping = region.memory.obj
    return mapping if isinstance(mapping, ExtentMapping) else None
