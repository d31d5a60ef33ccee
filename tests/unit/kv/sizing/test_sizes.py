"""KV sizes of models whose numbers are known, and what cannot be known."""

import msgspec
import pytest

from baton.errors import ConfigError
from baton.kv.layout import KVLayout, LayerLayout, TensorParallelShard, needed_tokens
from baton.kv.sizing.config import read_config
from baton.kv.sizing.families import read_kinds, read_shape
from baton.kv.sizing.parts import Attention, ModelShape, State
from baton.kv.sizing.sizes import Terms, compute_sizes
from baton.planner.sizing import find_model

BASE = {
    "model_type": "llama", "torch_dtype": "bfloat16", "num_hidden_layers": 4,
    "hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 2,
}  # fmt: skip


def shape_of(**fields):
    given = {key: value for key, value in (BASE | fields).items() if value is not None}
    return read_shape(read_config(msgspec.json.encode(given), "test")[0])


def kinds_of(**fields):
    given = {key: value for key, value in (BASE | fields).items() if value is not None}
    return "".join(kind[0] for kind in read_kinds(read_config(msgspec.json.encode(given), "")[0]))


def sizes_of(name, num_tokens=1024, **terms):
    return compute_sizes(find_model(name)[0], Terms(num_tokens, **terms))


@pytest.mark.parametrize(
    ("name", "token_bytes"),
    [
        ("llama-3.1-8b", 128 * 1024),
        ("llama-3.1-70b", 320 * 1024),
        ("mixtral-8x7b", 128 * 1024),
        ("qwen3-8b", 144 * 1024),
        ("deepseek-v3", 61 * 576 * 2),
        ("gpt-oss-120b", 36 * 2 * 8 * 64 * 2),
        ("gemma-3-27b", 62 * 2 * 16 * 128 * 2),
        ("qwen3-next-80b-a3b", 12 * 2 * 2 * 256 * 2),
        ("nemotron-h-8b", 4 * 2 * 8 * 128 * 2),
        ("demo", 6 * 2 * 2 * 32 * 2),
    ],
)
def test_bytes_of_a_token(name, token_bytes):
    assert sizes_of(name).token_bytes == token_bytes


@pytest.mark.parametrize(
    ("kv_format", "token_bytes"),
    [
        ("float32", 256 * 1024),
        ("fp8", 64 * 1024),
        ("fp8_token", 32 * 2 * 8 * (128 + 4)),
        ("int8_token", 32 * 2 * 8 * (128 + 4)),
        ("int4_token", 32 * 2 * 8 * (64 + 4)),
    ],
)
def test_quantised_kv_with_its_scales(kv_format, token_bytes):
    assert sizes_of("llama-3.1-8b", kv_format=kv_format).token_bytes == token_bytes


def test_mlas_packed_row_and_what_is_not_for_latent_vectors():
    assert sizes_of("deepseek-v3", kv_format="fp8_ds_mla").token_bytes == 61 * 656
    assert sizes_of("deepseek-v3", kv_format="fp8").token_bytes == 61 * 576
    with pytest.raises(ConfigError, match="latent"):
        sizes_of("deepseek-v3", kv_format="int8_token")


def test_an_indexer_keeps_its_keys_beside():
    shape = shape_of(kv_lora_rank=512, qk_rope_head_dim=64, index_head_dim=128)
    assert compute_sizes(shape, Terms(1)).token_bytes == 4 * (1152 + 132)


def test_whole_blocks():
    sizes = sizes_of("llama-3.1-8b", 17, block_size=16)
    assert (sizes.num_blocks, sizes.kept_bytes) == (2, 32 * 128 * 1024)


@pytest.mark.parametrize("num_tokens", [1, 1023, 1024, 1025, 5000, 8192])
def test_windows_need_what_the_layout_says_the_next_token_needs(num_tokens):
    sizes = sizes_of("gemma-3-27b", num_tokens, block_size=1)
    first, end = needed_tokens(LayerLayout.gqa(16, 128, window_tokens=1024), num_tokens)
    of_layer = 2 * 16 * 128 * 2
    assert sizes.needed_bytes == of_layer * (10 * num_tokens + 52 * (end - first))
    assert sizes.growing_token_bytes == 10 * of_layer


def test_a_windows_first_block_is_kept_whole():
    sizes = sizes_of("mistral-7b-v0.1", 8192 + 8, block_size=16)
    assert sizes.needed_bytes == 257 * 16 * 128 * 1024  # tokens 4105 to 8199: blocks 256 to 512


def test_chunks_need_their_own_chunk():
    part = Attention(1, 1, 1, chunk_tokens=100)
    assert [part.first_needed(each) for each in (99, 100, 101, 250)] == [0, 100, 100, 200]


@pytest.mark.parametrize("num_shards", [1, 2, 8, 16])
def test_shards_are_as_large_as_the_layout_says(num_shards):
    sizes = sizes_of("llama-3.1-8b", num_shards=num_shards)
    layout = KVLayout(
        (LayerLayout.gqa(8, 128),) * 32, 16, "bfloat16", shard=TensorParallelShard(0, num_shards)
    )
    assert sizes.rank_token_bytes == layout.bytes_per_token
    assert sizes.token_bytes == layout.bytes_per_token * num_shards


def test_latent_vectors_are_on_every_worker():
    assert sizes_of("deepseek-v3", num_shards=8).rank_token_bytes == 61 * 576 * 2


def test_states_of_one_size():
    few, many = (sizes_of("nemotron-h-8b", each) for each in (16, 4096))
    assert few.state_bytes == many.state_bytes == 24 * 2 * (3 * (8192 + 2 * 8 * 128) + 8192 * 128)
    assert few.needed_bytes == few.state_bytes + 16 * few.token_bytes


def test_states_in_float32_where_the_config_says_so():
    fields = {
        "layer_types": ["linear_attention", "full_attention"] * 2, "linear_num_key_heads": 2,
        "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    }  # fmt: skip
    half = compute_sizes(shape_of(**fields), Terms(16)).state_bytes
    full = compute_sizes(shape_of(**fields, mamba_ssm_dtype="float32"), Terms(16)).state_bytes
    conv, recurrent = 3 * (2 * 16 + 32), 4 * 8 * 8
    assert half == 2 * (conv + recurrent) * 2
    assert full == 2 * (conv * 2 + recurrent * 4)


def test_states_divided_among_workers_repeat_groups_that_do_not_divide():
    state = State(3, 64, 640, num_groups=1, group_dim=8)
    assert state.conv_numbers(1) == 3 * (64 + 8)
    assert state.conv_numbers(4) == 3 * (64 + 4 * 8) // 4
    with pytest.raises(ConfigError):
        compute_sizes(ModelShape("x", ((state,),), "bfloat16", None, ()), Terms(1, num_shards=3))


@pytest.mark.parametrize(
    ("fields", "kinds"),
    [
        ({}, "ffff"),
        ({"sliding_window": 8}, "ssss"),
        ({"sliding_window": 8, "use_sliding_window": False}, "ffff"),
        ({"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 3}, "fffs"),
        ({"sliding_window": 8, "model_type": "gemma2"}, "sfsf"),
        ({"sliding_window": 8, "sliding_window_pattern": 4}, "sssf"),
        ({"layer_types": ["sliding_attention", "full_attention"] * 2}, "sfsf"),
        ({"attention_chunk_size": 8}, "cccf"),
        ({"attention_chunk_size": 8, "no_rope_layers": [1, 0, 1, 1]}, "cfcc"),
        ({"hybrid_layer_pattern": [0, 1, 1, 0], "sliding_window": 8}, "fssf"),
        ({"full_attention_interval": 2}, "sfsf"),
        ({"attn_layer_period": 4, "attn_layer_offset": 1}, "sfss"),
        ({"attn_layer_indices": [2]}, "ssfs"),
        ({"full_attn_idxs": [0]}, "fccc"),
        ({"hybrid_override_pattern": "M-*E"}, "snfn"),
        ({"attn_type_list": [0, 0, 0, 1]}, "sssf"),
    ],
)
def test_how_families_write_which_layer_is_what(fields, kinds):
    assert kinds_of(**fields) == kinds


@pytest.mark.parametrize(
    ("fields", "token_bytes"),
    [
        ({"num_key_value_heads": None}, 4 * 2 * 256 * 2),
        ({"num_key_value_heads": None, "multi_query": True}, 4 * 2 * 32 * 2),
        ({"num_key_value_heads": [1, 2, 3, 4]}, 2 * (1 + 2 + 3 + 4) * 32 * 2),
        ({"head_dim": 48, "v_head_dim": 16}, 4 * 2 * (48 + 16) * 2),
        ({"num_kv_shared_layers": 3}, 1 * 2 * 64 * 2),
        ({"num_hidden_layers": None, "n_layer": 2}, 2 * 2 * 64 * 2),
        (
            {"block_configs": [{"attention": {"n_heads_in_group": 4}}]
             + [{"attention": {"no_op": True, "n_heads_in_group": None}}] * 3},
            2 * 2 * 32 * 2,
        ),
        (
            {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 8,
             "swa_num_key_value_heads": 1, "swa_head_dim": 8},
            2 * (2 * 1 * 8 + 2 * 2 * 32) * 2,
        ),
    ],
)  # fmt: skip
def test_how_families_write_heads(fields, token_bytes):
    assert compute_sizes(shape_of(**fields), Terms(16)).token_bytes == token_bytes


def test_nested_configs_and_the_outer_dtype():
    inner = {key: value for key, value in BASE.items() if key != "torch_dtype"}
    for outer in ({"text_config": inner}, {"thinker_config": {"text_config": inner}}):
        data = msgspec.json.encode(outer | {"model_type": "vlm", "torch_dtype": "float32"})
        config, way = read_config(data, "test")
        assert way[-1] == "text_config"
        assert compute_sizes(read_shape(config), Terms(1)).kv_format == "float32"


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"num_hidden_layers": None}, "num_hidden_layers"),
        ({"num_hidden_layers": 100_000}, "num_hidden_layers"),
        ({"is_encoder_decoder": True}, "encoder-decoder"),
        ({"layer_types": ["compressed_sparse_attention"] * 4}, "compressed_sparse"),
        ({"hybrid_override_pattern": "M?*-"}, "hybrid_override_pattern"),
        ({"layer_types": ["full_attention"] * 3}, "3 kinds"),
        ({"layer_types": ["linear_attention"] * 4}, "state whose size"),
        ({"num_hidden_layers": -3}, "num_hidden_layers"),
        ({"num_key_value_heads": "many"}, "num_key_value_heads"),
        ({"num_key_value_heads": [1]}, "num_key_value_heads: no layer 1"),
        ({"attention_chunk_size": 8, "no_rope_layers": [1, 0]}, "no_rope_layers: no layer 2"),
        ({"hybrid_layer_pattern": [1, 0, 1]}, "hybrid_layer_pattern: no layer 3"),
        ({"block_configs": []}, "block_configs: no layer 0"),
        ({"num_kv_shared_layers": 5}, "num_kv_shared_layers: 5 of 4 layers"),
        ({"layer_types": ["mamba"] * 4, "mamba_d_state": 16, "mamba_expand": 1e308}, "expand"),
        ({"layer_types": ["mamba"] * 4, "mamba_d_state": 16, "mamba_expand": -2}, "expand"),
    ],
)
def test_what_is_not_known_is_refused(fields, said):
    with pytest.raises(ConfigError, match=said):
        shape_of(**fields)


@pytest.mark.parametrize("data", [b"", b"[]", b"{", b"\xff", b"null", b'{"text_config": {"a"'])
def test_what_is_no_config(data):
    with pytest.raises(ConfigError):
        read_shape(read_config(data, "test")[0])


def test_terms_that_make_no_sense():
    shape = shape_of()
    for terms in (Terms(0), Terms(1, num_shards=3), Terms(1, block_size=0), Terms(1, num_shards=0)):
        with pytest.raises(ConfigError):
            compute_sizes(shape, terms)
    with pytest.raises(ConfigError, match="--kv-dtype"):
        compute_sizes(shape_of(torch_dtype="float8_e4m3fn"), Terms(1))
