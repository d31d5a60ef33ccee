"""What landed, compared with the digests of its sender."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from baton.handoff.messages import (
    DIGEST_BYTES,
    Notification,
)
from baton.kv.copies import (
    PagedSequence,
    compute_pieces,
    pair_layers,
)
from baton.kv.digest import (
    DigestKey,
    PieceDigests,
    PieceLocator,
    locate_pieces,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from baton.kv.layout import KVLayout


@dataclass(frozen=True, slots=True)
class DigestResult:
    """What came of a look at pages: of so many tokens (of one layer each) bytes were compared.

    `wrong_layers` have other bytes than their sender had, in one of their pieces or more.
    """

    wrong_layers: list[int]
    num_tokens: int


class DigestVerifier:
    """Decode's side of one handoff: checks what a peer laid out as `peer` wrote.

    `key` is for digests that cannot be forged.
    Keeps what the handoff's layers have in common. Owner thread: the handoff's.

    Raises:
        LayoutMismatchError: the peer's KV cannot be what lies there.
    """

    def __init__(
        self,
        layer_pages: Sequence[NDArray[np.uint8]],
        target: PagedSequence,
        peer: KVLayout,
        key: DigestKey | None = None,
    ) -> None:
        self._layer_pages, self._target, self._key = layer_pages, target, key
        self._block_sizes = peer.block_size, target.layout.block_size
        self._pairs = pair_layers(peer, target.layout)
        self._locator = PieceLocator()

    def begin(self, notification: Notification, *, is_keyed: bool = False) -> PieceDigests | None:
        """Digests of one layer, to be made as its pages are filled, for `verify`.

        None where a page has several pieces, so that they are not all there at once.
        """
        bounds = compute_pieces(*self._block_sizes, notification.start, notification.stop)
        pieces, layer = self._locator.locate(self._target, bounds), notification.layer
        if not pieces.has_one_in_each_block:
            return None
        pair, key = self._pairs[layer], self._key if is_keyed else None
        pages = self._layer_pages[layer]
        return PieceDigests(pair.dst, pages, pieces, heads=pair.heads, key=key, layer=layer)

    def verify(
        self,
        notification: Notification,
        sampler: Sampler | None = None,
        *,
        is_keyed: bool = False,
        begun: PieceDigests | None = None,
    ) -> DigestResult:
        """Where the bytes at the tokens that the notification names lack the digests it claims.

        With a sampler only some of the pieces are looked at; digests must be there for all.
        With `is_keyed` they are by the handoff's key, where it has one. `begun` is what `begin`
        returned for this notification and this `is_keyed`.
        """
        key = self._key if is_keyed else None
        bounds = compute_pieces(*self._block_sizes, notification.start, notification.stop)
        layers = range(notification.layer, notification.layer + notification.num_layers)
        num_pieces, digests = len(bounds) - 1, notification.digests
        layer_bytes = DIGEST_BYTES * num_pieces
        if len(digests) != layer_bytes * len(layers):
            return DigestResult(list(layers), num_tokens=0)
        wrong, num_tokens = [], 0
        pieces = self._locator.locate(self._target, bounds)
        for layer in layers:
            at = (layer - layers.start) * layer_bytes
            claimed = digests[at : at + layer_bytes]
            if sampler is not None:
                only = sampler.choose(layer, num_pieces)
                pieces = locate_pieces(self._target, bounds, only)
                of_each = np.frombuffer(claimed, np.uint8).reshape(num_pieces, DIGEST_BYTES)
                claimed = of_each[only].tobytes()
            pages, pair = self._layer_pages[layer], self._pairs[layer]
            digests_here = begun or PieceDigests(
                pair.dst, pages, pieces, heads=pair.heads, key=key, layer=layer
            )
            if digests_here.finish() != claimed:
                wrong.append(layer)
            num_tokens += pieces.num_tokens
        return DigestResult(wrong, num_tokens)


@dataclass(slots=True)
class Sampler:
    """Chooses the pieces of one handoff that are looked at. Owner: the receiver's thread.

    `chance` is seeded from the system's entropy: a peer cannot foresee the choice.
    """

    share: float
    chance: np.random.Generator = field(
        default_factory=lambda: np.random.default_rng(secrets.randbits(128))
    )
    _seen_layers: set[int] = field(default_factory=set)

    def choose(self, layer: int, num_segments: int) -> NDArray[np.int64]:
        """Indices of one notification's pieces to check, ascending; at least one of a new layer.

        Every piece is chosen with probability `share` or more, independently of the others.
        """
        is_chosen = self.chance.random(num_segments) < self.share
        if layer not in self._seen_layers and num_segments:
            self._seen_layers.add(layer)
            is_chosen[self.chance.integers(num_segments)] = True
        return np.flatnonzero(is_chosen)
