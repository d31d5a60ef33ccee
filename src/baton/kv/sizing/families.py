"""A config → what each layer keeps. A layer of a kind that is not known is refused, not guessed.

States of layers without attention come from whichever names a family gave their sizes. Shapes are
those that vLLM allocates (`MambaStateShapeCalculator`), without speculative tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal, TypeAlias, TypeVar

from baton.errors import ConfigError
from baton.kv.sizing.parts import Attention, Latent, Layer, ModelShape, NumberFormat, State

if TYPE_CHECKING:
    from baton.kv.sizing.config import HfConfig, NasBlock

T = TypeVar("T")


def read_state(config: HfConfig, hidden_size: int) -> State:
    """The state of one such layer.

    Raises:
        ConfigError: this family's is not known.
    """
    for read in (_gated_delta, _kimi, _lightning, _nemotron, _bamba, _jamba, _pure_mamba):
        state = read(config, hidden_size)
        if state is not None:
            return state
    raise ConfigError(
        f"model_type {config.model_type!r} has layers with a state whose size this does not know; "
        "known: Mamba 1 and 2, gated delta net, Kimi's delta attention, lightning attention"
    )


def read_short_convolution(config: HfConfig, hidden_size: int) -> State:
    """LFM2's: the last inputs of a convolution, and no more.

    Raises:
        ConfigError: its length is missing.
    """
    if not config.conv_L_cache:
        raise ConfigError("a layer is a convolution, and conv_L_cache is missing")
    return State(config.conv_L_cache - 1, hidden_size, 0)


def _format(config: HfConfig) -> NumberFormat:
    configured = config.mamba_ssm_cache_dtype or config.mamba_ssm_dtype
    return "float32" if configured in {"float32", "fp32"} else "model"


def _gated_delta(config: HfConfig, _: int) -> State | None:
    """Qwen3-Next and its like."""
    if not (config.linear_num_value_heads and config.linear_key_head_dim):
        return None
    key_dim = config.linear_key_head_dim * (config.linear_num_key_heads or 0)
    value_head_dim = config.linear_value_head_dim or config.linear_key_head_dim
    value_dim = value_head_dim * config.linear_num_value_heads
    recurrent = config.linear_num_value_heads * value_head_dim * config.linear_key_head_dim
    steps = (config.linear_conv_kernel_dim or 4) - 1
    return State(steps, 2 * key_dim + value_dim, recurrent, _format(config))


def _kimi(config: HfConfig, _: int) -> State | None:
    found = config.linear_attn_config
    if found is None:
        return None
    dim = found.num_heads * found.head_dim
    recurrent = dim * found.head_dim
    return State(found.short_conv_kernel_size - 1, 3 * dim, recurrent, "float32")


def _lightning(config: HfConfig, _: int) -> State | None:
    """MiniMax: a matrix for each head."""
    is_lightning = config.attn_type_list is not None or config.model_type == "minimax"
    if not (is_lightning and config.head_dim):
        return None
    return State(0, 0, (config.num_attention_heads or 0) * config.head_dim**2, "float32")


def _nemotron(config: HfConfig, _: int) -> State | None:
    if not (config.mamba_num_heads and config.mamba_head_dim and config.ssm_state_size):
        return None
    inner = config.mamba_num_heads * config.mamba_head_dim
    return State(
        (config.conv_kernel or 4) - 1,
        inner,
        inner * config.ssm_state_size,
        _format(config),
        config.n_groups or 1,
        2 * config.ssm_state_size,
    )


def _bamba(config: HfConfig, hidden_size: int) -> State | None:
    """Bamba, Granite 4, Falcon H1: Mamba 2 by other names."""
    if not (config.mamba_n_heads and config.mamba_d_state):
        return None
    if isinstance(config.mamba_d_head, int):
        inner = config.mamba_n_heads * config.mamba_d_head
    else:
        inner = config.mamba_d_ssm or int((config.mamba_expand or 2) * hidden_size)
    return State(
        (config.mamba_d_conv or 4) - 1,
        inner,
        inner * config.mamba_d_state,
        _format(config),
        config.mamba_n_groups or 1,
        2 * config.mamba_d_state,
    )


def _jamba(config: HfConfig, hidden_size: int) -> State | None:
    """Mamba 1."""
    if not config.mamba_d_state:
        return None
    inner = int((config.mamba_expand or 2) * hidden_size)
    return State((config.mamba_d_conv or 4) - 1, inner, inner * config.mamba_d_state)


def _pure_mamba(config: HfConfig, _: int) -> State | None:
    if config.model_type not in {"mamba", "falcon_mamba"} or not config.state_size:
        return None
    inner = config.intermediate_size
    if not isinstance(inner, int):
        return None
    return State((config.conv_kernel or 4) - 1, inner, inner * config.state_size)


Kind: TypeAlias = Literal["full", "sliding", "chunked", "state", "convolution", "both", "nothing"]

NAMES: Final[dict[str, Kind]] = {
    "full_attention": "full",
    "attention": "full",
    "sliding_attention": "sliding",
    "chunked_attention": "chunked",
    "linear_attention": "state",
    "mamba": "state",
    "mamba2": "state",
    "conv": "convolution",
    "moe": "nothing",
    "mlp": "nothing",
}
LETTERS: Final[dict[str, Kind]] = {"M": "state", "*": "full", "-": "nothing", "E": "nothing"}
MAX_LAYERS: Final = 1024
NO_ATTENTION: Final = frozenset({"mamba", "falcon_mamba"})
ALTERNATING: Final = {"gemma2": 2, "gemma3": 6, "gemma3_text": 6, "cohere2": 4}
"""Layers whose number this divides see all, the others a window; for configs that are silent."""


def read_shape(config: HfConfig) -> ModelShape:
    """What every layer of a model keeps.

    Raises:
        ConfigError: a size is missing, or a kind of layer is not known.
    """
    if config.is_encoder_decoder:
        raise ConfigError("an encoder-decoder model: what its cross attention keeps is not counted")
    kinds = read_kinds(config)
    own = len(kinds) - config.num_kv_shared_layers
    if own < 0:
        raise ConfigError(
            f"num_kv_shared_layers: {config.num_kv_shared_layers} of {len(kinds)} layers"
        )
    layers = tuple(
        _read_layer(config, kind, place) if place < own else () for place, kind in enumerate(kinds)
    )
    return ModelShape(
        config.model_type or "unknown",
        layers,
        (config.dtype or config.torch_dtype or "bfloat16").removeprefix("torch."),
        config.max_position_embeddings,
        tuple(_notes(config)),
    )


def read_kinds(config: HfConfig) -> list[Kind]:
    """Each layer's kind, whichever way this family writes it."""
    if config.hybrid_override_pattern:
        return _checked(config, [_letter(each) for each in config.hybrid_override_pattern])
    num_layers = _first(
        "num_hidden_layers",
        config.num_hidden_layers,
        config.n_layer,
        config.n_layers,
        config.num_layers,
    )
    named = config.layer_types or config.layers_block_type
    if named:
        return _checked(config, [_name(each) for each in named[:num_layers]])
    if not 0 < num_layers <= MAX_LAYERS:
        raise ConfigError(f"num_hidden_layers: {num_layers} is not in [1, {MAX_LAYERS}]")
    if config.model_type in NO_ATTENTION:
        return ["state"] * num_layers
    if config.model_type == "falcon_h1":
        return ["both"] * num_layers
    attending = _attending_layers(config, num_layers)
    if attending is not None:
        other: Kind = "convolution" if config.full_attn_idxs is not None else "state"
        return ["full" if place in attending else other for place in range(num_layers)]
    return [_windowed(config, place) for place in range(num_layers)]


def _attending_layers(config: HfConfig, num_layers: int) -> frozenset[int] | None:
    """Which layers attend, in families where others keep a state; None: all do."""
    places = range(num_layers)
    if config.attn_layer_indices is not None:
        return frozenset(config.attn_layer_indices)
    if config.full_attn_idxs is not None:
        return frozenset(config.full_attn_idxs)
    if config.linear_attn_config is not None:
        return frozenset(each - 1 for each in config.linear_attn_config.full_attn_layers)
    if config.attn_type_list is not None:
        return frozenset(place for place, kind in enumerate(config.attn_type_list) if kind)
    period, offset = config.attn_layer_period, config.attn_layer_offset
    if config.full_attention_interval:
        period, offset = config.full_attention_interval, config.full_attention_interval - 1
    if period:
        return frozenset(place for place in places if place % period == offset)
    return None


def _windowed(config: HfConfig, place: int) -> Kind:
    """A layer of a model in which all attend."""
    if config.attention_chunk_size:
        listed = config.no_rope_layers
        has_rope = _at("no_rope_layers", listed, place) if listed else (place + 1) % 4
        return "chunked" if has_rope else "full"
    if config.hybrid_layer_pattern is not None:
        slides = _at("hybrid_layer_pattern", config.hybrid_layer_pattern, place)
        return "sliding" if slides else "full"
    if not config.sliding_window or config.use_sliding_window is False:
        return "full"
    if config.max_window_layers is not None and config.use_sliding_window:
        return "sliding" if place >= config.max_window_layers else "full"
    period = config.sliding_window_pattern or ALTERNATING.get(config.model_type)
    return "full" if period and (place + 1) % period == 0 else "sliding"


def _read_layer(config: HfConfig, kind: Kind, place: int) -> Layer:
    hidden_size = _first("hidden_size", config.hidden_size, config.n_embd, config.d_model)
    match kind:
        case "nothing":
            return ()
        case "state":
            return (read_state(config, hidden_size),)
        case "convolution":
            return (read_short_convolution(config, hidden_size),)
        case "both":
            return (_read_attention(config, "full", place), read_state(config, hidden_size))
        case "full" | "sliding" | "chunked":
            if config.block_configs is not None:
                return _read_searched(config, config.block_configs, place)
            if config.kv_lora_rank and config.qk_rope_head_dim is not None:
                index_dim = config.index_head_dim or 0
                return (Latent(config.kv_lora_rank, config.qk_rope_head_dim, index_dim),)
            return (_read_attention(config, kind, place),)


def _read_attention(
    config: HfConfig, kind: Literal["full", "sliding", "chunked"], place: int
) -> Attention:
    num_heads = _first(
        "num_attention_heads", config.num_attention_heads, config.n_head, config.n_heads
    )
    num_kv_heads, head_dim = _kv_heads(config, num_heads, place), _head_dim(config, num_heads)
    v_dim = config.v_head_dim
    if kind == "sliding":
        num_kv_heads = config.swa_num_key_value_heads or num_kv_heads
        head_dim, v_dim = config.swa_head_dim or head_dim, config.swa_v_head_dim or v_dim
    else:
        num_kv_heads = config.num_global_key_value_heads or num_kv_heads
        head_dim = config.global_head_dim or head_dim
    return Attention(
        num_kv_heads,
        head_dim,
        v_dim or head_dim,
        (config.sliding_window or None) if kind == "sliding" else None,
        config.attention_chunk_size if kind == "chunked" else None,
    )


def _read_searched(config: HfConfig, blocks: tuple[NasBlock, ...], place: int) -> Layer:
    """A layer that an architecture search has shaped."""
    found = _at("block_configs", blocks, place).attention
    if found.no_op or found.replace_with_linear or not found.n_heads_in_group:
        return ()
    num_heads = _first("num_attention_heads", config.num_attention_heads)
    head_dim = _head_dim(config, num_heads)
    return (Attention(num_heads // found.n_heads_in_group, head_dim, head_dim),)


def _kv_heads(config: HfConfig, num_heads: int, place: int) -> int:
    for configured in (config.num_key_value_heads, config.num_kv_heads):
        if isinstance(configured, tuple):
            return _at("num_key_value_heads", configured, place)
    if config.multi_query and not config.new_decoder_architecture:
        return 1
    if config.multi_query_attention and config.multi_query_group_num:
        return config.multi_query_group_num
    for configured in (config.num_key_value_heads, config.num_kv_heads):
        if isinstance(configured, int) and configured:
            return configured
    return num_heads


def _head_dim(config: HfConfig, num_heads: int) -> int:
    if config.head_dim:
        return config.head_dim
    return _first("hidden_size", config.hidden_size, config.n_embd, config.d_model) // num_heads


def _notes(config: HfConfig) -> list[str]:
    notes = []
    if config.num_nextn_predict_layers:
        notes.append(
            f"{config.num_nextn_predict_layers} layer(s) that predict further tokens are not "
            "counted: they keep KV only where they are used to speculate"
        )
    if config.num_kv_shared_layers:
        notes.append(f"{config.num_kv_shared_layers} layers use the KV of earlier ones")
    if config.index_head_dim:
        notes.append("the sparse attention's indexer keeps FP8 keys, as in vLLM")
    return notes


def _checked(config: HfConfig, kinds: list[Kind]) -> list[Kind]:
    wanted = config.num_hidden_layers
    if not 0 < len(kinds) <= MAX_LAYERS or (wanted is not None and len(kinds) != wanted):
        raise ConfigError(f"{len(kinds)} kinds of layers for num_hidden_layers {wanted}")
    return kinds


def _name(name: str) -> Kind:
    if name not in NAMES:
        raise ConfigError(f"a layer of type {name[:60]!r}: not one of {', '.join(NAMES)}")
    return NAMES[name]


def _letter(letter: str) -> Kind:
    if letter not in LETTERS:
        raise ConfigError(f"hybrid_override_pattern: {letter!r} is not one of {' '.join(LETTERS)}")
    return LETTERS[letter]


def _at(name: str, by_layer: tuple[T, ...], place: int) -> T:
    if place >= len(by_layer):
        raise ConfigError(f"{name}: no layer {place}")
    return by_layer[place]


def _first(name: str, *values: int | None) -> int:
    found = next((value for value in values if value), None)
    if found is None:
        raise ConfigError(f"config.json has no {name}: is it a language model's?")
    return found
