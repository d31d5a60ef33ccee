"""Page copies between two layouts, as index arrays: described, never looped over.

They are computed once for all layers of a handoff that have the same (`CopyPlanner`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec
import numpy as np

from baton.errors import ProtocolError
from baton.kv.geometry import PageGeometry, compute_spans, page_geometry, shared_heads
from baton.kv.layout import KVLayout, Plane, check_compatible
from baton.kv.runs import MAX_FEW, find_runs, merge_few
from baton.record import Record

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

MAX_JOINED_BYTES: Final = 4 << 20
"""Of layers that are moved together: the receiver verifies them while the next are moved."""
MAX_JOINED_DEVICE_BYTES: Final = 256 << 20
"""The same between GPUs' memories, which move and digest it in less than a millisecond."""
_GATHER_BYTES: Final = 1 << 20
PART_BYTES: Final = 512 << 10
"""What is copied and then looked at in one go: 128 to 512 KiB are equally fast, and a
part takes some ten calls."""
_PACKED: Final = np.dtype("<u4")
_SHORT_RUN_BYTES: Final = 4096
_MANY_RUNS: Final = 32
"""So many runs that are so short on average are cheaper to gather and scatter (15 us, then two
copies) than to copy one by one (0.7 us each, then one copy)."""


class BlockTable(Record, frozen=True):
    """Which block holds which tokens of one sequence.

    `blocks[i]`, int64, holds tokens `[(first + i) * block_size, (first + i + 1) * block_size)`.
    `first` is above 0 where the leading blocks are not this table's business (a cached prefix).
    """

    first: int
    blocks: NDArray[np.int64]

    def slice_tokens(self, start: int, stop: int, block_size: int) -> BlockTable:
        """The blocks that hold tokens `[start, stop)`, all of which the table has."""
        held, first = blocks_holding(start, stop, block_size), self.first
        return BlockTable(held.start, self.blocks[held.start - first : held.stop - first])


def blocks_holding(start: int, stop: int, block_size: int) -> range:
    """Which of a sequence's blocks hold tokens `[start, stop)`: none, where that is empty."""
    first = start // block_size
    return range(first, count_blocks(stop, block_size) if start < stop else first)


def count_blocks(num_tokens: int, block_size: int) -> int:
    """Blocks that hold a sequence's first `num_tokens` tokens; the last may be partly filled."""
    return -(-num_tokens // block_size)


class PagedSequence(Record, frozen=True):
    """One sequence's KV on one worker: the blocks of `table`, in pages of `layout`."""

    layout: KVLayout
    table: BlockTable

    def check_covers(self, start: int, stop: int) -> None:
        """Refuse tokens `[start, stop)` where the table lacks a block of theirs.

        Raises:
            ProtocolError: a block is missing, or the range is none.
        """
        check_range(start, stop)
        first = self.table.first * self.layout.block_size
        end = first + len(self.table.blocks) * self.layout.block_size
        if start < stop and not first <= start <= stop <= end:
            raise ProtocolError(f"tokens [{start}, {stop}) where the blocks have [{first}, {end})")

    def blocks_of(self, tokens: NDArray[np.int64]) -> NDArray[np.int64]:
        """The block of each token, int64 `[n]`. The table covers them all."""
        return self.table.blocks[tokens // self.layout.block_size - self.table.first]


class PagePair(msgspec.Struct, frozen=True, gc=False):
    """A group of one page pair and one span, in numbers: faster to handle than arrays of one."""

    src_page: int
    dst_page: int
    src_byte: int
    dst_byte: int
    num_bytes: int


@dataclass(frozen=True)
class CopyGroup:
    """Copies that share one geometry.

    Page `src_pages[i]` → page `dst_pages[i]`, both int64 `[n]`; in each pair, for every row of
    `spans`, int64 `[s, 3]`: `(src_byte, dst_byte, num_bytes)` inside the page.

    A prepared list: what is derived from it is kept with it, and serves every layer whose copies
    have this group. So its arrays never change.
    """

    src_pages: NDArray[np.int64]
    dst_pages: NDArray[np.int64]
    spans: NDArray[np.int64]
    fits: set[tuple[int, int, int, int]] = field(
        default_factory=set, init=False, compare=False, repr=False
    )
    """Between which arrays it was found to be in bounds: `(num_pages, page_bytes)` of both."""
    pair: PagePair | None = field(default=None, init=False, compare=False, repr=False)
    """Where it is one page pair and one span, which small transfers are; else None."""

    def __post_init__(self) -> None:
        if len(self.src_pages) == len(self.dst_pages) == 1 and self.spans.shape == (1, 3):
            pair = PagePair(self.src_pages.item(), self.dst_pages.item(), *self.spans[0].tolist())
            object.__setattr__(self, "pair", pair)

    @property
    def num_bytes(self) -> int:
        """Bytes that this group moves."""
        return self._num_bytes if self.pair is None else self.pair.num_bytes

    @cached_property
    def _num_bytes(self) -> int:
        if len(self.spans) == 1:
            return len(self.src_pages) * int(self.spans[0, 2])
        return len(self.src_pages) * int(self.spans[:, 2].sum())

    @cached_property
    def packed_sources(self) -> tuple[bytes, bytes]:
        """Packed: `src_pages`, and `(src_byte, num_bytes)` of each span."""
        return pack_indices(self.src_pages), pack_indices(self.spans[:, ::2])

    @cached_property
    def packed_targets(self) -> tuple[bytes, bytes]:
        """Packed: `dst_pages`, and `(dst_byte, num_bytes)` of each span."""
        return pack_indices(self.dst_pages), pack_indices(self.spans[:, 1:])

    @cached_property
    def num_runs(self) -> int:
        """Runs of page pairs that are adjacent on both sides."""
        return len(self.runs) if len(self.src_pages) <= MAX_FEW else len(self._firsts)

    @cached_property
    def runs(self) -> list[list[int]]:
        """Those runs, `[src_page, dst_page, num_pages]` each, in the group's order."""
        sources, targets = self.src_pages, self.dst_pages
        if len(sources) <= MAX_FEW:
            ones = [1] * len(sources)
            return merge_few(zip(sources.tolist(), targets.tolist(), ones, strict=True))
        firsts = self._firsts
        runs = np.empty((len(firsts), 3), np.int64)
        runs[:, 0], runs[:, 1] = sources[firsts], targets[firsts]
        runs[:-1, 2] = firsts[1:] - firsts[:-1]
        runs[-1, 2] = len(sources) - firsts[-1]
        found: list[list[int]] = runs.tolist()
        return found

    def take(self, first: int, num_pages: int) -> CopyGroup:
        """The part from page pair `first` on; it is in bounds wherever the whole is."""
        some = slice(first, first + num_pages)
        part = CopyGroup(self.src_pages[some], self.dst_pages[some], self.spans)
        part.fits.update(self.fits)
        return part

    @cached_property
    def slices(self) -> list[tuple[tuple[int | slice, slice], tuple[int | slice, slice]]] | None:
        """Where each span is, to be sliced on either side; None if slices are many.

        Of each page, or of all pages at once where they are evenly spaced on both sides.
        """
        pages: list[tuple[int | slice, int | slice]]
        if len(self.src_pages) * len(self.spans) <= MAX_FEW:
            pages = list(zip(self.src_pages.tolist(), self.dst_pages.tolist(), strict=True))
        else:
            sources, targets = _find_slice(self.src_pages), _find_slice(self.dst_pages)
            if sources is None or targets is None or len(self.spans) > MAX_FEW:
                return None
            pages = [(sources, targets)]
        return [
            ((src, slice(src_byte, src_byte + size)), (dst, slice(dst_byte, dst_byte + size)))
            for src, dst in pages
            for src_byte, dst_byte, size in self.spans.tolist()
        ]

    @cached_property
    def _firsts(self) -> NDArray[np.int64]:
        """Where each run begins; of a group that has pages."""
        return find_runs(1, self.src_pages, self.dst_pages)

    def moves_whole_pages(self, src_page_bytes: int, dst_page_bytes: int) -> bool:
        """Whether nothing is cut from pages of these sizes, so that runs are runs of bytes."""
        pair = self.pair
        if pair is not None:
            return (
                src_page_bytes == dst_page_bytes == pair.num_bytes
                and pair.src_byte == pair.dst_byte == 0
            )
        return src_page_bytes == dst_page_bytes == self._whole_page_bytes

    @cached_property
    def _whole_page_bytes(self) -> int:
        """Of pages of so many bytes nothing is cut; 0 where something is of any."""
        if len(self.spans) != 1:
            return 0
        src_byte, dst_byte, num_bytes = map(int, self.spans[0])
        return num_bytes if src_byte == dst_byte == 0 else 0


def _find_slice(pages: NDArray[np.int64]) -> slice | None:
    """The slice that selects these pages, in this order; None where there is none."""
    steps = np.diff(pages)
    if not len(steps) or steps[0] < 1 or (steps != steps[0]).any():
        return None
    return slice(int(pages[0]), int(pages[-1]) + 1, int(steps[0]))


class PageCopies(Record, frozen=True):
    """What one transfer moves: on both sides, the same pages of `num_layers` arrays from `layer`.

    Above 1 only for transports that take such transfers
    (`transfer.interface.Capabilities.multi_array`).
    """

    layer: int
    groups: tuple[CopyGroup, ...]
    num_layers: int = 1

    @property
    def layers(self) -> range:
        """The arrays' numbers."""
        return range(self.layer, self.layer + self.num_layers)

    @property
    def num_bytes(self) -> int:
        """Bytes that all groups move, in all layers."""
        num_bytes = 0
        for group in self.groups:
            num_bytes += group.num_bytes
        return num_bytes * self.num_layers

    @property
    def layer_bytes(self) -> int:
        """Bytes that all groups move, in one layer."""
        return self.num_bytes // self.num_layers

    @property
    def num_pages(self) -> int:
        """Page pairs that are touched, in all layers."""
        num_pages = 0
        for group in self.groups:
            num_pages += len(group.src_pages)
        return num_pages * self.num_layers

    def split(self) -> tuple[PageCopies, ...]:
        """The same, layer by layer."""
        return tuple(PageCopies(layer, self.groups) for layer in self.layers)


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


def pack_indices(indices: NDArray[np.int64]) -> bytes:
    """Non-negative indices below 2**32, any shape, as packed little-endian u32."""
    return indices.astype(_PACKED).tobytes()


def apply_copies(
    copies: PageCopies, src_pages: NDArray[np.uint8], dst_pages: NDArray[np.uint8]
) -> None:
    """Carry out copies between two arrays of pages in this process's memory.

    Both are uint8 `[num_blocks, page_bytes]` of one of `copies.layers`, bytes of a page adjacent.
    They do not overlap.

    Raises:
        ProtocolError: a page or a span is out of bounds; the groups before it were copied.
    """
    apply_layer_copies(copies, (src_pages,), (dst_pages,))


def apply_layer_copies(
    copies: PageCopies,
    sources: Sequence[NDArray[np.uint8]],
    targets: Sequence[NDArray[np.uint8]],
) -> None:
    """`apply_copies` of several layers: from each of `sources` into its place in `targets`."""
    for group in copies.groups:
        _copy_group(group, sources, targets)


def apply_copies_in_parts(
    copies: PageCopies,
    sources: Sequence[NDArray[np.uint8]],
    targets: Sequence[NDArray[np.uint8]],
    *,
    read: Callable[[range, list[int]], None] | None = None,
    written: Callable[[range, list[int]], None] | None = None,
) -> None:
    """Like `apply_layer_copies`, part by part: then `read` and `written` get layers and pages.

    Those of the source, and those of the destination. A part is small enough to be in the
    processor's second-level cache then, except where pages are cut or are larger than that. It is
    of several layers, or of some pages of one.
    """
    layers = copies.layers
    for group in copies.groups:
        page_bytes = targets[0].shape[1]
        num_layers = PART_BYTES // max(1, group.num_bytes)
        if num_layers or not group.moves_whole_pages(sources[0].shape[1], page_bytes):
            num_layers = max(1, num_layers)
            for first in range(0, len(layers), num_layers):
                some = slice(first, first + num_layers)
                _copy_group(group, sources[some], targets[some])
                _report_part(group, layers[some], read, written)
            continue
        step = max(1, PART_BYTES // page_bytes)
        parts = [group.take(first, step) for first in range(0, len(group.src_pages), step)]
        for layer, src_pages, dst_pages in zip(layers, sources, targets, strict=True):
            for part in parts:
                _copy_group(part, (src_pages,), (dst_pages,))
                _report_part(part, range(layer, layer + 1), read, written)


def _report_part(
    group: CopyGroup,
    layers: range,
    read: Callable[[range, list[int]], None] | None,
    written: Callable[[range, list[int]], None] | None,
) -> None:
    if read is not None:
        read(layers, group.src_pages.tolist())
    if written is not None:
        written(layers, group.dst_pages.tolist())


def check_range(start: int, stop: int) -> None:
    """Refuse what is no token range.

    Raises:
        ProtocolError: negative, or it ends before it starts.
    """
    if not 0 <= start <= stop:
        raise ProtocolError(f"tokens [{start}, {stop}) are no range")


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


def _copy_group(
    group: CopyGroup, sources: Sequence[NDArray[np.uint8]], targets: Sequence[NDArray[np.uint8]]
) -> None:
    alike: dict[tuple[int, ...], list[tuple[NDArray[np.uint8], NDArray[np.uint8]]]] = {}
    for src_pages, dst_pages in zip(sources, targets, strict=True):
        sizes = *src_pages.shape, *dst_pages.shape
        alike.setdefault(sizes, []).append((src_pages, dst_pages))
    for sizes, pairs in alike.items():
        if sizes not in group.fits:
            _check_group(group, *pairs[0])
        if group.moves_whole_pages(sizes[1], sizes[3]):
            _copy_pages(group, pairs)
        elif group.slices is not None:
            for src_pages, dst_pages in pairs:
                for source, target in group.slices:
                    dst_pages[target] = src_pages[source]
        else:
            for src_pages, dst_pages in pairs:
                _copy_spans(group, src_pages, dst_pages)


def _check_group(
    group: CopyGroup, src_pages: NDArray[np.uint8], dst_pages: NDArray[np.uint8]
) -> None:
    check_pages(group.src_pages, src_pages)
    check_pages(group.dst_pages, dst_pages)
    _check_spans(group.spans[:, 0] + group.spans[:, 2], src_pages)
    _check_spans(group.spans[:, 1] + group.spans[:, 2], dst_pages)


def check_pages(pages: NDArray[np.int64], array: NDArray[Any]) -> None:
    """Refuse page ids that `array`, a page in each row, does not have.

    Raises:
        ProtocolError: there is one.
    """
    # Page ids may come from a peer, and numpy takes a negative one for a page from the end.
    if len(pages) == 1:
        low = high = int(pages[0])
    else:
        low, high = (int(pages.min()), int(pages.max())) if len(pages) else (0, -1)
    if low < 0 or high >= len(array):
        raise ProtocolError(f"pages {low} to {high} where there are {len(array)}")


def _check_spans(span_ends: NDArray[np.int64], array: NDArray[np.uint8]) -> None:
    if len(span_ends) and int(span_ends.max()) > array.shape[1]:
        raise ProtocolError(f"a span ends at byte {span_ends.max()} of {array.shape[1]}")


def _copy_pages(
    group: CopyGroup, pairs: Sequence[tuple[NDArray[np.uint8], NDArray[np.uint8]]]
) -> None:
    if (pair := group.pair) is not None:
        for src_pages, dst_pages in pairs:
            dst_pages[pair.dst_page] = src_pages[pair.src_page]
        return
    num_runs = group.num_runs
    if num_runs >= _MANY_RUNS and group.num_bytes <= _SHORT_RUN_BYTES * num_runs:
        for src_pages, dst_pages in pairs:
            _copy_tiny_pages(group, src_pages, dst_pages)
    elif num_runs == len(group.src_pages):
        runs = group.runs
        for src_pages, dst_pages in pairs:
            for src, dst, _ in runs:
                dst_pages[dst] = src_pages[src]
    else:
        runs = group.runs
        for src_pages, dst_pages in pairs:
            for src, dst, length in runs:
                dst_pages[dst : dst + length] = src_pages[src : src + length]


def _copy_tiny_pages(
    group: CopyGroup, src_pages: NDArray[np.uint8], dst_pages: NDArray[np.uint8]
) -> None:
    page_bytes = src_pages.shape[1]
    row = np.dtype((np.void, page_bytes))
    src_rows, dst_rows = src_pages.view(row)[:, 0], dst_pages.view(row)[:, 0]
    step = max(1, _GATHER_BYTES // page_bytes)
    for at in range(0, len(group.src_pages), step):
        some = slice(at, at + step)
        dst_rows[group.dst_pages[some]] = src_rows[group.src_pages[some]]


def _copy_spans(
    group: CopyGroup, src_pages: NDArray[np.uint8], dst_pages: NDArray[np.uint8]
) -> None:
    """Copy pages as rows of the largest unit of which every offset and length is a multiple."""
    unit = int(np.gcd.reduce(group.spans, axis=None, initial=src_pages.shape[1]))
    unit = math.gcd(unit, dst_pages.shape[1])
    row = np.dtype((np.void, unit))
    src_rows, dst_rows = src_pages.view(row), dst_pages.view(row)
    starts = group.spans[:, :2] // unit
    lengths = group.spans[:, 2] // unit
    within = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    src_index, dst_index = (np.repeat(starts[:, side], lengths) + within for side in (0, 1))
    # numpy gathers into a temporary array first: keep it in the cache.
    step = max(1, _GATHER_BYTES // (len(within) * unit))
    for at in range(0, len(group.src_pages), step):
        some = slice(at, at + step)
        gathered = src_rows[group.src_pages[some, None], src_index]
        dst_rows[group.dst_pages[some, None], dst_index] = gathered


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

    def __init__(
        self, src: KVLayout, dst: KVLayout, max_joined_bytes: int = MAX_JOINED_BYTES
    ) -> None:
        self.layers = pair_layers(src, dst)
        self._max_joined_bytes = max_joined_bytes
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

        Of as many as follow it with the same copies, and move at most `max_joined_bytes` together.
        """
        layers = layers[: max(1, self._max_joined_bytes // max(1, copies.layer_bytes))]
        return PageCopies(layers.start, copies.groups, len(self.layers.alike(layers)))
