"""Regions of KV in a GPU's memory: allocated, digested, and read for link probes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from baton.engines.gpu.page_digester import PageDigester
from baton.errors import TransferError, mapped
from baton.ids import new_region_handle
from baton.kv.device_digest import WORD_BYTES, PieceParts
from baton.transfer.interface import DeviceMemory, PagedRegion
from baton.transfer.region import compute_region_bytes, place_arrays

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from baton.transfer.interface import PageArray


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

    def allocate_more(more: Sequence[tuple[int, int]]) -> PagedRegion:
        return allocate_device_region(device, more)

    access = TensorAccess(memory, arrays, allocate_more)
    if arrays[0].page_bytes >= WORD_BYTES:
        access.warm_up()
    place = DeviceMemory(memory.device.index, memory.data_ptr(), (memory,), access)
    return PagedRegion(new_region_handle(), "cuda", memoryview(b""), arrays, device=place)


def view_memory(region: PagedRegion) -> torch.Tensor:
    """All bytes of a region, uint8 `[n]`, wherever they are; not copied.

    Raises:
        TransferError: they are on a device, and `allocate_device_region` did not make them.
    """
    if len(region.memory):
        return torch.frombuffer(region.memory, dtype=torch.uint8)
    held = () if region.device is None else region.device.holds
    if len(held) != 1 or not isinstance(held[0], torch.Tensor):
        raise TransferError("the region's memory is not one tensor of a device")
    return held[0]
