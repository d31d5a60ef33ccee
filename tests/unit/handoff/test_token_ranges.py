from __future__ import annotations

from itertools import pairwise, takewhile

from hypothesis import given
from hypothesis import strategies as st

from baton.errors import ProtocolError
from baton.handoff.token_ranges import (
    Coverage,
    LayerTokenRange,
    intersect,
    pack_ranges,
    subtract,
    unpack_ranges,
)

spans = st.tuples(st.integers(0, 2), st.integers(0, 19), st.integers(1, 6)).map(
    lambda each: LayerTokenRange(each[0], each[1], min(20, each[1] + each[2]))
)


def tokens(token_ranges: list[LayerTokenRange]) -> set[tuple[int, int]]:
    return {(s.layer, t) for s in token_ranges for t in range(s.start, s.stop)}


def disjoint(token_ranges: list[LayerTokenRange]) -> list[LayerTokenRange]:
    kept: list[LayerTokenRange] = []
    for each in token_ranges:
        if not tokens(kept) & tokens([each]):
            kept.append(each)
    return kept


@given(st.lists(spans, max_size=12).map(disjoint), st.lists(spans, max_size=12).map(disjoint))
def test_an_intersection_has_what_both_have(
    some: list[LayerTokenRange], others: list[LayerTokenRange]
) -> None:
    both = intersect(some, others)
    assert tokens(both) == tokens(some) & tokens(others)
    assert len(tokens(both)) == sum(s.stop - s.start for s in both)
    assert all(a.layer != b.layer or a.stop < b.start for a, b in pairwise(both))


@given(st.lists(spans, max_size=12).map(disjoint), spans)
def test_a_difference_has_what_is_left(some: list[LayerTokenRange], gone: LayerTokenRange) -> None:
    assert tokens(subtract(some, gone)) == tokens(some) - tokens([gone])


@given(st.lists(spans, max_size=12).map(disjoint))
def test_gaps_are_what_has_not_landed(landed: list[LayerTokenRange]) -> None:
    coverage = Coverage(num_layers=3, start=0, stop=20)
    for each in landed:
        coverage.add(*each)
    everything = tokens([LayerTokenRange(layer, 0, 20) for layer in range(3)])
    assert tokens(coverage.gaps()) == everything - tokens(landed)
    assert unpack_ranges(pack_ranges(coverage.gaps())) == coverage.gaps()


@given(st.lists(st.tuples(spans, st.integers(1, 3)), max_size=40))
def test_leading_layers_are_those_before_the_first_gap(
    landings: list[tuple[LayerTokenRange, int]],
) -> None:
    """One short, so that layers are complete often: here by a bitmap that is looked at whole."""
    coverage = Coverage(num_layers=3, start=2, stop=8)
    landed = [[False] * 6 for _ in range(3)]
    for (layer, start, stop), num_layers in landings:
        try:
            coverage.add(layer, start, stop, num_layers)
        except ProtocolError:
            continue
        for each in landed[layer : layer + num_layers]:
            each[start - 2 : stop - 2] = [True] * (stop - start)
        num_leading = len(list(takewhile(all, landed)))
        assert coverage.num_leading_layers == num_leading
        assert coverage.complete == (num_leading == 3)


def test_a_later_layer_that_is_complete_leads_nothing() -> None:
    coverage = Coverage(num_layers=3, start=0, stop=4)
    assert coverage.num_leading_layers == 0
    coverage.add(1, 0, 4)
    assert coverage.num_leading_layers == 0
    coverage.add(0, 0, 3)
    assert coverage.num_leading_layers == 0
    coverage.add(0, 3, 4)
    assert coverage.num_leading_layers == 2
    coverage.add(2, 0, 4)
    assert coverage.num_leading_layers == 3


def is_refused(coverage: Coverage, layer: int, start: int, stop: int) -> bool:
    try:
        coverage.check(layer, start, stop)
    except ProtocolError:
        return True
    return False


@given(st.lists(st.tuples(spans, st.integers(1, 3)), max_size=12))
def test_layers_that_land_together_are_the_same_as_one_by_one(
    landings: list[tuple[LayerTokenRange, int]],
) -> None:
    together, apart = (Coverage(num_layers=3, start=0, stop=20) for _ in range(2))
    for (layer, start, stop), num_layers in landings:
        layers = range(layer, layer + num_layers)
        try:
            together.add(layer, start, stop, num_layers)
        except ProtocolError:
            # All or nothing: of one of them, some of it is not expected or landed before.
            assert any(is_refused(apart, each, start, stop) for each in layers)
        else:
            for each in layers:
                apart.add(each, start, stop)
        together.check_invariants()
        assert together.gaps() == apart.gaps()
        assert together.complete == apart.complete
        assert together.has_complete_layer == apart.has_complete_layer
