"""Pages that a device copies, in all of vLLM's layouts; the CPU's streams do everything at once.

`tests/gpu/test_vllm_pages.py` has the order of streams.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.engines.gpu.copy_stream import CopyEvent
from baton.engines.vllm.device_pages import DevicePages
from baton.engines.vllm.layouts import pages_of, read_layers
from baton.errors import TransferError
from baton.kv.layout import TensorParallelShard
from baton.transfer.region import allocate_host_region, view_pages
from tests.examples import examples
from tests.gpu.vllm_layouts import LAYOUTS, allocate_layers
from tests.unit.engines_vllm.caches import (
    configure,
    kv_cache_layout,
    main_layers,
    plan,
    worker_utils,
    write_model,
)

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

CPU = torch.device("cpu")
DONE = CopyEvent(torch.cpu.Event())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_layouts_are_vllms(layout: str, tmp_path: Path) -> None:
    config = configure(write_model(tmp_path / "m"))
    config.cache_config.kv_cache_layout = layout
    cache = plan(config, main_layers())
    tensors = worker_utils.allocate_kv_cache(cache, CPU, kv_cache_layout.KVCacheLayout[layout])
    layers = read_layers(config, cache, TensorParallelShard())
    theirs = pages_of(tensors, layers)
    shape = (len(theirs), *theirs[0].shape)
    ours = allocate_layers(layout, shape, theirs[0].dtype, CPU)
    assert [each.stride() for each in theirs] == [each.stride() for each in ours]
    assert starts_of(theirs) == starts_of(ours)


def starts_of(layers: Sequence[torch.Tensor]) -> list[int]:
    """Where they begin, in bytes behind the first."""
    return [each.data_ptr() - layers[0].data_ptr() for each in layers]


@settings(deadline=None, max_examples=examples(30))
@given(
    layout=st.sampled_from(LAYOUTS),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.uint8]),
    num_heads=st.sampled_from([1, 3]),
    head_dim=st.sampled_from([6, 64]),
    num_pages=st.integers(0, 9),
    seed=st.integers(0, 2**31),
)
def test_pages_are_head_by_head_and_come_back(
    layout: str, dtype: torch.dtype, num_heads: int, head_dim: int, num_pages: int, seed: int
) -> None:
    layers = allocate_layers(layout, (2, 12, num_heads, 4, 2 * head_dim), dtype, CPU)
    region = allocate_host_region([(10, layers[0][0].nbytes)] * 2)
    host = [torch.from_numpy(view_pages(region.memory, array)) for array in region.arrays]
    pages = DevicePages(layers, region)
    chance = np.random.default_rng(seed)
    blocks, others = (chance.permutation(12)[:num_pages] for _ in range(2))
    staged = chance.permutation(10)[:num_pages]
    for number in (0, 1, 0):  # the second in the same way as the first, the third in another
        layer = layers[number]
        if number != 1:
            blocks = blocks[::-1].copy()
        expected = bytes_of(layer)[blocks]
        after = bytes_of(layer)
        after[others] = expected
        assert pages.gather(number, blocks, staged, DONE).is_done()
        assert torch.equal(host[number][torch.from_numpy(staged)], expected)
        assert pages.scatter(number, staged, others, DONE).is_done()
        assert torch.equal(bytes_of(layer), after)


def bytes_of(layer: torch.Tensor) -> torch.Tensor:
    """A copy of all pages, uint8 `[n, page_bytes]`, head by head."""
    return layer.contiguous().view(torch.uint8).reshape(len(layer), -1).clone()


def test_a_copy_without_a_position_is_refused() -> None:
    """It would not wait for the step that computes the pages."""
    layers = allocate_layers("LBHNC", (1, 4, 2, 4, 16), torch.float32, CPU)
    pages = DevicePages(layers, allocate_host_region([(4, layers[0][0].nbytes)]))
    with pytest.raises(TransferError, match="needs an event"):
        pages.gather(0, np.arange(1), np.arange(1))
