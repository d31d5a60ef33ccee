"""KV views of a vLLM worker: its own pages for equal layouts, canonical pages for all others.

`SharedKVMemory`: vLLM's KV cache in memory that peers on this host can map. On CPUs, vLLM 0.32
makes its whole KV cache with one `torch.zeros(n, dtype=torch.int8)` and hands each layer a view of
it (`vllm.v1.worker.utils.allocate_kv_cache`), inside a context that a connector may provide.
`SharedKVMemory.allocation` is that context: it answers this one call with a sealed, committed
memfd, or an extent of a device.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.overrides import TorchFunctionMode

from baton.engines.vllm.device_pages import DevicePages
from baton.engines.vllm.host_pages import PlainPages, TransposedPages
from baton.engines.vllm.layouts import (
    Arrangement,
    make_opaque,
    pages_of,
    read_arrangement,
    view_canonical,
)
from baton.errors import ConfigError, TransferError
from baton.handoff.encoded_view import StagingSize, make_encoded_views
from baton.handoff.kv_views import KVView
from baton.ids import new_region_handle
from baton.kv.copies import count_blocks
from baton.transfer.interface import PageArray, PagedRegion
from baton.transfer.region import (
    ARRAY_ALIGNMENT_BYTES,
    allocate_host_region,
    allocate_shared_region,
    check_arrays,
    release_region,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from contextlib import AbstractContextManager

    from vllm.config import VllmConfig

    from baton.clock import Clock
    from baton.encodings.interface import KVEncoding
    from baton.engines.vllm.layouts import CachedLayers
    from baton.kv.layout import KVLayout
    from baton.transfer.devices.extents import AllocateRegion

logger: Final = logging.getLogger(__name__)

STORE_STAGING_BYTES: Final = 16 * 1024 * 1024
"""A write batch of the store (`BATCH_BYTES` in `pool_mode`), and some."""

ENCODER_SCRATCH_BYTES: Final = 1024 * 1024
"""For each layer, and room for a page at least. What is encoded at once fits the L2 cache."""

CONVERTED_STAGING_BYTES: Final = 256 << 20
DEVICE_STAGING_BYTES: Final = 2 << 30


def choose_staging_bytes(configured: int | None, device: torch.device) -> int:
    """The option, or its default: on a GPU all KV that is handed over passes through staging."""
    if configured is not None:
        return configured
    return CONVERTED_STAGING_BYTES if device.type == "cpu" else DEVICE_STAGING_BYTES


def build_kv_views(
    vllm_config: VllmConfig,
    layers: CachedLayers,
    kv_caches: Mapping[str, torch.Tensor],
    pool: SharedKVMemory | None,
    *,
    staging_bytes: int,
) -> tuple[KVView, ...]:
    """One worker's KV views, best first: vLLM's KV caches as peers reach them.

    The main model's native pages, then canonical ones, unless the native ones are, or their
    arrangement is unknown to Baton. Layer i of a view is `layers.names[i]`: a drafter's are in
    none. Each view has a region of its own, which the caller releases.

    Args:
        vllm_config: This worker's.
        layers: From `read_layers`.
        kv_caches: What vLLM registers, by layer name.
        pool: The memory in which they should be; None where a device has them.
        staging_bytes: At most so many for each region of staged pages; they are committed here.

    Raises:
        ConfigError: the tensors do not match `layers`, or one staged block does not fit.
        TransferError: there is no memory for staging.
    """
    pages = pages_of(kv_caches, layers)[: layers.num_main]
    arrangement = find_arrangement(vllm_config, layers.names[: layers.num_main], pages[0])
    max_tokens = vllm_config.model_config.max_model_len
    builder = KVViewBuilder(layers, pages, pool, staging=StagingBudget(staging_bytes, max_tokens))
    native, canonical = builder.native(arrangement), builder.try_canonical(arrangement)
    return (native,) if canonical is None else (native, canonical)


def build_encoded_views(
    vllm_config: VllmConfig,
    layers: CachedLayers,
    kv_caches: Mapping[str, torch.Tensor],
    encodings: Sequence[KVEncoding],
    *,
    staging_bytes: int,
    clock: Clock,
) -> tuple[KVView, ...]:
    """The main model's pages in each of `encodings`, for slow links; they share scratch memory.

    The caller releases their regions.

    Raises:
        ConfigError: their order is not known to Baton, or not one encoded block fits.
        TransferError: there is no memory for staging.
    """
    layout = layers.main_layout
    page_bytes = max(layout.page_bytes(layer) for layer in range(layout.num_layers))
    num_pages = min(layers.num_blocks, max(1, ENCODER_SCRATCH_BYTES // page_bytes))
    raw = _try_show_canonical(vllm_config, layers, kv_caches, num_pages)
    if isinstance(raw, Arrangement):
        raise ConfigError(
            f"handoff.encoding: pages of {raw} are in an order that Baton does not know, so that "
            'they cannot be encoded: set it to "raw"'
        )
    max_tokens = vllm_config.model_config.max_model_len
    size = StagingSize(staging_bytes, max_tokens, layers.num_blocks, "staging_bytes")
    return make_encoded_views(raw, encodings, size, clock=clock)


def try_build_store_view(
    vllm_config: VllmConfig,
    layers: CachedLayers,
    kv_caches: Mapping[str, torch.Tensor],
    *,
    store_block_size: int,
) -> KVView | None:
    """The main model's pages in canonical order, for the store alone; the caller releases.

    None, with a warning, where that cannot be. The pages of a GPU get into that order on the GPU,
    and are copied from and to pinned memory of the host.

    Raises:
        ConfigError: the tensors do not match `layers`.
        TransferError: there is no memory for staging, or the GPU fails.
    """
    layout = layers.main_layout
    if any(layer.window_tokens is not None for layer in layout.layers):
        # vLLM gives away blocks behind the window while it computes: they would be kept as garbage.
        logger.warning("KV of layers with a sliding window is not kept in a store: no mode pool")
        return None
    fewest = count_blocks(store_block_size, layout.block_size) + 1
    num_pages = max(fewest, STORE_STAGING_BYTES // layout.block_bytes)
    num_pages = min(num_pages, max(fewest, layers.num_blocks))
    view = _try_show_canonical(vllm_config, layers, kv_caches, num_pages)
    if isinstance(view, Arrangement):
        logger.warning("pages of %s cannot be kept in a store: no mode pool here", view)
        return None
    return view


def _try_show_canonical(
    vllm_config: VllmConfig,
    layers: CachedLayers,
    kv_caches: Mapping[str, torch.Tensor],
    num_pages: int,
) -> KVView | Arrangement:
    """The main model's pages in canonical order, through `num_pages` of this process's memory.

    What they are in instead, where that order is not known. The memory goes with the view.

    Raises:
        ConfigError: the tensors do not match `layers`.
        TransferError: there is no memory for it, or the GPU fails.
    """
    layout = layers.main_layout
    pages = pages_of(kv_caches, layers)[: layout.num_layers]
    arrangement = find_arrangement(vllm_config, layers.names[: layout.num_layers], pages[0])
    joins_planes = arrangement.joins_planes and _has_equal_planes(layout)
    if not (arrangement.is_canonical or arrangement.transposes_k or joins_planes):
        return arrangement
    region = allocate_host_region(_shapes(layout, num_pages))
    if joins_planes:
        logger.warning(
            "the store's copies from and to a GPU were tested on CPUs only:"
            " compare tokens with and without --store before you rely on them (docs/gpu.md)"
        )
        views = [
            view_canonical(each, len(layer.planes))
            for each, layer in zip(pages, layout.layers, strict=True)
        ]
        return KVView(layout, region, DevicePages(views, region))
    if arrangement.is_canonical:
        return KVView(layout, region, PlainPages(pages, region))
    return KVView(layout, region, TransposedPages(pages, layout, region))


def _has_equal_planes(layout: KVLayout) -> bool:
    return all(len({plane.head_dim for plane in layer.planes}) == 1 for layer in layout.layers)


def find_arrangement(
    vllm_config: VllmConfig, names: Sequence[str], first: torch.Tensor
) -> Arrangement:
    """How vLLM arranges the pages of these layers; `first` is the first one's tensor.

    Raises:
        ConfigError: a layer does not report its backend.
    """
    return read_arrangement(
        vllm_config.compilation_config.static_forward_context,
        names,
        device=first.device.type,
        layout=vllm_config.cache_config.get_resolved_kv_cache_layout().name,
    )


@dataclass(frozen=True, slots=True)
class StagingBudget:
    """At most `num_bytes` for a region of staged pages; requests have `max_tokens` at most."""

    num_bytes: int
    max_tokens: int

    def count_pages(self, layout: KVLayout) -> int:
        """How many pages of each layer fit; warns where the longest request would not."""
        num_pages = self.num_bytes // layout.block_bytes
        needed = count_blocks(self.max_tokens, layout.block_size)
        if num_pages < needed:
            logger.warning(
                "staging_bytes: %d holds %d tokens in %s pages; KV of a longer request is computed "
                "anew where it would have to be staged (%d tokens need %d bytes)",
                self.num_bytes,
                num_pages * layout.block_size,
                layout.order,
                self.max_tokens,
                needed * layout.block_bytes,
            )
        return num_pages


class KVViewBuilder:
    """Makes the views of one worker; `pages` are those of the main model's layers."""

    def __init__(
        self,
        layers: CachedLayers,
        pages: Sequence[torch.Tensor],
        pool: SharedKVMemory | None,
        *,
        staging: StagingBudget,
    ) -> None:
        self._layers = layers
        self._pages = pages
        self._pool = pool
        self._staging = staging

    def native(self, arrangement: Arrangement) -> KVView:
        """The engine's own pages: in place, if peers can reach them.

        Raises:
            ConfigError: they must be staged, and not one block of them fits.
        """
        layout, pages = self._layers.main_layout, self._pages
        if not arrangement.is_canonical:
            layout = make_opaque(layout, arrangement)
        region = None
        if self._pool is not None:
            region = self._pool.region_for(pages, self._layers.num_blocks)
        if region is not None:
            return KVView(layout, region)
        region = self._try_stage(layout)
        if region is None:
            raise ConfigError(f"staging_bytes: one block alone has {layout.block_bytes}")
        on_host = pages[0].device.type == "cpu"
        staging = PlainPages(pages, region) if on_host else DevicePages(pages, region)
        return KVView(layout, region, staging)

    def try_canonical(self, arrangement: Arrangement) -> KVView | None:
        """The main model's pages for other engines and block sizes; None where that cannot be."""
        if arrangement.is_canonical:
            return None
        if not arrangement.transposes_k:
            logger.warning(
                "pages of %s are in an order that Baton does not know: this worker exchanges KV "
                "with vLLM workers of the same kind and block size only",
                arrangement,
            )
            return None
        layout = self._layers.main_layout
        region = self._try_stage(layout)
        if region is None:
            return None
        return KVView(layout, region, TransposedPages(self._pages, layout, region))

    def _try_stage(self, layout: KVLayout) -> PagedRegion | None:
        num_pages = min(self._staging.count_pages(layout), self._layers.num_blocks)
        return allocate_shared_region(_shapes(layout, num_pages)) if num_pages else None


def _shapes(layout: KVLayout, num_pages: int) -> list[tuple[int, int]]:
    return [(num_pages, layout.page_bytes(layer)) for layer in range(layout.num_layers)]


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
