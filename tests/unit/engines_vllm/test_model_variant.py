"""Settings of a vLLM server with which equal tokens of equal files give other KV."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, get_args

import pytest
import torch
from torch import nn

from baton.engines.vllm.layouts import FP8_DTYPES, read_dtype, read_layers
from baton.engines.vllm.model_variant import describe_variant, extend_fingerprint
from baton.errors import ConfigError
from baton.kv.layout import DTYPE_BYTES, TensorParallelShard
from tests.lazy_modules import LazyModule
from tests.unit.engines_vllm.caches import configure, main_layers, plan, write_model

if TYPE_CHECKING:
    from pathlib import Path

    from vllm.config import VllmConfig

ALONE = TensorParallelShard()
LONG_ROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 16,
    "long_factor": [4.0] * 16,
    "original_max_position_embeddings": 128,
}

attention_layers = LazyModule("vllm.model_executor.layers.attention.attention")
kv_cache_methods = LazyModule("vllm.model_executor.layers.quantization.kv_cache")
cache_configs = LazyModule("vllm.config.cache")
torch_utils = LazyModule("vllm.utils.torch_utils")
platforms = LazyModule("vllm.platforms")


def describe(folder: Path, *, changes: dict[str, Any] | None = None, **arguments: Any) -> str:
    """The variant of a server with these settings, whose KV is not quantized."""
    config = configure(write_model(folder, **(changes or {})), **arguments)
    specs = main_layers(dtype=config.model_config.dtype)
    return describe_variant(config, read_layers(config, plan(config, specs), ALONE))


def test_a_server_as_the_files_say_has_the_files_fingerprint(tmp_path: Path) -> None:
    """Other engines that load the same files find its KV."""
    variant = describe(tmp_path, max_model_len=256, load_format="safetensors")
    assert not variant
    assert extend_fingerprint("f" * 64, variant) == "f" * 64


@pytest.mark.parametrize(
    "arguments",
    [
        {"hf_overrides": {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}},
        {"hf_overrides": {"rms_norm_eps": 1e-3}},
        {"quantization": "fp8", "dtype": "bfloat16"},
        {"quantization": "fp8_per_tensor", "dtype": "bfloat16"},
        {"quantization_config": {"linear": "fp8_per_tensor_static"}, "dtype": "bfloat16"},
        {"load_format": "dummy"},
        {"load_format": "pt"},
    ],
    ids=str,
)
def test_settings_that_change_kv_change_the_fingerprint(
    tmp_path: Path, arguments: dict[str, Any]
) -> None:
    variant = describe(tmp_path, **arguments)
    assert next(iter(arguments)).removesuffix("_config") in variant
    assert extend_fingerprint("f" * 64, variant) != "f" * 64
    assert describe(tmp_path, **arguments) == variant


def test_overrides_and_quantizations_differ_from_each_other(tmp_path: Path) -> None:
    settings: list[dict[str, Any]] = [
        {"hf_overrides": {"rms_norm_eps": 1e-3}},
        {"hf_overrides": {"rms_norm_eps": 1e-4}},
        {"quantization": "fp8"},
        {"quantization": "fp8_per_tensor"},
        {"quantization_config": {"linear": "fp8_per_tensor_static"}},
        {"quantization_config": {"linear": "fp8_per_block_static"}},
    ]
    variants = [describe(tmp_path, dtype="bfloat16", **each) for each in settings]
    assert len({extend_fingerprint("f" * 64, each) for each in variants}) == len(settings)


def test_another_class_for_the_model_is_part_of_it(tmp_path: Path) -> None:
    """Set here: vLLM registers such a class for the whole process."""
    config = configure(write_model(tmp_path))
    config.model_config.model_class_overrides = {"LlamaForCausalLM": "package:Other"}
    layers = read_layers(config, plan(config, main_layers()), ALONE)
    assert describe_variant(config, layers).startswith("model_class_overrides")


def test_a_configuration_from_elsewhere_is_part_of_it(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    found = []
    for theta in (1e4, 5e5):
        write_model(there, rope_parameters={"rope_type": "default", "rope_theta": theta})
        found.append(describe(here, hf_config_path=str(there)))
    assert len({*found, describe(here)}) == 3


def test_a_function_in_place_of_overrides_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="hf_overrides is a function"):
        describe(tmp_path, hf_overrides=lambda config: config)


@pytest.mark.parametrize(("max_model_len", "is_long"), [(128, False), (129, True)])
def test_long_rope_depends_on_the_longest_context(
    tmp_path: Path, max_model_len: int, *, is_long: bool
) -> None:
    changes = {"rope_parameters": LONG_ROPE}
    variant = describe(tmp_path, changes=changes, max_model_len=max_model_len)
    assert variant == ("rope longrope, long factors" if is_long else "")


def test_a_cache_of_another_dtype_than_the_models(tmp_path: Path) -> None:
    """Its layout says what the numbers are, not in which precision they were computed."""
    config = configure(write_model(tmp_path), kv_cache_dtype="bfloat16")
    specs = main_layers(dtype=torch.bfloat16)
    layers = read_layers(config, plan(config, specs), ALONE)
    assert describe_variant(config, layers) == "computed in float32"


def test_caches_with_more_than_numbers_are_refused(tmp_path: Path) -> None:
    """All types that vLLM has: with scales of their own beside the numbers, or as Baton's."""
    config = configure(write_model(tmp_path))
    taken = {"auto", "float16", "bfloat16", *FP8_DTYPES}
    found = get_args(cache_configs.CacheDType)
    assert taken < set(found)
    for cache_dtype in found:
        config.cache_config.cache_dtype = cache_dtype
        dtype = torch_utils.kv_cache_dtype_str_to_dtype(cache_dtype, config.model_config)
        if cache_dtype in taken:
            assert DTYPE_BYTES[read_dtype(config, dtype)] == dtype.itemsize
            continue
        with pytest.raises(ConfigError, match=f"a KV cache of {cache_dtype}"):
            read_dtype(config, dtype)


class QuantizedAttention(nn.Module):
    """An attention layer's scales, through vLLM's own code: of a checkpoint, or none."""

    def __init__(self, scales: dict[str, float], cache_dtype: str = "fp8") -> None:
        super().__init__()
        self.kv_cache_dtype = cache_dtype
        attention_layers.set_default_quant_scales(self, register_buffer=True)
        method = kv_cache_methods.BaseKVCacheMethod(None)
        method.create_weights(self)
        for name, scale in scales.items():
            parameter = getattr(self, name)
            parameter.weight_loader(parameter, torch.tensor(scale))
        method.process_weights_after_loading(self)


def fp8_server(folder: Path, *layers: dict[str, float], **arguments: Any) -> VllmConfig:
    config = configure(write_model(folder), kv_cache_dtype="fp8", **arguments)
    for name, scales in zip(main_layers(), layers, strict=True):
        config.compilation_config.static_forward_context[name] = QuantizedAttention(scales)
    return config


def describe_fp8(config: VllmConfig) -> str:
    layers = read_layers(config, plan(config, main_layers(dtype=torch.uint8)), ALONE)
    return describe_variant(config, layers)


def test_scales_of_fp8_numbers_are_part_of_the_fingerprint(tmp_path: Path) -> None:
    """The same bits with other scales are other KV. A single scale of a layer is k's and v's."""
    plain: dict[str, float] = {}
    both, single = {"k_scale": 0.5, "v_scale": 0.5}, {"k_scale": 0.5}
    other = {"k_scale": 0.5, "v_scale": 0.25}
    servers = [
        (plain, plain, plain),
        (both, plain, plain),
        (plain, both, plain),
        (other, plain, plain),
    ]
    found = [describe_fp8(fp8_server(tmp_path, *each)) for each in servers]
    assert len(set(found)) == len(servers)
    assert describe_fp8(fp8_server(tmp_path, single, plain, plain)) == found[1]
    assert all("computed in float32" in each for each in found)


def test_scales_of_heads_are_part_of_the_fingerprint(tmp_path: Path) -> None:
    config = fp8_server(tmp_path, {}, {}, {})
    module = config.compilation_config.static_forward_context["model.layers.1.self_attn.attn"]
    found = []
    for scales in ([1.0, 1.0], [1.0, 2.0], [2.0, 1.0]):
        module._k_scale = torch.tensor(scales)
        found.append(describe_fp8(config))
    assert len(set(found)) == 3


def test_fp8_of_another_kind_is_another_variant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = fp8_server(tmp_path, {}, {}, {})
    here = describe_fp8(config)
    monkeypatch.setattr(type(platforms.current_platform), "is_fp8_fnuz", lambda *_: True)
    assert here != describe_fp8(config)


def test_a_layer_without_scales_is_refused(tmp_path: Path) -> None:
    config = fp8_server(tmp_path, {}, {}, {})
    del config.compilation_config.static_forward_context["model.layers.2.self_attn.attn"]
    with pytest.raises(ConfigError, match=r"KV scales of layer model\.layers\.2"):
        describe_fp8(config)
