"""Page copies of layouts that can be checked by hand, and what is refused."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from baton.errors import LayoutMismatchError, ProtocolError
from baton.kv.copies import (
    BlockTable,
    CopyGroup,
    PageCopies,
    PagedSequence,
    apply_copies,
    compute_page_copies,
    compute_pieces,
)
from baton.kv.layout import KVLayout, TensorParallelShard

LAYOUT = KVLayout.gqa(2, 4, 8, block_size=4, dtype="int8")
PAGE_BYTES = 2 * 4 * 4 * 8
HEADS_FIRST = msgspec.structs.replace(LAYOUT, order="heads_first")


def paged(layout: KVLayout, blocks: list[int], first: int = 0) -> PagedSequence:
    return PagedSequence(layout, BlockTable(first, np.array(blocks, dtype=np.int64)))


def group(src: list[int], dst: list[int], spans: list[list[int]]) -> CopyGroup:
    arrays = (np.array(values, dtype=np.int64) for values in (src, dst, spans))
    return CopyGroup(*arrays)


@pytest.mark.parametrize("layout", [LAYOUT, HEADS_FIRST], ids=lambda layout: layout.order)
def test_full_pages_of_equal_layouts_are_one_span(layout: KVLayout) -> None:
    copies = compute_page_copies(
        paged(layout, [7, 3, 5]), paged(layout, [0, 9, 1]), 1, start=0, stop=12
    )
    assert copies.layer == 1
    (only,) = copies.groups
    assert only.spans.tolist() == [[0, 0, PAGE_BYTES]]
    assert only.src_pages.tolist() == [7, 3, 5]
    assert only.dst_pages.tolist() == [0, 9, 1]
    assert (copies.num_pages, copies.num_bytes) == (3, 3 * PAGE_BYTES)


def test_a_ragged_range_has_a_head_full_pages_and_a_tail() -> None:
    sequence = paged(LAYOUT, [0, 1, 2, 3])
    copies = compute_page_copies(sequence, sequence, 0, start=3, stop=14)
    found = {tuple(g.src_pages.tolist()): g.spans.tolist() for g in copies.groups}
    assert found == {
        (0,): [[96, 96, 32], [224, 224, 32]],  # token 3 of k, then of v
        (1, 2): [[0, 0, PAGE_BYTES]],
        (3,): [[0, 0, 64], [128, 128, 64]],
    }


def test_a_block_size_that_is_a_multiple() -> None:
    wide = msgspec.structs.replace(LAYOUT, block_size=8)
    copies = compute_page_copies(paged(LAYOUT, [0, 1]), paged(wide, [5]), 0, start=0, stop=8)
    spans = {int(g.src_pages[0]): g.spans.tolist() for g in copies.groups}
    assert spans == {
        0: [[0, 0, 128], [128, 256, 128]],
        1: [[0, 128, 128], [128, 384, 128]],
    }


def test_a_head_shard_gets_its_heads_only() -> None:
    shard = msgspec.structs.replace(LAYOUT, shard=TensorParallelShard(1, 2))
    copies = compute_page_copies(paged(LAYOUT, [0]), paged(shard, [0]), 0, start=0, stop=2)
    assert copies.groups[0].spans.tolist() == [
        [16, 0, 16],
        [48, 16, 16],
        [144, 64, 16],
        [176, 80, 16],
    ]


def test_shards_that_do_not_meet_exchange_nothing() -> None:
    shards = [msgspec.structs.replace(LAYOUT, shard=TensorParallelShard(r, 2)) for r in (0, 1)]
    copies = compute_page_copies(paged(shards[0], [0]), paged(shards[1], [0]), 0, start=0, stop=4)
    assert copies.groups == ()


OPAQUE = msgspec.structs.replace(LAYOUT, order="opaque", arrangement="a")


def test_opaque_pages_are_copied_whole_whatever_the_tokens() -> None:
    copies = compute_page_copies(
        paged(OPAQUE, [7, 3, 5]), paged(OPAQUE, [0, 9, 1]), 0, start=3, stop=9
    )
    assert all(g.spans.tolist() == [[0, 0, PAGE_BYTES]] for g in copies.groups)
    pairs = {(s, d) for g in copies.groups for s, d in zip(g.src_pages, g.dst_pages, strict=True)}
    assert pairs == {(7, 0), (3, 9), (5, 1)}
    assert copies.num_pages == 3


def test_an_opaque_shard_gets_the_units_of_its_heads() -> None:
    shard = msgspec.structs.replace(OPAQUE, shard=TensorParallelShard(1, 2))
    copies = compute_page_copies(paged(OPAQUE, [0]), paged(shard, [0]), 0, start=1, stop=2)
    assert copies.groups[0].spans.tolist() == [[PAGE_BYTES // 2, 0, PAGE_BYTES // 2]]


def test_an_opaque_latent_page_is_one_unit_on_every_shard() -> None:
    latent = KVLayout.mla(1, 24, block_size=4, dtype="int8")
    latent = msgspec.structs.replace(latent, order="opaque", arrangement="a")
    shard = msgspec.structs.replace(latent, shard=TensorParallelShard(3, 4))
    copies = compute_page_copies(paged(latent, [0]), paged(shard, [2]), 0, start=0, stop=3)
    assert copies.groups[0].spans.tolist() == [[0, 0, 4 * 24]]


def test_an_empty_range_copies_nothing() -> None:
    copies = compute_page_copies(paged(LAYOUT, []), paged(LAYOUT, []), 0, start=5, stop=5)
    assert copies == PageCopies(0, ())
    assert compute_pieces(4, 8, 5, 5).tolist() == [5]


def test_a_table_may_begin_after_a_cached_prefix() -> None:
    copies = compute_page_copies(
        paged(LAYOUT, [4, 5], first=2), paged(LAYOUT, [0, 1, 2, 3]), 0, start=8, stop=16
    )
    assert copies.groups[0].src_pages.tolist() == [4, 5]
    assert copies.groups[0].dst_pages.tolist() == [2, 3]


@pytest.mark.parametrize(
    ("sequence", "start", "stop"),
    [
        (paged(LAYOUT, [0, 1]), 0, 9),
        (paged(LAYOUT, [0, 1], first=1), 3, 8),
        (paged(LAYOUT, []), 0, 1),
        (paged(LAYOUT, [0]), 3, 2),
        (paged(LAYOUT, [0]), -1, 2),
    ],
)
def test_a_table_that_does_not_cover_the_tokens_is_refused(
    sequence: PagedSequence, start: int, stop: int
) -> None:
    enough = paged(LAYOUT, list(range(4)))
    with pytest.raises(ProtocolError):
        compute_page_copies(sequence, enough, 0, start=start, stop=stop)
    with pytest.raises(ProtocolError):
        compute_page_copies(enough, sequence, 0, start=start, stop=stop)


@pytest.mark.parametrize("num_kv_heads", [2, 8])
def test_layouts_of_two_models_are_refused(num_kv_heads: int) -> None:
    other = KVLayout.gqa(2, num_kv_heads, 8, block_size=4, dtype="int8")
    with pytest.raises(LayoutMismatchError, match="layer 0: k 4x8"):
        compute_page_copies(paged(LAYOUT, [0]), paged(other, [0]), 0, start=0, stop=4)


@pytest.mark.parametrize(
    ("src", "dst", "runs"),
    [
        ([], [], []),
        ([3], [4], [[3, 4, 1]]),
        ([1, 2, 3], [5, 6, 7], [[1, 5, 3]]),
        ([1, 2, 3], [5, 7, 8], [[1, 5, 1], [2, 7, 2]]),
        ([3, 2, 1], [3, 2, 1], [[3, 3, 1], [2, 2, 1], [1, 1, 1]]),
    ],
)
def test_runs(src: list[int], dst: list[int], runs: list[list[int]]) -> None:
    assert group(src, dst, [[0, 0, 8]]).runs == runs


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (group([0], [-1], [[0, 0, 8]]), "pages -1 to -1"),
        (group([4], [0], [[0, 0, 8]]), "pages 4 to 4 where there are 4"),
        (group([0], [0, 4], [[0, 0, 4]]), "pages 0 to 4"),
        (group([0], [0], [[0, 4, 8]]), "a span ends at byte 12 of 8"),
        (group([0], [0], [[1, 0, 8]]), "a span ends at byte 9 of 8"),
    ],
)
def test_copies_out_of_bounds_write_nothing(bad: CopyGroup, says: str) -> None:
    src, dst = np.ones((4, 8), dtype=np.uint8), np.zeros((4, 8), dtype=np.uint8)
    with pytest.raises(ProtocolError, match=says):
        apply_copies(PageCopies(0, (bad,)), src, dst)
    assert not dst.any()


def test_spans_larger_than_the_gather_buffer_are_copied_page_by_page() -> None:
    src = np.arange(3 << 21, dtype=np.uint8).reshape(3, 1 << 21)
    dst = np.zeros((3, 1 << 21), dtype=np.uint8)
    half = 1 << 20
    swap = group([0, 1, 2], [2, 1, 0], [[0, half, half], [half, 0, half]])
    apply_copies(PageCopies(0, (swap,)), src, dst)
    assert np.array_equal(dst, np.roll(src[::-1], half, axis=1))


def test_more_tiny_pages_than_the_gather_buffer_holds() -> None:
    rng = np.random.default_rng(5)
    src, dst = rng.integers(0, 256, (2, 700, 4096), np.uint8)
    pages, places = rng.permutation(700), rng.permutation(700)
    one_group = CopyGroup(pages, places, np.array([[0, 0, 4096]]))
    apply_copies(PageCopies(0, (one_group,)), src, dst)
    assert np.array_equal(dst[places], src[pages])


@pytest.mark.parametrize(
    ("sources", "targets", "num_slices"),
    [
        (range(1, 41), range(0, 80, 2), 2),  # evenly spaced: all pages at once
        ([*range(1, 40), 50], range(0, 80, 2), None),
        (range(40, 0, -1), range(0, 80, 2), None),
        ([7] * 40, range(0, 80, 2), None),
    ],
    ids=["even", "uneven", "backwards", "one page"],
)
def test_parts_of_many_pages(
    sources: list[int], targets: list[int], num_slices: int | None
) -> None:
    copies = group([*sources], [*targets], [[0, 64, 16], [32, 8, 24]])
    found = copies.slices
    assert (None if found is None else len(found)) == num_slices
    source = np.random.default_rng(0).integers(0, 256, (60, 128), dtype=np.uint8)
    target = np.zeros((100, 96), np.uint8)
    apply_copies(PageCopies(0, (copies,)), source, target)
    expected = np.zeros_like(target)
    for src, dst in zip(sources, targets, strict=True):
        expected[dst, 64:80], expected[dst, 8:32] = source[src, :16], source[src, 32:56]
    assert np.array_equal(target, expected)
