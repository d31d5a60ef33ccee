"""Where a page's bytes are, and how the bytes of some tokens lie in two different pages.

The one place that turns (plane, token, head) into a byte offset. Everything here depends on the
layouts alone, never on block ids, and is memoised: a forward pass asks for it once a layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, assert_never

import numpy as np
from numpy.lib.stride_tricks import as_strided

from baton.errors import InvalidLayoutError
from baton.kv.runs import merge_spans

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from baton.kv.layout import KVLayout, Plane


@dataclass(frozen=True, slots=True, eq=False)
class PlaneGeometry:
    """Where one plane of a page is.

    The row of (token, head) is the `row_bytes` bytes from
    `offset + token * token_stride + (head - heads.start) * head_stride`. `heads` are those of the
    model's that are held here; a plane that is not `sharded` is held whole by every worker.
    `block_size` counts tokens (`PageGeometry.locate`).
    """

    heads: range
    sharded: bool
    block_size: int
    row_bytes: int
    offset: int
    token_stride: int
    head_stride: int

    @property
    def num_bytes(self) -> int:
        """Bytes of this plane in one page."""
        return self.block_size * len(self.heads) * self.row_bytes

    @property
    def is_canonical(self) -> bool:
        """Whether its bytes lie in canonical order: token after token, head after head."""
        return (
            self.head_stride == self.row_bytes
            and self.token_stride == len(self.heads) * self.row_bytes
        )

    def heads_among(self, wanted: range | None) -> range:
        """The held heads that are wanted: all, where the plane is not sharded or None is given."""
        if wanted is None or not self.sharded:
            return self.heads
        return intersect(self.heads, wanted)

    def row_offsets(self, tokens: range, heads: range) -> NDArray[np.int64]:
        """Byte offset of each row, int64 `[token][head]` flattened."""
        token_part = np.arange(tokens.start, tokens.stop, dtype=np.int64) * self.token_stride
        head_index = np.arange(heads.start, heads.stop, dtype=np.int64) - self.heads.start
        rows: NDArray[np.int64] = token_part[:, None] + head_index * self.head_stride
        return self.offset + rows.reshape(-1)


@dataclass(frozen=True, slots=True, eq=False)
class PageGeometry:
    """The planes of one layer's page, in canonical order. Equal pages are one object.

    An opaque page is not `divisible`: it is the one plane of one token, whose rows are the
    heads' units, and whatever tokens are named, all of them are meant.
    """

    divisible: bool
    page_bytes: int
    planes: tuple[PlaneGeometry, ...]

    def locate(self, tokens: range) -> range:
        """Where these tokens of the page are in its planes."""
        return tokens if self.divisible else range(1)


def page_geometry(layout: KVLayout, layer: int) -> PageGeometry:
    """Where everything is in a page of `layer`."""
    return _compute_geometry(layout, layout.layers[layer].planes)


@lru_cache(maxsize=1024)
def compute_spans(
    src: PageGeometry, dst: PageGeometry, offsets: tuple[int, int], num_tokens: int
) -> NDArray[np.int64]:
    """Where the bytes of `num_tokens` adjacent tokens are in a page of either side.

    The tokens begin at token `offsets[0]` of the src page and `offsets[1]` of the dst page; of
    sharded planes, only the heads that both sides hold. The layouts are exchangeable. Of opaque
    pages it is always the whole units of those heads.

    Returns:
        int64 `[s, 3]`, read-only, ascending in dst: `(src_byte, dst_byte, num_bytes)`, as few as
        there can be: no two of them are adjacent on both sides.
    """
    places = [
        side.locate(range(first, first + num_tokens))
        for side, first in zip((src, dst), offsets, strict=True)
    ]
    rows = np.concatenate([
        _row_spans((ours, theirs), places)
        for ours, theirs in zip(src.planes, dst.planes, strict=True)
    ])
    spans = merge_spans(rows[np.argsort(rows[:, 1])])
    spans.flags.writeable = False
    return spans


def shared_heads(src: KVLayout, dst: KVLayout, layer: int) -> range:
    """The model's kv heads of `layer` that both workers hold; empty where their shards do not meet.

    Latent planes have no part in it: every worker holds them whole.
    """
    for plane in src.layers[layer].planes:
        if plane.name != "latent":
            return intersect(src.held_heads(plane), dst.held_heads(plane))
    return range(0)


def view_planes(
    layer_pages: NDArray[np.uint8], geometry: PageGeometry, heads: range | None
) -> list[NDArray[np.uint8]]:
    """Each plane of `[num_blocks, page_bytes]` as a view `[num_blocks, token, head, row_bytes]`.

    Of sharded planes, only the held heads among `heads` (all for None). Opaque pages are one plane
    of one token (`PageGeometry.locate`).

    Raises:
        InvalidLayoutError: the pages have another size than this geometry's.
    """
    check_page_size(
        layer_pages.shape[1], geometry
    )  # else the strides below would reach beyond the pages
    return [_view_plane(layer_pages, plane, heads) for plane in geometry.planes]


def check_page_size(page_bytes: int, geometry: PageGeometry) -> None:
    """Refuse pages of another size than this geometry's.

    Raises:
        InvalidLayoutError: they are.
    """
    if page_bytes != geometry.page_bytes:
        raise InvalidLayoutError(
            f"pages of {page_bytes} bytes where the layout has {geometry.page_bytes}"
        )


def intersect(one: range, other: range) -> range:
    """What is in both of two ranges of step 1."""
    start = max(one.start, other.start)
    return range(start, max(start, min(one.stop, other.stop)))


def _view_plane(
    layer_pages: NDArray[np.uint8], plane: PlaneGeometry, heads: range | None
) -> NDArray[np.uint8]:
    wanted = plane.heads_among(heads)
    page_stride, byte_stride = layer_pages.strides
    first = plane.offset + (wanted.start - plane.heads.start) * plane.head_stride
    return as_strided(
        layer_pages[:, first:],
        (len(layer_pages), plane.block_size, len(wanted), plane.row_bytes),
        (page_stride, plane.token_stride, plane.head_stride, byte_stride),
    )


@lru_cache(maxsize=1024)
def _compute_geometry(layout: KVLayout, planes: tuple[Plane, ...]) -> PageGeometry:
    if layout.order == "opaque":
        units = _unit_geometry(layout, planes)
        return PageGeometry(divisible=False, page_bytes=units.num_bytes, planes=(units,))
    geometries: list[PlaneGeometry] = []
    offset = 0
    for plane in planes:
        geometries.append(_plane_geometry(layout, plane, offset))
        offset += geometries[-1].num_bytes
    return PageGeometry(divisible=True, page_bytes=offset, planes=tuple(geometries))


def _unit_geometry(layout: KVLayout, planes: tuple[Plane, ...]) -> PlaneGeometry:
    """The units of an opaque page: one a held head, with what all planes keep of that head."""
    heads = layout.held_heads(planes[0])
    unit_bytes = layout.block_size * sum(p.head_dim for p in planes) * layout.element_bytes
    return PlaneGeometry(
        heads=heads,
        sharded=planes[0].name != "latent",
        block_size=1,
        row_bytes=unit_bytes,
        offset=0,
        token_stride=len(heads) * unit_bytes,
        head_stride=unit_bytes,
    )


def _plane_geometry(layout: KVLayout, plane: Plane, offset: int) -> PlaneGeometry:
    heads = layout.held_heads(plane)
    row_bytes = plane.head_dim * layout.element_bytes
    match layout.order:
        case "canonical":
            token_stride, head_stride = len(heads) * row_bytes, row_bytes
        case "heads_first":
            token_stride, head_stride = row_bytes, layout.block_size * row_bytes
        case "opaque":
            raise InvalidLayoutError("where a token is in an opaque page is known to its engine")
        case _:
            assert_never(layout.order)
    return PlaneGeometry(
        heads=heads,
        sharded=plane.name != "latent",
        block_size=layout.block_size,
        row_bytes=row_bytes,
        offset=offset,
        token_stride=token_stride,
        head_stride=head_stride,
    )


def _row_spans(
    planes: tuple[PlaneGeometry, PlaneGeometry], places: Sequence[range]
) -> NDArray[np.int64]:
    """One span for each (token, head) row of a plane, src's and dst's: equally many tokens."""
    src, dst = planes
    heads = src.heads_among(dst.heads)
    rows = np.empty((len(places[0]) * len(heads), 3), dtype=np.int64)
    for side, (plane, tokens) in enumerate(zip(planes, places, strict=True)):
        rows[:, side] = plane.row_offsets(tokens, heads)
    rows[:, 2] = src.row_bytes
    return rows
