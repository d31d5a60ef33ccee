"""Which bytes of a region leave the caches, and when, where processors do not keep them right.

receiver: opens a grant      its pages leave its caches: no old line is written back later
writer:   stored              the bytes it stored leave its caches, before its notification
receiver: heard the notification    the grant's pages leave its caches: the next load is fresh
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from baton.transfer.devices.extents import find_extent
from baton.transfer.scatter_gather import Geometry, compute_runs

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from baton.kv.copies import PageCopies
    from baton.transfer.interface import PageArray, PagedRegion


def compute_written(
    copies: PageCopies, array: PageArray
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Offsets in the destination region and lengths of what copies write: int64 `[r]` each."""
    runs = [
        compute_runs(Geometry(group.dst_pages, group.spans[:, 1], group.spans[:, 2]), array)
        for group in copies.groups
    ]
    return _join(runs)


def settle_pages(region: PagedRegion, pages: NDArray[np.int64], layers: Iterable[int]) -> None:
    """Before others write these pages, or before this side reads what they wrote.

    Nothing is done where the region is no extent, or its caches need no care.

    Raises:
        TransferError: the kernel could not.
    """
    extent = find_extent(region)
    if extent is None or extent.flusher is None or not extent.flusher.evicts:
        return
    arrays = [region.arrays[layer] for layer in layers]
    starts = [array.offset_bytes + pages * array.page_bytes for array in arrays]
    lengths = [np.full(len(pages), array.page_bytes) for array in arrays]
    extent.flush_ranges(*_join(list(zip(starts, lengths, strict=True))))


def _join(
    runs: list[tuple[NDArray[np.int64], NDArray[np.int64]]],
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    none = np.empty(0, np.int64)
    starts, lengths = zip((none, none), *runs, strict=True)
    return np.concatenate(starts), np.concatenate(lengths)
