"""A digest for each piece of a token range: equal on both sides, whatever their layouts.

A piece's digest covers its bytes in canonical order (`[plane][token][head][dim]`); of an opaque
page, the shared heads' units as they lie, whatever tokens the piece has. Where the bytes stay in
one host it is xxh3_128, which finds torn, stale and misplaced bytes. Where they could be changed on
their way it is GMAC (NIST SP 800-38D) under a key of the handoff, which only the two workers have:
other bytes cannot be given the same digest on the way.
"""

from __future__ import annotations

import hmac
import struct
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Final

import numpy as np
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from xxhash import xxh3_128, xxh3_128_digest

from baton.errors import ProtocolError
from baton.kv.geometry import PageGeometry, view_planes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from baton.kv.copies import BlockTable, PagedSequence

DIGEST_BYTES: Final = 16


class DigestKey:
    """Digests pieces of one handoff. Both ends derive the same from their link's secret."""

    def __init__(self, secret: bytes, handoff: bytes) -> None:
        self._mac = AESGCM(hmac.digest(secret, b"handoff|" + handoff, "sha256"))

    def digest(self, layer: int, token: int, data: bytes | memoryview) -> bytes:
        """`DIGEST_BYTES` of the piece of `layer` that begins at `token`, which make its nonce."""
        return self._mac.encrypt(_NONCE.pack(layer, token), b"", data)


_NONCE: Final = struct.Struct("<IQ")


@dataclass(frozen=True)
class Pieces:
    """Where pieces are on one side: piece i is `lengths[i]` tokens of a block from `firsts[i]`.

    `tokens[i]` is the first of them, counted from the prompt's beginning.

    A block has `block_size` tokens.
    """

    tokens: list[int]
    blocks: list[int]
    firsts: list[int]
    lengths: list[int]
    num_tokens: int
    block_size: int

    @cached_property
    def places(self) -> dict[int, int]:
        """Of each block: which piece it holds, the last one if there are several."""
        return {block: place for place, block in enumerate(self.blocks)}

    @property
    def has_one_in_each_block(self) -> bool:
        """Whether no block holds two of them."""
        return len(self.places) == len(self.blocks)


class PieceLocator:
    """Locates a handoff's pieces once for all layers: only the last answer is kept.

    Owner thread: the handoff's. Tables and bounds are compared as objects, and do not change.
    """

    def __init__(self) -> None:
        self._last: tuple[BlockTable, NDArray[np.int64], Pieces] | None = None

    def locate(self, sequence: PagedSequence, bounds: NDArray[np.int64]) -> Pieces:
        """See `locate_pieces`."""
        last = self._last
        if last is not None and last[0] is sequence.table and last[1] is bounds:
            return last[2]
        pieces = locate_pieces(sequence, bounds)
        self._last = sequence.table, bounds, pieces
        return pieces


def locate_pieces(
    sequence: PagedSequence, bounds: NDArray[np.int64], only: NDArray[np.int64] | None = None
) -> Pieces:
    """Where each piece is, or each of those chosen.

    Args:
        sequence: This side's layout and block table.
        bounds: int64 `[k + 1]` from `compute_pieces`: no piece crosses a page of this side.
        only: int64 `[m]`, indices of the pieces that are wanted; None for all.

    Raises:
        ProtocolError: the table does not cover the pieces, or one of them crosses a page.
    """
    block_size = sequence.layout.block_size
    tokens, lengths = bounds[:-1], bounds[1:] - bounds[:-1]
    if not len(tokens):
        return Pieces([], [], [], [], 0, block_size)
    sequence.check_covers(int(bounds[0]), int(bounds[-1]))
    in_page = tokens % block_size
    ends = np.maximum.reduce(in_page + lengths)
    if int(ends) > block_size or int(np.minimum.reduce(lengths)) < 1:
        raise ProtocolError("a piece is empty or crosses a page")
    if only is not None:
        tokens, lengths, in_page = tokens[only], lengths[only], in_page[only]
    blocks = sequence.blocks_of(tokens).tolist()
    num_tokens = int(np.add.reduce(lengths))
    return Pieces(
        tokens.tolist(), blocks, in_page.tolist(), lengths.tolist(), num_tokens, block_size
    )


def compute_digests(
    geometry: PageGeometry,
    layer_pages: Sequence[NDArray[np.uint8]],
    pieces: Pieces,
    *,
    heads: range | None = None,
    key: DigestKey | None = None,
    layer: int = 0,
) -> bytes:
    """`DIGEST_BYTES` for each piece of each layer, layer after layer.

    Args:
        geometry: The layers', of this side's layout.
        layer_pages: Of each layer uint8 `[num_blocks, page_bytes]`, of that geometry
            (`check_page_size`).
        pieces: From `locate_pieces`, of this side's block table.
        heads: The kv heads that both sides hold (`shared_heads`); None for all that this one does.
        key: The handoff's, for digests that cannot be forged; None for xxh3_128.
        layer: The first layer's index: such a digest covers its layer's.
    """
    digests = PieceDigests(geometry, layer_pages, pieces, heads=heads, key=key, layer=layer)
    return digests.finish()


class PieceDigests:
    """The digests of the same pieces of several layers; may be made while pages are being filled.

    Arguments as of `compute_digests`. Owner thread: the handoff's.
    """

    def __init__(
        self,
        geometry: PageGeometry,
        layer_pages: Sequence[NDArray[np.uint8]],
        pieces: Pieces,
        *,
        heads: range | None = None,
        key: DigestKey | None = None,
        layer: int = 0,
    ) -> None:
        self._geometry, self._layer_pages, self._pieces = geometry, layer_pages, pieces
        self._heads, self._key, self._layer = heads, key, layer
        # Of so many tokens or more, a piece is a page as it lies.
        page_tokens = pieces.block_size if geometry.divisible else 1
        if key is not None or not _is_stored_as_digested(geometry, heads):
            page_tokens = pieces.block_size + 1
        self._page_tokens = page_tokens
        self._planes: dict[int, list[NDArray[np.uint8]]] = {}
        self._found: list[bytes | None] = []

    def add_pages(self, layers: range, pages: list[int]) -> None:
        """Some pages of some layers are filled; only where `Pieces.has_one_in_each_block`."""
        places, lengths, page_tokens = self._pieces.places, self._pieces.lengths, self._page_tokens
        found, num_pieces = self._found, len(lengths)
        if not found:
            found += [None] * (num_pieces * len(self._layer_pages))
        first = layers.start - self._layer
        for index in range(first, first + len(layers)):
            layer_pages, at = self._layer_pages[index], index * num_pieces
            for page in pages:
                place = places.get(page)
                if place is None:
                    continue
                is_page = lengths[place] >= page_tokens
                found[at + place] = (
                    xxh3_128_digest(layer_pages[page]) if is_page else self._digest(index, place)
                )

    def finish(self) -> bytes:
        """All pages are filled: `DIGEST_BYTES` for each piece of each layer, layer after layer."""
        found = b"".join(filter(None, self._found))
        if found and len(found) == DIGEST_BYTES * len(self._found):
            return found
        pieces, page_tokens, digests = self._pieces, self._page_tokens, list[bytes]()
        located = list(enumerate(zip(pieces.blocks, pieces.lengths, strict=True)))
        for index, pages in enumerate(self._layer_pages):
            for place, (block, length) in located:
                if length >= page_tokens:  # without a call for each page
                    digests.append(xxh3_128_digest(pages[block]))
                else:
                    digests.append(self._digest(index, place))
        return b"".join(digests)

    def _digest(self, index: int, place: int) -> bytes:
        """Of a piece that is no page as it lies, or with a key."""
        pieces, key, pages = self._pieces, self._key, self._layer_pages[index]
        first, length = pieces.firsts[place], pieces.lengths[place]
        parts = find_parts(self._geometry, self._heads, first, length)
        if parts is None:
            tokens = self._geometry.locate(range(first, first + length))
            rows = _gather(self._view_planes(index), pieces.blocks[place], tokens)
        else:
            page = pages[pieces.blocks[place]].data
            rows = [page[part] for part in parts]
        if key is not None:
            return key.digest(
                self._layer + index, pieces.tokens[place],
                rows[0] if len(rows) == 1 else b"".join(rows),
            )  # fmt: skip
        return _digest_rows(rows)

    def _view_planes(self, index: int) -> list[NDArray[np.uint8]]:
        planes = self._planes.get(index)
        if planes is None:
            pages = self._layer_pages[index]
            planes = self._planes[index] = view_planes(pages, self._geometry, self._heads)
        return planes


def _gather(planes: list[NDArray[np.uint8]], block: int, tokens: range) -> list[memoryview]:
    # Views where the rows are adjacent, copies in canonical order where they are not.
    return [np.ascontiguousarray(rows[block, tokens.start : tokens.stop]).data for rows in planes]


def _digest_rows(rows: list[memoryview]) -> bytes:
    digest = xxh3_128()
    for each in rows:
        digest.update(each)
    return digest.digest()


@lru_cache(maxsize=1024)
def find_parts(
    geometry: PageGeometry, heads: range | None, first: int, num_tokens: int
) -> list[slice] | None:
    """The bytes of some tokens in a page, in canonical order; None where planes lie otherwise.

    A geometry never changes and is compared as an object, so the key has all that it depends on.
    """
    if not _is_stored_as_digested(geometry, heads):
        return None
    tokens = geometry.locate(range(first, first + num_tokens))
    parts: list[slice] = []
    for plane in geometry.planes:
        start = plane.offset + tokens.start * plane.token_stride
        stop = plane.offset + tokens.stop * plane.token_stride
        if parts and parts[-1].stop == start:
            parts[-1] = slice(parts[-1].start, stop)
        else:
            parts.append(slice(start, stop))
    return parts


@lru_cache(maxsize=1024)
def _is_stored_as_digested(geometry: PageGeometry, heads: range | None) -> bool:
    """Whether a whole page's bytes, as they lie, are what its digest covers."""
    return all(
        plane.is_canonical and plane.heads_among(heads) == plane.heads for plane in geometry.planes
    )
