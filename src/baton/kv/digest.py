"""A digest for each piece of a token range: equal on both sides, whatever their layouts.

A piece's digest is xxh3_128 over its bytes in canonical order (`[plane][token][head][dim]`); of an
opaque page, over the shared heads' units as they lie, whatever tokens the piece has. It
finds torn, stale and misplaced bytes; it is no proof against an adversary, who is kept out by the
link's authentication.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
from xxhash import xxh3_128, xxh3_128_digest

from baton.errors import ProtocolError
from baton.kv.geometry import check_page_size, page_geometry, view_planes

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from baton.kv.copies import PagedSequence
    from baton.kv.geometry import PageGeometry
    from baton.kv.layout import KVLayout

DIGEST_BYTES: Final = 16


def compute_digests(
    sequence: PagedSequence,
    layer: int,
    layer_pages: NDArray[np.uint8],
    bounds: NDArray[np.int64],
    *,
    heads: range | None = None,
    only: NDArray[np.int64] | None = None,
) -> bytes:
    """`DIGEST_BYTES` for each piece, or each of those chosen, concatenated.

    Args:
        sequence: This side's layout and block table.
        layer: Which layer the pages are of.
        layer_pages: uint8 `[num_blocks, page_bytes]`.
        bounds: int64 `[k + 1]` from `compute_pieces`: no piece crosses a page of this side.
        heads: The kv heads that both sides hold (`shared_heads`); None for all that this one does.
        only: int64 `[m]`, indices of the pieces that are wanted; None for all.

    Raises:
        ProtocolError: the table does not cover the pieces, or one of them crosses a page.
        InvalidLayoutError: the pages have another size than the layout's.
    """
    tokens, lengths = bounds[:-1], np.diff(bounds)
    if not len(tokens):
        return b""
    sequence.check_covers(int(bounds[0]), int(bounds[-1]))
    block_size = sequence.layout.block_size
    in_page = tokens % block_size
    if int((in_page + lengths).max()) > block_size or int(lengths.min()) < 1:
        raise ProtocolError("a piece is empty or crosses a page")
    if only is not None:
        tokens, lengths, in_page = tokens[only], lengths[only], in_page[only]
    geometry = page_geometry(sequence.layout, layer)
    check_page_size(layer_pages, geometry)
    planes: list[NDArray[np.uint8]] = []
    is_stored_as_digested = _is_stored_as_digested(sequence.layout, geometry, heads)
    digests: list[bytes] = []
    for block, first, length in zip(
        sequence.blocks_of(tokens).tolist(), in_page.tolist(), lengths.tolist(), strict=True
    ):
        if is_stored_as_digested and (length == block_size or not geometry.divisible):
            digests.append(xxh3_128_digest(layer_pages[block]))
        else:
            planes = planes or view_planes(layer_pages, geometry, heads)
            tokens_in_page = geometry.locate(range(first, first + length))
            digests.append(_digest_gathered(planes, block, tokens_in_page))
    return b"".join(digests)


def _digest_gathered(planes: list[NDArray[np.uint8]], block: int, tokens: range) -> bytes:
    digest = xxh3_128()
    for rows in planes:
        # A view where the rows are adjacent, a copy in canonical order where they are not.
        digest.update(np.ascontiguousarray(rows[block, tokens.start : tokens.stop]).data)
    return digest.digest()


def _is_stored_as_digested(layout: KVLayout, geometry: PageGeometry, heads: range | None) -> bool:
    """Whether a whole page's bytes, as they lie, are what its digest covers."""
    return layout.order != "heads_first" and all(
        plane.heads_among(heads) == plane.heads for plane in geometry.planes
    )
