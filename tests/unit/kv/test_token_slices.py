"""Tokens of two paged sequences as slices: numpy copies what a loop over tokens would."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.kv.token_slices import TokenPages, find_token_slices


@given(data=st.data(), sizes=st.tuples(st.integers(1, 7), st.integers(1, 7)))
def test_each_token_is_copied_to_its_place(data: st.DataObject, sizes: tuple[int, int]) -> None:
    first = [data.draw(st.integers(0, 5), "first") for _ in sizes]
    start = max(first)
    stop = start + data.draw(st.integers(0, 40), "tokens")
    ends = []
    for begin, size in zip(first, sizes, strict=True):
        num_pages = -(-(stop - begin) // size)
        pages = data.draw(st.permutations(range(num_pages + 2)), "pages")[:num_pages]
        ends.append(TokenPages(begin, size, pages))
    src, dst = (np.full((len(end.pages) + 2, end.page_size), -1) for end in ends)
    for token in range(start, stop):
        page, at = divmod(token - first[0], sizes[0])
        src[ends[0].pages[page], at] = token
    for source, target in find_token_slices(ends[0], ends[1], start, stop):
        dst[target] = src[source]
    expected = np.full_like(dst, -1)
    for token in range(start, stop):
        page, at = divmod(token - first[1], sizes[1])
        expected[ends[1].pages[page], at] = token
    assert (dst == expected).all()


@pytest.mark.parametrize("blocks", [range(20, 48), range(27, -1, -1), range(1, 57, 2)])
def test_evenly_spaced_pages_are_one_slice_for_each_way_to_lie_in_them(blocks: range) -> None:
    entries, pages = TokenPages(0, 64, range(56)), TokenPages(0, 128, blocks)
    assert len(find_token_slices(entries, pages, 0, 3584)) == 2
    assert len(find_token_slices(entries, pages, 32, 3584)) == 3
