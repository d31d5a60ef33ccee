"""From a token range to page copies, digests and a notice; and, on the other side, the check."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from baton.handoff.messages import DIGEST_BYTES, Notice
from baton.kv.copies import PageCopies, PagedSequence, compute_pieces
from baton.kv.digest import compute_digests
from baton.kv.geometry import shared_heads
from baton.transfer.region import view_pages

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from baton.handoff.sampler import Sampler
    from baton.kv.layout import KVLayout
    from baton.kv.planning import CopyPlanner
    from baton.transfer.interface import PagedRegion

MAX_PIECES: Final = 2048
"""Pieces of one write: keeps its notice far below `transfer.interface.MAX_NOTICE_BYTES`."""


@dataclass(frozen=True, slots=True)
class Parcel:
    """One write: the copies, and what is in them: the pieces `bounds` of `layer`."""

    copies: PageCopies
    layer: int
    bounds: NDArray[np.int64]

    @property
    def start(self) -> int:
        """The first token."""
        return int(self.bounds[0])

    @property
    def stop(self) -> int:
        """One past the last token."""
        return int(self.bounds[-1])


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
        bounds = compute_pieces(source.layout.block_size, target.layout.block_size, start, stop)
        for first in range(0, len(bounds) - 1, MAX_PIECES):
            part = bounds[first : first + MAX_PIECES + 1]
            low, high = int(part[0]), int(part[-1])
            yield Parcel(
                self.planner.plan(source, target, layer, start=low, stop=high), layer, part
            )

    def digest(self, parcel: Parcel) -> Notice:
        """What announces a parcel, with a digest for each of its pieces."""
        source, layer = self.source, parcel.layer
        digests = compute_digests(
            source,
            layer,
            _layer_pages(self.region, layer),
            parcel.bounds,
            heads=shared_heads(source.layout, self.target.layout, layer),
        )
        return Notice(layer, parcel.start, parcel.stop, digests)


def announce_undigested(parcel: Parcel) -> Notice:
    """What announces a parcel to a receiver that verifies identities only."""
    return Notice(parcel.layer, parcel.start, parcel.stop, b"")


@dataclass(frozen=True, slots=True)
class Inspection:
    """What came of a look at pages: of so many tokens the bytes were compared."""

    is_intact: bool
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Inspector:
    """Decode's side of one handoff: checks what a peer laid out as `peer` wrote."""

    region: PagedRegion
    target: PagedSequence
    peer: KVLayout

    def inspect(self, notice: Notice, sampler: Sampler | None = None) -> Inspection:
        """Whether the bytes at the tokens that the notice names have the digests it claims.

        With a sampler only some of the pieces are looked at; digests must be there for all.
        """
        layer, layout = notice.layer, self.target.layout
        bounds = compute_pieces(self.peer.block_size, layout.block_size, notice.start, notice.stop)
        num_pieces = len(bounds) - 1
        if len(notice.digests) != DIGEST_BYTES * num_pieces:
            return Inspection(is_intact=False, num_tokens=0)
        only = None if sampler is None else sampler.choose(layer, num_pieces)
        pages = _layer_pages(self.region, layer)
        heads = shared_heads(self.peer, layout, layer)
        found = compute_digests(self.target, layer, pages, bounds, heads=heads, only=only)
        lengths = np.diff(bounds)
        if only is None:
            return Inspection(found == notice.digests, int(lengths.sum()))
        claimed = np.frombuffer(notice.digests, np.uint8).reshape(num_pieces, DIGEST_BYTES)
        return Inspection(found == claimed[only].tobytes(), int(lengths[only].sum()))


def _layer_pages(region: PagedRegion, layer: int) -> NDArray[np.uint8]:
    return view_pages(region.memory, region.arrays[layer])
