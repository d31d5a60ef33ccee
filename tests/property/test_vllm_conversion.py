"""Conversion against vLLM's own kernel: what it writes for a token is found in canonical order."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.engines.vllm.host_pages import TransposedPages
from baton.kv.canonical import read_canonical
from baton.kv.copies import BlockTable, PagedSequence
from baton.kv.layout import DTYPE_BYTES, DType, KVLayout, LayerLayout, TensorParallelShard
from baton.transfer.region import allocate_host_region, view_pages
from tests.cpu import needs_fp8
from tests.examples import examples
from tests.lazy_modules import LazyModule, skip_without_vllm

skip_without_vllm()


ops = LazyModule("vllm._custom_ops")

TORCH: dict[DType, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
NUM_BLOCKS = 6


@st.composite
def layouts(draw: st.DrawFn) -> KVLayout:
    shard = TensorParallelShard(*draw(st.sampled_from([(0, 1), (1, 2)])))
    heads = draw(st.integers(1, 3)) * shard.size
    return KVLayout(
        layers=(LayerLayout.gqa(heads, draw(st.sampled_from([32, 64, 80]))),),
        block_size=draw(st.sampled_from([32, 64, 128])),
        dtype=draw(st.sampled_from(sorted(TORCH))),
        shard=shard,
    )


class Written:
    """One layer's cache, filled by the kernel for a sequence in shuffled blocks."""

    def __init__(self, layout: KVLayout, num_tokens: int, seed: int) -> None:
        rng = torch.Generator().manual_seed(seed)
        plane = layout.layers[0].planes[0]
        heads, dim, size = len(layout.held_heads(plane)), plane.head_dim, layout.block_size
        dtype = TORCH[layout.dtype]
        shape = (num_tokens, heads, dim)
        self.k = torch.randn(shape, generator=rng).to(dtype)
        self.v = torch.randn(shape, generator=rng).to(dtype)
        self.blocks = torch.randperm(NUM_BLOCKS, generator=rng)[: -(-num_tokens // size)].numpy()
        self.cache = torch.zeros(NUM_BLOCKS, heads, size, 2 * dim, dtype=dtype)
        tokens = np.arange(num_tokens)
        slots = self.blocks[tokens // size] * size + tokens % size
        halves = self.cache.view(NUM_BLOCKS, heads, 2 * size, dim).chunk(2, dim=2)
        isa = "vec" if dim % 32 == 0 else "vec16"
        ops.cpu_attn_reshape_and_cache(self.k, self.v, *halves, torch.from_numpy(slots), isa)

    @property
    def canonical(self) -> bytes:
        """`[plane][token][head][dim]` of the whole sequence."""
        return b"".join(bytes_of(plane) for plane in (self.k, self.v))


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


@settings(deadline=None, max_examples=examples(20))
@given(layouts(), st.data(), st.integers(0, 2**31))
def test_what_the_kernel_writes_becomes_canonical_and_back(
    layout: KVLayout, data: st.DataObject, seed: int
) -> None:
    num_tokens = data.draw(st.integers(1, 4 * layout.block_size))
    written = Written(layout, num_tokens, seed)
    region = allocate_host_region([(5, layout.page_bytes(0))])
    staged = np.random.default_rng(seed).permutation(5)[: len(written.blocks)].astype(np.int64)
    staging = TransposedPages([written.cache], layout, region)
    staging.gather(0, written.blocks, staged)
    sequence = PagedSequence(layout, BlockTable(0, staged))
    found = read_canonical(
        sequence, 0, view_pages(region.memory, region.arrays[0]), start=0, stop=num_tokens
    )
    assert found.tobytes() == written.canonical

    other = torch.full_like(written.cache, 7.0)
    landed = np.random.default_rng(seed + 1).permutation(NUM_BLOCKS)[: len(staged)]
    if data.draw(st.booleans(), "adjacent"):
        landed = np.sort(landed)
    TransposedPages([other], layout, region).scatter(0, staged, landed)
    assert bytes_of(other[torch.from_numpy(landed)]) == bytes_of(
        written.cache[torch.from_numpy(written.blocks)]
    )
    untouched = torch.from_numpy(np.setdiff1d(np.arange(NUM_BLOCKS), landed))
    assert bool((other[untouched] == 7.0).all())


@needs_fp8
@pytest.mark.parametrize("cache_dtype", ["fp8", "fp8_e5m2"])
def test_fp8_lies_the_same_way(cache_dtype: str) -> None:
    """Each token has K and V of its own that fp8 holds exactly: found where they belong."""
    layout = KVLayout.gqa(1, 2, 32, block_size=64, dtype="float8_e5m2")
    assert DTYPE_BYTES[layout.dtype] == 1
    powers = torch.tensor([0.25, 0.5, 1.0, 2.0])
    rng = torch.Generator().manual_seed(3)
    k, v = (powers[torch.randint(4, (128, 2, 32), generator=rng)] for _ in range(2))
    cache = torch.zeros(2, 2, 64, 64, dtype=torch.uint8)
    halves = cache.view(2, 2, 128, 32).chunk(2, dim=2)
    ops.cpu_attn_reshape_and_cache(
        k, v, *halves, torch.arange(128), "vec", kv_cache_dtype=cache_dtype
    )
    region = allocate_host_region([(2, layout.page_bytes(0))])
    blocks = np.arange(2)
    TransposedPages([cache], layout, region).gather(0, blocks, blocks)
    dtype = torch.float8_e4m3fn if cache_dtype == "fp8" else torch.float8_e5m2
    pages = torch.from_numpy(view_pages(region.memory, region.arrays[0])).view(dtype).float()
    planes = pages.view(2, 2, 64, 2, 32)
    assert torch.equal(planes[:, 0].reshape(128, 2, 32), k)
    assert torch.equal(planes[:, 1].reshape(128, 2, 32), v)
