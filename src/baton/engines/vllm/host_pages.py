"""vLLM's pages in memory of this host, and their staged pages: as they are, or converted.

Pages that are adjacent on both sides are copied by one call, straight from one side to the other:
vLLM's block pool gives a prompt runs of blocks for the most part. numpy copies, since torch's
indexed copies, and its conversions, take ten times as long by way of memory in between (ADR 71).
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from baton.transfer.region import view_pages

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from baton.handoff.interface import StreamPosition
    from baton.kv.layout import KVLayout
    from baton.transfer.interface import PagedRegion

    Numbers = NDArray[Any]

_BITS: Final[dict[int, torch.dtype]] = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
"""Numbers are moved as integers of their size: no NaN is touched, whatever the dtype."""


class PlainPages:
    """`Staging` that copies pages of this host's memory as they are.

    A staged page is `[head][unit]`, whatever the order of dimensions in the engine's memory.
    """

    def __init__(self, pages: Sequence[torch.Tensor], region: PagedRegion) -> None:
        """`pages` are views `[num_blocks, head, …]`, one for each array of `region`."""
        self._pages = tuple(map(_to_numbers, pages))
        self._staged = tuple(
            rows.view(engine.dtype).reshape(len(rows), *engine.shape[1:])
            for rows, engine in zip(_staged_rows(region), self._pages, strict=True)
        )

    def gather(
        self,
        layer: int,
        blocks: NDArray[np.int64],
        staged: NDArray[np.int64],
        _after: StreamPosition | None = None,
    ) -> None:
        """Engine's blocks → staged pages."""
        for pages, rows in _adjacent(self._pages[layer], blocks, self._staged[layer], staged):
            np.copyto(rows, pages)

    def scatter(
        self,
        layer: int,
        staged: NDArray[np.int64],
        blocks: NDArray[np.int64],
        _after: StreamPosition | None = None,
    ) -> None:
        """Staged pages → engine's blocks, in place when this returns."""
        for pages, rows in _adjacent(self._pages[layer], blocks, self._staged[layer], staged):
            np.copyto(pages, rows)


class TransposedPages:
    """`Staging` between canonical pages and those of vLLM's CPU kernels `vec` and `vec16`.

    There, a head's unit is K as `[dim][token]`, then V as `[token][dim]`; a canonical page is K,
    then V, both `[token][head][dim]`.
    """

    def __init__(
        self, pages: Sequence[torch.Tensor], layout: KVLayout, region: PagedRegion
    ) -> None:
        """`pages` are contiguous `[num_blocks, …]`, one for each layer of canonical `layout`."""
        shapes = [_page_shape(layout, layer) for layer in range(layout.num_layers)]
        dtype = np.dtype(f"i{layout.element_bytes}")
        self._engine = tuple(
            _native_planes(_to_numbers(tensor.view(len(tensor), -1)).view(dtype), shape)
            for tensor, shape in zip(pages, shapes, strict=True)
        )
        self._staged = tuple(
            _canonical_planes(rows.view(dtype), shape)
            for rows, shape in zip(_staged_rows(region), shapes, strict=True)
        )

    def token_planes(self, layer: int) -> Sequence[Numbers]:
        """See `ShowsTokens`: K, then V."""
        return [plane.transpose(0, 3, 1, 2) for plane in self._engine[layer]]

    def gather(
        self,
        layer: int,
        blocks: NDArray[np.int64],
        staged: NDArray[np.int64],
        _after: StreamPosition | None = None,
    ) -> None:
        """Engine's blocks → staged pages, canonical."""
        for native, canonical in zip(self._engine[layer], self._staged[layer], strict=True):
            for pages, rows in _adjacent(native, blocks, canonical, staged):
                np.copyto(rows, pages)

    def scatter(
        self,
        layer: int,
        staged: NDArray[np.int64],
        blocks: NDArray[np.int64],
        _after: StreamPosition | None = None,
    ) -> None:
        """Staged pages, canonical → engine's blocks."""
        for native, canonical in zip(self._engine[layer], self._staged[layer], strict=True):
            for pages, rows in _adjacent(native, blocks, canonical, staged):
                np.copyto(pages, rows)


def _native_planes(pages: Numbers, shape: tuple[int, int, int, int]) -> tuple[Numbers, Numbers]:
    """K, then V, of the engine's pages, as views `[page, head, dim, token]`."""
    tokens, heads, k_dim, v_dim = shape
    units = pages.reshape(len(pages), heads, tokens * (k_dim + v_dim))
    k_units, v_units = units[:, :, : tokens * k_dim], units[:, :, tokens * k_dim :]
    return (
        k_units.reshape(len(pages), heads, k_dim, tokens),
        v_units.reshape(len(pages), heads, tokens, v_dim).transpose(0, 1, 3, 2),
    )


def _canonical_planes(rows: Numbers, shape: tuple[int, int, int, int]) -> tuple[Numbers, Numbers]:
    """The same of staged pages."""
    tokens, heads, k_dim, v_dim = shape
    num_rows, k_numbers = len(rows), tokens * heads * k_dim
    return (
        rows[:, :k_numbers].reshape(num_rows, tokens, heads, k_dim).transpose(0, 2, 3, 1),
        rows[:, k_numbers:].reshape(num_rows, tokens, heads, v_dim).transpose(0, 2, 3, 1),
    )


def _page_shape(layout: KVLayout, layer: int) -> tuple[int, int, int, int]:
    """Tokens, held heads, K's dim and V's."""
    k, v = layout.layers[layer].planes
    return layout.block_size, len(layout.held_heads(k)), k.head_dim, v.head_dim


def _to_numbers(pages: torch.Tensor) -> Numbers:
    numbers: Numbers = pages.detach().view(_BITS[pages.element_size()]).numpy()
    return numbers


def _staged_rows(region: PagedRegion) -> list[NDArray[np.uint8]]:
    return [view_pages(region.memory, array) for array in region.arrays]


def _adjacent(
    pages: Numbers, blocks: NDArray[np.int64], rows: Numbers, staged: NDArray[np.int64]
) -> Iterator[tuple[Numbers, Numbers]]:
    """Views of the pages `blocks` and the rows `staged`, as many at once as are adjacent in both.

    Raises:
        IndexError: one is out of bounds; nothing was copied.
    """
    if not len(blocks):
        return
    for indices, array in ((blocks, pages), (staged, rows)):
        if not 0 <= indices.min() <= indices.max() < len(array):
            raise IndexError(f"pages {indices.min()} to {indices.max()} of {len(array)}")
    breaks = np.flatnonzero((np.diff(blocks) != 1) | (np.diff(staged) != 1)) + 1
    for start, stop in pairwise((0, *breaks.tolist(), len(blocks))):
        page, row, num_pages = int(blocks[start]), int(staged[start]), stop - start
        yield pages[page : page + num_pages], rows[row : row + num_pages]
