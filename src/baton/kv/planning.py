"""Page copies of a handoff's layers, computed once for all that have the same."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from baton.kv.copies import PageCopies, compute_page_copies
from baton.kv.digest import PieceLocator
from baton.kv.geometry import page_geometry

if TYPE_CHECKING:
    from baton.kv.copies import BlockTable, PagedSequence
    from baton.kv.geometry import PageGeometry


@dataclass(frozen=True, slots=True, eq=False)
class _PlanKey:
    """What groups depend on.

    Tables and geometries are compared as objects: a layout's layers with pages alike have one.
    """

    tables: tuple[BlockTable, BlockTable]
    geometries: tuple[PageGeometry, PageGeometry]
    tokens: tuple[int, int]

    def matches(self, other: _PlanKey) -> bool:
        """Whether the answer is the same, as far as a quick comparison shows."""
        mine, theirs = (*self.tables, *self.geometries), (*other.tables, *other.geometries)
        return self.tokens == other.tokens and all(
            one is another for one, another in zip(mine, theirs, strict=True)
        )


class CopyPlanner:
    """`compute_page_copies` for a handoff, which asks for the same tokens layer by layer.

    Layers with pages alike get the very same groups, so that what is derived from these is derived
    once, too (`CopyGroup`). Only the last answer is kept. `pieces` does the same for digests.
    Owner thread: the handoff's.
    """

    def __init__(self) -> None:
        self._last: tuple[_PlanKey, PageCopies] | None = None
        self.pieces = PieceLocator()

    def plan(
        self, src: PagedSequence, dst: PagedSequence, layer: int, *, start: int, stop: int
    ) -> PageCopies:
        """See `compute_page_copies`. The block tables do not change."""
        key = _PlanKey(
            (src.table, dst.table),
            (page_geometry(src.layout, layer), page_geometry(dst.layout, layer)),
            (start, stop),
        )
        if self._last is not None and self._last[0].matches(key):
            return PageCopies(layer, self._last[1].groups)
        copies = compute_page_copies(src, dst, layer, start=start, stop=stop)
        self._last = key, copies
        return copies
