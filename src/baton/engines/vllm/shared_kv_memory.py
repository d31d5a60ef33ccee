"""vLLM's KV cache in memory that peers on this host can map.

On CPUs, vLLM 0.32 makes its whole KV cache with one `torch.zeros(n, dtype=torch.int8)` and hands
each layer a view of it (`vllm.v1.worker.utils.allocate_kv_cache`), inside a context that a
connector may provide. `SharedKVMemory.allocation` is that context: it answers this one call with a
sealed, committed memfd, or an extent of a device.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.overrides import TorchFunctionMode

from baton.errors import TransferError
from baton.ids import new_region_handle
from baton.transfer.interface import PageArray, PagedRegion
from baton.transfer.region import (
    ARRAY_ALIGNMENT_BYTES,
    allocate_shared_region,
    check_arrays,
    release_region,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from baton.transfer.devices.extents import AllocateRegion

logger: Final = logging.getLogger(__name__)


class SharedKVMemory:
    """The memory of one worker's KV cache. Owned by the worker's main thread.

    `num_bytes` is what vLLM is about to allocate (`KVCacheTensor.size`, the same in all of them).
    The memory is free again when the last process that maps it is dead.
    """

    def __init__(self, num_bytes: int, allocate: AllocateRegion = allocate_shared_region) -> None:
        self._num_bytes, self._allocate = num_bytes, allocate
        self._memory: PagedRegion | None = None
        self._base = 0

    def allocation(self) -> AbstractContextManager[object]:
        """The context in which vLLM allocates its KV cache; for this thread alone."""
        return _AllocationOverride(self._try_place)

    def region_for(self, layers: Sequence[torch.Tensor], num_blocks: int) -> PagedRegion | None:
        """The given layers' pages as a region: array i is `layers[i]`, page n its block n.

        Each call gives a region of its own over the same memory, with its own descriptor: release
        them one by one, in any order. None, with a warning, where the layers are not in this pool
        or their blocks are not adjacent (vLLM allocated in another way than this module knows).
        """
        try:
            memory = self._placed()
            arrays = tuple(self._locate(layer, num_blocks) for layer in layers)
            check_arrays(arrays)
        except TransferError as exc:
            logger.warning("peers on this host cannot map the KV cache: %s", exc)
            return None
        fd = None if memory.fd is None else os.dup(memory.fd)
        view = memoryview(memory.memory.obj)
        return PagedRegion(new_region_handle(), memory.kind, view, arrays, fd)

    def release(self) -> None:
        """Drop this pool's own hold; the memory goes when the last tensor and region do."""
        if self._memory is not None:
            release_region(self._memory)
            self._memory = None

    def _try_place(self, num_bytes: int) -> torch.Tensor | None:
        """The pool as a tensor, once, for an allocation of exactly the expected size."""
        if num_bytes != self._num_bytes or self._memory is not None:
            return None
        num_pages = -(-num_bytes // ARRAY_ALIGNMENT_BYTES)
        try:
            self._memory = self._allocate([(num_pages, ARRAY_ALIGNMENT_BYTES)])
        except TransferError as exc:
            logger.warning("%s; vLLM allocates its KV cache itself", exc)
            return None
        # This view is never released: the mapping stays while any tensor looks into it.
        view = memoryview(self._memory.memory.obj)
        pool = torch.frombuffer(view, dtype=torch.int8, count=num_bytes)
        self._base = pool.data_ptr()
        logger.info(
            "the KV cache, %d bytes, is in memory that this host's peers can map", num_bytes
        )
        return pool

    def _placed(self) -> PagedRegion:
        if self._memory is None:
            raise TransferError(f"vLLM did not allocate {self._num_bytes} bytes as expected")
        return self._memory

    def _locate(self, layer: torch.Tensor, num_blocks: int) -> PageArray:
        """Where one layer's pages are in the pool."""
        start = layer.data_ptr() - self._base
        if not layer.is_contiguous() or layer.nbytes % num_blocks:
            raise TransferError("the blocks of a layer are not adjacent")
        if not 0 <= start <= self._num_bytes - layer.nbytes:
            raise TransferError("a layer is outside the memory made for the cache")
        return PageArray(start, layer.nbytes // num_blocks, num_blocks)


class _AllocationOverride(TorchFunctionMode):
    """Offers each `torch.zeros(n, dtype=int8)` on the host to `place`; the rest passes through."""

    def __init__(self, allocate: Callable[[int], torch.Tensor | None]) -> None:
        super().__init__()
        self._allocate_for = allocate

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 - whatever torch's function returns
        kwargs = kwargs or {}
        if func is torch.zeros and len(args) == 1 and isinstance(args[0], int):
            on_host = torch.device(kwargs.get("device") or "cpu").type == "cpu"
            if kwargs.get("dtype") is torch.int8 and on_host:
                placed = self._allocate_for(args[0])
                if placed is not None:
                    return placed
        return func(*args, **kwargs)
