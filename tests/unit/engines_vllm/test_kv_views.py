"""What a worker shows to its peers: native in place where it can be, canonical for the others."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from baton.clock import MachineClock
from baton.engines.vllm import kv_views
from baton.engines.vllm.host_pages import PlainPages, TransposedPages
from baton.engines.vllm.kv_views import (
    SharedKVMemory,
    build_encoded_views,
    build_kv_views,
    choose_staging_bytes,
)
from baton.engines.vllm.layouts import read_layers
from baton.errors import ConfigError
from baton.handoff.encoded_view import encoding_of, open_handoff_encodings
from baton.kv.layout import KVLayout, TensorParallelShard, find_differences
from baton.transfer.region import view_pages
from tests.unit.engines_vllm.caches import (
    BLOCK_SIZE,
    allocate,
    announce,
    attention,
    configure,
    main_layers,
    plan,
    write_model,
)

if TYPE_CHECKING:
    from pathlib import Path

    from vllm.config import VllmConfig

    from baton.engines.vllm.layouts import CachedLayers
    from baton.handoff.kv_views import KVView

MIB = 1 << 20
DRAFTED = "draft_model.model.layers.0.self_attn.attn"


class Worker:
    """A worker's KV memory, as the connector meets it."""

    def __init__(self, config: VllmConfig, *, drafts: bool = False, isa: str = "vec") -> None:
        self.config = config
        specs = main_layers() | ({DRAFTED: attention()} if drafts else {})
        cache = plan(config, specs)
        self.layers: CachedLayers = read_layers(config, cache, TensorParallelShard())
        self.pool = SharedKVMemory(cache.kv_cache_tensors[0].size)
        with self.pool.allocation():
            self.tensors = allocate(cache)
        announce(config, self.layers.names, isa)

    def faces(self, pool: SharedKVMemory | None, staging_bytes: int = MIB) -> tuple[KVView, ...]:
        return build_kv_views(
            self.config, self.layers, self.tensors, pool, staging_bytes=staging_bytes
        )


@pytest.fixture
def config(tmp_path: Path) -> VllmConfig:
    return configure(write_model(tmp_path / "m"))


def test_native_in_place_then_canonical(config: VllmConfig) -> None:
    worker = Worker(config)
    native, canonical = worker.faces(worker.pool)
    assert native.layout.arrangement == "vllm-cpu/vec/LBHNC"
    assert native.staging is None
    assert native.region.kind == "shared"
    assert canonical.layout == KVLayout.gqa(3, 2, 32, block_size=BLOCK_SIZE, dtype="float32")
    assert isinstance(canonical.staging, TransposedPages)
    assert canonical.region.fd != native.region.fd
    assert find_differences(native.layout, native.layout) == ()
    assert find_differences(native.layout, canonical.layout)


@pytest.mark.parametrize("is_shared", [True, False])
def test_a_drafters_layers_are_in_no_view(tmp_path: Path, *, is_shared: bool) -> None:
    draft = write_model(tmp_path / "draft", num_hidden_layers=1)
    speculative = {"method": "draft_model", "model": draft, "num_speculative_tokens": 2}
    worker = Worker(
        configure(write_model(tmp_path / "m"), speculative_config=speculative), drafts=True
    )
    native, canonical = worker.faces(worker.pool if is_shared else None)
    assert [len(face.region.arrays) for face in (native, canonical)] == [3, 3]
    assert {face.layout.num_layers for face in (native, canonical)} == {3}
    plain = Worker(configure(write_model(tmp_path / "m")))
    assert find_differences(native.layout, plain.faces(plain.pool)[0].layout) == ()


def test_without_a_shared_pool_native_pages_are_staged(config: VllmConfig) -> None:
    worker = Worker(config)
    native, canonical = worker.faces(None)
    assert isinstance(native.staging, PlainPages)
    assert isinstance(canonical.staging, TransposedPages)
    tensor = worker.tensors[worker.layers.names[1]]
    tensor.copy_(torch.randn_like(tensor))
    native.staging.gather(1, np.array([7]), np.array([2]))
    page = view_pages(native.region.memory, native.region.arrays[1])[2]
    assert page.tobytes() == tensor[7].numpy().tobytes()


def test_a_cache_that_vllm_made_elsewhere_is_staged(config: VllmConfig) -> None:
    worker = Worker(config)
    worker.tensors = {name: tensor.clone() for name, tensor in worker.tensors.items()}
    native, _ = worker.faces(worker.pool)
    assert isinstance(native.staging, PlainPages)


def test_an_unknown_arrangement_has_no_canonical_face(
    config: VllmConfig, caplog: pytest.LogCaptureFixture
) -> None:
    worker = Worker(config, isa="amx")
    with caplog.at_level(logging.WARNING):
        (native,) = worker.faces(worker.pool)
    assert native.layout.arrangement == "vllm-cpu/amx/LBHNC"
    assert "vllm-cpu/amx/LBHNC" in caplog.text


def test_a_gpu_has_more_staging_memory_by_default() -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda", 0)
    assert choose_staging_bytes(None, cpu) < choose_staging_bytes(None, gpu)
    assert choose_staging_bytes(0, gpu) == 0


def test_staging_is_bounded_and_says_what_the_longest_request_needs(
    config: VllmConfig, caplog: pytest.LogCaptureFixture
) -> None:
    worker = Worker(config)
    block_bytes = worker.layers.layout.block_bytes
    with caplog.at_level(logging.WARNING):
        _, canonical = worker.faces(worker.pool, staging_bytes=3 * block_bytes + 1)
    assert {array.num_pages for array in canonical.region.arrays} == {3}
    # max_model_len is 512: 16 blocks of 32 tokens.
    assert f"512 tokens need {16 * block_bytes} bytes" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        _, canonical = worker.faces(worker.pool, staging_bytes=100 * block_bytes)
    assert {a.num_pages for a in canonical.region.arrays} == {worker.layers.num_blocks}
    assert not caplog.text


def test_staging_that_holds_nothing(config: VllmConfig) -> None:
    worker = Worker(config)
    assert len(worker.faces(worker.pool, staging_bytes=100)) == 1
    with pytest.raises(ConfigError, match="staging_bytes"):
        worker.faces(None, staging_bytes=100)


def encoded(worker: Worker, staging_bytes: int = MIB) -> KVView:
    encodings = open_handoff_encodings("int8", worker.layers.main_layout)
    (view,) = build_encoded_views(
        worker.config,
        worker.layers,
        worker.tensors,
        encodings,
        staging_bytes=staging_bytes,
        clock=MachineClock(),
    )
    return view


def test_encoded_pages_of_one_worker_are_decoded_by_another(
    config: VllmConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through scratch memory of two pages, so that five blocks are encoded in parts."""
    source, target = Worker(config), Worker(config)
    page_bytes = source.layers.main_layout.page_bytes(0)
    monkeypatch.setattr(kv_views, "ENCODER_SCRATCH_BYTES", 2 * page_bytes)
    sent, landed = encoded(source), encoded(target)
    assert encoding_of(sent.layout) == "int8/1"
    assert find_differences(sent.layout, landed.layout) == ()
    assert sent.layout.block_bytes < 0.3 * source.layers.main_layout.block_bytes
    torch.manual_seed(0)
    for name in source.layers.names:
        source.tensors[name].copy_(torch.randn_like(source.tensors[name]))
        target.tensors[name].fill_(7.0)
    blocks, others = np.array([5, 0, 3, 9, 2]), np.array([1, 8, 4, 6, 0])
    staged, pages = np.array([4, 2, 0, 1, 3]), np.array([0, 1, 2, 3, 4])
    assert sent.staging is not None
    assert landed.staging is not None
    for layer, name in enumerate(source.layers.names):
        sent.staging.gather(layer, blocks, staged)
        there = view_pages(landed.region.memory, landed.region.arrays[layer])
        there[pages] = view_pages(sent.region.memory, sent.region.arrays[layer])[staged]
        landed.staging.scatter(layer, pages, others)
        received, computed = target.tensors[name], source.tensors[name]
        difference = (received[others] - computed[blocks]).abs().max()
        assert 0 < difference < 0.03
        untouched = np.setdiff1d(np.arange(len(received)), others)
        assert bool((received[untouched] == 7.0).all())


def test_pages_of_an_unknown_order_are_not_encoded(config: VllmConfig) -> None:
    with pytest.raises(ConfigError, match=r"handoff.encoding.*vllm-cpu/amx/LBHNC"):
        encoded(Worker(config, isa="amx"))


def test_encoded_pages_have_a_size_that_an_option_bounds(config: VllmConfig) -> None:
    worker = Worker(config)
    view = encoded(worker, staging_bytes=3 * encoded(worker).layout.block_bytes + 1)
    assert {array.num_pages for array in view.region.arrays} == {3}
    with pytest.raises(ConfigError, match=r"^staging_bytes: one encoded block"):
        encoded(worker, staging_bytes=100)
