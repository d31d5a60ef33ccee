"""KV through bodies of entries: whatever the layouts, the same tokens' bytes on the other side."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.errors import ProtocolError
from baton.handoff.kv_views import KVView
from baton.handoff.pool_mode.block_copier import (
    BlockCopier,
    EntryBodies,
    TokenSegment,
    hash_segments,
)
from baton.kv.canonical import read_canonical, write_canonical
from baton.kv.copies import BlockTable, PagedSequence
from baton.kv.geometry import page_geometry, shared_heads, view_planes
from baton.kv.identity import HashDomain
from baton.kv.layout import KVLayout, LayerLayout, TensorParallelShard
from baton.store.entry_format import EntryFormat
from baton.transfer.region import allocate_host_region, release_region, view_pages
from tests.examples import examples
from tests.integration.handoff_nodes import ConvertedPages

if TYPE_CHECKING:
    from numpy.typing import NDArray

SIZES = st.sampled_from([1, 3, 8, 16, 24])
LAYERS = {
    "gqa": (LayerLayout.gqa(4, 6), LayerLayout.gqa(2, 8)),
    "mla": (LayerLayout.mla(20),),
}


class ShownPages(ConvertedPages):
    """See `ShowsTokens`. Nothing may be staged."""

    def token_planes(self, layer: int) -> list[NDArray[np.uint8]]:
        return view_planes(self.own[layer], page_geometry(self.layout, layer), None)

    def gather(self, *_: object) -> None:
        raise AssertionError

    def scatter(self, *_: object) -> None:
        raise AssertionError


class Engine:
    """One worker's pages, random, and its way to the store; `staged`: through few pages, if any."""

    def __init__(
        self,
        layout: KVLayout,
        num_tokens: int,
        seed: int,
        *,
        staged: type[ConvertedPages] | None = None,
    ) -> None:
        rng = np.random.default_rng(seed)
        num_blocks = -(-num_tokens // layout.block_size) + 3
        self.layout = layout
        self.own = [
            rng.integers(0, 256, (num_blocks, layout.page_bytes(layer)), dtype=np.uint8)
            for layer in range(layout.num_layers)
        ]
        self.table = BlockTable(0, rng.permutation(num_blocks))
        if staged:
            shown = msgspec.structs.replace(layout, order="canonical")
            region = allocate_host_region([(14, len(pages[0])) for pages in self.own])
            self.view = KVView(shown, region, staged(layout, self.own, shown, region))
        else:
            region = allocate_host_region([pages.shape for pages in self.own])
            for layer, pages in enumerate(self.own):
                self.own[layer] = view_pages(region.memory, region.arrays[layer])
                self.own[layer][:] = pages
            self.view = KVView(layout, region)

    def read(self, layer: int, start: int, stop: int) -> NDArray[np.uint8]:
        here = PagedSequence(self.layout, self.table)
        return read_canonical(here, layer, self.own[layer], start=start, stop=stop)

    def close(self) -> None:
        self.own.clear()
        release_region(self.view.region)


def batches(
    copier: BlockCopier, segments: tuple[TokenSegment, ...]
) -> list[tuple[TokenSegment, ...]]:
    found = []
    while segments:
        batch = copier.take_batch(segments)
        assert batch
        assert len({segment.stop - segment.start for segment in batch}) == 1
        found.append(tuple(batch))
        segments = segments[len(batch) :]
    return found


def orders(shape: str) -> st.SearchStrategy[str]:
    return st.sampled_from(["canonical", "heads_first"] if shape == "gqa" else ["canonical"])


@pytest.mark.parametrize("staged", [ConvertedPages, ShownPages])
def test_a_page_whose_tokens_come_in_two_batches_keeps_both(
    staged: type[ConvertedPages],
) -> None:
    layout = KVLayout(LAYERS["gqa"], 24, "float16")
    entry_format = EntryFormat.of(layout, block_size=8, num_parts=1)
    segments = hash_segments(HashDomain("m", "", 8), np.arange(60, dtype=np.int32))
    source, target = Engine(layout, 60, 1), Engine(layout, 60, 2, staged=staged)
    takes, gives = BlockCopier(source.view, entry_format), BlockCopier(target.view, entry_format)
    assert [batch[-1].stop for batch in batches(takes, segments)] == [56, 60]
    for batch in batches(takes, segments):
        gives.scatter(takes.gather(batch, source.table), batch, start=0, table=target.table)
    for layer in range(2):
        assert (target.read(layer, 0, 60) == source.read(layer, 0, 60)).all()
    source.close()
    target.close()


@settings(deadline=None, max_examples=examples(30))
@given(data=st.data(), shape=st.sampled_from(list(LAYERS)), num_tokens=st.integers(1, 60))
def test_what_one_engine_keeps_another_takes(
    data: st.DataObject, shape: str, num_tokens: int
) -> None:
    layers = LAYERS[shape]
    in_store = data.draw(SIZES, "store's block size")
    num_parts = data.draw(st.sampled_from([1, 2]), "parts")
    source_layout, target_layout = (
        KVLayout(layers, data.draw(SIZES), "float16", data.draw(orders(shape))) for _ in range(2)
    )
    entry_format = EntryFormat.of(source_layout, block_size=in_store, num_parts=num_parts)
    segments = hash_segments(HashDomain("m", "", in_store), np.arange(num_tokens, dtype=np.int32))
    assert [segments[0].start, segments[-1].stop] == [0, num_tokens]
    add_stored: dict[tuple[bytes, int], bytes] = {}
    staged = draw_staging(data, source_layout, in_store)
    sizes = data.draw(st.sampled_from(range(1, num_parts + 1)), "ranks that prefill")
    full_layout = Engine(source_layout, num_tokens, 1)
    for rank in range(sizes):
        shard = TensorParallelShard(rank, sizes)
        layout = msgspec.structs.replace(source_layout, shard=shard)
        engine = Engine(layout, num_tokens, 1, staged=staged)
        copy_heads(full_layout, engine, num_tokens)
        copier = BlockCopier(engine.view, entry_format)
        for batch in batches(copier, segments):
            for part, bodies in zip(copier.parts, copier.gather(batch, engine.table), strict=True):
                for segment, row in zip(batch, bodies.rows, strict=True):
                    add_stored[segment.block_hash, part] = row.tobytes()
        engine.close()
    assert len(add_stored) == len(segments) * num_parts
    start = data.draw(st.integers(0, (num_tokens - 1) // target_layout.block_size), "cached")
    start *= target_layout.block_size
    staged = draw_staging(data, target_layout, in_store)
    target = Engine(target_layout, num_tokens, 2, staged=staged)
    before = [target.read(layer, 0, start) for layer in range(len(layers))]
    copier = BlockCopier(target.view, entry_format)
    for batch in batches(copier, tuple(segment for segment in segments if segment.stop > start)):
        found = copier.allocate_bodies(batch)
        for part, bodies in zip(copier.parts, found, strict=True):
            fill(bodies, [add_stored[segment.block_hash, part] for segment in batch])
        first = start // target_layout.block_size
        lacking = BlockTable(first, target.table.blocks[first:])
        copier.scatter(found, batch, start=start, table=lacking)
    for layer in range(len(layers)):
        assert (target.read(layer, 0, start) == before[layer]).all()
        add_landed = target.read(layer, start, num_tokens)
        assert (add_landed == full_layout.read(layer, start, num_tokens)).all()
    target.close()
    full_layout.close()


def draw_staging(
    data: st.DataObject, layout: KVLayout, in_store: int
) -> type[ConvertedPages] | None:
    staged = data.draw(st.sampled_from([None, ConvertedPages, ShownPages]), "staged")
    fits = 12 * layout.block_size >= in_store
    return staged if fits or staged is not ConvertedPages else None


def test_blocks_that_there_are_not_are_refused() -> None:
    layout = KVLayout(LAYERS["gqa"], 8, "float16")
    entry_format = EntryFormat.of(layout, block_size=8, num_parts=1)
    engine = Engine(layout, 16, 1, staged=ShownPages)
    copier = BlockCopier(engine.view, entry_format)
    segments = hash_segments(HashDomain("m", "", 8), np.arange(16, dtype=np.int32))
    bodies = copier.allocate_bodies(segments)
    for blocks in ([0, -1], [0, len(engine.own[0])]):
        table = BlockTable(0, np.array(blocks))
        with pytest.raises(ProtocolError, match="pages"):
            copier.scatter(bodies, segments, start=0, table=table)
    with pytest.raises(ProtocolError, match="where the blocks have"):
        copier.gather(segments, BlockTable(0, np.array([1])))
    engine.close()


def fill(bodies: EntryBodies, rows: list[bytes]) -> None:
    for row, body in zip(bodies.rows, rows, strict=True):
        row[:] = np.frombuffer(body, np.uint8)


def copy_heads(full_layout: Engine, rank: Engine, num_tokens: int) -> None:
    """Give a rank its heads of what one worker has computed."""
    for layer in range(full_layout.layout.num_layers):
        heads = shared_heads(full_layout.layout, rank.layout, layer)
        data = read_canonical(
            PagedSequence(full_layout.layout, full_layout.table),
            layer,
            full_layout.own[layer],
            start=0,
            stop=num_tokens,
            heads=heads,
        )
        sequence = PagedSequence(rank.layout, rank.table)
        write_canonical(sequence, layer, rank.own[layer], data, start=0)
