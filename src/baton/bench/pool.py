"""One side's memory: random bytes, which can be wiped and compared."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal, TypeAlias

import numpy as np
import xxhash

from baton.bench.workload import PAGE_BYTES, place_pool
from baton.errors import TransferError
from baton.transfer.region import allocate_host_region, allocate_shared_region

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from baton.bench.workload import Move
    from baton.transfer.devices.options import AllocateRegion
    from baton.transfer.interface import MemoryKind, PagedRegion

Side: TypeAlias = Literal["src", "dst"]
_COLUMN: Final[dict[Side, int]] = {"src": 0, "dst": 1}


def allocate_pool(
    kinds: Sequence[MemoryKind],
    num_pages: int,
    page_bytes: int = PAGE_BYTES,
    *,
    allocate_shared: AllocateRegion = allocate_shared_region,
) -> PagedRegion:
    """Memory of the first kind that can be had here, all of it touched, full of random bytes.

    Raises:
        TransferError: none of the kinds is in this process's power, or there is not enough.
    """
    shapes = [(array.num_pages, array.page_bytes) for array in place_pool(num_pages, page_bytes)]
    for kind in kinds:
        if kind in {"shared", "host"}:
            make = allocate_shared if kind == "shared" else allocate_host_region
            region = make(shapes)
            _fill(region)
            return region
    raise TransferError(f"it moves {' and '.join(kinds)} memory only: not measured")


def view_bytes(region: PagedRegion) -> NDArray[np.uint8]:
    """All of a pool, uint8 `[n]`, writable."""
    return np.frombuffer(region.memory, np.uint8)


def wipe(pool: NDArray[np.uint8], move: Move) -> None:
    """Set the bytes that a move will write to 0."""
    for _, at, num_bytes in move.ranges.tolist():
        pool[at : at + num_bytes] = 0


def digest(pool: memoryview, move: Move, side: Side) -> str:
    """XXH3-128 of the bytes of one side of a move, in its order."""
    hasher, column = xxhash.xxh3_128(), _COLUMN[side]
    for row in move.ranges.tolist():
        hasher.update(pool[row[column] : row[column] + row[2]])
    return hasher.hexdigest()


def _fill(region: PagedRegion) -> None:
    words = np.frombuffer(region.memory, np.uint64)
    words[:] = np.random.Generator(np.random.SFC64()).integers(
        0, np.iinfo(np.uint64).max, len(words), np.uint64, endpoint=True
    )
