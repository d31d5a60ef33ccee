"""The engine's KV pages as tensors, and transformers' `Cache` over them."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from transformers import Cache

from baton.engines.gpu.copy_stream import CopyEvent, CopyStream, pin_memory
from baton.engines.gpu.device_region import view_memory
from baton.engines.gpu.page_copier import view_rows
from baton.kv.geometry import PlaneGeometry, page_geometry
from baton.transfer.peer_mappings import PeerMappings
from baton.transfer.region import allocate_shared_region

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from baton.engines.transformers.attention import Step
    from baton.engines.transformers.shape import ModelShape
    from baton.kv.layout import DType, KVLayout
    from baton.transfer.devices.extents import AllocateRegion
    from baton.transfer.interface import PagedRegion

TORCH_DTYPES: Final[dict[DType, torch.dtype]] = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}


class KVPages:
    """Pages that live in the region itself: what the engine writes is at once what peers read.

    With `peer_mappings` blocks of peers can be read as further blocks (`open_peer_mappings`).
    `planes[layer]` holds the layer's keys and values, `[num_blocks, block_size, heads, dim]`
    each; of a latent plane, its two parts. Owned by the engine's thread.
    """

    lands_in_place = True
    """Whether what peers have written can be read without `load_blocks`."""

    def __init__(
        self,
        shape: ModelShape,
        layout: KVLayout,
        region: PagedRegion,
        peer_mappings: PeerMappings | None = None,
    ) -> None:
        self.region, self.peer_mappings = region, peer_mappings
        self._shape, self._layout = shape, layout
        memory, dtype = view_memory(region), TORCH_DTYPES[layout.dtype]
        self._in_region = tuple(
            memory[array.offset_bytes : array.offset_bytes + array.num_pages * array.page_bytes]
            .view(dtype)
            .view(array.num_pages, -1)
            for array in region.arrays
        )
        self.planes = _split(shape, layout, self._in_region)
        self._maps_peers = False
        self._published: deque[int] = deque()

    def publish_layer(self, layer: int, blocks: NDArray[np.int64]) -> None:
        """Begin to make pages `blocks` of `layer` visible to peers: see `poll_published`."""
        del blocks
        self._published.append(layer)

    def poll_published(self) -> Iterator[int]:
        """Layers of which all pages are visible by now, in the order of the calls, each once."""
        while self._published:
            yield self._published.popleft()

    def wait_published(self) -> Iterator[int]:
        """The other ones, each as soon as it is visible."""
        return self.poll_published()

    def load_blocks(self, blocks: Sequence[int]) -> None:
        """Take what peers have written into `blocks`, all layers."""

    def open_peer_mappings(self) -> None:
        """From now on blocks of peers that were attached can be read. Cheap when it is so already.

        The same pages at other addresses: `planes` look at them there, once there is a peer.
        """
        if self._maps_peers or self.peer_mappings is None:
            return
        self._maps_peers = True
        dtype = TORCH_DTYPES[self._layout.dtype]
        self._in_region = tuple(
            torch.from_numpy(self.peer_mappings.view(array)).view(dtype)
            for array in range(len(self.region.arrays))
        )
        self.planes = _split(self._shape, self._layout, self._in_region)

    def copy(self, source: Sequence[int], target: Sequence[int]) -> None:
        """Copy whole blocks into blocks of this engine's own, all layers."""
        src, dst = torch.tensor(source), torch.tensor(target)
        for pages in self._in_region:
            pages[dst] = pages[src]

    def release(self) -> None:
        """Give peer_mappings back: `planes` are of no use any more."""
        self.planes = self._in_region = ()
        if self.peer_mappings is not None:
            self.peer_mappings.close()


class DevicePages(KVPages):
    """Pages in a region of an accelerator's own memory, which peers reach there.

    Pages of a layer are visible once the accelerator has written them: the model goes on meanwhile.
    """

    lands_in_place = False  # a step cannot wait for single layers of an accelerator's

    def __init__(self, shape: ModelShape, layout: KVLayout, region: PagedRegion) -> None:
        super().__init__(shape, layout, region)
        self._device = self._in_region[0].device
        # CUDA's module, or that of another accelerator; the CPU's does everything at once.
        self._streams: Any = torch.get_device_module(self._device)
        self._written: deque[tuple[int, CopyEvent]] = deque()

    def publish_layer(self, layer: int, blocks: NDArray[np.int64]) -> None:
        """See `KVPages`: visible once what the accelerator was given to do has been done."""
        del blocks
        event = self._streams.Event()
        event.record(self._streams.current_stream(self._device))
        self._written.append((layer, CopyEvent(event)))

    def poll_published(self) -> Iterator[int]:
        """See `KVPages`. Does not wait."""
        while self._written and self._written[0][1].is_done():
            yield self._written.popleft()[0]

    def wait_published(self) -> Iterator[int]:
        """See `KVPages`. Waits for the accelerator."""
        while self._written:
            layer, event = self._written.popleft()
            event.wait()
            yield layer


class MirroredPages(KVPages):
    """Pages on an accelerator, mirrored in a region of host memory that peers reach.

    Pages cross beside the model's computing: it never waits for a page on its way to the host.
    """

    lands_in_place = False

    def __init__(
        self, shape: ModelShape, layout: KVLayout, region: PagedRegion, device: torch.device
    ) -> None:
        super().__init__(shape, layout, region)
        self._on_device = tuple(torch.zeros_like(a, device=device) for a in self._in_region)
        self.planes = _split(shape, layout, self._on_device)
        self._host_rows = tuple(view_rows(each) for each in self._in_region)
        self._device_rows = tuple(view_rows(each) for each in self._on_device)
        pin_memory(region.memory, device)
        self._copy_stream = CopyStream(device)
        self._copies: deque[tuple[int, CopyEvent]] = deque()

    def publish_layer(self, layer: int, blocks: NDArray[np.int64]) -> None:
        """Begin to copy pages from the accelerator, once what it was given to do has been done."""
        event = self._copy_stream.to_host(
            self._device_rows[layer], blocks, self._host_rows[layer], blocks
        )
        self._copies.append((layer, event))

    def poll_published(self) -> Iterator[int]:
        """See `KVPages`. Does not wait."""
        while self._copies and self._copies[0][1].is_done():
            yield self._copies.popleft()[0]

    def wait_published(self) -> Iterator[int]:
        """See `KVPages`. Waits for the accelerator."""
        while self._copies:
            layer, event = self._copies.popleft()
            event.wait()
            yield layer

    def load_blocks(self, blocks: Sequence[int]) -> None:
        """Copy pages to the accelerator; returns when peers may overwrite those of the region."""
        index = np.array(blocks, np.int64)
        events = [
            self._copy_stream.to_device(host, index, device, index)
            for host, device in zip(self._host_rows, self._device_rows, strict=True)
        ]
        for event in events:
            event.wait()


def allocate_pages(
    shape: ModelShape,
    layout: KVLayout,
    num_blocks: int,
    device: torch.device,
    *,
    allocate: AllocateRegion = allocate_shared_region,
) -> KVPages:
    """Zeroed pages for `num_blocks` blocks of `layout`, on a device for a model on `device`.

    Where `allocate` makes memory of that device, peers reach the pages there; else in a mirror.

    Raises:
        TransferError: there is not that much memory.
    """
    region = allocate([
        (num_blocks, layout.page_bytes(layer)) for layer in range(layout.num_layers)
    ])
    if region.kind == "cuda":
        return DevicePages(shape, layout, region)
    if device.type == "cpu":
        # Memory that is mapped a second time is a memfd's; a device's caches want care.
        peer_mappings = PeerMappings(region) if region.fd is not None else None
        return KVPages(shape, layout, region, peer_mappings)
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


class PagedCache(Cache):  # type: ignore[misc]  # transformers is untyped for us
    """Writes a step's keys and values into pages, and returns all that the step attends to.

    `on_layer(layer)` is called as soon as the keys and values of all the step's tokens are in the
    pages of that layer, where peers see them: in the middle of the forward pass, or, where an
    accelerator is behind, in `finish_step`. Owned by the engine's thread.
    """

    def __init__(self, pages: KVPages) -> None:
        super().__init__(layers=[])
        self._pages = pages
        self._step: Step | None = None
        self._on_layer: Callable[[int], None] = lambda _: None
        self._before_layer: Callable[[int], None] | None = None
        self._gathered = tuple(_Workspace() for _ in range(2))

    def begin_step(
        self,
        step: Step,
        on_layer: Callable[[int], None],
        before_layer: Callable[[int], None] | None = None,
    ) -> None:
        """Take `step`'s arrays for the forward pass that follows.

        `before_layer(layer)` returns once what is attended to in that layer is in the pages.
        """
        for _ in self._pages.wait_published():
            continue  # of a pass that failed
        self._step, self._on_layer, self._before_layer = step, on_layer, before_layer

    def finish_step(self) -> None:
        """End the pass: report layers whose KV was not in the pages yet."""
        for layer in self._pages.wait_published():
            self._on_layer(layer)

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *_: object,
        **__: object,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store `[1, heads, T, dim]` each; return `[1, heads, gathered tokens, dim]` each.

        What is returned is valid until the next layer's update.

        Args:
            key_states: new keys of the step's packed tokens.
            value_states: new values of the step's packed tokens.
            layer_idx: the layer.
        """
        step = self._step
        if step is None:
            raise RuntimeError("update() before begin_step()")
        if self._before_layer is not None:
            self._before_layer(layer_idx)
        gathered = []
        planes = self._pages.planes[layer_idx]
        for plane, new, workspace in zip(
            planes, (key_states, value_states), self._gathered, strict=True
        ):
            plane[step.write_blocks, step.write_offsets] = new[0].transpose(0, 1)
            gathered.append(workspace.gather(plane, step.read_blocks))
        self._pages.publish_layer(layer_idx, step.written_pages)
        for layer in self._pages.poll_published():
            self._on_layer(layer)
        return gathered[0], gathered[1]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Nothing is seen yet, for a model that asks: positions are always given to it."""
        del layer_idx
        return 0


class _Workspace:
    """Memory that all layers gather into: fresh memory for each would cost more than the copy."""

    def __init__(self) -> None:
        self._flat: torch.Tensor | None = None

    def gather(self, plane: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
        """Pages `blocks` of `plane`, `[1, heads, len(blocks) * block_size, dim]`, as one run."""
        _, block_size, num_heads, dim = plane.shape
        num_elements = len(blocks) * block_size * num_heads * dim
        if self._flat is None or len(self._flat) < num_elements:
            self._flat = torch.empty(
                num_elements + num_elements // 2, dtype=plane.dtype, device=plane.device
            )
        out = self._flat[:num_elements].view(len(blocks), block_size, num_heads, dim)
        torch.index_select(plane, 0, blocks, out=out)
        return out.view(-1, num_heads, dim).transpose(0, 1)[None]
