"""Which page copies take KV from one layout to another: computed once for layers that are alike."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from baton.kv.copies import CopyGroup, PageCopies
from baton.kv.geometry import compute_spans, page_geometry, shared_heads
from baton.kv.layout import check_compatible
from baton.kv.paged import check_range

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from baton.kv.geometry import PageGeometry
    from baton.kv.layout import KVLayout, Plane
    from baton.kv.paged import BlockTable, PagedSequence

MAX_JOINED_BYTES: Final = 4 << 20
"""Of layers that are moved together: the receiver verifies them while the next are moved."""


@lru_cache(maxsize=256)
def compute_pieces(
    src_block_size: int, dst_block_size: int, start: int, stop: int
) -> NDArray[np.int64]:
    """Cut tokens `[start, stop)` wherever either side turns a page.

    Returns:
        int64 `[k + 1]`, ascending: piece i is tokens `[bounds[i], bounds[i + 1])`, the longest run
        that lies in one page of each side. An empty range has no pieces: `[start]`. Read-only,
        and the same object for the same question.

    Raises:
        ProtocolError: not a range.
    """
    check_range(start, stop)
    if start == stop:
        cuts = np.array([start], dtype=np.int64)
        cuts.flags.writeable = False
        return cuts
    cuts = _page_starts(src_block_size, start, stop)
    if dst_block_size != src_block_size:
        cuts = np.union1d(cuts, _page_starts(dst_block_size, start, stop))
    bounds = np.empty(len(cuts) + 2, dtype=np.int64)
    bounds[0], bounds[1:-1], bounds[-1] = start, cuts, stop
    bounds.flags.writeable = False
    return bounds


def compute_page_copies(
    src: PagedSequence, dst: PagedSequence, layer: int, *, start: int, stop: int
) -> PageCopies:
    """How KV of tokens `[start, stop)` of one layer gets from src's pages into dst's.

    Only heads that both sides hold are copied. Spans are as long as can be: between equal
    layouts a full page is the one span `(0, 0, page_bytes)`. Opaque pages are copied whole (all of
    the shared heads), also those of which the range has some tokens only.

    Raises:
        ProtocolError: not a range, or a table does not cover it.
        LayoutMismatchError: KV of the one layout cannot become KV of the other.
    """
    check_compatible(src.layout, dst.layout)
    src.check_covers(start, stop)
    dst.check_covers(start, stop)
    sizes = src.layout.block_size, dst.layout.block_size
    geometries = page_geometry(src.layout, layer), page_geometry(dst.layout, layer)
    bounds = compute_pieces(*sizes, start, stop)
    tokens = bounds[:-1]
    src_pages, dst_pages = src.blocks_of(tokens), dst.blocks_of(tokens)
    groups: list[CopyGroup] = []
    for pieces in _group_alike(*sizes, start, stop):
        first = int(tokens[pieces[0]])
        length = int(bounds[pieces[0] + 1]) - first
        spans = compute_spans(*geometries, (first % sizes[0], first % sizes[1]), length)
        if len(spans):
            groups.append(CopyGroup(src_pages[pieces], dst_pages[pieces], spans))
    return PageCopies(layer, tuple(groups))


def _page_starts(block_size: int, start: int, stop: int) -> NDArray[np.int64]:
    """First tokens of the pages that begin inside `(start, stop)`."""
    first = (start // block_size + 1) * block_size
    return np.arange(first, stop, block_size, dtype=np.int64)


@lru_cache(maxsize=256)
def _group_alike(
    src_block_size: int, dst_block_size: int, start: int, stop: int
) -> list[NDArray[np.int64]]:
    """Indices of pieces that lie alike in their pages: same offsets on both sides, same length."""
    bounds = compute_pieces(src_block_size, dst_block_size, start, stop)
    tokens, lengths = bounds[:-1], np.diff(bounds)
    # One number for (src offset, dst offset, length); block sizes are below 2**17, so it fits.
    alike = (tokens % src_block_size * dst_block_size + tokens % dst_block_size) << 17 | lengths
    if not len(alike):
        return []
    if (alike == alike[0]).all():
        return [np.arange(len(alike))]
    order = np.argsort(alike, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(alike[order])) + 1)


@dataclass(frozen=True, slots=True, eq=False)
class LayerPair:
    """A layer's page on either side, and the kv heads that both hold.

    Block tables apart, all that a layer's copies and digests depend on. Layers of two layouts whose
    planes are equal have the same object.
    """

    src: PageGeometry
    dst: PageGeometry
    heads: range


@dataclass(frozen=True, slots=True, eq=False)
class PairedLayers:
    """The layers of two layouts. `stops[n]` is the end of the run of layers like layer n."""

    pairs: tuple[LayerPair, ...]
    stops: tuple[int, ...]

    def alike(self, layers: range) -> range:
        """As many of some layers as begin with ones like the first."""
        return range(layers.start, min(layers.stop, self.stops[layers.start]))


@lru_cache(maxsize=64)
def pair_layers(src: KVLayout, dst: KVLayout) -> PairedLayers:
    """Of each layer of two layouts. A handoff asks once, and keeps the answer.

    Raises:
        LayoutMismatchError: KV of the one layout cannot become KV of the other.
    """
    check_compatible(src, dst)  # so layer for layer both have the same planes
    known: dict[tuple[Plane, ...], LayerPair] = {}
    for number, layer in enumerate(src.layers):
        if layer.planes not in known:
            known[layer.planes] = LayerPair(
                page_geometry(src, number),
                page_geometry(dst, number),
                shared_heads(src, dst, number),
            )
    pairs = [known[layer.planes] for layer in src.layers]
    stops = list(range(1, len(pairs) + 1))
    for number in reversed(range(len(pairs) - 1)):
        if pairs[number] is pairs[number + 1]:
            stops[number] = stops[number + 1]
    return PairedLayers(tuple(pairs), tuple(stops))


class _Plan(NamedTuple):
    """The groups of one token range, and all that they depend on."""

    tables: tuple[BlockTable, BlockTable]
    pair: LayerPair
    tokens: tuple[int, int]
    groups: tuple[CopyGroup, ...]


class CopyPlanner:
    """`compute_page_copies` for a handoff, which asks for the same tokens layer by layer.

    Layers with pages alike get the very same groups, so that what is derived from these is derived
    once, too (`CopyGroup`). Only the last answer is kept. Owner thread: the handoff's.
    """

    def __init__(self, src: KVLayout, dst: KVLayout) -> None:
        self.layers = pair_layers(src, dst)
        self._last: _Plan | None = None

    def plan(
        self, src: PagedSequence, dst: PagedSequence, layer: int, *, start: int, stop: int
    ) -> PageCopies:
        """See `compute_page_copies`. The layouts are the planner's; block tables do not change."""
        pair, last = self.layers.pairs[layer], self._last
        if (
            last is not None
            and last.pair is pair
            and last.tables[0] is src.table
            and last.tables[1] is dst.table
            and last.tokens == (start, stop)
        ):
            return PageCopies(layer, last.groups)
        copies = compute_page_copies(src, dst, layer, start=start, stop=stop)
        self._last = _Plan((src.table, dst.table), pair, (start, stop), copies.groups)
        return copies

    def join(self, copies: PageCopies, layers: range) -> PageCopies:
        """The same of more than the first of `layers`, whose `copies` are.

        Of as many as follow it with the same copies, and move at most `MAX_JOINED_BYTES` together.
        """
        layers = layers[: max(1, MAX_JOINED_BYTES // max(1, copies.layer_bytes))]
        return PageCopies(layers.start, copies.groups, len(self.layers.alike(layers)))
