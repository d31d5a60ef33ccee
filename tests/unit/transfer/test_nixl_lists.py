"""Which descriptors NIXL is given: by index into a prepared list, or spelt out."""

import numpy as np
import pytest

from baton.transfer.interface import PageArray
from baton.transfer.transports.nixl import lists
from baton.transfer.transports.nixl.lists import (
    PreparedLists,
    Spans,
    compute_items,
    compute_rows,
    compute_strided_rows,
)

BASE = 0x7F00_0000_0000
ARRAY = PageArray(4096, 512, 100)


def expand(strided):
    """A list as NIXL makes it of strided rows: item by item."""
    return [
        (address + at * stride, num_bytes, device)
        for address, num_bytes, device, stride, count in strided.tolist()
        for at in range(count)
    ]


@pytest.mark.parametrize("spans", [[(0, 512)], [(0, 16), (64, 8), (500, 12)]])
def test_items_of_a_prepared_list_are_the_rows_spelt_out(spans):
    starts, lengths = np.array(spans).T
    some, pages = Spans(starts, lengths), np.array([7, 0, 99, 7])
    prepared = expand(compute_strided_rows(BASE, ARRAY, some))
    assert len(prepared) == some.count_items(ARRAY)
    items = compute_items(pages, ARRAY.num_pages, len(starts))
    assert items.dtype == np.int32
    rows = compute_rows(BASE, ARRAY, some, pages)
    assert rows.dtype == np.uint64
    assert [prepared[item] for item in items] == list(map(tuple, rows.tolist()))
    assert rows[0].tolist() == [BASE + 4096 + 7 * 512 + spans[0][0], spans[0][1], 0]


class Handle:
    def __init__(self):
        self.num_released = 0

    def release(self):
        self.num_released += 1


def test_a_list_is_prepared_once():
    kept, made = PreparedLists(), []

    def prepare():
        made.append(Handle())
        return made[-1]

    assert kept.find(("a",), 10, prepare) is kept.find(("a",), 10, prepare)
    kept.find(("b",), 10, prepare)
    assert len(made) == 2
    kept.clear()
    assert [each.num_released for each in made] == [1, 1]


def test_the_least_recently_used_lists_are_given_back(monkeypatch):
    monkeypatch.setattr(lists, "MAX_PREPARED_ITEMS", 30)
    kept = PreparedLists()
    a, b, c = (kept.find((name,), 10, Handle) for name in "abc")
    kept.find(("a",), 10, Handle)
    kept.find(("d",), 10, Handle)
    assert [each.num_released for each in (a, b, c)] == [0, 1, 0]
    assert kept.find(("a",), 10, Handle) is a
    large = [kept.find((name,), 1000, Handle) for name in "xy"]
    assert [each.num_released for each in (a, b, c, *large)] == [1, 1, 1, 0, 0]
