"""Hugging Face's config.json, as far as KV depends on it. Fields are named as they are there."""

from __future__ import annotations

from typing import Annotated, Final, TypeAlias

import msgspec
from msgspec import Meta

from baton.errors import UNDECODABLE, ConfigError

Count: TypeAlias = Annotated[int, Meta(ge=0, le=1 << 24)]
MAX_BYTES: Final = 16 << 20
NESTED: Final = ("text_config", "llm_config", "language_config", "thinker_config")


class NasAttention(msgspec.Struct, frozen=True):
    """A layer's attention where each layer has its own (DeciLM, Nemotron-NAS)."""

    n_heads_in_group: Count | None = None
    no_op: bool = False
    replace_with_linear: bool = False


class NasBlock(msgspec.Struct, frozen=True):
    """One layer of those."""

    attention: NasAttention


class KdaConfig(msgspec.Struct, frozen=True):
    """Kimi Linear's layers; their numbers count from 1."""

    full_attn_layers: tuple[Count, ...]
    num_heads: Count
    head_dim: Count
    short_conv_kernel_size: Count = 4


class HfConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What may stand in a config.json. None: it does not."""

    model_type: str = ""
    is_encoder_decoder: bool = False
    dtype: str | None = None
    torch_dtype: str | None = None
    num_hidden_layers: Count | None = None
    n_layer: Count | None = None
    n_layers: Count | None = None
    num_layers: Count | None = None
    hidden_size: Count | None = None
    n_embd: Count | None = None
    d_model: Count | None = None
    num_attention_heads: Count | None = None
    n_head: Count | None = None
    n_heads: Count | None = None
    num_key_value_heads: Count | tuple[Count, ...] | None = None
    num_kv_heads: Count | tuple[Count, ...] | None = None
    multi_query: bool | None = None
    multi_query_attention: bool | None = None
    multi_query_group_num: Count | None = None
    new_decoder_architecture: bool = False
    head_dim: Count | None = None
    v_head_dim: Count | None = None
    max_position_embeddings: Count | None = None
    # layers that differ
    layer_types: tuple[str, ...] | None = None
    layers_block_type: tuple[str, ...] | None = None
    hybrid_override_pattern: str | None = None
    attn_layer_period: Count | None = None
    attn_layer_offset: Count = 0
    attn_layer_indices: tuple[int, ...] | None = None
    full_attn_idxs: tuple[int, ...] | None = None
    full_attention_interval: Count | None = None
    attn_type_list: tuple[int, ...] | None = None
    hybrid_layer_pattern: tuple[int, ...] | None = None
    block_configs: tuple[NasBlock, ...] | None = None
    num_kv_shared_layers: Count = 0
    num_nextn_predict_layers: Count = 0
    # windows
    sliding_window: Count | None = None
    use_sliding_window: bool | None = None
    max_window_layers: Count | None = None
    sliding_window_pattern: Count | None = None
    attention_chunk_size: Count | None = None
    no_rope_layers: tuple[int, ...] | None = None
    swa_num_key_value_heads: Count | None = None
    swa_head_dim: Count | None = None
    swa_v_head_dim: Count | None = None
    global_head_dim: Count | None = None
    num_global_key_value_heads: Count | None = None
    # latent attention
    kv_lora_rank: Count | None = None
    qk_rope_head_dim: Count | None = None
    index_head_dim: Count | None = None
    # states
    mamba_num_heads: Count | None = None
    mamba_head_dim: Count | None = None
    ssm_state_size: Count | None = None
    n_groups: Count | None = None
    conv_kernel: Count | None = None
    mamba_n_heads: Count | None = None
    mamba_d_head: Count | str | None = None
    mamba_d_state: Count | None = None
    mamba_d_ssm: Count | None = None
    mamba_n_groups: Count | None = None
    mamba_d_conv: Count | None = None
    mamba_expand: Annotated[float, Meta(gt=0, le=1024)] | None = None
    mamba_ssm_dtype: str | None = None
    mamba_ssm_cache_dtype: str | None = None
    state_size: Count | None = None
    num_heads: Count | None = None
    intermediate_size: Count | tuple[Count, ...] | None = None
    linear_num_key_heads: Count | None = None
    linear_num_value_heads: Count | None = None
    linear_key_head_dim: Count | None = None
    linear_value_head_dim: Count | None = None
    linear_conv_kernel_dim: Count | None = None
    linear_attn_config: KdaConfig | None = None
    conv_L_cache: Count | None = None  # noqa: N815 - its name there


class Nesting(msgspec.Struct, frozen=True):
    """Where models of several modalities keep the part that generates text."""

    text_config: msgspec.Raw = msgspec.Raw()
    llm_config: msgspec.Raw = msgspec.Raw()
    language_config: msgspec.Raw = msgspec.Raw()
    thinker_config: msgspec.Raw = msgspec.Raw()


def read_config(data: bytes, source: str) -> tuple[HfConfig, tuple[str, ...]]:
    """A config.json, and the way to the part of it that was used (`text_config`).

    Raises:
        ConfigError: it is none.
    """
    if len(data) > MAX_BYTES:
        raise ConfigError(f"{source}: more than {MAX_BYTES >> 20} MiB is no config.json")
    try:
        inner, way = _unwrap(data)
        return msgspec.json.decode(inner, type=HfConfig), way
    except UNDECODABLE as exc:
        raise ConfigError(f"{source} is not a model's config.json: {exc}") from exc


def _unwrap(data: bytes) -> tuple[bytes, tuple[str, ...]]:
    """The innermost part with text, and its path; an outer dtype is for the inner part too."""
    way: tuple[str, ...] = ()
    for _ in NESTED:
        nesting = msgspec.json.decode(data, type=Nesting)
        raws = {name: bytes(getattr(nesting, name)) for name in NESTED}
        found = next((item for item in raws.items() if item[1].startswith(b"{")), None)
        if found is None:
            break
        outer, inner = (msgspec.json.decode(each, type=dict) for each in (data, found[1]))
        for name in ("dtype", "torch_dtype"):
            if outer.get(name) and not inner.get(name):
                inner[name] = outer[name]
        data, way = msgspec.json.encode(inner), (*way, found[0])
    return data, way
