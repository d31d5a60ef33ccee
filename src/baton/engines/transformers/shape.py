"""What a model keeps for each token: found by running it once, not by guessing from its name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from baton.errors import ConfigError
from baton.kv.layout import DType, KVLayout, LayerLayout

_PLAIN_LAYERS: Final = frozenset({"full_attention", "sliding_attention"})


@dataclass(frozen=True, slots=True)
class LayerShape:
    """One layer's keys and values for one token, and the window of its attention.

    `is_latent`: the model caches a compressed vector and its rotary part, and expands them anew
    each time (multi-head latent attention).
    """

    num_heads: int
    key_dim: int
    value_dim: int
    window_tokens: int | None
    is_latent: bool

    def to_layout(self) -> LayerLayout:
        """How it lies in a page. The two parts of a latent are one plane, as in other engines."""
        if self.is_latent:
            return LayerLayout.mla(self.key_dim + self.value_dim, self.window_tokens)
        return LayerLayout.gqa(self.num_heads, self.key_dim, self.value_dim, self.window_tokens)


@dataclass(frozen=True, slots=True)
class ModelShape:
    """All layers, in the order of transformers' `layer_idx`."""

    layers: tuple[LayerShape, ...]

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The window of each layer."""
        return tuple(layer.window_tokens for layer in self.layers)

    def to_layout(self, block_size: int, dtype: DType) -> KVLayout:
        """The layout of pages of `block_size` tokens."""
        return KVLayout(tuple(layer.to_layout() for layer in self.layers), block_size, dtype)


def check_layer_kinds(config: Any) -> tuple[int | None, ...]:  # noqa: ANN401 - transformers'
    """Each layer's window, for a model whose every layer keeps keys and values of every token.

    Raises:
        ConfigError: some layers keep something else, or attend in another way.
    """
    text = config.get_text_config(decoder=True)
    kinds = set(getattr(text, "layer_types", None) or ()) - _PLAIN_LAYERS
    if config.is_encoder_decoder:
        kinds.add("cross_attention")
    # transformers itself fails on kinds that it does not know
    layers = [] if kinds else DynamicCache(config=config).layers
    kinds |= {
        type(layer).__name__
        for layer in layers
        if type(layer) not in {DynamicLayer, DynamicSlidingWindowLayer}
    }
    if kinds or len(layers) != text.num_hidden_layers:
        raise ConfigError(
            f"model type {config.model_type!r} has layers that this engine cannot page "
            f"({', '.join(sorted(kinds)) or 'layers that share one cache'}): it serves "
            "decoder-only models whose layers all have full or sliding-window attention; use such "
            "a model, or serve this one with the vllm engine"
        )
    return tuple(getattr(layer, "sliding_window", None) for layer in layers)


def discover_shape(model: Any) -> ModelShape:  # noqa: ANN401 - transformers is untyped for us
    """Run one token through the model and look at what it caches.

    Raises:
        ConfigError: this engine cannot page the model.
    """
    windows = check_layer_kinds(model.config)
    cache = DynamicCache(config=model.config)
    token = torch.zeros((1, 1), dtype=torch.int64, device=model.device)
    with torch.inference_mode():
        model(token, past_key_values=cache, use_cache=True)
    latent_rank = getattr(model.config.get_text_config(decoder=True), "kv_lora_rank", None)
    shapes = []
    for layer, window in zip(cache.layers, windows, strict=True):
        if layer.keys is None:
            raise ConfigError(
                f"model type {model.config.model_type!r} does not keep keys and values in "
                "transformers' cache in every layer; this engine cannot serve it"
            )
        (_, num_heads, _, key_dim), value_dim = layer.keys.shape, layer.values.shape[3]
        is_latent = num_heads == 1 and key_dim == latent_rank
        shapes.append(LayerShape(num_heads, key_dim, value_dim, window, is_latent))
    return ModelShape(tuple(shapes))
