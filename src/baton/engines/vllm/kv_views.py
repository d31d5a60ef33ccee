"""The faces of a vLLM worker: its own pages for its kind, canonical pages for everybody else."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from baton.engines.vllm.conversion import PlainPages, TransposedPages
from baton.engines.vllm.isa import read_arrangement
from baton.engines.vllm.layouts import keep_layers, make_opaque, pages_of
from baton.errors import ConfigError
from baton.handoff.kv_views import KVView
from baton.transfer.region import allocate_host_region, allocate_shared_region

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch
    from vllm.config import VllmConfig

    from baton.engines.vllm.isa import Arrangement
    from baton.engines.vllm.layouts import CachedLayers
    from baton.engines.vllm.shared_kv_memory import SharedKVMemory
    from baton.kv.layout import KVLayout
    from baton.transfer.interface import PagedRegion

logger: Final = logging.getLogger(__name__)

STORE_STAGING_BYTES: Final = 16 * 1024 * 1024
"""A batch of the store's (`pool_mode.block_packer.BATCH_BYTES`), and some."""


def build_kv_views(
    vllm_config: VllmConfig,
    layers: CachedLayers,
    kv_caches: Mapping[str, torch.Tensor],
    pool: SharedKVMemory | None,
    *,
    staging_bytes: int,
) -> tuple[KVView, ...]:
    """One worker's faces, best first: what `register_kv_caches` was given, shown to peers.

    The native pages of all layers; of the main model's alone, where there is a drafter; then
    canonical ones, unless the native ones are, or their arrangement is unknown to Baton. A face's
    layer i is `layers.names[i]`. Each face has a region of its own, which the caller releases.

    Args:
        vllm_config: This worker's.
        layers: From `read_layers`.
        kv_caches: What vLLM registers, by layer name.
        pool: The memory in which they should be; None where a device has them.
        staging_bytes: At most so many for each region of staged pages; they are committed here.

    Raises:
        ConfigError: the tensors are not what `layers` say, or one staged block does not fit.
        TransferError: there is no memory for staging.
    """
    pages = pages_of(kv_caches, layers)
    arrangements = {
        num_layers: _read_arrangement(vllm_config, layers.names[:num_layers], pages[0])
        for num_layers in (len(layers.names), layers.num_main)
    }
    max_tokens = vllm_config.model_config.max_model_len
    builder = KVViewBuilder(layers, pages, pool, staging=StagingBudget(staging_bytes, max_tokens))
    faces = [builder.native(arrangement, n) for n, arrangement in arrangements.items()]
    canonical = builder.try_canonical(arrangements[layers.num_main])
    return (*faces,) if canonical is None else (*faces, canonical)


def try_build_store_view(
    vllm_config: VllmConfig,
    layers: CachedLayers,
    kv_caches: Mapping[str, torch.Tensor],
    *,
    store_block_size: int,
) -> KVView | None:
    """The main model's pages in canonical order, for the store's thread alone; the caller releases.

    None, with a warning, where that cannot be.

    Raises:
        ConfigError: the tensors are not what `layers` say.
        TransferError: there is no memory for staging.
    """
    layout = layers.main_layout
    pages = pages_of(kv_caches, layers)[: layout.num_layers]
    arrangement = _read_arrangement(vllm_config, layers.names[: layout.num_layers], pages[0])
    if not (arrangement.is_canonical or arrangement.transposes_k):
        logger.warning("pages of %s cannot be kept in a store: no mode pool here", arrangement)
        return None
    if any(layer.window_tokens is not None for layer in layout.layers):
        # vLLM gives away blocks behind the window while it computes: they would be kept as garbage.
        logger.warning("KV of layers with a sliding window is not kept in a store: no mode pool")
        return None
    fewest = -(-store_block_size // layout.block_size) + 1
    num_pages = max(fewest, STORE_STAGING_BYTES // layout.block_bytes)
    region = allocate_host_region(_shapes(layout, min(num_pages, max(fewest, layers.num_blocks))))
    if arrangement.is_canonical:
        return KVView(layout, region, PlainPages(pages, region))
    return KVView(layout, region, TransposedPages(pages, layout, region))


def _read_arrangement(
    vllm_config: VllmConfig, names: Sequence[str], first: torch.Tensor
) -> Arrangement:
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
        needed = -(-self.max_tokens // layout.block_size)
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
    """Makes the faces of one worker; `pages` are those of `pages_of`."""

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

    def native(self, arrangement: Arrangement, num_layers: int) -> KVView:
        """The engine's own pages of the first `num_layers`: in place, if peers can reach them.

        Raises:
            ConfigError: they must be staged, and not one block of them fits.
        """
        layout = keep_layers(self._layers.layout, num_layers)
        if not arrangement.is_canonical:
            layout = make_opaque(layout, arrangement)
        pages = self._pages[:num_layers]
        region = None
        if self._pool is not None:
            region = self._pool.region_for(pages, self._layers.num_blocks)
        if region is not None:
            return KVView(layout, region)
        region = self._try_stage(layout)
        if region is None:
            raise ConfigError(f"staging_bytes: one block alone has {layout.block_bytes}")
        return KVView(layout, region, PlainPages(pages, region))

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
        pages = self._pages[: layout.num_layers]
        return KVView(layout, region, TransposedPages(pages, layout, region))

    def _try_stage(self, layout: KVLayout) -> PagedRegion | None:
        num_pages = min(self._staging.count_pages(layout), self._layers.num_blocks)
        return allocate_shared_region(_shapes(layout, num_pages)) if num_pages else None


def _shapes(layout: KVLayout, num_pages: int) -> list[tuple[int, int]]:
    return [(num_pages, layout.page_bytes(layer)) for layer in range(layout.num_layers)]
