"""What a vLLM server makes of its model's files that changes KV for equal tokens (ADR 78).

The fingerprint of the files alone would let a server load KV that another one computed with other
weights, positions or scales. What the KV's layout has (dtype of the cache, windows, heads) is not
here: it is compared, and part of the store's names, by itself.
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Final

from baton.engines.checkpoint import list_ropes
from baton.engines.vllm.layouts import FP8_DTYPES
from baton.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from vllm.config import ModelConfig, VllmConfig

    from baton.engines.vllm.layouts import CachedLayers

_SAFETENSORS_LOADERS: Final = frozenset({
    "auto",
    "fastsafetensors",
    "hf",
    "instanttensor",
    "modelexpress",
    "runai_streamer",
    "safetensors",
})
"""Load formats that read the files which the fingerprint covers."""
_DIGEST_CHARS: Final = 16


def describe_variant(vllm_config: VllmConfig, layers: CachedLayers) -> str:
    """Each setting that changes KV, "" where the files alone decide it.

    After the weights are loaded. Equal on all ranks, unless KV scales differ by head.

    Raises:
        ConfigError: settings that cannot be compared between servers.
    """
    return "; ".join([
        *_model_settings(vllm_config),
        *_cache_settings(vllm_config, layers),
    ])


def extend_fingerprint(fingerprint: str, variant: str) -> str:
    """The fingerprint of the files, or with a `variant` another one, 64 hex digits."""
    if not variant:
        return fingerprint
    return hashlib.sha256(f"baton/variant/1|{fingerprint}|{variant}".encode()).hexdigest()


def _model_settings(vllm_config: VllmConfig) -> Iterator[str]:
    model, load_format = vllm_config.model_config, str(vllm_config.load_config.load_format)
    if model.hf_overrides:
        yield f"hf_overrides {_format_overrides(model)}"
    if model.hf_config_path is not None:
        text = json.dumps(model.hf_config.to_dict(), sort_keys=True, default=str)
        yield f"hf_config_path {_digest(text.encode())}"
    if model.model_class_overrides:
        yield f"model_class_overrides {json.dumps(model.model_class_overrides, sort_keys=True)}"
    if model.config_format == "mistral":
        yield "config_format mistral"
    if load_format not in _SAFETENSORS_LOADERS:
        yield f"load_format {load_format}"
    is_online = model.model_arch_config.quantization_config is None
    if model.quantization_config is not None or (is_online and model.quantization):
        text = repr(model.quantization_config)
        yield f"quantization {model.quantization} {_digest(text.encode())}"
    if _uses_long_factors(model):
        yield "rope longrope, long factors"


def _cache_settings(vllm_config: VllmConfig, layers: CachedLayers) -> Iterator[str]:
    model_dtype = str(vllm_config.model_config.dtype).removeprefix("torch.")
    if model_dtype != layers.layout.dtype:
        yield f"computed in {model_dtype}"
    if str(vllm_config.cache_config.cache_dtype) in FP8_DTYPES:
        from vllm.platforms import current_platform  # noqa: PLC0415 - picks a platform when imported

        if current_platform.is_fp8_fnuz():
            yield "fp8 fnuz"  # the same bits are other numbers
        modules = vllm_config.compilation_config.static_forward_context
        names = layers.names[: layers.num_main]
        scales = b"".join(_read_scales(modules, name) for name in names)
        yield f"KV scales {_digest(scales)}"


def _format_overrides(model: ModelConfig) -> str:
    if callable(model.hf_overrides):
        raise ConfigError(
            "hf_overrides is a function, which servers cannot compare: give a dictionary"
        )
    return json.dumps(model.hf_overrides, sort_keys=True, default=str)


def _uses_long_factors(model: ModelConfig) -> bool:
    """Whether LongRoPE's factors for long contexts apply, to short prompts too.

    vLLM decides it by `max_model_len`.
    """
    return any(
        rope.kind == "longrope" and model.max_model_len > rope.original_tokens
        for rope in list_ropes(model.hf_text_config)
    )


def _read_scales(modules: Mapping[str, object], name: str) -> bytes:
    """What FP8 numbers of a layer's keys and values are multiplied by: float32, `[1]` or `[head]`.

    From the checkpoint, or 1: vLLM 0.32 computes none from what a server is asked.
    """
    found = b""
    for kind in ("_k_scale", "_v_scale"):
        scale = getattr(modules.get(name), kind, None)
        if scale is None:
            raise ConfigError(f"vLLM does not report the KV scales of layer {name}")
        found += scale.detach().float().cpu().numpy().tobytes()
    return found


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:_DIGEST_CHARS]
