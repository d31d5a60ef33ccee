"""Page copies, digests and the canonical gather agree for any two layouts of one model."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING
from unittest import mock

import msgspec
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.kv import copies as copies_module
from baton.kv.canonical import read_canonical, write_canonical
from baton.kv.copies import (
    BlockTable,
    PageCopies,
    PagedSequence,
    apply_copies,
    apply_copies_in_parts,
    blocks_holding,
    compute_page_copies,
    compute_pieces,
    count_blocks,
)
from baton.kv.digest import DIGEST_BYTES, PieceDigests, compute_digests, locate_pieces
from baton.kv.geometry import page_geometry, shared_heads
from baton.kv.layout import KVLayout, LayerLayout, TensorParallelShard, check_compatible
from tests.examples import examples

if TYPE_CHECKING:
    from numpy.typing import NDArray

MAX_TOKENS = 120
SPARE_BLOCKS = 3
QUICK = settings(max_examples=examples(50), deadline=None)


@dataclass(frozen=True)
class Side:
    """One worker: a sequence, and the pages of one layer filled with noise."""

    sequence: PagedSequence
    pages: NDArray[np.uint8]

    @property
    def layout(self) -> KVLayout:
        return self.sequence.layout


@dataclass(frozen=True)
class Case:
    src: Side
    dst: Side
    start: int
    stop: int

    @property
    def bounds(self) -> NDArray[np.int64]:
        sizes = self.src.layout.block_size, self.dst.layout.block_size
        return compute_pieces(*sizes, self.start, self.stop)

    @property
    def copies(self) -> PageCopies:
        return compute_page_copies(
            self.src.sequence, self.dst.sequence, 0, start=self.start, stop=self.stop
        )

    @property
    def heads(self) -> range:
        return shared_heads(self.src.layout, self.dst.layout, 0)


@st.composite
def models(draw: st.DrawFn) -> KVLayout:
    """An unsharded layout of one layer."""
    dims = st.integers(1, 5)
    gqa = st.builds(
        LayerLayout.gqa, num_kv_heads=st.sampled_from([1, 2, 4]), head_dim=dims, v_head_dim=dims
    )
    layer = draw(gqa | st.builds(LayerLayout.mla, latent_dim=dims))
    return KVLayout((layer,), block_size=1, dtype=draw(st.sampled_from(["int8", "bfloat16"])))


@st.composite
def sides(draw: st.DrawFn, model: KVLayout, start: int, stop: int) -> Side:
    size = draw(st.sampled_from([1, 2, 4, 8]))
    layout = msgspec.structs.replace(
        model,
        block_size=draw(st.integers(1, 40)),
        order=draw(st.sampled_from(["canonical", "heads_first"])),
        shard=TensorParallelShard(draw(st.integers(0, size - 1)), size),
    )
    first = draw(st.integers(0, start // layout.block_size))
    needed = -(-stop // layout.block_size) - first
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    blocks = rng.permutation(needed + SPARE_BLOCKS)[:needed]
    if draw(st.booleans()):
        blocks = np.sort(blocks)
    shape = (needed + SPARE_BLOCKS, layout.page_bytes(0))
    pages = rng.integers(0, 256, shape, dtype=np.uint8)
    return Side(PagedSequence(layout, BlockTable(first, blocks)), pages)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    model = draw(models())
    start = draw(st.integers(0, MAX_TOKENS))
    stop = draw(st.integers(start, MAX_TOKENS))
    return Case(draw(sides(model, start, stop)), draw(sides(model, start, stop)), start, stop)


def transplant(case: Case) -> NDArray[np.uint8]:
    """What dst's pages must look like afterwards, by the plain gather and scatter."""
    expected = case.dst.pages.copy()
    data = read_canonical(
        case.src.sequence, 0, case.src.pages, start=case.start, stop=case.stop, heads=case.heads
    )
    write_canonical(case.dst.sequence, 0, expected, data, start=case.start, heads=case.heads)
    return expected


@QUICK
@given(cases())
def test_copies_do_what_the_plain_way_does_and_touch_no_other_byte(case: Case) -> None:
    check_compatible(case.src.layout, case.dst.layout)
    expected = transplant(case)
    apply_copies(case.copies, case.src.pages, case.dst.pages)
    assert np.array_equal(case.dst.pages, expected)


@QUICK
@given(cases())
def test_num_bytes_is_what_the_shared_heads_have(case: Case) -> None:
    data = read_canonical(
        case.src.sequence, 0, case.src.pages, start=case.start, stop=case.stop, heads=case.heads
    )
    assert case.copies.num_bytes == len(data)


@QUICK
@given(cases())
def test_spans_are_maximal_and_disjoint(case: Case) -> None:
    for group in case.copies.groups:
        ends = group.spans[:-1, :2] + group.spans[:-1, 2:]
        begins = group.spans[1:, :2]
        assert (begins[:, 1] >= ends[:, 1]).all()
        assert not (begins == ends).all(axis=1).any()


@QUICK
@given(cases())
def test_digests_are_equal_on_both_sides_after_the_copy(case: Case) -> None:
    apply_copies(case.copies, case.src.pages, case.dst.pages)
    sent, found = (
        compute_digests(
            page_geometry(side.sequence.layout, 0),
            [side.pages],
            locate_pieces(side.sequence, case.bounds),
            heads=case.heads,
        )
        for side in (case.src, case.dst)
    )
    assert sent == found
    assert len(sent) == DIGEST_BYTES * (len(case.bounds) - 1)


@QUICK
@given(cases(), st.integers(1, 4096))
def test_digests_made_part_by_part_are_those_of_the_pages_afterwards(
    case: Case, part_bytes: int
) -> None:
    copied: tuple[list[tuple[int, int]], list[tuple[int, int]]] = ([], [])
    sides = (case.src, case.dst)
    pieces = [locate_pieces(side.sequence, case.bounds) for side in sides]
    geometries = [page_geometry(side.layout, 0) for side in sides]
    expected = case.dst.pages.copy()
    apply_copies(case.copies, case.src.pages, expected)
    first, num_layers = 5, 3
    copies = PageCopies(first, case.copies.groups, num_layers)
    arrays = [
        [case.src.pages] * num_layers,
        [case.dst.pages.copy() for _ in range(num_layers)],
    ]
    digests = [
        PieceDigests(geometry, pages, each, heads=case.heads, layer=first)
        for geometry, pages, each in zip(geometries, arrays, pieces, strict=True)
    ]

    def look(side: int, layers: range, pages: list[int]) -> None:
        copied[side].extend((layer, page) for layer in layers for page in pages)
        if pieces[side].has_one_in_each_block:
            digests[side].add_pages(layers, pages)

    with mock.patch.object(copies_module, "PART_BYTES", part_bytes):
        apply_copies_in_parts(copies, *arrays, read=partial(look, 0), written=partial(look, 1))
    assert all((pages == expected).all() for pages in arrays[1])
    for side, name in enumerate(("src_pages", "dst_pages")):
        assert sorted(copied[side]) == sorted(
            (layer, page)
            for layer in copies.layers
            for group in copies.groups
            for page in getattr(group, name).tolist()
        )
        alone = compute_digests(geometries[side], arrays[side][:1], pieces[side], heads=case.heads)
        assert digests[side].finish() == alone * num_layers


@QUICK
@given(cases(), st.data())
def test_one_changed_byte_changes_exactly_the_digest_of_its_piece(
    case: Case, data: st.DataObject
) -> None:
    before = digest_list(case.dst, case)
    length = len(before)
    payload = read_canonical(
        case.dst.sequence, 0, case.dst.pages, start=case.start, stop=case.stop, heads=case.heads
    )
    if len(payload) == 0:
        return
    token = data.draw(st.integers(case.start, case.stop - 1))
    one = read_canonical(
        case.dst.sequence, 0, case.dst.pages, start=token, stop=token + 1, heads=case.heads
    )
    one[data.draw(st.integers(0, len(one) - 1))] ^= 0x40
    write_canonical(case.dst.sequence, 0, case.dst.pages, one, start=token, heads=case.heads)
    after = digest_list(case.dst, case)
    hit = int(np.searchsorted(case.bounds, token, side="right")) - 1
    assert [i for i in range(length) if before[i] != after[i]] == [hit]


def digest_list(side: Side, case: Case) -> list[bytes]:
    raw = compute_digests(
        page_geometry(side.sequence.layout, 0),
        [side.pages],
        locate_pieces(side.sequence, case.bounds),
        heads=case.heads,
    )
    return [raw[i : i + DIGEST_BYTES] for i in range(0, len(raw), DIGEST_BYTES)]


@QUICK
@given(st.integers(1, 40), st.integers(1, 40), st.integers(0, 300), st.integers(0, 300))
def test_pieces_partition_the_range_at_every_page_turn(
    src_block_size: int, dst_block_size: int, one: int, other: int
) -> None:
    start, stop = sorted((one, other))
    bounds = compute_pieces(src_block_size, dst_block_size, start, stop).tolist()
    turns = {
        t for t in range(start + 1, stop) if t % src_block_size == 0 or t % dst_block_size == 0
    }
    assert bounds == sorted({start, stop} | turns)


@QUICK
@given(cases())
def test_runs_unroll_to_the_page_pairs(case: Case) -> None:
    for group in case.copies.groups:
        runs = group.runs
        unrolled = [(s + i, d + i) for s, d, n in runs for i in range(n)]
        assert unrolled == list(
            zip(group.src_pages.tolist(), group.dst_pages.tolist(), strict=True)
        )
        for (s, d, n), (next_s, next_d, _) in pairwise(runs):
            assert (s + n, d + n) != (next_s, next_d)


@QUICK
@given(cases())
def test_canonical_round_trip_is_independent_of_the_layout(case: Case) -> None:
    sequence, pages = case.src.sequence, case.src.pages.copy()
    data = read_canonical(sequence, 0, pages, start=case.start, stop=case.stop)
    write_canonical(sequence, 0, pages, data, start=case.start)
    assert np.array_equal(pages, case.src.pages)


@given(st.integers(0, 60), st.integers(0, 60), st.integers(1, 20))
def test_blocks_of_tokens_are_those_that_hold_one_of_them(
    start: int, num_tokens: int, block_size: int
) -> None:
    stop = start + num_tokens
    holding = {token // block_size for token in range(start, stop)}
    assert list(blocks_holding(start, stop, block_size)) == sorted(holding)
    assert count_blocks(stop, block_size) == len(blocks_holding(0, stop, block_size))


@given(st.integers(0, 3), st.integers(0, 60), st.integers(0, 60), st.integers(1, 20))
def test_a_slice_of_a_table_holds_the_same_tokens_in_the_same_blocks(
    skipped: int, at: int, num_tokens: int, block_size: int
) -> None:
    start = skipped * block_size + at
    stop = start + num_tokens
    num_blocks = count_blocks(stop, block_size) - skipped
    table = BlockTable(skipped, np.random.default_rng(3).permutation(num_blocks))
    layout = KVLayout.gqa(1, 1, 8, block_size=block_size, dtype="int8")
    part = table.slice_tokens(start, stop, block_size)
    tokens = np.arange(start, stop)
    whole, some = (PagedSequence(layout, each) for each in (table, part))
    some.check_covers(start, stop)
    assert np.array_equal(some.blocks_of(tokens), whole.blocks_of(tokens))
    assert len(part.blocks) == len(set(part.blocks)) == len(set(some.blocks_of(tokens)))
