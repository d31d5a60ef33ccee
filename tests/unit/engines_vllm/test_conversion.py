"""Pages copied as they are, and converted; `tests/property` holds conversion against the kernel."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from baton.engines.vllm.host_pages import PlainPages, TransposedPages
from baton.kv.layout import KVLayout
from baton.transfer.region import allocate_host_region, view_pages


def test_plain_pages_are_head_by_head_whatever_the_memory_order() -> None:
    """As on CUDA with LBNHC: memory `[block][token][head][content]`, viewed head first."""
    memory = torch.arange(6 * 4 * 2 * 8, dtype=torch.int32).view(6, 4, 2, 8)
    pages = memory.permute(0, 2, 1, 3)
    region = allocate_host_region([(3, 4 * 2 * 8 * 4)])
    staging = PlainPages([pages], region)
    staging.gather(0, np.array([5, 1]), np.array([0, 2]))
    rows = torch.from_numpy(view_pages(region.memory, region.arrays[0])).view(torch.int32)
    assert torch.equal(rows[0], pages[5].reshape(-1))
    assert torch.equal(rows[2], pages[1].reshape(-1))
    assert not rows[1].any()
    expected = memory.clone()
    expected[3], expected[0] = memory[5], memory[1]
    staging.scatter(0, np.array([2, 0]), np.array([0, 3]))
    assert torch.equal(memory, expected)


def test_plain_pages_of_every_number_keep_their_bits() -> None:
    pages = torch.tensor([[float("nan"), -0.0] * 32, [1.0, 2.0] * 32]).view(2, 1, 8, 8)
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float8_e5m2):
        cache = pages.to(dtype)
        region = allocate_host_region([(2, cache[0].nbytes)])
        staging = PlainPages([cache], region)
        wanted = cache.view(torch.uint8).clone()
        staging.gather(0, np.array([0, 1]), np.array([1, 0]))
        cache.view(torch.uint8).zero_()
        staging.scatter(0, np.array([1, 0]), np.array([0, 1]))
        assert torch.equal(cache.view(torch.uint8), wanted)


def test_read_only_indices_and_several_layers() -> None:
    layout = KVLayout.gqa(2, 1, 2, block_size=4, dtype="float32")
    engine = [torch.arange(2 * 16.0).view(2, 1, 4, 4) + 100 * layer for layer in range(2)]
    region = allocate_host_region([(2, layout.page_bytes(0))] * 2)
    blocks, staged = np.array([1]), np.array([0])
    blocks.flags.writeable = staged.flags.writeable = False
    TransposedPages(engine, layout, region).gather(1, blocks, staged)
    page = view_pages(region.memory, region.arrays[1])[0].view(np.float32)
    # In block 1 of layer 1, K is [dim][token] from 116 on, then V [token][dim] from 124 on.
    assert page.tolist() == [116, 120, 117, 121, 118, 122, 119, 123, *range(124, 132)]
    assert not view_pages(region.memory, region.arrays[0]).any()


def test_no_pages_is_no_work() -> None:
    layout = KVLayout.gqa(1, 1, 2, block_size=4, dtype="float32")
    region = allocate_host_region([(2, layout.page_bytes(0))])
    none = np.array([], dtype=np.int64)
    TransposedPages([torch.ones(2, 1, 4, 4)], layout, region).gather(0, none, none)
    assert not view_pages(region.memory, region.arrays[0]).any()


@pytest.mark.parametrize(("blocks", "staged"), [([0, -1], [0, 1]), ([0, 2], [0, 1]), ([1], [2])])
def test_pages_out_of_bounds_are_refused(blocks: list[int], staged: list[int]) -> None:
    layout = KVLayout.gqa(1, 1, 2, block_size=4, dtype="float32")
    region = allocate_host_region([(2, layout.page_bytes(0))])
    pages = torch.ones(2, 1, 4, 4)
    for staging in (TransposedPages([pages], layout, region), PlainPages([pages], region)):
        with pytest.raises(IndexError, match="of 2"):
            staging.scatter(0, np.array(staged), np.array(blocks))
    assert bool((pages == 1).all())
