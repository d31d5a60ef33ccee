"""Page copies of a handoff's layers, computed once for all that have the same."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from baton.kv.copies import CopyGroup, PageCopies, compute_page_copies
from baton.kv.geometry import page_geometry, shared_heads
from baton.kv.layout import check_compatible

if TYPE_CHECKING:
    from baton.kv.copies import BlockTable, PagedSequence
    from baton.kv.geometry import PageGeometry
    from baton.kv.layout import KVLayout, Plane


@dataclass(frozen=True, slots=True, eq=False)
class LayerPair:
    """A layer's page on either side, and the kv heads that both hold.

    Block tables apart, all that a layer's copies and digests depend on. Layers of two layouts whose
    planes are equal have the same object.
    """

    src: PageGeometry
    dst: PageGeometry
    heads: range


@lru_cache(maxsize=64)
def pair_layers(src: KVLayout, dst: KVLayout) -> tuple[LayerPair, ...]:
    """Of each layer of two layouts. A handoff asks once, and keeps the answer.

    Raises:
        LayoutMismatchError: KV of the one layout cannot become KV of the other.
    """
    check_compatible(src, dst)  # so layer for layer both have the same planes
    pairs: dict[tuple[Plane, ...], LayerPair] = {}
    for number, layer in enumerate(src.layers):
        if layer.planes not in pairs:
            pairs[layer.planes] = LayerPair(
                page_geometry(src, number),
                page_geometry(dst, number),
                shared_heads(src, dst, number),
            )
    return tuple(pairs[layer.planes] for layer in src.layers)


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
        self.pairs = pair_layers(src, dst)
        self._last: _Plan | None = None

    def plan(
        self, src: PagedSequence, dst: PagedSequence, layer: int, *, start: int, stop: int
    ) -> PageCopies:
        """See `compute_page_copies`. The layouts are the planner's; block tables do not change."""
        pair, last = self.pairs[layer], self._last
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

    def count_alike(self, layers: range) -> int:
        """How many of the leading ones of some layers have the same copies as the first."""
        first = self.pairs[layers.start]
        return next(
            (n for n, each in enumerate(layers) if self.pairs[each] is not first), len(layers)
        )
