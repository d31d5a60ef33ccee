"""vLLM's configuration, as vLLM itself makes it, becomes a layout."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from baton.engines.vllm.layouts import pages_of, read_layers
from baton.errors import ConfigError
from baton.kv.layout import KVLayout, LayerLayout, TensorParallelShard
from tests.unit.engines_vllm.caches import (
    BLOCK_SIZE,
    allocate,
    attention,
    configure,
    kv_cache_interface,
    main_layers,
    plan,
    write_model,
)

if TYPE_CHECKING:
    from pathlib import Path

ALONE = TensorParallelShard()


def test_a_plain_model(tmp_path: Path) -> None:
    config = configure(write_model(tmp_path / "m"))
    cache = plan(config, main_layers())
    layers = read_layers(config, cache, ALONE)
    assert layers.layout == KVLayout.gqa(3, 2, 32, block_size=BLOCK_SIZE, dtype="float32")
    assert layers.main_layout == layers.layout
    assert layers.num_blocks == cache.num_blocks
    assert layers.names == tuple(main_layers())


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("pipeline_parallel_size", 2),
        ("prefill_context_parallel_size", 2),
        ("decode_context_parallel_size", 2),
        ("enable_dbo", True),
        ("ubatch_size", 2),
    ],
)
def test_steps_that_are_cut_in_parts_are_refused(
    option: str, value: object, tmp_path: Path
) -> None:
    config = configure(write_model(tmp_path / "m"))
    cache = plan(config, main_layers())
    setattr(config.parallel_config, option, value)
    with pytest.raises(ConfigError, match="hands over no KV under"):
        read_layers(config, cache, ALONE)


@pytest.mark.parametrize(
    "engines", [{"data_parallel_size": 2}, {"data_parallel_index": 1}], ids=["of experts", "dense"]
)
def test_engines_behind_one_address_are_refused(engines: dict[str, int], tmp_path: Path) -> None:
    """Dense ones each see a size of 1."""
    config = configure(write_model(tmp_path / "m"))
    cache = plan(config, main_layers())
    for name, value in engines.items():
        setattr(config.parallel_config, name, value)
    with pytest.raises(ConfigError, match="start a server for each engine"):
        read_layers(config, cache, ALONE)
    config.parallel_config.data_parallel_external_lb = True
    read_layers(config, cache, ALONE)


def test_layers_are_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    config = configure(write_model(tmp_path / "m", num_hidden_layers=11))
    specs = main_layers(11)
    shuffled = {name: specs[name] for name in sorted(specs, reverse=True)}
    layers = read_layers(config, plan(config, shuffled), ALONE)
    assert layers.names == tuple(specs)


def test_a_draft_models_layers_come_last(tmp_path: Path) -> None:
    draft = write_model(tmp_path / "draft", num_hidden_layers=1)
    config = configure(
        write_model(tmp_path / "m"),
        speculative_config={"method": "draft_model", "model": draft, "num_speculative_tokens": 2},
    )
    drafted = "draft_model.model.layers.0.self_attn.attn"
    specs = {drafted: attention()} | main_layers()
    layers = read_layers(config, plan(config, specs), ALONE)
    assert layers.names == (*main_layers(), drafted)
    assert layers.num_main == 3
    assert layers.main_layout.num_layers == 3
    eagle = "model.layers.3.self_attn.attn"
    layers = read_layers(config, plan(config, {eagle: attention()} | main_layers()), ALONE)
    assert layers.names[layers.num_main :] == (eagle,)


@pytest.mark.parametrize(
    ("cache_dtype", "expected"),
    [("fp8", "float8_e4m3fn"), ("fp8_e4m3", "float8_e4m3fn"), ("fp8_e5m2", "float8_e5m2")],
)
def test_fp8_is_named_though_tensors_are_bytes(
    tmp_path: Path, cache_dtype: str, expected: str
) -> None:
    config = configure(write_model(tmp_path / "m"), kv_cache_dtype=cache_dtype)
    layers = read_layers(config, plan(config, main_layers(dtype=torch.uint8)), ALONE)
    assert layers.layout.dtype == expected
    assert layers.layout.page_bytes(0) == 2 * 2 * 32 * BLOCK_SIZE


@pytest.mark.parametrize(("heads", "shards"), [(2, 2), (4, 2), (2, 4), (1, 2)])
def test_the_whole_models_heads_and_this_ranks_shard(
    tmp_path: Path, heads: int, shards: int
) -> None:
    config = configure(
        write_model(tmp_path / "m", num_key_value_heads=heads, num_attention_heads=4, head_dim=32),
        tensor_parallel_size=shards,
        distributed_executor_backend="mp",
    )
    held = config.model_config.get_num_kv_heads(config.parallel_config)
    cache = plan(config, main_layers(num_kv_heads=held))
    for rank in range(shards):
        layout = read_layers(config, cache, TensorParallelShard(rank, shards)).layout
        assert layout.layers[0] == LayerLayout.gqa(heads, 32)
        assert len(layout.held_heads(layout.layers[0].planes[0])) == held


def test_latent_attention(tmp_path: Path) -> None:
    config = configure(write_model(tmp_path / "m"))
    spec = kv_cache_interface.MLAAttentionSpec(
        block_size=BLOCK_SIZE, num_kv_heads=1, head_size=576, dtype=torch.bfloat16
    )
    layers = read_layers(config, plan(config, dict.fromkeys(main_layers(), spec)), ALONE)
    assert layers.layout == KVLayout.mla(3, 576, block_size=BLOCK_SIZE, dtype="bfloat16")


def test_a_window_counts_only_where_vllm_drops_what_is_behind_it(tmp_path: Path) -> None:
    config = configure(write_model(tmp_path / "m"))
    window = kv_cache_interface.SlidingWindowSpec(
        block_size=BLOCK_SIZE, num_kv_heads=2, head_size=32, dtype=torch.float32, sliding_window=64
    )
    layers = read_layers(config, plan(config, dict.fromkeys(main_layers(), window)), ALONE)
    assert {layer.window_tokens for layer in layers.layout.layers} == {64}
    layers = read_layers(config, plan(config, main_layers(sliding_window=64)), ALONE)
    assert {layer.window_tokens for layer in layers.layout.layers} == {None}


def test_two_groups_of_blocks_are_refused_with_what_helps(tmp_path: Path) -> None:
    config = configure(write_model(tmp_path / "m"))
    window = kv_cache_interface.SlidingWindowSpec(
        block_size=BLOCK_SIZE, num_kv_heads=2, head_size=32, dtype=torch.float32, sliding_window=64
    )
    specs = main_layers() | {"model.layers.1.self_attn.attn": window}
    with pytest.raises(ConfigError, match="--disable-hybrid-kv-cache-manager"):
        read_layers(config, plan(config, specs), ALONE)


def test_groups_that_no_setting_unites_are_refused_without_one(tmp_path: Path) -> None:
    """Of an encoder-decoder: vLLM has two groups with that flag, too."""
    config = configure(write_model(tmp_path / "m"))
    cross = kv_cache_interface.CrossAttentionSpec(
        block_size=BLOCK_SIZE, num_kv_heads=2, head_size=32, dtype=torch.float32
    )
    specs = main_layers() | {"model.layers.1.encoder_attn.attn": cross}
    with pytest.raises(ConfigError, match=r"\(CrossAttentionSpec, Full.* is not supported"):
        read_layers(config, plan(config, specs), ALONE)


def test_kv_that_depends_on_where_the_answer_began_is_refused(tmp_path: Path) -> None:
    config = configure(write_model(tmp_path / "m"))
    spec = kv_cache_interface.RSWASpec(
        block_size=BLOCK_SIZE, num_kv_heads=2, head_size=32, dtype=torch.float32, rswa_window=64
    )
    with pytest.raises(ConfigError, match=r"RSWASpec\) cannot be handed over"):
        read_layers(config, plan(config, dict.fromkeys(main_layers(), spec)), ALONE)


def test_what_holds_more_than_keys_and_values_is_refused(tmp_path: Path) -> None:
    config = configure(write_model(tmp_path / "m"))
    scaled = main_layers(state_content_bytes=2 * 32 * 4 + 8)
    with pytest.raises(ConfigError, match="more than K and V"):
        read_layers(config, plan(config, scaled), ALONE)
    with pytest.raises(ConfigError, match="cannot be handed over"):
        read_layers(config, plan(config, main_layers(dtype=torch.int8)), ALONE)


def test_layers_of_two_dtypes_are_refused(tmp_path: Path) -> None:
    config = configure(write_model(tmp_path / "m"))
    cache = plan(config, main_layers())
    specs = main_layers() | {"model.layers.1.self_attn.attn": attention(dtype=torch.float16)}
    cache.kv_cache_groups[0].kv_cache_spec = kv_cache_interface.UniformTypeKVCacheSpecs(
        BLOCK_SIZE, kv_cache_specs=specs
    )
    with pytest.raises(ConfigError, match="dtypes"):
        read_layers(config, cache, ALONE)


def test_keys_and_values_in_head_slots_of_their_own_are_not_divided(tmp_path: Path) -> None:
    """As with FlashInfer: which slots are a head's is the backend's secret."""
    config = configure(write_model(tmp_path / "m"))
    cache = plan(config, main_layers(num_head_slots=4, state_content_bytes=32 * 4))
    assert read_layers(config, cache, ALONE).layout.layers[0] == LayerLayout.gqa(2, 32)
    with pytest.raises(ConfigError, match="tensor parallel"):
        read_layers(config, cache, TensorParallelShard(0, 2))


def test_pages_of_what_vllm_allocates(tmp_path: Path) -> None:
    config = configure(write_model(tmp_path / "m"))
    cache = plan(config, main_layers())
    layers = read_layers(config, cache, ALONE)
    tensors = allocate(cache)
    pages = pages_of(tensors | {"shared.with.another": tensors[layers.names[0]]}, layers)
    assert [page.data_ptr() for page in pages] == [tensors[n].data_ptr() for n in layers.names]
    with pytest.raises(ConfigError, match=r"no KV cache for layer model\.layers\.0"):
        pages_of({}, layers)
    small = {name: tensor[1:] for name, tensor in tensors.items()}
    with pytest.raises(ConfigError, match=f"not {cache.num_blocks} blocks"):
        pages_of(small, layers)


def test_smaller_kernel_blocks_are_behind_the_heads(tmp_path: Path) -> None:
    """A CUDA backend's view `[blocks x 2, head, token / 2, content]` of the same memory."""
    config = configure(write_model(tmp_path / "m"))
    cache = plan(config, main_layers())
    layers = read_layers(config, cache, ALONE)
    halves = {
        name: torch.arange(2 * 85 * 2 * 16 * 64).view(170, 2, 16, 64).int() for name in layers.names
    }
    pages = pages_of(halves, layers)
    assert pages[0].shape == (85, 2, 2, 16, 64)
    assert torch.equal(pages[0][4, 1, 0], halves[layers.names[0]][8, 1])
    assert torch.equal(pages[0][4, 1, 1], halves[layers.names[0]][9, 1])
