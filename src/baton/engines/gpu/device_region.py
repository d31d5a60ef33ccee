"""Regions of KV in a GPU's memory: allocated or registered, digested, and read for link probes."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from baton.engines.gpu.page_digester import PageDigester
from baton.errors import TransferError, mapped
from baton.ids import new_region_handle
from baton.kv.device_digest import WORD_BYTES, PieceParts
from baton.transfer.interface import DeviceMemory, PageArray, PagedRegion
from baton.transfer.region import check_arrays, compute_region_bytes, place_arrays

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class TensorAccess:
    """See `DeviceAccess`: a region that is one tensor.

    `allocate` makes further regions of its kind.
    """

    def __init__(
        self,
        memory: torch.Tensor,
        arrays: Sequence[PageArray],
        allocate: Callable[[Sequence[tuple[int, int]]], PagedRegion],
    ) -> None:
        """`memory` is all of the region, uint8 `[n]`."""
        self._memory, self._digester = memory, PageDigester(memory, arrays)
        self.allocate = allocate

    def digest(self, layers: range, parts: PieceParts) -> bytes:
        """See `DeviceAccess`."""
        return self._digester.digest(layers, parts)

    def warm_up(self) -> None:
        """Compile what digests need, before the first handoff waits for it."""
        word = np.array([(0, 0, 0, WORD_BYTES, 0)], np.int64)
        self.digest(range(1), PieceParts(word, num_pieces=1))

    def read(self, first_byte: int, num_bytes: int) -> bytes:
        """See `DeviceAccess`. Waits for what this thread's stream was given."""
        found: bytes = self._memory[first_byte : first_byte + num_bytes].cpu().numpy().tobytes()
        return found

    def write(self, first_byte: int, data: bytes) -> None:
        """See `DeviceAccess`."""
        source = torch.from_numpy(np.frombuffer(data, np.uint8).copy())
        self._memory[first_byte : first_byte + len(data)].copy_(source)
        if self._memory.device.type != "cpu":
            torch.get_device_module(self._memory.device).current_stream().synchronize()


def allocate_device_region(device: torch.device, shapes: Sequence[tuple[int, int]]) -> PagedRegion:
    """Zeroed memory of a GPU, in one tensor: one array for each `(num_pages, page_bytes)`.

    Peers on this host can map it (`cuda_ipc`), so torch must have it from `cudaMalloc`, as it does
    by default.

    Raises:
        TransferError: the sizes make no sense, there is not that much memory, or the device is none
            of CUDA's.
    """
    if device.type != "cuda":
        raise TransferError(
            "transfer.transports moves KV between GPUs (cuda_ipc), and the model is on "
            f'{device}: set engine.device = "cuda", or choose another transport'
        )
    arrays = place_arrays(shapes)
    with mapped({torch.OutOfMemoryError: TransferError}):
        memory = torch.zeros(compute_region_bytes(arrays), dtype=torch.uint8, device=device)
    torch.cuda.synchronize(device)
    return _make_region(memory, arrays)


def register_pages(layers: Sequence[torch.Tensor]) -> PagedRegion:
    """Memory that an engine has allocated: array i is `layers[i]`, `[num_pages, …]`; not copied.

    Whatever the order of dimensions within a page. Peers on this host can map the allocation, all
    of it, where it is from `cudaMalloc`.

    Raises:
        TransferError: the layers are in several allocations, the bytes of one page or the pages of
            one layer are not adjacent, or there are none.
    """
    storage = layers[0].untyped_storage()
    if any(layer.untyped_storage().data_ptr() != storage.data_ptr() for layer in layers):
        raise TransferError("the layers of the KV cache are in several allocations")
    arrays = tuple(map(_locate_pages, layers))
    check_arrays(arrays)
    memory = torch.empty(0, dtype=torch.uint8, device=layers[0].device).set_(storage)
    return _make_region(memory, arrays)


def _locate_pages(layer: torch.Tensor) -> PageArray:
    """Where in its storage the pages of a layer are."""
    num_pages, page_elements = len(layer), layer.numel() // max(1, len(layer))
    expected, is_run = 1, num_pages == 1 or layer.stride(0) == page_elements
    for stride, size in sorted(zip(layer.stride()[1:], layer.shape[1:], strict=True)):
        is_run = is_run and (size == 1 or stride == expected)
        expected *= size
    if not is_run:
        raise TransferError(
            f"the bytes of a page, or the pages, are not adjacent: {tuple(layer.shape)} with "
            f"strides {layer.stride()}"
        )
    first_byte = int(layer.storage_offset()) * layer.element_size()
    return PageArray(first_byte, page_elements * layer.element_size(), num_pages)


def _make_region(memory: torch.Tensor, arrays: tuple[PageArray, ...]) -> PagedRegion:
    """`memory` is all of the region, uint8 `[n]`. Kernels are compiled when this returns."""
    access = TensorAccess(memory, arrays, partial(allocate_device_region, memory.device))
    if arrays[0].page_bytes >= WORD_BYTES:
        access.warm_up()
    place = DeviceMemory(memory.device.index or 0, memory.data_ptr(), (memory,), access)
    return PagedRegion(new_region_handle(), "cuda", memoryview(b""), arrays, device=place)


def view_memory(region: PagedRegion) -> torch.Tensor:
    """All bytes of a region, uint8 `[n]`, wherever they are; not copied.

    Raises:
        TransferError: they are on a device, and this module did not make the region.
    """
    if len(region.memory):
        return torch.frombuffer(region.memory, dtype=torch.uint8)
    held = () if region.device is None else region.device.holds
    if len(held) != 1 or not isinstance(held[0], torch.Tensor):
        raise TransferError("the region's memory is not one tensor of a device")
    return held[0]
