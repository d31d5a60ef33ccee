"""Runs: the same pieces in order, as few as there can be; both ways to merge agree."""

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from baton.kv.runs import find_runs, merge_few, merge_runs, merge_spans

pieces = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6), st.integers(1, 3)), max_size=30)


@given(pieces)
def test_runs_unroll_to_the_pieces_and_never_touch(pieces):
    runs = merge_few(pieces)
    unrolled = [(s + i, t + i) for s, t, n in runs for i in range(n)]
    assert unrolled == [(s + i, t + i) for s, t, n in pieces for i in range(n)]
    assert all((s + n, t + n) != tuple(after[:2]) for (s, t, n), after in pairwise(runs))


@given(pieces)
def test_arrays_and_lists_give_the_same_runs(pieces):
    rows = np.array(pieces, np.int64).reshape(-1, 3)
    assert merge_spans(rows).tolist() == merge_few(pieces)
    lengths, starts = merge_runs(rows[:, 2], rows[:, 0])
    one_sided = merge_few([(start, start, length) for start, _, length in pieces])
    assert [*zip(starts.tolist(), lengths.tolist(), strict=True)] == [
        (start, length) for start, _, length in one_sided
    ]


@given(st.lists(st.integers(0, 6), min_size=1, max_size=30))
def test_pages_are_pieces_of_one(pages):
    firsts = find_runs(1, np.array(pages))
    assert firsts.tolist() == [0] + [
        i for i in range(1, len(pages)) if pages[i] != pages[i - 1] + 1
    ]
