"""Opaque pages move by whole units of heads, against a reference that knows nothing but numpy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.kv.copies import (
    BlockTable,
    PageCopies,
    PagedSequence,
    apply_copies,
    compute_page_copies,
    compute_pieces,
)
from baton.kv.digest import DIGEST_BYTES, compute_digests, locate_pieces
from baton.kv.geometry import page_geometry, shared_heads
from baton.kv.layout import KVLayout, LayerLayout, TensorParallelShard
from tests.examples import examples

if TYPE_CHECKING:
    from numpy.typing import NDArray

MAX_TOKENS = 60
QUICK = settings(max_examples=examples(75), deadline=None)


@dataclass(frozen=True)
class Side:
    """One worker: pages uint8 `[block, held head, unit]` full of noise, and who is where."""

    sequence: PagedSequence
    units: NDArray[np.uint8]
    heads: list[int]

    @property
    def pages(self) -> NDArray[np.uint8]:
        return self.units.reshape(len(self.units), -1)

    def place(self, token: int, head: int) -> tuple[int, int]:
        """Block, and place of the head in its pages."""
        table, block_size = self.sequence.table, self.sequence.layout.block_size
        return int(table.blocks[token // block_size - table.first]), self.heads.index(head)


@dataclass(frozen=True)
class Case:
    src: Side
    dst: Side
    start: int
    stop: int

    @property
    def copies(self) -> PageCopies:
        return compute_page_copies(
            self.src.sequence, self.dst.sequence, 0, start=self.start, stop=self.stop
        )

    @property
    def bounds(self) -> NDArray[np.int64]:
        block_size = self.src.sequence.layout.block_size
        return compute_pieces(block_size, block_size, self.start, self.stop)

    @property
    def shared(self) -> list[int]:
        return [head for head in self.src.heads if head in self.dst.heads]

    def digests(self, side: Side) -> list[bytes]:
        heads = shared_heads(self.src.sequence.layout, self.dst.sequence.layout, 0)
        raw = compute_digests(
            page_geometry(side.sequence.layout, 0),
            [side.pages],
            locate_pieces(side.sequence, self.bounds),
            heads=heads,
        )
        return [raw[at : at + DIGEST_BYTES] for at in range(0, len(raw), DIGEST_BYTES)]

    def units_of(self, side: Side) -> list[bytes]:
        """Of each piece, the shared heads' units as they lie."""
        return [
            b"".join(side.units[side.place(int(token), head)].tobytes() for head in self.shared)
            for token in self.bounds[:-1]
        ]


def held(num_heads: int, rank: int, size: int) -> list[int]:
    """Heads of one of `size` workers, said another way than the code does."""
    owners = [head for head in range(num_heads) for _ in range(max(1, size // num_heads))]
    share = len(owners) // size
    return sorted(set(owners[rank * share : (rank + 1) * share]))


@st.composite
def sides(draw: st.DrawFn, layer: LayerLayout, block_size: int, start: int, stop: int) -> Side:
    size = draw(st.sampled_from([1, 2, 3, 4, 6, 12]))
    num_heads = layer.planes[0].num_heads
    if num_heads % size and size % num_heads:
        size = 1
    rank = draw(st.integers(0, size - 1))
    layout = KVLayout(
        (layer,),
        block_size,
        "bfloat16",
        order="opaque",
        shard=TensorParallelShard(rank, size),
        arrangement="engine/isa/LBHNC",
    )
    is_latent = layer.planes[0].name == "latent"
    heads = list(range(num_heads)) if is_latent else held(num_heads, rank, size)
    unit_bytes = block_size * sum(plane.head_dim for plane in layer.planes) * 2
    first = draw(st.integers(0, start // block_size))
    needed = -(-stop // block_size) - first
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    blocks = rng.permutation(needed + 2)[:needed]
    # Few values: now and then two units are equal by chance, and so must their digests be.
    units = rng.integers(0, 2, (needed + 2, len(heads), unit_bytes), dtype=np.uint8)
    return Side(PagedSequence(layout, BlockTable(first, blocks)), units, heads)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    dims = st.integers(1, 3)
    gqa = st.builds(
        LayerLayout.gqa, num_kv_heads=st.sampled_from([1, 2, 3, 4, 6, 12]), head_dim=dims
    )
    layer = draw(gqa | st.builds(LayerLayout.mla, latent_dim=dims))
    block_size = draw(st.integers(1, 17))
    start = draw(st.integers(0, MAX_TOKENS))
    stop = draw(st.integers(start, MAX_TOKENS))
    src, dst = (draw(sides(layer, block_size, start, stop)) for _ in range(2))
    return Case(src, dst, start, stop)


@QUICK
@given(cases())
def test_the_shared_heads_units_are_copied_and_no_other_byte(case: Case) -> None:
    expected = case.dst.units.copy()
    for token in range(case.start, case.stop):
        for head in case.shared:
            expected[case.dst.place(token, head)] = case.src.units[case.src.place(token, head)]
    apply_copies(case.copies, case.src.pages, case.dst.pages)
    assert np.array_equal(case.dst.units, expected)


@QUICK
@given(cases())
def test_a_page_is_one_span_and_moves_once(case: Case) -> None:
    groups = case.copies.groups
    assert all(len(group.spans) == 1 for group in groups)
    moved = [page for group in groups for page in group.dst_pages.tolist()]
    assert len(moved) == len(set(moved)) == (len(case.bounds) - 1 if case.shared else 0)
    if case.src.heads == case.dst.heads:
        assert all(g.spans.tolist() == [[0, 0, case.src.pages.shape[1]]] for g in groups)


@QUICK
@given(cases())
def test_digests_are_equal_exactly_where_the_shared_units_are(case: Case) -> None:
    ours, theirs = case.units_of(case.src), case.units_of(case.dst)
    equal = [one == other for one, other in zip(ours, theirs, strict=True)]
    sent, found = case.digests(case.src), case.digests(case.dst)
    assert [one == other for one, other in zip(sent, found, strict=True)] == equal
    apply_copies(case.copies, case.src.pages, case.dst.pages)
    assert case.digests(case.dst) == sent


@QUICK
@given(cases(), st.data())
def test_one_changed_byte_changes_exactly_the_digest_of_its_page(
    case: Case, data: st.DataObject
) -> None:
    if case.start == case.stop or not case.shared:
        return
    before = case.digests(case.dst)
    piece = data.draw(st.integers(0, len(before) - 1))
    place = case.dst.place(int(case.bounds[piece]), data.draw(st.sampled_from(case.shared)))
    unit = case.dst.units[place]
    unit[data.draw(st.integers(0, len(unit) - 1))] ^= 0x40
    after = case.digests(case.dst)
    assert [i for i in range(len(before)) if before[i] != after[i]] == [piece]
