"""The engine's pages as tensors, and how they meet the region that peers reach."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

from baton.kv.geometry import page_geometry
from baton.transfer.region import allocate_shared_region

if TYPE_CHECKING:
    from collections.abc import Sequence

    from baton.engines.transformers.shape import ModelShape
    from baton.kv.geometry import PlaneGeometry
    from baton.kv.layout import DType, KVLayout
    from baton.transfer.devices.options import AllocateRegion
    from baton.transfer.interface import PagedRegion

TORCH_DTYPES: Final[dict[DType, torch.dtype]] = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}


class KVPages:
    """Pages that live in the region itself: what the engine writes is at once what peers read.

    `planes[layer]` holds the layer's keys and values, `[num_blocks, block_size, heads, dim]`
    each; of a latent plane, its two parts. Owned by the engine's thread.
    """

    def __init__(self, shape: ModelShape, layout: KVLayout, region: PagedRegion) -> None:
        self.region = region
        self._in_region = tuple(
            torch.frombuffer(
                region.memory,
                dtype=TORCH_DTYPES[layout.dtype],
                count=array.num_pages * array.page_bytes // layout.element_bytes,
                offset=array.offset_bytes,
            ).view(array.num_pages, -1)
            for array in region.arrays
        )
        self.planes = _split(shape, layout, self._in_region)

    def to_region(self, layer: int, blocks: torch.Tensor) -> None:
        """Make pages `blocks` of `layer` visible to peers."""

    def from_region(self, blocks: Sequence[int]) -> None:
        """Take what peers have written into `blocks`, all layers."""


class MirroredPages(KVPages):
    """Pages on an accelerator, mirrored in a region of host memory that peers reach."""

    def __init__(
        self, shape: ModelShape, layout: KVLayout, region: PagedRegion, device: torch.device
    ) -> None:
        super().__init__(shape, layout, region)
        self._on_device = tuple(torch.zeros_like(a, device=device) for a in self._in_region)
        self.planes = _split(shape, layout, self._on_device)

    def to_region(self, layer: int, blocks: torch.Tensor) -> None:
        """Copy pages from the accelerator; returns when they are in place."""
        blocks = torch.unique(blocks)
        pages = self._on_device[layer].index_select(0, blocks)
        self._in_region[layer].index_copy_(0, blocks.cpu(), pages.cpu())

    def from_region(self, blocks: Sequence[int]) -> None:
        """Copy pages to the accelerator."""
        index = torch.tensor(blocks)
        for host, device in zip(self._in_region, self._on_device, strict=True):
            pages = host.index_select(0, index).to(device.device)
            device.index_copy_(0, index.to(device.device), pages)


def allocate_pages(
    shape: ModelShape,
    layout: KVLayout,
    num_blocks: int,
    device: torch.device,
    *,
    allocate: AllocateRegion = allocate_shared_region,
) -> KVPages:
    """Zeroed pages for `num_blocks` blocks of `layout`.

    Raises:
        TransferError: there is not that much memory.
    """
    region = allocate([
        (num_blocks, layout.page_bytes(layer)) for layer in range(layout.num_layers)
    ])
    if device.type == "cpu":
        return KVPages(shape, layout, region)
    return MirroredPages(shape, layout, region, device)


def _split(
    shape: ModelShape, layout: KVLayout, arrays: Sequence[torch.Tensor]
) -> tuple[tuple[torch.Tensor, torch.Tensor], ...]:
    """Views of each layer's keys and values; an array is `[num_blocks, elements of a page]`."""
    split = []
    for layer, pages in enumerate(arrays):
        planes = [
            _view(plane, pages, layout.element_bytes)
            for plane in page_geometry(layout, layer).planes
        ]
        if len(planes) == 1:
            key_dim = shape.layers[layer].key_dim
            split.append((planes[0][..., :key_dim], planes[0][..., key_dim:]))
        else:
            split.append((planes[0], planes[1]))
    return tuple(split)


def _view(plane: PlaneGeometry, pages: torch.Tensor, element_bytes: int) -> torch.Tensor:
    """One plane of all pages: `[num_blocks, block_size, heads, dim]`."""
    size = (len(pages), plane.block_size, len(plane.heads), plane.row_bytes // element_bytes)
    strides = (plane.token_stride // element_bytes, plane.head_stride // element_bytes, 1)
    offset = pages.storage_offset() + plane.offset // element_bytes
    return pages.as_strided(size, (pages.stride(0), *strides), offset)
