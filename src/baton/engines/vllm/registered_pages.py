"""vLLM's KV cache in its GPU's memory as peers reach it there (`cuda_ipc`): nothing is staged."""

from __future__ import annotations

from typing import TYPE_CHECKING

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
    return KVView(_name_ranks(make_opaque(layout, arrangement)), region)


def _name_ranks(layout: KVLayout) -> KVLayout:
    """Whole pages are digested: ranks of another number, which have other heads, are no peers."""
    if layout.shard.size == 1:
        return layout
    arrangement = f"{layout.arrangement}/{layout.shard.size} ranks"
    return msgspec.structs.replace(layout, arrangement=arrangement)
