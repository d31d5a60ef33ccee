"""KV of a token range in canonical order: `[plane][token][head][dim]`, whatever the pages' layout.

The plain way, token by token index: the order in which bytes rest or cross engines, and what the
tests hold page copies against. Opaque pages have no such order: their engine converts them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from baton.errors import InvalidLayoutError, ProtocolError
from baton.kv.geometry import PageGeometry, page_geometry, view_planes

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from baton.kv.copies import PagedSequence
    from baton.kv.layout import KVLayout


def canonical_bytes(
    sequence: PagedSequence, layer: int, num_tokens: int, heads: range | None = None
) -> int:
    """Bytes of that many tokens of one layer; of sharded planes, the held heads in `heads`.

    Raises:
        InvalidLayoutError: the layout is opaque.
    """
    planes = _divisible_geometry(sequence.layout, layer).planes
    return num_tokens * sum(len(plane.heads_among(heads)) * plane.row_bytes for plane in planes)


def read_canonical(
    sequence: PagedSequence,
    layer: int,
    layer_pages: NDArray[np.uint8],
    *,
    start: int,
    stop: int,
    heads: range | None = None,
) -> NDArray[np.uint8]:
    """Gather tokens `[start, stop)` from `layer_pages`, uint8 `[num_blocks, page_bytes]`.

    Of sharded planes only the held heads among `heads` are read, all of them for None. Returns a
    fresh flat uint8 array of `canonical_bytes`.

    Raises:
        ProtocolError: not a range, or the table does not cover it.
        InvalidLayoutError: the pages have another size than the layout's, or it is opaque.
    """
    blocks, in_page = _places(sequence, start, stop)
    planes = view_planes(layer_pages, _divisible_geometry(sequence.layout, layer), heads)
    return np.concatenate([rows[blocks, in_page].reshape(-1) for rows in planes])


def write_canonical(
    sequence: PagedSequence,
    layer: int,
    layer_pages: NDArray[np.uint8],
    data: NDArray[np.uint8],
    *,
    start: int,
    heads: range | None = None,
) -> None:
    """Scatter `data`, flat uint8 as `read_canonical` returns it, to tokens from `start` on.

    How many tokens follows from its length.

    Raises:
        ProtocolError: not a whole number of tokens, or the table does not cover them; nothing is
            written then.
        InvalidLayoutError: the pages have another size than the layout's, or it is opaque.
    """
    token_bytes = canonical_bytes(sequence, layer, 1, heads)
    num_tokens, rest = divmod(len(data), token_bytes) if token_bytes else (0, len(data))
    if rest:
        raise ProtocolError(f"{len(data)} bytes are no whole number of tokens ({token_bytes} B)")
    blocks, in_page = _places(sequence, start, start + num_tokens)
    at = 0
    for rows in view_planes(layer_pages, _divisible_geometry(sequence.layout, layer), heads):
        shape = (num_tokens, *rows.shape[2:])
        end = at + num_tokens * rows.shape[2] * rows.shape[3]
        rows[blocks, in_page] = data[at:end].reshape(shape)
        at = end


def _divisible_geometry(layout: KVLayout, layer: int) -> PageGeometry:
    geometry = page_geometry(layout, layer)
    if not geometry.divisible:
        raise InvalidLayoutError(
            f"pages arranged as {layout.arrangement} are opaque: they have no canonical order"
        )
    return geometry


def _places(
    sequence: PagedSequence, start: int, stop: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Block of each token, and its place in that block's pages."""
    sequence.check_covers(start, stop)
    tokens = np.arange(start, stop, dtype=np.int64)
    return sequence.blocks_of(tokens), tokens % sequence.layout.block_size
