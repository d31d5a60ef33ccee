"""The states of layers without attention, from whichever names a family gave their sizes.

Shapes are those that vLLM allocates (`MambaStateShapeCalculator`), without speculative tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from baton.errors import ConfigError
from baton.kv.sizing.parts import NumberFormat, State

if TYPE_CHECKING:
    from baton.kv.sizing.config import HfConfig


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
