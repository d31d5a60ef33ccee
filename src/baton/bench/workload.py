"""What is moved: one message, or pages scattered over the pool. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Final, Literal, TypeAlias

import msgspec
import numpy as np

from baton.errors import ConfigError
from baton.kv.copies import CopyGroup, PageCopies
from baton.transfer.region import place_arrays

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from baton.transfer.interface import PageArray

PAGE_BYTES: Final = 32 * 1024
TINY_PAGE_BYTES: Final = 64
"""So few that a transfer of them costs what its descriptors cost."""
MAX_MESSAGE_BYTES: Final = 4 << 30
MAX_RUN_VARIANTS: Final = 1024
NUM_SCATTERED_VARIANTS: Final = 4

Shape: TypeAlias = Literal["message", "scattered", "descriptors"]
Direction: TypeAlias = Literal["push", "pull", "lend"]
"""push: the driver's bytes are copied to the owner · pull: the other way round · lend: the driver's
pages are announced, and the owner has them in view."""
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
    """One transfer: a run of `num_bytes`, or so many bytes in scattered pages.

    message: one run of bytes · scattered: the pool's pages at random places · descriptors: the
    same number of pages of 64 bytes.
    """

    shape: Shape
    num_bytes: Annotated[int, msgspec.Meta(ge=1, le=MAX_MESSAGE_BYTES)]
    pool_page_bytes: PoolPageBytes = PAGE_BYTES

    @property
    def page_bytes(self) -> int:
        """Size of the pages that it touches."""
        return TINY_PAGE_BYTES if self.shape == "descriptors" else self.pool_page_bytes

    @property
    def num_pages(self) -> int:
        """Pages that it touches, the last one perhaps in part."""
        return -(-self.num_bytes // self.page_bytes)

    @property
    def num_descriptors(self) -> int:
        """Runs of bytes that have to be named."""
        return 1 if self.shape == "message" else self.num_pages

    @property
    def name(self) -> str:
        """For people."""
        if self.shape == "message":
            return write_size(self.num_bytes)
        return f"{self.num_pages:,} pages of {write_size(self.page_bytes)}"


@dataclass(frozen=True, slots=True)
class Move:
    """Where one transfer takes its bytes and puts them: page `src_pages[i]` → `dst_pages[i]`.

    Both int64 `[n]`, pages of array number `layer` of the pool. Of the last pair `num_last_bytes`
    are moved. `is_run`: the pages follow each other on both sides.
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
        """As a transport is asked for it."""
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
    """Pages of each size that a pool needs: twice the largest transfer, so that it stays cold."""
    return max(least_pages, *(2 * workload.num_pages for workload in workloads))


def place_pool(num_pages: int, page_bytes: int = PAGE_BYTES) -> tuple[PageArray, ...]:
    """A pool's two arrays: pages, and tiny pages, `num_pages` of each."""
    return place_arrays([(num_pages, page_bytes), (num_pages, TINY_PAGE_BYTES)])


def place_moves(workload: Workload, num_pages: int) -> list[Move]:
    """One transfer at different places of pools of `num_pages`; the same for who asks again."""
    layer = 1 if workload.shape == "descriptors" else 0
    array = place_pool(num_pages, workload.pool_page_bytes)[layer]
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
            f"up to {write_size(MAX_MESSAGE_BYTES)}"
        )
    return num_bytes


def write_size(num_bytes: int) -> str:
    """The shortest exact way to say it: `32 KiB`, `100 MB`."""
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
    """Runs that walk through both pools in two random orders."""
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
