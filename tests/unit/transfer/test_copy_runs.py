"""Copies as runs of bytes."""

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from baton.testing.transport_pair import spans_of_pages
from baton.transfer.interface import PageArray
from baton.transfer.scatter_gather import compute_copy_runs

SOURCE, TARGET = PageArray(4096, 64, 32), PageArray(0, 128, 32)
SPANS = [(0, 64, 16), (16, 80, 8), (40, 0, 24)]


@given(st.lists(st.tuples(st.integers(0, 31), st.integers(0, 31)), max_size=12))
def test_runs_are_the_spans_in_order_neighbours_joined(pairs):
    sources, targets = [a for a, _ in pairs], [b for _, b in pairs]
    runs = compute_copy_runs(spans_of_pages(sources, targets, SPANS), SOURCE, TARGET)
    bytes_of_runs = [(s + i, t + i) for s, t, n in runs.tolist() for i in range(n)]
    assert bytes_of_runs == [
        (4096 + a * 64 + src + i, b * 128 + dst + i)
        for a, b in pairs
        for src, dst, n in SPANS
        for i in range(n)
    ]
    assert not any((after[:2] == before[:2] + before[2]).all() for before, after in pairwise(runs))


def test_pages_that_are_adjacent_on_both_sides_are_one_run():
    alike = PageArray(0, 64, 32)
    whole = spans_of_pages([3, 4, 5, 9], [7, 8, 9, 10], [(0, 0, 64)])
    assert compute_copy_runs(whole, alike, alike).tolist() == [[192, 448, 192], [576, 640, 64]]


def test_nothing_is_no_run():
    empty = spans_of_pages(np.array([], np.int64), np.array([], np.int64), SPANS)
    assert compute_copy_runs(empty, SOURCE, TARGET).shape == (0, 3)
