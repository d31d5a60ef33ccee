"""From a token range to page copies, digests and a notification; and back, checked."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import product
from typing import TYPE_CHECKING, Final

import numpy as np

from baton.handoff.messages import DIGEST_BYTES, Notification
from baton.handoff.token_ranges import LayerTokenRange
from baton.kv.copies import PageCopies, PagedSequence, compute_pieces
from baton.kv.digest import PieceLocator, compute_digests, locate_pieces
from baton.kv.geometry import shared_heads
from baton.transfer.region import view_pages

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from baton.handoff.sampler import Sampler
    from baton.kv.layout import KVLayout
    from baton.kv.planning import CopyPlanner
    from baton.transfer.interface import PagedRegion

MAX_SEGMENTS: Final = 2048
"""Pieces of one write: keeps its notification far below `MAX_NOTIFICATION_BYTES`."""
MAX_JOINED_BYTES: Final = 1 << 20
"""Of layers that are written together: the receiver verifies them while the next are written."""


@dataclass(frozen=True, slots=True)
class WriteBatch:
    """One write: the copies, and what is in them: the pieces `bounds` of each of its layers."""

    copies: PageCopies
    bounds: NDArray[np.int64]

    @property
    def start(self) -> int:
        """The first token."""
        return int(self.bounds[0])

    @property
    def stop(self) -> int:
        """One past the last token."""
        return int(self.bounds[-1])

    @property
    def token_ranges(self) -> tuple[LayerTokenRange, ...]:
        """What it carries, layer by layer."""
        start, stop = self.start, self.stop
        return tuple(LayerTokenRange(layer, start, stop) for layer in self.copies.layers)

    def split(self) -> Iterator[WriteBatch]:
        """The same, layer by layer."""
        return (WriteBatch(copies, self.bounds) for copies in self.copies.split())

    def join(self, following: WriteBatch) -> WriteBatch | None:
        """With the next layer's of the same tokens; None if they go apart."""
        mine, theirs = self.copies, following.copies
        num_layers = mine.num_layers + 1
        if following.bounds is not self.bounds or theirs.groups is not mine.groups:
            return None
        is_large = num_layers * mine.layer_bytes > MAX_JOINED_BYTES
        if is_large or num_layers * (len(self.bounds) - 1) > MAX_SEGMENTS:
            return None
        return WriteBatch(PageCopies(mine.layer, mine.groups, num_layers), self.bounds)


@dataclass(frozen=True, slots=True)
class WriteBatchBuilder:
    """Prefill's side of one handoff: `source` lies in `region`, `target` in the peer's.

    `planner` is the handoff's.
    """

    region: PagedRegion
    source: PagedSequence
    target: PagedSequence
    planner: CopyPlanner

    def build(self, layers: range, start: int, stop: int) -> Iterator[WriteBatch]:
        """Split tokens `[start, stop)` of `layers` into batches of bounded size, in order.

        Layers whose pages are alike and small are together in one.
        """
        sizes = self.source.layout.block_size, self.target.layout.block_size
        bounds = compute_pieces(*sizes, start, stop)
        cuts = _cut(bounds)
        last: WriteBatch | None = None
        for layer, some in product(layers, cuts):
            batch = WriteBatch(self._plan(layer, some), some)
            joined = None if last is None else last.join(batch)
            if last is not None and joined is None:
                yield last
            last = joined or batch
        if last is not None:
            yield last

    def digest(self, batch: WriteBatch) -> Notification:
        """The notification of a batch, with a digest for each of its pieces."""
        digests = b"".join(self._digest(layer, batch.bounds) for layer in batch.copies.layers)
        return _make_notification(batch, digests)

    def _plan(self, layer: int, bounds: NDArray[np.int64]) -> PageCopies:
        low, high = int(bounds[0]), int(bounds[-1])
        return self.planner.plan(self.source, self.target, layer, start=low, stop=high)

    def _digest(self, layer: int, bounds: NDArray[np.int64]) -> bytes:
        source = self.source
        heads = shared_heads(source.layout, self.target.layout, layer)
        pages = _layer_pages(self.region, layer)
        pieces = self.planner.pieces.locate(source, bounds)
        return compute_digests(source.layout, layer, pages, pieces, heads=heads)


def _cut(bounds: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """Pieces in runs of at most `MAX_SEGMENTS`; the same object where one run holds them all."""
    if 1 < len(bounds) <= MAX_SEGMENTS + 1:
        return [bounds]
    return [
        bounds[first : first + MAX_SEGMENTS + 1]
        for first in range(0, len(bounds) - 1, MAX_SEGMENTS)
    ]


def notify_without_digests(batch: WriteBatch) -> Notification:
    """The notification of a batch, for a receiver that verifies identities only."""
    return _make_notification(batch, b"")


def _make_notification(batch: WriteBatch, digests: bytes) -> Notification:
    copies = batch.copies
    return Notification(copies.layer, batch.start, batch.stop, digests, copies.num_layers)


@dataclass(frozen=True, slots=True)
class DigestResult:
    """What came of a look at pages: of so many tokens the bytes were compared."""

    is_intact: bool
    num_tokens: int


@dataclass(frozen=True, slots=True)
class DigestVerifier:
    """Decode's side of one handoff: checks what a peer laid out as `peer` wrote."""

    region: PagedRegion
    target: PagedSequence
    peer: KVLayout
    locator: PieceLocator = field(default_factory=PieceLocator)

    def verify(self, notification: Notification, sampler: Sampler | None = None) -> DigestResult:
        """Whether the bytes at the tokens that the notification names have the digests it claims.

        With a sampler only some of the pieces are looked at; digests must be there for all.
        """
        layer, layout = notification.layer, self.target.layout
        bounds = compute_pieces(
            self.peer.block_size, layout.block_size, notification.start, notification.stop
        )
        num_segments = len(bounds) - 1
        if len(notification.digests) != DIGEST_BYTES * num_segments:
            return DigestResult(is_intact=False, num_tokens=0)
        pages = _layer_pages(self.region, layer)
        heads = shared_heads(self.peer, layout, layer)
        if sampler is None:
            pieces = self.locator.locate(self.target, bounds)
            found = compute_digests(layout, layer, pages, pieces, heads=heads)
            return DigestResult(found == notification.digests, pieces.num_tokens)
        only = sampler.choose(layer, num_segments)
        pieces = locate_pieces(self.target, bounds, only)
        found = compute_digests(layout, layer, pages, pieces, heads=heads)
        claimed = np.frombuffer(notification.digests, np.uint8).reshape(num_segments, DIGEST_BYTES)
        return DigestResult(found == claimed[only].tobytes(), pieces.num_tokens)


def _layer_pages(region: PagedRegion, layer: int) -> NDArray[np.uint8]:
    return view_pages(region.memory, region.arrays[layer])
