from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from baton.handoff.coverage import Coverage
from baton.handoff.stretches import (
    Stretch,
    intersect,
    pack_stretches,
    subtract,
    unpack_stretches,
)

spans = st.tuples(st.integers(0, 2), st.integers(0, 19), st.integers(1, 6)).map(
    lambda each: Stretch(each[0], each[1], min(20, each[1] + each[2]))
)


def tokens(stretches: list[Stretch]) -> set[tuple[int, int]]:
    return {(s.layer, t) for s in stretches for t in range(s.start, s.stop)}


def disjoint(stretches: list[Stretch]) -> list[Stretch]:
    kept: list[Stretch] = []
    for each in stretches:
        if not tokens(kept) & tokens([each]):
            kept.append(each)
    return kept


@given(st.lists(spans, max_size=12).map(disjoint), st.lists(spans, max_size=12).map(disjoint))
def test_an_intersection_has_what_both_have(some: list[Stretch], others: list[Stretch]) -> None:
    both = intersect(some, others)
    assert tokens(both) == tokens(some) & tokens(others)
    assert len(tokens(both)) == sum(s.stop - s.start for s in both)
    assert all(a.layer != b.layer or a.stop < b.start for a, b in pairwise(both))


@given(st.lists(spans, max_size=12).map(disjoint), spans)
def test_a_difference_has_what_is_left(some: list[Stretch], gone: Stretch) -> None:
    assert tokens(subtract(some, gone)) == tokens(some) - tokens([gone])


@given(st.lists(spans, max_size=12).map(disjoint))
def test_gaps_are_what_has_not_landed(landed: list[Stretch]) -> None:
    coverage = Coverage(num_layers=3, start=0, stop=20)
    for each in landed:
        coverage.add(*each)
    everything = tokens([Stretch(layer, 0, 20) for layer in range(3)])
    assert tokens(coverage.gaps()) == everything - tokens(landed)
    assert unpack_stretches(pack_stretches(coverage.gaps())) == coverage.gaps()
