"""Which bytes of an array one part of a write names, as index arrays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from baton.transfer.interface import PageArray


@dataclass(frozen=True, slots=True)
class Geometry:
    """Each of `pages`, int64 `[n]`, in turn; in each page every span in turn.

    `starts` and `lengths`, int64 `[s]`, are bytes inside a page. The order is that of the payload.
    """

    pages: NDArray[np.int64]
    starts: NDArray[np.int64]
    lengths: NDArray[np.int64]

    @property
    def bytes_per_page(self) -> int:
        """Payload of one page."""
        return int(self.lengths.sum())

    @property
    def num_bytes(self) -> int:
        """Payload of all pages."""
        return len(self.pages) * self.bytes_per_page

    def joined(self) -> Geometry:
        """The same bytes in the same order, spans that touch made one."""
        starts, lengths = _join_neighbours(self.starts, self.lengths)
        return Geometry(self.pages, starts, lengths)

    def take_pages(self, first: int, num_pages: int) -> Geometry:
        """The part from page number `first` on."""
        return Geometry(self.pages[first : first + num_pages], self.starts, self.lengths)


def compute_runs(
    geometry: Geometry, array: PageArray
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Offsets in the region and lengths of all pieces, neighbours joined: int64 `[r]` each."""
    bases = array.offset_bytes + geometry.pages * array.page_bytes
    offsets = (bases[:, None] + geometry.starts[None, :]).reshape(-1)
    lengths = np.broadcast_to(geometry.lengths, (len(bases), len(geometry.lengths))).reshape(-1)
    return _join_neighbours(offsets, lengths)


def _join_neighbours(
    offsets: NDArray[np.int64], lengths: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    if len(offsets) == 0:
        return offsets, lengths
    is_first = np.empty(len(offsets), np.bool_)
    is_first[0] = True
    np.not_equal(offsets[1:], offsets[:-1] + lengths[:-1], out=is_first[1:])
    firsts = np.flatnonzero(is_first)
    return offsets[firsts], np.add.reduceat(lengths, firsts)
