"""A GPU's pages as the store sees them, beside the CPU's: host memory in a GPU's layouts."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.engines.gpu.copy_stream import CopyEvent
from baton.engines.vllm import kv_views
from baton.engines.vllm.device_pages import DevicePages
from baton.engines.vllm.host_pages import TransposedPages
from baton.engines.vllm.kv_views import try_build_store_view
from baton.engines.vllm.layouts import Arrangement, read_layers, view_canonical
from baton.handoff.pool_mode.block_copier import BlockCopier, hash_segments
from baton.kv.copies import BlockTable
from baton.kv.identity import HashDomain
from baton.kv.layout import TensorParallelShard
from baton.store.entry_format import EntryFormat
from baton.transfer.region import allocate_host_region, view_pages
from tests.examples import examples
from tests.gpu.vllm_layouts import LAYOUTS, allocate_layers
from tests.unit.engines_vllm.caches import (
    BLOCK_SIZE,
    allocate,
    announce,
    attention,
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

    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheSpec

    from baton.handoff.kv_views import KVView
    from baton.handoff.pool_mode.block_copier import EntryBodies, TokenSegment

CPU = torch.device("cpu")
DONE = CopyEvent(torch.cpu.Event())
IN_STORE = 24
"""Not a multiple of vLLM's blocks: entries begin and end within pages."""
NUM_TOKENS = 5 * IN_STORE + 7


class Worker:
    """A worker's KV memory of random numbers, and the store's view of it."""

    def __init__(
        self,
        config: VllmConfig,
        monkeypatch: pytest.MonkeyPatch,
        *,
        kernel: str | None = None,
        layout: str = "LBHNC",
        specs: dict[str, KVCacheSpec] | None = None,
        kernel_block_size: int | None = None,
    ) -> None:
        """`kernel`: a GPU's attention backend; None: pages of the CPU's kernel `vec`."""
        config.cache_config.kv_cache_layout = layout
        cache = plan(config, specs or main_layers())
        layers = read_layers(config, cache, TensorParallelShard())
        announce(config, layers.names)
        if kernel is None:
            self.tensors = allocate(cache)
        else:
            order = kv_cache_layout.KVCacheLayout[layout]
            sizes = [kernel_block_size] if kernel_block_size else None
            self.tensors = worker_utils.allocate_kv_cache(cache, CPU, order, sizes)
        for tensor in self.tensors.values():
            tensor.copy_(torch.randn(tensor.shape).to(tensor.dtype))
        with monkeypatch.context() as patch:
            if kernel is not None:
                found = Arrangement("cuda", (kernel,), layout)
                patch.setattr(kv_views, "find_arrangement", lambda *_: found)
            view = try_build_store_view(config, layers, self.tensors, store_block_size=IN_STORE)
        self.view: KVView | None = view

    def copier(self) -> BlockCopier:
        assert self.view is not None
        entry_format = EntryFormat.of(self.view.layout, block_size=IN_STORE, num_parts=1)
        return BlockCopier(self.view, entry_format)


@pytest.fixture(name="config")
def config_fixture(tmp_path: Path) -> VllmConfig:
    return configure(write_model(tmp_path / "m"))


def segments() -> tuple[TokenSegment, ...]:
    return hash_segments(HashDomain("m", "", IN_STORE), np.arange(NUM_TOKENS, dtype=np.int32))


def table(seed: int) -> BlockTable:
    blocks = np.random.default_rng(seed).permutation(16)[: -(-NUM_TOKENS // BLOCK_SIZE)]
    return BlockTable(0, blocks.astype(np.int64))


def keep(copier: BlockCopier, blocks: BlockTable) -> list[tuple[list[EntryBodies], object]]:
    found, left = [], segments()
    while left:
        batch = copier.take_batch(left)
        found.append((copier.gather(batch, blocks, DONE), batch))
        left = left[len(batch) :]
    return found


def bodies_of(kept: list[tuple[list[EntryBodies], object]]) -> list[bytes]:
    return [each.rows.tobytes() for bodies, _ in kept for each in bodies]


def load(copier: BlockCopier, kept: list, blocks: BlockTable, start: int = 0) -> None:
    first = start // BLOCK_SIZE
    held = BlockTable(first, blocks.blocks[first:])
    for bodies, batch in kept:
        if batch[-1].stop > start:
            copier.scatter(bodies, batch, start=start, table=held, after=DONE)


def tokens_of(worker: Worker, name: str, blocks: BlockTable) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of a prompt, `[token, head, dim]`, as vLLM's backends for GPUs see them."""
    pages = worker.tensors[name]
    planes = pages.transpose(1, 2).split(pages.shape[-1] // 2, dim=-1)
    k, v = (plane[torch.from_numpy(blocks.blocks)].flatten(0, 1) for plane in planes)
    return k, v


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_gpu_keeps_and_loads_what_the_cpus_pages_do(
    layout: str, config: VllmConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = Worker(config, monkeypatch, kernel="flash_attn", layout=layout)
    other = Worker(config, monkeypatch, kernel="flashinfer", layout=layout)
    cpu = Worker(config, monkeypatch)
    assert gpu.view is not None
    assert cpu.view is not None
    assert gpu.view.layout == cpu.view.layout
    assert isinstance(gpu.view.staging, DevicePages)
    assert isinstance(cpu.view.staging, TransposedPages)
    kept = keep(gpu.copier(), table(1))
    load(cpu.copier(), kept, table(2))
    again = keep(cpu.copier(), table(2))
    assert bodies_of(again) == bodies_of(kept)
    before = {name: tensor.clone() for name, tensor in other.tensors.items()}
    start = 2 * BLOCK_SIZE
    load(other.copier(), again, table(3), start)
    for name, tensor in other.tensors.items():
        for theirs, ours in zip(
            tokens_of(other, name, table(3)), tokens_of(gpu, name, table(1)), strict=True
        ):
            assert torch.equal(theirs[start:NUM_TOKENS], ours[start:NUM_TOKENS])
        written = set(table(3).blocks[2:].tolist())
        untouched = [block for block in range(len(tensor)) if block not in written]
        assert torch.equal(tensor[untouched], before[name][untouched])


def test_vllms_thread_and_the_stores_take_turns(
    config: VllmConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM calls in inference mode, whose tensors no other thread may write to."""
    worker = Worker(config, monkeypatch, kernel="flash_attn", layout="LBNHC")
    copier = worker.copier()
    kept = keep(copier, table(1))
    for in_step in (True, False, True):
        for tensor in worker.tensors.values():
            tensor.zero_()
        with torch.inference_mode(in_step):
            load(copier, kept, table(2))
        assert bodies_of(keep(copier, table(2))) == bodies_of(kept)


def test_kernels_with_smaller_blocks_keep_the_same(
    config: VllmConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = Worker(config, monkeypatch, kernel="flash_attn", layout="LBNHC")
    halves = Worker(
        config,
        monkeypatch,
        kernel="flash_attn",
        layout="LBNHC",
        kernel_block_size=BLOCK_SIZE // 2,
    )
    for name, tensor in halves.tensors.items():
        assert len(tensor) == 2 * len(whole.tensors[name])
        blocks = whole.tensors[name].transpose(1, 2)
        tensor.copy_(blocks.unflatten(1, (2, -1)).flatten(0, 1).transpose(1, 2))
    kept = keep(whole.copier(), table(1))
    assert bodies_of(keep(halves.copier(), table(1))) == bodies_of(kept)


def test_latents_are_kept_as_they_lie(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = kv_cache_interface.MLAAttentionSpec(
        block_size=BLOCK_SIZE, num_kv_heads=1, head_size=72, dtype=torch.float32
    )
    config = configure(write_model(tmp_path / "m"))
    worker = Worker(
        config, monkeypatch, kernel="flashmla", specs=dict.fromkeys(main_layers(), spec)
    )
    blocks = table(1)
    (bodies, batch), *_ = keep(worker.copier(), blocks)
    assert batch[0].start == 0
    first = next(iter(worker.tensors.values()))[int(blocks.blocks[0])].flatten()
    assert bodies[0].rows[0, : IN_STORE * 72 * 4].tobytes() == (
        first[: IN_STORE * 72].numpy().tobytes()
    )


@pytest.mark.parametrize(
    ("kernel", "changes"), [("turboquant", {}), ("flash_attn", {"head_size_v": 16})]
)
def test_pages_in_an_unknown_order_are_not_kept(
    kernel: str,
    changes: dict[str, int],
    config: VllmConfig,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    specs = dict.fromkeys(main_layers(), attention(**changes))
    with caplog.at_level(logging.WARNING):
        worker = Worker(config, monkeypatch, kernel=kernel, specs=specs)
    assert worker.view is None
    assert f"vllm-cuda/{kernel}/LBHNC cannot be kept" in caplog.text


@settings(deadline=None, max_examples=examples(20))
@given(
    layout=st.sampled_from(LAYOUTS),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.uint8]),
    num_heads=st.sampled_from([1, 3]),
    head_dim=st.sampled_from([3, 6, 64]),
    seed=st.integers(0, 2**31),
)
def test_staged_pages_are_canonical_and_come_back(
    layout: str, dtype: torch.dtype, num_heads: int, head_dim: int, seed: int
) -> None:
    layers = allocate_layers(layout, (2, 12, num_heads, 4, 2 * head_dim), dtype, CPU)
    region = allocate_host_region([(10, layers[0][0].nbytes)] * 2)
    host = [torch.from_numpy(view_pages(region.memory, array)) for array in region.arrays]
    pages = DevicePages([view_canonical(layer, 2) for layer in layers], region)
    chance = np.random.default_rng(seed)
    blocks, others = (chance.permutation(12)[:7] for _ in range(2))
    staged = chance.permutation(10)[:7]
    for number, layer in enumerate(layers):
        planes = layer.transpose(1, 2).split(head_dim, dim=-1)
        expected = torch.cat([bytes_of(plane)[blocks] for plane in planes], dim=1)
        pages.gather(number, blocks, staged, DONE)
        assert torch.equal(host[number][torch.from_numpy(staged)], expected)
        after = bytes_of(layer)
        after[others] = bytes_of(layer)[blocks]
        pages.scatter(number, staged, others, DONE)
        assert torch.equal(bytes_of(layer), after)


def bytes_of(pages: torch.Tensor) -> torch.Tensor:
    """A copy, uint8 `[n, page_bytes]`, in the order of the dimensions."""
    return pages.contiguous().view(torch.uint8).reshape(len(pages), -1).clone()
