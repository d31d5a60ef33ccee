"""Prepared descriptor lists: what NIXL gets about an array once, and then chooses from by index.

A list names, for each span of a page (the whole page is one span), every page of the array: item
`span * num_pages + page`. NIXL takes it as one strided row for each span.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from baton.transfer.interface import PageArray
    from baton.transfer.transports.nixl.agent import Handle

MAX_LIST_ITEMS: Final = 1 << 20
"""A larger list is not prepared: its descriptors are made for each transfer."""
MAX_PREPARED_ITEMS: Final = 1 << 21
"""Of all lists of one agent."""
NUM_SIDES: Final = 2
"""Both lists of the transfer that is being made are kept, however large."""


@dataclass(frozen=True, slots=True)
class Spans:
    """One side of a group's spans in pages of one array: int64 `[s]` each, bytes in the page."""

    starts: NDArray[np.int64]
    lengths: NDArray[np.int64]

    @property
    def key(self) -> bytes:
        """Equal for equal spans."""
        return self.starts.tobytes() + self.lengths.tobytes()

    def count_items(self, array: PageArray) -> int:
        """Descriptors of a prepared list."""
        return len(self.starts) * array.num_pages


class PreparedLists:
    """Lists that may be asked for again, the least recently used given back first. Of one agent."""

    def __init__(self) -> None:
        self._lists: OrderedDict[tuple[object, ...], tuple[Handle, int]] = OrderedDict()
        self._num_items = 0

    def find(
        self, key: tuple[object, ...], num_items: int, prepare: Callable[[], Handle]
    ) -> Handle:
        """The list of this key, prepared if it is not there."""
        found = self._lists.pop(key, None)
        if found is None:
            found = prepare(), num_items
            self._num_items += num_items
        self._lists[key] = found
        while self._num_items > MAX_PREPARED_ITEMS and len(self._lists) > NUM_SIDES:
            _, (oldest, num_oldest) = self._lists.popitem(last=False)
            oldest.release()
            self._num_items -= num_oldest
        return found[0]

    def clear(self) -> None:
        """Give all of them back."""
        while self._lists:
            _, (each, _) = self._lists.popitem()
            each.release()
        self._num_items = 0


def compute_strided_rows(base: int, array: PageArray, spans: Spans) -> NDArray[np.uint64]:
    """A whole list: uint64 `[s, 5]` of (address, bytes, device 0, stride, count)."""
    rows = np.zeros((len(spans.starts), 5), np.uint64)
    rows[:, 0] = base + array.offset_bytes + spans.starts
    rows[:, 1] = spans.lengths
    rows[:, 3] = array.page_bytes
    rows[:, 4] = array.num_pages
    return rows


def compute_items(pages: NDArray[np.int64], num_pages: int, num_spans: int) -> NDArray[np.int32]:
    """Items of a prepared list: span by span, in each the pages in their order; int32 `[s * n]`."""
    firsts = np.arange(num_spans, dtype=np.int32) * np.int32(num_pages)
    return (firsts[:, None] + pages.astype(np.int32)).reshape(-1)


def compute_rows(
    base: int, array: PageArray, spans: Spans, pages: NDArray[np.int64]
) -> NDArray[np.uint64]:
    """The same choice as `compute_items`, spelt out: uint64 `[s * n, 3]`."""
    rows = np.zeros((len(spans.starts), len(pages), 3), np.uint64)
    firsts = base + array.offset_bytes + pages * array.page_bytes
    rows[:, :, 0] = spans.starts[:, None] + firsts
    rows[:, :, 1] = spans.lengths[:, None]
    return rows.reshape(-1, 3)
