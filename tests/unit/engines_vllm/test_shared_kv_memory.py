"""The KV cache as vLLM allocates it lies in memory that a peer can map, and nothing else does."""

from __future__ import annotations

import gc
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from baton.engines.vllm.kv_views import SharedKVMemory
from baton.transfer.region import map_peer_memory, release_region, view_pages
from tests.unit.engines_vllm.caches import allocate, configure, main_layers, plan, write_model

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig


@pytest.fixture
def cache(tmp_path: Path) -> KVCacheConfig:
    return plan(configure(write_model(tmp_path / "m")), main_layers())


def size_of(cache: KVCacheConfig) -> int:
    return cache.kv_cache_tensors[0].size


def open_files() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def test_a_peer_sees_what_is_written_into_vllms_tensors(cache: KVCacheConfig) -> None:
    pool = SharedKVMemory(size_of(cache))
    with pool.allocation():
        tensors = allocate(cache)
    layers = [tensors[name] for name in main_layers()]
    region = pool.region_for(layers, cache.num_blocks)
    assert region is not None
    assert region.fd is not None
    assert region.kind == "shared"
    assert [array.num_pages for array in region.arrays] == [cache.num_blocks] * 3
    mapped = map_peer_memory(os.dup(region.fd), region.arrays)
    for index, layer in enumerate(layers):
        layer.fill_(float(index + 1))
        layer[3].fill_(10.0 * (index + 1))
    for index, array in enumerate(region.arrays):
        pages = torch.from_numpy(view_pages(mapped, array).copy()).view(torch.float32)
        assert bool((pages[3] == 10.0 * (index + 1)).all())
        assert bool((pages[2] == index + 1).all())
        view_pages(mapped, array)[5] = 0
        assert bool((layers[index][5] == 0).all())


def test_a_subset_of_layers_in_any_order(cache: KVCacheConfig) -> None:
    pool = SharedKVMemory(size_of(cache))
    with pool.allocation():
        tensors = allocate(cache)
    first, _, last = (tensors[name] for name in main_layers())
    region = pool.region_for([last, first], cache.num_blocks)
    assert region is not None
    last.fill_(1.0)
    first.fill_(2.0)
    numbers = [
        view_pages(region.memory, array).view("float32")[0, 0].item() for array in region.arrays
    ]
    assert numbers == [1.0, 2.0]


def test_only_one_allocation_of_exactly_the_expected_size_is_taken() -> None:
    pool = SharedKVMemory(8192)
    with pool.allocation():
        others = [
            torch.zeros(8191, dtype=torch.int8),
            torch.zeros(8192, dtype=torch.uint8),
            torch.zeros((8192,), dtype=torch.int8),
            torch.empty(8192, dtype=torch.int8),
            torch.zeros(8192, dtype=torch.int8, device="meta"),
        ]
        taken = torch.zeros(8192, dtype=torch.int8)
        again = torch.zeros(8192, dtype=torch.int8)
    outside = torch.zeros(8192, dtype=torch.int8)
    assert pool.region_for([taken.view(2, -1)], 2) is not None
    assert not taken.any()
    for tensor in (*others[:4], again, outside):
        assert pool.region_for([tensor[:8190].view(2, -1)], 2) is None


def test_another_pools_tensors_are_outside_wherever_they_are() -> None:
    one, two = SharedKVMemory(4096), SharedKVMemory(4096)
    with one.allocation():
        first = torch.zeros(4096, dtype=torch.int8)
    with two.allocation():
        second = torch.zeros(4096, dtype=torch.int8)
    assert one.region_for([second], 1) is None
    assert two.region_for([first], 1) is None


def test_says_why_the_cache_is_not_shared(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert SharedKVMemory(4096).region_for([torch.zeros(4096)], 1) is None
        pool = SharedKVMemory(4096)
        with pool.allocation():
            memory = torch.zeros(4096, dtype=torch.int8)
        strided = memory.view(2, 32, 64).transpose(1, 2)
        assert pool.region_for([strided], 2) is None
    assert "did not allocate 4096 bytes" in caplog.text
    assert "not adjacent" in caplog.text


def test_more_memory_than_there_is_is_left_to_vllm(caplog: pytest.LogCaptureFixture) -> None:
    pool = SharedKVMemory(1 << 60)
    with caplog.at_level(logging.WARNING), pytest.raises(RuntimeError), pool.allocation():
        torch.zeros(1 << 60, dtype=torch.int8)
    assert "cannot allocate the region" in caplog.text or "makes no sense" in caplog.text


def test_regions_are_released_one_by_one_and_tensors_outlive_them() -> None:
    pool = SharedKVMemory(8192)
    gc.collect()  # what earlier tests left would be closed in the middle of this one
    before = open_files()
    with pool.allocation():
        memory = torch.zeros(8192, dtype=torch.int8)
    one = pool.region_for([memory.view(2, -1)], 2)
    two = pool.region_for([memory.view(2, -1)], 2)
    assert one is not None
    assert two is not None
    assert one.fd != two.fd
    assert one.handle != two.handle
    release_region(one)
    pool.release()
    view_pages(two.memory, two.arrays[0])[1] = 7
    release_region(two)
    gc.collect()
    assert int(memory[4096]) == 7
    del memory
    gc.collect()
    assert open_files() == before
