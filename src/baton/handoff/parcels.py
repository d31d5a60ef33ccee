"""From a token range to page copies, digests and a notice; and, on the other side, the check."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from baton.handoff.messages import DIGEST_BYTES, Notice, encode
from baton.kv.copies import PageCopies, PagedSequence, compute_pieces
from baton.kv.digest import compute_digests
from baton.kv.geometry import shared_heads
from baton.transfer.region import view_pages

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np
    from numpy.typing import NDArray

    from baton.kv.layout import KVLayout
    from baton.kv.planning import CopyPlanner
    from baton.transfer.interface import PagedRegion

MAX_PIECES: Final = 2048
"""Pieces of one write: keeps its notice far below `transfer.interface.MAX_NOTICE_BYTES`."""


@dataclass(frozen=True, slots=True)
class Parcel:
    """One write: the copies, and the notice that announces them."""

    copies: PageCopies
    notice: Notice

    @property
    def notice_bytes(self) -> bytes:
        """The notice as it travels."""
        return encode(self.notice)


@dataclass(frozen=True, slots=True)
class Packer:
    """Prefill's side of one handoff: `source` lies in `region`, `target` in the peer's.

    `planner` is the handoff's.
    """

    region: PagedRegion
    source: PagedSequence
    target: PagedSequence
    planner: CopyPlanner

    def pack(self, layer: int, start: int, stop: int) -> Iterator[Parcel]:
        """Split tokens `[start, stop)` of `layer` into parcels of bounded size, in order."""
        source, target = self.source, self.target
        pages = _layer_pages(self.region, layer)
        heads = shared_heads(source.layout, target.layout, layer)
        bounds = compute_pieces(source.layout.block_size, target.layout.block_size, start, stop)
        for first in range(0, len(bounds) - 1, MAX_PIECES):
            part = bounds[first : first + MAX_PIECES + 1]
            low, high = int(part[0]), int(part[-1])
            copies = self.planner.plan(source, target, layer, start=low, stop=high)
            digests = compute_digests(source, layer, pages, part, heads=heads)
            yield Parcel(copies, Notice(layer, low, high, digests))


@dataclass(frozen=True, slots=True)
class Inspector:
    """Decode's side of one handoff: checks what a peer laid out as `peer` wrote."""

    region: PagedRegion
    target: PagedSequence
    peer: KVLayout

    def is_intact(self, notice: Notice) -> bool:
        """Whether the bytes at the tokens that the notice names have the digests it claims."""
        layout = self.target.layout
        bounds = compute_pieces(self.peer.block_size, layout.block_size, notice.start, notice.stop)
        if len(notice.digests) != DIGEST_BYTES * (len(bounds) - 1):
            return False
        pages = _layer_pages(self.region, notice.layer)
        heads = shared_heads(self.peer, layout, notice.layer)
        return (
            compute_digests(self.target, notice.layer, pages, bounds, heads=heads) == notice.digests
        )


def _layer_pages(region: PagedRegion, layer: int) -> NDArray[np.uint8]:
    return view_pages(region.memory, region.arrays[layer])
