"""vLLM's KV cache as a region in the memory that it is in: in which layouts, and which bytes."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from baton.engines.gpu.device_region import register_pages, view_memory
from baton.engines.vllm.layouts import pages_of, read_layers
from baton.engines.vllm.registered_pages import register_kv_view
from baton.errors import ConfigError, TransferError
from baton.kv.device_digest import PieceParts
from baton.kv.layout import KVLayout, TensorParallelShard, find_differences
from tests.gpu.vllm_layouts import LAYOUTS, allocate_layers, view_layers
from tests.property.page_digesting import compute_sum128
from tests.unit.engines_vllm.caches import (
    BLOCK_SIZE,
    announce,
    configure,
    kv_cache_interface,
    kv_cache_layout,
    main_layers,
    plan,
    worker_utils,
    write_model,
)

if TYPE_CHECKING:
    from pathlib import Path

    from vllm.v1.kv_cache_interface import KVCacheSpec

    from baton.handoff.kv_views import KVView

CPU = torch.device("cpu")
WHOLE_PAGES = frozenset({"LBHNC", "LBNHC"})
"""Layouts of a cache with several heads in which a page of a layer is one run of bytes."""


def register(
    folder: Path,
    order: str,
    specs: dict[str, KVCacheSpec],
    num_ranks: int = 1,
    kernel_block_size: int = BLOCK_SIZE,
) -> tuple[KVView, tuple[torch.Tensor, ...]]:
    config = configure(write_model(folder))
    config.cache_config.kv_cache_layout = order
    cache = plan(config, specs)
    layers = read_layers(config, cache, TensorParallelShard(0, num_ranks))
    announce(config, layers.names)
    tensors = worker_utils.allocate_kv_cache(
        cache, CPU, kv_cache_layout.KVCacheLayout[order], [kernel_block_size]
    )
    return register_kv_view(config, layers, tensors), pages_of(tensors, layers)


@pytest.mark.parametrize("order", LAYOUTS)
def test_layouts_whose_pages_are_runs_of_bytes_are_registered(order: str, tmp_path: Path) -> None:
    if order not in WHOLE_PAGES:
        with pytest.raises(ConfigError, match=f"{order} cannot.*VLLM_KV_CACHE_LAYOUT=LBHNC"):
            register(tmp_path / "m", order, main_layers())
        return
    view, tensors = register(tmp_path / "m", order, main_layers())
    assert (view.region.kind, view.staging, view.digest) == ("cuda", None, "sum128")
    assert view.layout.arrangement.endswith(order)
    memory, block = view_memory(view.region), 5
    for number, (tensor, array) in enumerate(zip(tensors, view.region.arrays, strict=True)):
        tensor[block].copy_(torch.randn_like(tensor[block]))
        first = array.offset_bytes + block * array.page_bytes
        page = memory[first : first + array.page_bytes]
        assert page.data_ptr() == tensor[block].data_ptr()
        assert page.numel() == tensor[block].nbytes
        assert view.device_access is not None
        parts = PieceParts(np.array([(0, block, 0, array.page_bytes, 0)]), 1)
        digest = view.device_access.digest(range(number, number + 1), parts)
        assert digest == np.array(compute_sum128(page.numpy()), "<u8").tobytes()


def test_latent_pages_have_no_heads_to_be_apart(tmp_path: Path) -> None:
    spec = kv_cache_interface.MLAAttentionSpec(
        block_size=BLOCK_SIZE, num_kv_heads=1, head_size=96, dtype=torch.float32
    )
    for order in ("LBHNC", "LBNHC", "LHBNC"):
        view, _ = register(tmp_path / "m", order, dict.fromkeys(main_layers(), spec))
        expected = KVLayout.mla(3, 96, block_size=BLOCK_SIZE, dtype="float32").page_bytes(0)
        assert {array.page_bytes for array in view.region.arrays} == {expected}


def test_two_orders_or_numbers_of_ranks_are_no_peers(tmp_path: Path) -> None:
    """Whole pages move, as they are."""
    alone, _ = register(tmp_path / "m", "LBHNC", main_layers())
    tokens_first, _ = register(tmp_path / "m", "LBNHC", main_layers())
    one_of_two, _ = register(tmp_path / "m", "LBHNC", main_layers(), num_ranks=2)
    again, _ = register(tmp_path / "m", "LBHNC", main_layers(), num_ranks=2)
    for other in (tokens_first, one_of_two):
        (difference, *_) = find_differences(alone.layout, other.layout)
        assert "arrange" in difference
    assert find_differences(one_of_two.layout, again.layout) == ()


def test_pages_in_smaller_kernel_blocks_are_peers_of_their_like_alone(tmp_path: Path) -> None:
    """A drafter's backend may split the main model's blocks: heads then lie within the parts."""

    def find(order: str, *kernel_block_sizes: int) -> tuple[str, ...]:
        one, other = (
            register(tmp_path / "m", order, main_layers(), kernel_block_size=size)[0]
            for size in kernel_block_sizes
        )
        return find_differences(one.layout, other.layout)

    half = BLOCK_SIZE // 2
    (difference,) = find("LBHNC", BLOCK_SIZE, half)
    assert f"LBHNC/kernel blocks of {half} at" in difference
    assert find("LBHNC", half, half) == ()
    assert find("LBNHC", BLOCK_SIZE, half) == (), "tokens come first: no byte lies elsewhere"


@given(order=st.sampled_from(LAYOUTS), dims=st.tuples(*[st.integers(1, 3)] * 4))
def test_pages_are_registered_if_and_only_if_they_are_adjacent_runs(
    order: str, dims: tuple[int, int, int, int]
) -> None:
    """Dimensions of one are in no one's way."""
    shape = (*dims, 64)
    numbers = view_layers(order, shape, torch.arange(math.prod(shape)))
    addresses = [[np.sort(page.numpy(), axis=None) for page in layer] for layer in numbers]
    size = addresses[0][0].size
    is_regular = all(
        np.array_equal(page, layer[0][0] + number * size + np.arange(size))
        for layer in addresses
        for number, page in enumerate(layer)
    )
    layers = view_layers(order, shape, torch.zeros(math.prod(shape), dtype=torch.uint8))
    if not is_regular:
        with pytest.raises(TransferError, match="not adjacent"):
            register_pages(layers)
        return
    arrays = register_pages(layers).arrays
    assert [each.offset_bytes for each in arrays] == [layer[0][0] for layer in addresses]
    assert {(each.page_bytes, each.num_pages) for each in arrays} == {(size, dims[1])}


def test_layers_in_several_allocations_are_refused() -> None:
    shape = (1, 8, 2, 16, 16)
    layers = [allocate_layers("LBHNC", shape, torch.float32, CPU)[0] for _ in range(2)]
    with pytest.raises(TransferError, match="several allocations"):
        register_pages(layers)
