"""KV between a worker's pages and the store's entries, some pieces at a time."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from baton.errors import ConfigError
from baton.handoff.kv_views import KVView, ShowsTokens
from baton.kv.canonical import read_canonical, write_canonical
from baton.kv.copies import (
    BlockTable,
    PagedSequence,
    apply_copies,
    check_pages,
    compute_page_copies,
)
from baton.kv.geometry import page_geometry, shared_heads, view_planes
from baton.kv.identity import BlockHash, HashDomain, compute_block_hashes, compute_tail_hash
from baton.kv.token_slices import TokenPages, find_token_slices
from baton.transfer.region import view_pages

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from baton.handoff.interface import StreamPosition
    from baton.kv.layout import KVLayout
    from baton.store.entry_format import EntryFormat

BATCH_BYTES: Final = 8 << 20
"""Of bodies in hand at once: fits a processor's cache, and gives the others their turn."""


def allocate_bytes(num_bytes: int) -> NDArray[np.uint8]:
    """New memory, not zeroed."""
    return np.empty(num_bytes, np.uint8)


@dataclass(frozen=True, slots=True)
class EntryBodies:
    """One part's bodies of a batch, uint8 `[num_pieces, body_bytes]`; `layout` is a body's."""

    layout: KVLayout
    rows: NDArray[np.uint8]

    def part(self, start: int, stop: int) -> EntryBodies:
        """Those of pieces `[start, stop)`."""
        return EntryBodies(self.layout, self.rows[start:stop])

    def pages(self) -> Iterator[NDArray[np.uint8]]:
        """Each layer's share of them, `[num_pieces, page_bytes]`."""
        at = 0
        for layer in range(self.layout.num_layers):
            stop = at + self.layout.page_bytes(layer)
            yield self.rows[:, at:stop]
            at = stop


@dataclass(frozen=True, slots=True)
class _Span:
    """The engine's blocks that hold some tokens, and the KV view's pages for them."""

    blocks: NDArray[np.int64]
    pages: BlockTable


class BlockCopier:
    """Copies batches: adjacent segments of one length. Owner: the pool's thread.

    Through the staging pages of a KV view that has some, but where it `ShowsTokens`.
    `scatter` may be called by the engine's thread, too: one copy at a time, none of which waits for
    anything but memory. No other component stages through the KV view's region.
    Pages of a GPU are copied once it has reached `after`; the call waits until they are in place.
    """

    def __init__(self, view: KVView, entry_format: EntryFormat) -> None:
        """Check that the two fit.

        Raises:
            ConfigError: the KV view's pages have no canonical order, or too few of them are staged.
        """
        layout = view.layout
        if layout.order == "opaque":
            raise ConfigError(f"pages arranged as {layout.arrangement} cannot be kept in a store")
        self._view, self._layout, self._entry_format = view, layout, entry_format
        staging = view.staging
        self._in_place = staging if isinstance(staging, ShowsTokens) else None
        is_staged = staging is not None and self._in_place is None
        self._pages = [view_pages(view.region.memory, array) for array in view.region.arrays]
        # A block's tokens may begin in the middle of a page, and end in the middle of another.
        room = (len(self._pages[0]) - 1) * layout.block_size
        self._max_tokens = room if is_staged else None
        if is_staged and room < entry_format.block_size:
            raise ConfigError(
                f"{len(self._pages[0])} staging pages of {layout.block_size} tokens are too few "
                f"for a store's blocks of {entry_format.block_size}"
            )
        self.parts = entry_format.parts_of_shard(layout.shard)
        self._staging = threading.Lock()

    def take_batch(self, segments: Sequence[TokenSegment]) -> Sequence[TokenSegment]:
        """The leading pieces that can be carried at once."""
        length = segments[0].stop - segments[0].start
        num_bytes = sum(self._entry_format.body_bytes(part, length) for part in self.parts)
        most = max(1, BATCH_BYTES // num_bytes)
        if self._max_tokens is not None:
            most = min(most, self._max_tokens // length)
        is_tail = segments[-1].stop - segments[-1].start != length
        return segments[: min(most, len(segments) - is_tail)]

    def allocate_bodies(
        self,
        batch: Sequence[TokenSegment],
        allocate: Callable[[int], NDArray[np.uint8]] = allocate_bytes,
    ) -> list[EntryBodies]:
        """Room for the bodies of a batch, for each part; `allocate` gives so many bytes."""
        length, num_pieces = batch[0].stop - batch[0].start, len(batch)
        layouts = [self._entry_format.part_layout(part, length) for part in self.parts]
        return [
            EntryBodies(each, allocate(num_pieces * each.block_bytes).reshape(num_pieces, -1))
            for each in layouts
        ]

    def gather(
        self,
        batch: Sequence[TokenSegment],
        table: BlockTable,
        after: StreamPosition | None = None,
    ) -> list[EntryBodies]:
        """The bodies of a batch, from the engine's blocks in `table`.

        Raises:
            ProtocolError: the table does not cover it.
            TransferError: the GPU failed.
        """
        start, found = batch[0].start, self.allocate_bodies(batch)
        if self._in_place is not None:
            for rows, blocks in self._pair_tokens(
                self._in_place, found, batch, start=start, table=table
            ):
                np.copyto(rows, blocks)
            return found
        span = self._find(start, batch[-1].stop, table)
        here = PagedSequence(self._layout, span.pages)
        with self._staging:
            self._gather_to_staging(span.blocks, span.pages.blocks, after)
            for bodies in found:
                for layer, rows in enumerate(bodies.pages()):
                    self._pack_layer(rows, batch, (bodies.layout, here, layer))
        return found

    def scatter(
        self,
        found: Sequence[EntryBodies],
        batch: Sequence[TokenSegment],
        *,
        start: int,
        table: BlockTable,
        after: StreamPosition | None = None,
    ) -> None:
        """Put tokens of a batch, those from `start` on, into the engine's blocks in `table`.

        Raises:
            ProtocolError: the table does not cover them.
            TransferError: the GPU failed.
        """
        start = max(start, batch[0].start)
        if self._in_place is not None:
            for rows, blocks in self._pair_tokens(
                self._in_place, found, batch, start=start, table=table
            ):
                np.copyto(blocks, rows)
            return
        span = self._find(start, batch[-1].stop, table)
        with self._staging:
            self._scatter(found, batch, start, span, after=after)

    def _scatter(
        self,
        found: Sequence[EntryBodies],
        batch: Sequence[TokenSegment],
        start: int,
        span: _Span,
        *,
        after: StreamPosition | None,
    ) -> None:
        if start % self._layout.block_size:  # a page's first tokens came before: they stay
            self._gather_to_staging(span.blocks[:1], span.pages.blocks[:1], after)
        here = PagedSequence(self._layout, span.pages)
        for bodies in found:
            for layer, rows in enumerate(bodies.pages()):
                self._unpack_layer(rows, batch, (bodies.layout, here, layer), start)
        if self._view.staging is not None:
            scatter = self._view.staging.scatter
            _wait_for_all(
                scatter(layer, span.pages.blocks, span.blocks, after)
                for layer in range(self._layout.num_layers)
            )

    def _pair_tokens(
        self,
        engine: ShowsTokens,
        found: Sequence[EntryBodies],
        batch: Sequence[TokenSegment],
        *,
        start: int,
        table: BlockTable,
    ) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
        """Views of the same tokens, those from `start` on: in bodies, and in the engine's blocks.

        Raises:
            ProtocolError: the table does not cover them, or names blocks that there are not.
        """
        stop, size = batch[-1].stop, self._layout.block_size
        PagedSequence(self._layout, table).check_covers(start, stop)
        held = table.slice_tokens(start, stop, size)
        slices = find_token_slices(
            TokenPages(batch[0].start, batch[0].stop - batch[0].start, range(len(batch))),
            TokenPages(held.first * size, size, held.blocks.tolist()),
            start,
            stop,
        )
        for bodies in found:
            for layer, pages in enumerate(bodies.pages()):
                planes = engine.token_planes(layer)
                check_pages(held.blocks, planes[0])
                theirs, ours = (page_geometry(x, layer) for x in (bodies.layout, self._layout))
                views = view_planes(pages, theirs, None)
                for rows, blocks, part, whole in zip(
                    views, planes, theirs.planes, ours.planes, strict=True
                ):
                    first = part.heads.start - whole.heads.start
                    of_part = blocks[:, :, first : first + len(part.heads)]
                    numbers = rows.view(blocks.dtype)
                    for row_slice, block_slice in slices:
                        yield numbers[row_slice], of_part[block_slice]

    def _find(self, start: int, stop: int, table: BlockTable) -> _Span:
        PagedSequence(self._layout, table).check_covers(start, stop)
        found = table.slice_tokens(start, stop, self._layout.block_size)
        blocks = found.blocks
        staged = blocks if self._view.staging is None else np.arange(len(blocks), dtype=np.int64)
        return _Span(blocks, BlockTable(found.first, staged))

    def _gather_to_staging(
        self, blocks: NDArray[np.int64], pages: NDArray[np.int64], after: StreamPosition | None
    ) -> None:
        if self._view.staging is not None:
            gather = self._view.staging.gather
            _wait_for_all(
                gather(layer, blocks, pages, after) for layer in range(self._layout.num_layers)
            )

    def _pack_layer(
        self,
        rows: NDArray[np.uint8],
        batch: Sequence[TokenSegment],
        between: tuple[KVLayout, PagedSequence, int],
    ) -> None:
        layout, here, layer = between
        start, stop = batch[0].start, batch[-1].stop
        pages = self._pages[layer]
        if layout.block_size == self._entry_format.block_size:
            theirs = PagedSequence(layout, _rows_of(batch, layout))
            copies = compute_page_copies(here, theirs, layer, start=start, stop=stop)
            apply_copies(copies, pages, rows)
            return
        heads = shared_heads(layout, self._layout, layer)
        rows[0] = read_canonical(here, layer, pages, start=start, stop=stop, heads=heads)

    def _unpack_layer(
        self,
        rows: NDArray[np.uint8],
        batch: Sequence[TokenSegment],
        between: tuple[KVLayout, PagedSequence, int],
        start: int,
    ) -> None:
        layout, here, layer = between
        stop, pages = batch[-1].stop, self._pages[layer]
        if layout.block_size == self._entry_format.block_size:
            theirs = PagedSequence(layout, _rows_of(batch, layout))
            copies = compute_page_copies(theirs, here, layer, start=start, stop=stop)
            apply_copies(copies, rows, pages)
            return
        heads = shared_heads(layout, self._layout, layer)
        tail = PagedSequence(layout, BlockTable(0, np.zeros(1, np.int64)))
        skipped = start - batch[0].start
        data = read_canonical(tail, layer, rows, start=skipped, stop=layout.block_size)
        write_canonical(here, layer, pages, data, start=start, heads=heads)


def _wait_for_all(copies: Iterator[StreamPosition | None]) -> None:
    """Begin copies in one direction, which end in that order; none is under way afterwards."""
    last = None
    try:
        for last in copies:  # noqa: B007 - the last one that was begun, also where the next fails
            pass
    finally:
        if last is not None:
            last.wait()


def _rows_of(batch: Sequence[TokenSegment], layout: KVLayout) -> BlockTable:
    """Full pieces as blocks of the store's size: piece i of the batch is row i."""
    return BlockTable(batch[0].start // layout.block_size, np.arange(len(batch), dtype=np.int64))


@dataclass(frozen=True, slots=True)
class TokenSegment:
    """Tokens `[start, stop)` of a prompt, kept under one hash."""

    block_hash: BlockHash
    start: int
    stop: int


def hash_segments(domain: HashDomain, prompt_ids: NDArray[np.int32]) -> tuple[TokenSegment, ...]:
    """All pieces of a prompt, in order, without a gap. `domain` has the store's block size."""
    hashes = compute_block_hashes(domain, prompt_ids)
    size = domain.block_size
    segments = [TokenSegment(present, i * size, (i + 1) * size) for i, present in enumerate(hashes)]
    stop = len(hashes) * size
    if stop < len(prompt_ids):
        parent = hashes[-1] if hashes else None
        tail = compute_tail_hash(domain, prompt_ids[stop:], parent)
        segments.append(TokenSegment(tail, stop, len(prompt_ids)))
    return tuple(segments)
