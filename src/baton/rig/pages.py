"""What is moved: one message, or pages scattered over a pool of random bytes; and its digests."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Final, Literal, TypeAlias

import msgspec
import numpy as np
import xxhash

from baton.errors import ConfigError, TransferError
from baton.kv.copies import CopyGroup, PageCopies
from baton.transfer.region import allocate_host_region, allocate_shared_region, place_arrays

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from baton.transfer.devices.extents import AllocateRegion
    from baton.transfer.interface import MemoryKind, PageArray, PagedRegion

PAGE_BYTES: Final = 32 * 1024
TINY_PAGE_BYTES: Final = 64
"""So small that a transfer of them costs what its descriptors cost."""
MAX_MESSAGE_BYTES: Final = 4 << 30
MAX_RUN_VARIANTS: Final = 1024
NUM_SCATTERED_VARIANTS: Final = 4

Shape: TypeAlias = Literal["message", "scattered", "descriptors"]
Direction: TypeAlias = Literal["push", "pull", "reference"]
"""push: the driver's bytes are copied to the owner · pull: the other way round · reference: the
driver's pages are announced, and the owner maps them."""
PoolPageBytes: TypeAlias = Annotated[int, msgspec.Meta(ge=64, le=1 << 20, multiple_of=64)]

_UNITS: Final = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "kib": 1 << 10,
    "mib": 1 << 20,
    "gib": 1 << 30,
}
_SIZE: Final = re.compile(r"(\d+)\s*([a-z]*)", re.IGNORECASE)


class Workload(msgspec.Struct, frozen=True):
    """One transfer of `num_bytes`.

    message: one contiguous run · scattered: pages of the pool in random order · descriptors: the
    same number of pages of 64 bytes.
    """

    shape: Shape
    num_bytes: Annotated[int, msgspec.Meta(ge=1, le=MAX_MESSAGE_BYTES)]
    pool_page_bytes: PoolPageBytes = PAGE_BYTES

    @property
    def page_bytes(self) -> int:
        """Size of the pages that it reads and writes."""
        return TINY_PAGE_BYTES if self.shape == "descriptors" else self.pool_page_bytes

    @property
    def num_pages(self) -> int:
        """Pages that it reads; of the last one perhaps a part."""
        return -(-self.num_bytes // self.page_bytes)

    @property
    def num_descriptors(self) -> int:
        """Contiguous runs, each of which takes a descriptor."""
        return 1 if self.shape == "message" else self.num_pages

    @property
    def name(self) -> str:
        """For a table: `1 MiB`, `8,192 pages of 32 KiB`."""
        if self.shape == "message":
            return format_size(self.num_bytes)
        return f"{self.num_pages:,} pages of {format_size(self.page_bytes)}"


@dataclass(frozen=True, slots=True)
class Move:
    """The pages of one transfer: `src_pages[i]` → `dst_pages[i]`.

    Both int64 `[n]`, pages of array number `layer` of the pool. Of the last pair `num_last_bytes`
    are moved. `is_run`: the pages are adjacent on both sides.
    """

    layer: int
    array: PageArray
    src_pages: NDArray[np.int64]
    dst_pages: NDArray[np.int64]
    num_last_bytes: int
    is_run: bool

    @property
    def num_bytes(self) -> int:
        """Bytes that are moved."""
        return (len(self.src_pages) - 1) * self.array.page_bytes + self.num_last_bytes

    @property
    def copies(self) -> PageCopies:
        """What a transport takes."""
        num_whole = len(self.src_pages) - (self.num_last_bytes < self.array.page_bytes)
        groups = (
            self._group(slice(0, num_whole), self.array.page_bytes),
            self._group(slice(num_whole, None), self.num_last_bytes),
        )
        return PageCopies(self.layer, tuple(group for group in groups if len(group.src_pages)))

    @property
    def ranges(self) -> NDArray[np.int64]:
        """int64 `[r, 3]`: `(src_byte, dst_byte, num_bytes)` in the pools' memory."""
        if self.is_run:
            whole = self._offset(self.src_pages[0]), self._offset(self.dst_pages[0])
            return np.array([[*whole, self.num_bytes]], np.int64)
        lengths = np.full(len(self.src_pages), self.array.page_bytes)
        lengths[-1] = self.num_last_bytes
        src, dst = self._offset(self.src_pages), self._offset(self.dst_pages)
        return np.stack((src, dst, lengths), axis=1)

    def _offset(self, pages: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.asarray(self.array.offset_bytes + pages * self.array.page_bytes)

    def _group(self, some: slice, num_bytes: int) -> CopyGroup:
        span = np.array([[0, 0, num_bytes]], np.int64)
        return CopyGroup(self.src_pages[some], self.dst_pages[some], span)


def plan_pool(workloads: Sequence[Workload], least_pages: int) -> int:
    """Pages that a pool needs: twice the largest transfer, so that caches stay cold."""
    return max(least_pages, *(2 * workload.num_pages for workload in workloads))


def layout_pool(num_pages: int, page_bytes: int = PAGE_BYTES) -> tuple[PageArray, ...]:
    """A pool's two arrays: pages, and tiny pages, `num_pages` of each."""
    return place_arrays([(num_pages, page_bytes), (num_pages, TINY_PAGE_BYTES)])


def layout_moves(workload: Workload, num_pages: int) -> list[Move]:
    """One transfer at different places of pools of `num_pages`; deterministic."""
    layer = 1 if workload.shape == "descriptors" else 0
    array = layout_pool(num_pages, workload.pool_page_bytes)[layer]
    num_last_bytes = workload.num_bytes - (workload.num_pages - 1) * array.page_bytes
    is_run = workload.shape == "message"
    pairs = _place_runs(workload, num_pages) if is_run else _place_scattered(workload, num_pages)
    return [Move(layer, array, src, dst, num_last_bytes, is_run) for src, dst in pairs]


def parse_size(text: str) -> int:
    """`32KiB`, `100 MB`, `4096` → bytes.

    Raises:
        ConfigError: not a size, or more than can be measured.
    """
    match = _SIZE.fullmatch(text.strip())
    unit = None if match is None else _UNITS.get(match[2].lower())
    num_bytes = 0 if match is None or unit is None else int(match[1]) * unit
    if not 1 <= num_bytes <= MAX_MESSAGE_BYTES:
        raise ConfigError(
            f"{text!r} is no message size: a number and B, KB, MB, GB, KiB, MiB or GiB, "
            f"up to {format_size(MAX_MESSAGE_BYTES)}"
        )
    return num_bytes


def format_size(num_bytes: int) -> str:
    """The shortest exact form: `32 KiB`, `100 MB`."""
    for unit, factor in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if num_bytes % (1 << factor) == 0:
            return f"{num_bytes >> factor} {unit}"
    for unit, power in (("GB", 9), ("MB", 6), ("KB", 3)):
        if num_bytes % 10**power == 0:
            return f"{num_bytes // 10**power} {unit}"
    return f"{num_bytes} B"


def _place_runs(
    workload: Workload, num_pages: int
) -> list[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Runs at the places of both pools, in two random orders."""
    length, rng = workload.num_pages, np.random.default_rng(7)
    count = num_pages // length
    starts = zip(rng.permutation(count), rng.permutation(count), strict=True)
    pages = np.arange(length)
    runs = [(src * length + pages, dst * length + pages) for src, dst in starts]
    return runs[:MAX_RUN_VARIANTS]


def _place_scattered(
    workload: Workload, num_pages: int
) -> list[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    rng = np.random.default_rng(11)
    return [
        (
            rng.permutation(num_pages)[: workload.num_pages],
            rng.permutation(num_pages)[: workload.num_pages],
        )
        for _ in range(NUM_SCATTERED_VARIANTS)
    ]


Side: TypeAlias = Literal["src", "dst", "rest"]
"""Of a move: the bytes that are read, those that are written, or all that are not written."""


class UnsupportedError(TransferError):
    """The backend moves only memory of kinds that the rig does not allocate."""


def allocate_pool(
    kinds: Sequence[MemoryKind],
    num_pages: int,
    page_bytes: int = PAGE_BYTES,
    *,
    allocate_shared: AllocateRegion = allocate_shared_region,
) -> PagedRegion:
    """Memory of the first kind that can be allocated here, filled with random bytes.

    Raises:
        UnsupportedError: none of the kinds can be allocated here.
        TransferError: there is not enough memory.
    """
    shapes = [(array.num_pages, array.page_bytes) for array in layout_pool(num_pages, page_bytes)]
    for kind in kinds:
        if kind in {"shared", "host"}:
            make = allocate_shared if kind == "shared" else allocate_host_region
            region = make(shapes)
            _fill(region)
            return region
    raise UnsupportedError(f"it moves {' and '.join(kinds)} memory only")


def view_bytes(region: PagedRegion) -> NDArray[np.uint8]:
    """All of a pool, uint8 `[n]`, writable."""
    return np.frombuffer(region.memory, np.uint8)


def clear_target(pool: NDArray[np.uint8], move: Move) -> None:
    """Set the bytes that a move will write to 0."""
    for _, at, num_bytes in move.ranges.tolist():
        pool[at : at + num_bytes] = 0


def digest(pool: memoryview, move: Move, side: Side) -> str:
    """XXH3-128 of the bytes of one side of a move, in its order."""
    hasher = xxhash.xxh3_128()
    for at, num_bytes in _ranges_of(move, side, len(pool)):
        hasher.update(pool[at : at + num_bytes])
    return hasher.hexdigest()


def _ranges_of(move: Move, side: Side, pool_bytes: int) -> list[list[int]]:
    """`[offset, num_bytes]` of each range."""
    ranges = move.ranges[:, [0 if side == "src" else 1, 2]]
    if side == "rest":
        ranges = ranges[np.argsort(ranges[:, 0])]
        starts = np.concatenate(([0], ranges.sum(axis=1)))
        ends = np.concatenate((ranges[:, 0], [pool_bytes]))
        ranges = np.stack((starts, ends - starts), axis=1)
    listed: list[list[int]] = ranges.tolist()
    return listed


def _fill(region: PagedRegion) -> None:
    words = np.frombuffer(region.memory, np.uint64)
    words[:] = np.random.Generator(np.random.SFC64()).integers(
        0, np.iinfo(np.uint64).max, len(words), np.uint64, endpoint=True
    )
