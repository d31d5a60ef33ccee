"""From a token range to page copies, digests and a notification."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product, repeat
from typing import TYPE_CHECKING, Final

from baton.handoff.messages import (
    Notification,
)
from baton.handoff.token_ranges import LayerTokenRange
from baton.kv.copies import (
    CopyPlanner,
    PageCopies,
    PagedSequence,
    compute_pieces,
)
from baton.kv.digest import (
    DigestKey,
    PieceLocator,
    compute_digests,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from baton.transfer.interface import PageArray

MAX_SEGMENTS: Final = 2048
"""Pieces of one write: keeps its notification far below `MAX_NOTIFICATION_BYTES`."""
MAX_JOINED_BYTES: Final = 4 << 20
"""Of layers that are written together: the receiver verifies them while the next are written."""


@dataclass(frozen=True, slots=True)
class WriteBatch:
    """One write: tokens `[start, stop)` of each of its layers, cut into the pieces `bounds`."""

    copies: PageCopies
    bounds: NDArray[np.int64]
    start: int
    stop: int

    @property
    def end(self) -> tuple[int, int]:
        """Behind its last layer, and its last token."""
        return self.copies.layers.stop, self.stop

    @property
    def token_ranges(self) -> list[LayerTokenRange]:
        """What it carries, layer by layer."""
        return list(map(LayerTokenRange, self.copies.layers, repeat(self.start), repeat(self.stop)))

    def split(self) -> Iterator[WriteBatch]:
        """The same, layer by layer."""
        return (
            WriteBatch(copies, self.bounds, self.start, self.stop) for copies in self.copies.split()
        )


class WriteBatchBuilder:
    """Prefill's side of one handoff: `source` lies in `layer_pages`, `target` in the peer's.

    `target_arrays` are the peer's region; `key` is for digests that cannot be forged. Keeps what
    the handoff's layers have in common. Owner thread: the handoff's.

    Raises:
        LayoutMismatchError: KV cannot be copied from the one to the other.
    """

    def __init__(
        self,
        layer_pages: Sequence[NDArray[np.uint8]],
        source: PagedSequence,
        target: PagedSequence,
        target_arrays: Sequence[PageArray] = (),
        *,
        key: DigestKey | None = None,
    ) -> None:
        self._layer_pages, self._source, self._target = layer_pages, source, target
        self._key = key
        self.target_arrays = target_arrays
        self._planner = CopyPlanner(source.layout, target.layout)
        self._locator = PieceLocator()

    def build(self, layers: range, start: int, stop: int) -> Iterator[WriteBatch]:
        """Split tokens `[start, stop)` of `layers` into batches of bounded size, in order.

        Layers whose pages are alike and small are together in one.
        """
        sizes = self._source.layout.block_size, self._target.layout.block_size
        bounds = compute_pieces(*sizes, start, stop)
        if 1 < len(bounds) <= MAX_SEGMENTS + 1:
            yield from self._join(layers, bounds, start, stop)
            return
        for layer, some in product(layers, _cut(bounds)):
            low, high = int(some[0]), int(some[-1])
            copies = self._planner.plan(self._source, self._target, layer, start=low, stop=high)
            yield WriteBatch(copies, some, low, high)

    def _join(
        self, layers: range, bounds: NDArray[np.int64], start: int, stop: int
    ) -> Iterator[WriteBatch]:
        """Batches of as many layers as may go together; each has all of the pieces."""
        max_layers = MAX_SEGMENTS // (len(bounds) - 1)
        while layers:
            first = layers[0]
            copies = self._planner.plan(self._source, self._target, first, start=start, stop=stop)
            num_layers = 1
            if len(layers) > 1:
                most = min(max_layers, MAX_JOINED_BYTES // max(1, copies.layer_bytes))
                num_layers = self._planner.count_alike(layers[: max(1, most)])
                copies = PageCopies(first, copies.groups, num_layers)
            yield WriteBatch(copies, bounds, start, stop)
            layers = layers[num_layers:]

    def digest(self, batch: WriteBatch, *, is_keyed: bool = False) -> Notification:
        """The notification of a batch, with a digest for each of its pieces.

        With `is_keyed` by the handoff's key, where it has one.
        """
        key = self._key if is_keyed else None
        pieces = self._locator.locate(self._source, batch.bounds)
        digests: list[bytes] = []
        for layer in batch.copies.layers:
            pair, pages = self._planner.pairs[layer], self._layer_pages[layer]
            digests.append(
                compute_digests(pair.src, pages, pieces, heads=pair.heads, key=key, layer=layer)
            )
        return _make_notification(batch, b"".join(digests))


def _cut(bounds: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """Pieces in runs of at most `MAX_SEGMENTS`."""
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
