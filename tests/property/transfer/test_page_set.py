"""Page sets answer as sets do, whether they are dense or sparse, and whoever asked before."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from baton.transfer.grants import PageSet

DENSE = st.lists(st.integers(100, 140), max_size=60)
SPARSE = st.lists(st.sampled_from([0, 3, 1 << 20, 1 << 31, (1 << 32) - 2]), max_size=6)
ASKED = st.lists(
    st.one_of(st.integers(95, 145), st.sampled_from([-1, 0, 3, 4, 1 << 20, (1 << 32) - 2])),
    max_size=8,
)


@given(st.one_of(DENSE, SPARSE), st.lists(ASKED, min_size=1, max_size=6), st.data())
def test_a_page_set_is_a_set(
    members: list[int], asked: list[list[int]], data: st.DataObject
) -> None:
    pages = PageSet(np.array(members, np.int64))
    assert len(pages) == len(set(members))
    arrays = [np.array(each, np.int64) for each in asked]
    if members:
        inside = data.draw(st.lists(st.sampled_from(members), max_size=9))
        between = data.draw(st.lists(st.integers(min(members), max(members)), max_size=3))
        arrays += [np.array(inside, np.int64), np.array(inside + between, np.int64)]
    for _ in range(2):  # the second time, some are recognised
        for array in arrays:
            assert pages.covers(array) == (set(array.tolist()) <= set(members))


def test_two_far_pages_take_no_memory_for_those_between() -> None:
    pages = PageSet(np.array([0, (1 << 32) - 2]))
    assert pages._is_in is None
    assert pages.covers(np.array([0, (1 << 32) - 2]))
    assert not pages.covers(np.array([1]))
