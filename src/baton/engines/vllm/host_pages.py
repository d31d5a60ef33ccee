"""vLLM's pages in memory of this host, and their staged pages: as they are, or converted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

from baton.transfer.region import find_run, view_pages

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from baton.handoff.interface import StreamPosition
    from baton.kv.layout import KVLayout
    from baton.transfer.interface import PagedRegion

_TEMPORARY_BYTES: Final = 4 << 20
_BITS: Final[dict[int, torch.dtype]] = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
"""Numbers are moved as integers of their size: no NaN is touched, whatever the dtype."""


class PlainPages:
    """`Staging` that copies pages of this host's memory as they are.

    A staged page is `[head][unit]`, whatever the order of dimensions in the engine's memory.
    """

    def __init__(self, pages: Sequence[torch.Tensor], region: PagedRegion) -> None:
        """`pages` are views `[num_blocks, head, …]`, one for each array of `region`."""
        self._pages = tuple(tensor.view(_bits(tensor)) for tensor in pages)
        self._staged = _staged_rows(region)

    def gather(
        self,
        layer: int,
        blocks: NDArray[np.int64],
        staged: NDArray[np.int64],
        _after: StreamPosition | None = None,
    ) -> None:
        """Engine's blocks → staged pages."""
        pages, rows = self._pages[layer], self._staged[layer]
        for part in _bounded(len(blocks), rows):
            _put_rows(rows, staged[part], pages.index_select(0, _indices(blocks[part])))

    def scatter(
        self,
        layer: int,
        staged: NDArray[np.int64],
        blocks: NDArray[np.int64],
        _after: StreamPosition | None = None,
    ) -> None:
        """Staged pages → engine's blocks, in place when this returns."""
        pages, rows = self._pages[layer], self._staged[layer]
        for part in _bounded(len(blocks), rows):
            taken = rows.index_select(0, _indices(staged[part]))
            shaped = taken.view(pages.dtype).view(-1, *pages.shape[1:])
            pages.index_copy_(0, _indices(blocks[part]), shaped)


class TransposedPages:
    """`Staging` between canonical pages and those of vLLM's CPU kernels `vec` and `vec16`.

    There, a head's unit is K as `[dim][token]`, then V as `[token][dim]`; a canonical page is K,
    then V, both `[token][head][dim]`.
    """

    def __init__(
        self, pages: Sequence[torch.Tensor], layout: KVLayout, region: PagedRegion
    ) -> None:
        """`pages` are contiguous `[num_blocks, …]`, one for each layer of canonical `layout`."""
        self._engine = tuple(_rows(tensor.view(len(tensor), -1)) for tensor in pages)
        self._staged = _staged_rows(region)
        self._shapes = tuple(_page_shape(layout, layer) for layer in range(layout.num_layers))
        self._dtype = _BITS[layout.element_bytes]

    def gather(
        self,
        layer: int,
        blocks: NDArray[np.int64],
        staged: NDArray[np.int64],
        _after: StreamPosition | None = None,
    ) -> None:
        """Engine's blocks → staged pages, canonical."""
        engine, rows = self._engine[layer], self._staged[layer]
        for part in _bounded(len(blocks), rows):
            taken, run = _take_rows(engine, blocks[part]), find_run(staged[part])
            converted = torch.empty_like(taken) if run is None else rows[run]
            for native, canonical in self._paired(layer, taken, converted):
                canonical.copy_(native)
            if run is None:
                _put_rows(rows, staged[part], converted)

    def scatter(
        self,
        layer: int,
        staged: NDArray[np.int64],
        blocks: NDArray[np.int64],
        _after: StreamPosition | None = None,
    ) -> None:
        """Staged pages, canonical → engine's blocks."""
        engine, rows = self._engine[layer], self._staged[layer]
        for part in _bounded(len(blocks), rows):
            taken, run = _take_rows(rows, staged[part]), find_run(blocks[part])
            converted = torch.empty_like(taken) if run is None else engine[run]
            for native, canonical in self._paired(layer, converted, taken):
                native.copy_(canonical)
            if run is None:
                _put_rows(engine, blocks[part], converted)

    def _paired(
        self, layer: int, native: torch.Tensor, canonical: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """K, then V, of the same pages as views `[page, token, head, dim]` of either order."""
        tokens, heads, k_dim, v_dim = self._shapes[layer]
        num_pages = len(native)
        units = native.view(self._dtype).view(num_pages, heads, tokens * (k_dim + v_dim))
        k_units, v_units = units[:, :, : tokens * k_dim], units[:, :, tokens * k_dim :]
        planes = canonical.view(self._dtype).view(num_pages, tokens * heads * (k_dim + v_dim))
        k_bound = tokens * heads * k_dim
        k_plane, v_plane = planes[:, :k_bound], planes[:, k_bound:]
        yield (
            k_units.view(num_pages, heads, k_dim, tokens).permute(0, 3, 1, 2),
            k_plane.view(num_pages, tokens, heads, k_dim),
        )
        yield (
            v_units.view(num_pages, heads, tokens, v_dim).permute(0, 2, 1, 3),
            v_plane.view(num_pages, tokens, heads, v_dim),
        )


def _page_shape(layout: KVLayout, layer: int) -> tuple[int, int, int, int]:
    """Tokens, held heads, K's dim and V's."""
    k, v = layout.layers[layer].planes
    return layout.block_size, len(layout.held_heads(k)), k.head_dim, v.head_dim


def _staged_rows(region: PagedRegion) -> tuple[torch.Tensor, ...]:
    return tuple(
        _rows(torch.from_numpy(view_pages(region.memory, array))) for array in region.arrays
    )


def _rows(pages: torch.Tensor) -> torch.Tensor:
    """Pages `[n, …]` as rows of 8-byte words: torch's indexed copies go word by word."""
    return pages.view(torch.int64)


def _take_rows(rows: torch.Tensor, indices: NDArray[np.int64]) -> torch.Tensor:
    """These rows: in place where they follow one another, else a copy."""
    run = find_run(indices)
    return rows.index_select(0, _indices(indices)) if run is None else rows[run]


def _put_rows(rows: torch.Tensor, at: NDArray[np.int64], pages: torch.Tensor) -> None:
    rows.index_copy_(0, _indices(at), pages.reshape(len(pages), -1).view(torch.int64))


def _bits(tensor: torch.Tensor) -> torch.dtype:
    return _BITS[tensor.element_size()]


def _indices(of: NDArray[np.int64]) -> torch.Tensor:
    return torch.tensor(of)


def _bounded(num_pages: int, rows: torch.Tensor) -> Iterator[slice]:
    """Parts of so many pages, at least one each, that a copy of a part is bounded."""
    step = max(1, _TEMPORARY_BYTES // (rows.shape[1] * rows.element_size()))
    for start in range(0, num_pages, step):
        yield slice(start, start + step)
