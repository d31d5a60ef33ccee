"""What a receiver admits: sets of pages, and the grants that name them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from baton.errors import TransferError
from baton.transfer.bounds import are_pages_inside

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from baton.transfer.interface import PageArray


_MAX_SPARSENESS: Final = 8
"""A set whose extent is more times its size is searched: marking each page between would let a peer
take memory by naming two pages. Up to here the marks are no larger than the indices."""


class PageSet:
    """Page indices that are asked "are all of these in you?" once for each write.

    Consecutive writes of one handoff, layer by layer, ask with the very same array, which never
    changes: it is recognised.
    """

    def __init__(self, pages: NDArray[np.int64]) -> None:
        self._sorted = np.unique(pages)
        self._covered: NDArray[np.int64] | None = None
        self._is_in: NDArray[np.bool_] | None = None
        if len(self._sorted):
            self._is_in = _mark(self._sorted)

    def __len__(self) -> int:
        return len(self._sorted)

    def covers(self, pages: NDArray[np.int64]) -> bool:
        """Whether every one of `pages` (any order, repeats allowed) is in the set."""
        if pages is self._covered or len(pages) == 0:
            return True
        if self._find_all(pages):
            self._covered = pages
            return True
        return False

    def _find_all(self, pages: NDArray[np.int64]) -> bool:
        if len(self._sorted) == 0:
            return False
        low, high = _extent(pages)
        first, last = int(self._sorted[0]), int(self._sorted[-1])
        if low < first or high > last:
            return False
        if last - first + 1 == len(self._sorted):
            return True  # an interval
        if self._is_in is not None:
            return bool(self._is_in[pages - first].all())
        found = np.minimum(np.searchsorted(self._sorted, pages), len(self._sorted) - 1)
        return bool((self._sorted[found] == pages).all())


def _mark(ascending: NDArray[np.int64]) -> NDArray[np.bool_] | None:
    """For each page from the first one on, whether it is in the set; None if few of them are."""
    first, num_pages = int(ascending[0]), int(ascending[-1] - ascending[0]) + 1
    if num_pages > _MAX_SPARSENESS * len(ascending):
        return None
    marks = np.zeros(num_pages, np.bool_)
    marks[ascending - first] = True
    return marks


def _extent(pages: NDArray[np.int64]) -> tuple[int, int]:
    if len(pages) == 1:
        return int(pages[0]), int(pages[0])
    return int(pages.min()), int(pages.max())


def check_grant_pages(pages: NDArray[np.int64], arrays: Sequence[PageArray]) -> None:
    """Refuse a grant that reaches outside one of its region's arrays.

    Raises:
        TransferError: a page is out of range in some array.
    """
    num_pages = min(array.num_pages for array in arrays)
    if not are_pages_inside(pages, num_pages):
        raise TransferError(f"a grant's page is out of range: the region has {num_pages} pages")
