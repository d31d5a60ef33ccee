"""Prepared lists of page copies: kept for later layers, and the same as computed anew."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.kv.copies import (
    BlockTable,
    CopyGroup,
    CopyPlanner,
    PageCopies,
    PagedSequence,
    apply_copies,
    compute_page_copies,
)
from baton.kv.layout import KVLayout, LayerLayout
from tests.examples import examples

QUICK = settings(max_examples=examples(75), deadline=None)
NUM_PAGES = 300
WIDE, NARROW = (LayerLayout.gqa(num_kv_heads=2, head_dim=dim, v_head_dim=dim) for dim in (4, 2))
LAYERS = (WIDE, WIDE, NARROW, WIDE)
LAYOUTS = [KVLayout(LAYERS, block_size=size, dtype="int8") for size in (4, 4, 6)]
TABLES = [BlockTable(0, np.random.default_rng(seed).permutation(40)) for seed in (1, 2, 2)]


@st.composite
def groups_of_whole_pages(draw: st.DrawFn) -> CopyGroup:
    """Long runs, short ones or single pages; tiny pages to large ones; no destination twice."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    num_cuts = draw(st.sampled_from([0, 3, 40, 400]))
    sides = []
    for _ in range(2):
        cuts = np.unique(rng.integers(1, NUM_PAGES, num_cuts))
        pieces = np.split(np.arange(NUM_PAGES), cuts)
        sides.append(np.concatenate([pieces[i] for i in rng.permutation(len(pieces))]))
    num_pages = draw(st.integers(0, NUM_PAGES))
    page_bytes = draw(st.sampled_from([1, 24, 64, 4096, 4097, 9000]))
    src, dst = sides
    return CopyGroup(src[:num_pages], dst[:num_pages], np.array([[0, 0, page_bytes]]))


@QUICK
@given(groups_of_whole_pages(), st.integers(0, 2**32))
def test_whole_pages_arrive_whatever_their_size_and_runs(group: CopyGroup, seed: int) -> None:
    page_bytes = int(group.spans[0, 2])
    rng = np.random.default_rng(seed)
    src, dst = rng.integers(0, 256, (2, NUM_PAGES, page_bytes), np.uint8)
    expected = dst.copy()
    for s, d in zip(group.src_pages.tolist(), group.dst_pages.tolist(), strict=True):
        expected[d] = src[s]
    for _ in range(2):  # computed, then kept
        target = dst.copy()
        apply_copies(PageCopies(0, (group,)), src, target)
        assert np.array_equal(target, expected)


@QUICK
@given(groups_of_whole_pages())
def test_runs_are_as_few_as_can_be_and_their_number_is_known_without_them(
    group: CopyGroup,
) -> None:
    pairs = list(zip(group.src_pages.tolist(), group.dst_pages.tolist(), strict=True))
    num_runs = group.num_runs
    assert [(s + i, d + i) for s, d, length in group.runs for i in range(length)] == pairs
    breaks = [(s + 1, d + 1) != other for (s, d), other in pairwise(pairs)]
    assert num_runs == len(group.runs) == (1 + sum(breaks) if pairs else 0)


@st.composite
def questions(draw: st.DrawFn) -> tuple[int, int, int, int, int, int, int]:
    """Indices of two layouts and two tables; a layer; tokens. Few of each: repeats are likely."""
    start, stop = draw(st.sampled_from([(0, 40), (0, 41), (7, 40)]))
    pick = st.integers(0, 2)
    return (*(draw(pick) for _ in range(4)), draw(st.integers(0, 3)), start, stop)


@QUICK
@given(st.lists(questions(), min_size=1, max_size=12))
def test_a_planner_answers_as_if_it_remembered_nothing(
    asked: list[tuple[int, int, int, int, int, int, int]],
) -> None:
    planners: dict[tuple[int, int], CopyPlanner] = {}
    for src_layout, dst_layout, src_table, dst_table, layer, start, stop in asked:
        # Sequences are made anew each time, as the handoff does.
        src = PagedSequence(LAYOUTS[src_layout], TABLES[src_table])
        dst = PagedSequence(LAYOUTS[dst_layout], TABLES[dst_table])
        planner = planners.setdefault((src_layout, dst_layout), CopyPlanner(src.layout, dst.layout))
        found = planner.plan(src, dst, layer, start=start, stop=stop)
        expected = compute_page_copies(src, dst, layer, start=start, stop=stop)
        assert found.layer == expected.layer == layer
        for one, other in zip(found.groups, expected.groups, strict=True):
            assert np.array_equal(one.src_pages, other.src_pages)
            assert np.array_equal(one.dst_pages, other.dst_pages)
            assert np.array_equal(one.spans, other.spans)


def test_layers_alike_have_the_very_same_groups_and_others_do_not() -> None:
    planner, table = CopyPlanner(LAYOUTS[0], LAYOUTS[0]), TABLES[0]

    def plan(layer: int) -> PageCopies:
        src, dst = (PagedSequence(LAYOUTS[0], table) for _ in range(2))
        return planner.plan(src, dst, layer, start=0, stop=40)

    first, second, narrow = plan(0), plan(1), plan(2)
    assert first.groups
    assert second.groups is first.groups
    assert (first.layer, second.layer) == (0, 1)
    assert narrow.groups is not first.groups
    joined = [planner.join(plan(layer), range(layer, len(LAYERS))) for layer in range(len(LAYERS))]
    assert [(copies.layer, copies.num_layers) for copies in joined] == [
        (0, 2),
        (1, 1),
        (2, 1),
        (3, 1),
    ]
    assert planner.join(plan(0), range(1)).num_layers == 1
