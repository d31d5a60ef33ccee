"""vLLM's KV cache in its GPU's memory as peers reach it there (`cuda_ipc`): nothing is staged."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from baton.engines.gpu.device_region import register_pages
from baton.engines.vllm.kv_views import find_arrangement
from baton.engines.vllm.layouts import CachedLayers, make_opaque, pages_of
from baton.errors import ConfigError, TransferError
from baton.handoff.kv_views import KVView

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch
    from vllm.config import VllmConfig

    from baton.kv.layout import KVLayout

SPLIT_DIMS: Final = 5
"""Of pages `[block, head, kernel block, token, planes]`; others have no kernel blocks."""


def register_kv_view(
    vllm_config: VllmConfig, layers: CachedLayers, kv_caches: Mapping[str, torch.Tensor]
) -> KVView:
    """The main model's pages, where vLLM's kernels read and write them.

    Raises:
        ConfigError: the tensors do not match `layers`, or vLLM arranges them so that a page of one
            layer is not one run of bytes behind the page before.
    """
    layout = layers.main_layout
    pages = pages_of(kv_caches, layers)[: layout.num_layers]
    arrangement = find_arrangement(vllm_config, layers.names[: layout.num_layers], pages[0])
    try:
        region = register_pages(pages)
    except TransferError as exc:
        raise ConfigError(
            f"pages of {arrangement} cannot be handed over from GPU to GPU ({exc}): set "
            'VLLM_KV_CACHE_LAYOUT=LBHNC, or transfer.transports = ["shared", "tcp"]'
        ) from exc
    return KVView(_name_order(make_opaque(layout, arrangement), pages[0]), region)


def _name_order(layout: KVLayout, pages: torch.Tensor) -> KVLayout:
    """Whole pages move as they lie, and are digested so: those in another order are no peers.

    Ranks of another number have other heads. Where kernels use smaller blocks, each of these has
    all heads, if heads come before tokens; another layer's backend (a drafter's) may decide that.
    """
    arrangement = layout.arrangement
    if layout.shard.size > 1:
        arrangement += f"/{layout.shard.size} ranks"
    if pages.dim() == SPLIT_DIMS and pages.shape[1] > 1 and pages.stride(1) > pages.stride(3):
        arrangement += f"/kernel blocks of {pages.shape[3]}"
    return msgspec.structs.replace(layout, arrangement=arrangement)
