"""Page copies as index arrays: described, never looped over."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np

from baton.kv.runs import MAX_FEW, find_runs, merge_few
from baton.record import Record

if TYPE_CHECKING:
    from numpy.typing import NDArray

_PACKED: Final = np.dtype("<u4")


class PagePair(msgspec.Struct, frozen=True, gc=False):
    """A group of one page pair and one span, in numbers: faster to handle than arrays of one."""

    src_page: int
    dst_page: int
    src_byte: int
    dst_byte: int
    num_bytes: int


@dataclass(frozen=True)
class CopyGroup:
    """Copies that share one geometry.

    Page `src_pages[i]` → page `dst_pages[i]`, both int64 `[n]`; in each pair, for every row of
    `spans`, int64 `[s, 3]`: `(src_byte, dst_byte, num_bytes)` inside the page.

    A prepared list: what is derived from it is kept with it, and serves every layer whose copies
    have this group. So its arrays never change.
    """

    src_pages: NDArray[np.int64]
    dst_pages: NDArray[np.int64]
    spans: NDArray[np.int64]
    fits: set[tuple[int, int, int, int]] = field(
        default_factory=set, init=False, compare=False, repr=False
    )
    """Between which arrays it was found to be in bounds: `(num_pages, page_bytes)` of both."""
    pair: PagePair | None = field(default=None, init=False, compare=False, repr=False)
    """Where it is one page pair and one span, which small transfers are; else None."""

    def __post_init__(self) -> None:
        if len(self.src_pages) == len(self.dst_pages) == 1 and self.spans.shape == (1, 3):
            pair = PagePair(self.src_pages.item(), self.dst_pages.item(), *self.spans[0].tolist())
            object.__setattr__(self, "pair", pair)

    @property
    def num_bytes(self) -> int:
        """Bytes that this group moves."""
        return self._num_bytes if self.pair is None else self.pair.num_bytes

    @cached_property
    def _num_bytes(self) -> int:
        if len(self.spans) == 1:
            return len(self.src_pages) * int(self.spans[0, 2])
        return len(self.src_pages) * int(self.spans[:, 2].sum())

    @cached_property
    def packed_sources(self) -> tuple[bytes, bytes]:
        """Packed: `src_pages`, and `(src_byte, num_bytes)` of each span."""
        return pack_indices(self.src_pages), pack_indices(self.spans[:, ::2])

    @cached_property
    def packed_targets(self) -> tuple[bytes, bytes]:
        """Packed: `dst_pages`, and `(dst_byte, num_bytes)` of each span."""
        return pack_indices(self.dst_pages), pack_indices(self.spans[:, 1:])

    @cached_property
    def num_runs(self) -> int:
        """Runs of page pairs that are adjacent on both sides."""
        return len(self.runs) if len(self.src_pages) <= MAX_FEW else len(self._firsts)

    @cached_property
    def runs(self) -> list[list[int]]:
        """Those runs, `[src_page, dst_page, num_pages]` each, in the group's order."""
        sources, targets = self.src_pages, self.dst_pages
        if len(sources) <= MAX_FEW:
            ones = [1] * len(sources)
            return merge_few(zip(sources.tolist(), targets.tolist(), ones, strict=True))
        firsts = self._firsts
        runs = np.empty((len(firsts), 3), np.int64)
        runs[:, 0], runs[:, 1] = sources[firsts], targets[firsts]
        runs[:-1, 2] = firsts[1:] - firsts[:-1]
        runs[-1, 2] = len(sources) - firsts[-1]
        found: list[list[int]] = runs.tolist()
        return found

    def take(self, first: int, num_pages: int) -> CopyGroup:
        """The part from page pair `first` on; it is in bounds wherever the whole is."""
        some = slice(first, first + num_pages)
        part = CopyGroup(self.src_pages[some], self.dst_pages[some], self.spans)
        part.fits.update(self.fits)
        return part

    @cached_property
    def slices(self) -> list[tuple[tuple[int, slice], tuple[int, slice]]] | None:
        """Where each span of each page is, to be sliced on either side; None if they are many."""
        if len(self.src_pages) * len(self.spans) > MAX_FEW:
            return None
        pages = list(zip(self.src_pages.tolist(), self.dst_pages.tolist(), strict=True))
        return [
            ((src, slice(src_byte, src_byte + size)), (dst, slice(dst_byte, dst_byte + size)))
            for src, dst in pages
            for src_byte, dst_byte, size in self.spans.tolist()
        ]

    @cached_property
    def _firsts(self) -> NDArray[np.int64]:
        """Where each run begins; of a group that has pages."""
        return find_runs(1, self.src_pages, self.dst_pages)

    def moves_whole_pages(self, src_page_bytes: int, dst_page_bytes: int) -> bool:
        """Whether nothing is cut from pages of these sizes, so that runs are runs of bytes."""
        pair = self.pair
        if pair is not None:
            return (
                src_page_bytes == dst_page_bytes == pair.num_bytes
                and pair.src_byte == pair.dst_byte == 0
            )
        return src_page_bytes == dst_page_bytes == self._whole_page_bytes

    @cached_property
    def _whole_page_bytes(self) -> int:
        """Of pages of so many bytes nothing is cut; 0 where something is of any."""
        if len(self.spans) != 1:
            return 0
        src_byte, dst_byte, num_bytes = map(int, self.spans[0])
        return num_bytes if src_byte == dst_byte == 0 else 0


class PageCopies(Record, frozen=True):
    """What one transfer moves: on both sides, the same pages of `num_layers` arrays from `layer`.

    Above 1 only for transports that take such transfers
    (`transfer.interface.Capabilities.multi_array`).
    """

    layer: int
    groups: tuple[CopyGroup, ...]
    num_layers: int = 1

    @property
    def layers(self) -> range:
        """The arrays' numbers."""
        return range(self.layer, self.layer + self.num_layers)

    @property
    def num_bytes(self) -> int:
        """Bytes that all groups move, in all layers."""
        num_bytes = 0
        for group in self.groups:
            num_bytes += group.num_bytes
        return num_bytes * self.num_layers

    @property
    def layer_bytes(self) -> int:
        """Bytes that all groups move, in one layer."""
        return self.num_bytes // self.num_layers

    @property
    def num_pages(self) -> int:
        """Page pairs that are touched, in all layers."""
        num_pages = 0
        for group in self.groups:
            num_pages += len(group.src_pages)
        return num_pages * self.num_layers

    def split(self) -> tuple[PageCopies, ...]:
        """The same, layer by layer."""
        return tuple(PageCopies(layer, self.groups) for layer in self.layers)


def pack_indices(indices: NDArray[np.int64]) -> bytes:
    """Non-negative indices below 2**32, any shape, as packed little-endian u32."""
    return indices.astype(_PACKED).tobytes()
