"""Real vLLM configurations and KV caches, without an engine: what a worker would be given."""

from __future__ import annotations

import json
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from tests.lazy_modules import LazyModule, skip_without_vllm

skip_without_vllm()


if TYPE_CHECKING:
    from pathlib import Path

    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheSpec

arg_utils = LazyModule("vllm.engine.arg_utils")
kv_cache_utils = LazyModule("vllm.v1.core.kv_cache_utils")
kv_cache_interface = LazyModule("vllm.v1.kv_cache_interface")
kv_cache_layout = LazyModule("vllm.v1.kv_cache_layout")
worker_utils = LazyModule("vllm.v1.worker.utils")

BLOCK_SIZE = 32
POOL_BYTES = 4 << 20


def attention(**changes: Any) -> FullAttentionSpec:
    """The spec of an ordinary layer."""
    fields = {"block_size": BLOCK_SIZE, "num_kv_heads": 2, "head_size": 32}
    return kv_cache_interface.FullAttentionSpec(**({**fields, "dtype": torch.float32} | changes))


def write_model(folder: Path, **changes: Any) -> str:
    """A folder that vLLM takes for a Llama of three layers; it has no weights."""
    folder.mkdir(exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "num_hidden_layers": 3,
        "vocab_size": 128,
        "max_position_embeddings": 512,
        "dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config | changes))
    return str(folder)


def configure(model: str, **arguments: Any) -> VllmConfig:
    """vLLM's own configuration of a server of that model."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = arg_utils.EngineArgs(
            model=model,
            block_size=BLOCK_SIZE,
            enforce_eager=True,
            skip_tokenizer_init=True,
            **{"dtype": "float32"} | arguments,
        ).create_engine_config()
    config.cache_config.kv_cache_layout = "LBHNC"
    return config


def plan(config: VllmConfig, specs: dict[str, KVCacheSpec]) -> KVCacheConfig:
    """How vLLM would keep KV for these layers."""
    return kv_cache_utils.get_kv_cache_configs(config, [specs], [POOL_BYTES])[0]


def main_layers(num_layers: int = 3, **changes: Any) -> dict[str, KVCacheSpec]:
    """Specs of the main model, by the names that vLLM gives its layers."""
    return {f"model.layers.{i}.self_attn.attn": attention(**changes) for i in range(num_layers)}


def allocate(config: KVCacheConfig) -> dict[str, torch.Tensor]:
    """What vLLM's worker does, inside the connector's context."""
    sizes = [group.kv_cache_spec.block_size for group in config.kv_cache_groups]
    layout = kv_cache_layout.KVCacheLayout.LBHNC
    return worker_utils.allocate_kv_cache(config, torch.device("cpu"), layout, sizes)


class Backend:
    """As much of an attention backend as says its name."""

    @staticmethod
    def get_name() -> str:
        return "CPU_ATTN"


@dataclass
class AttentionModule:
    """What the metadata builders leave on an attention layer."""

    isa: str = "vec"
    attn_backend: type = Backend


def announce(config: VllmConfig, names: tuple[str, ...], isa: str = "vec") -> None:
    """Put attention modules where vLLM keeps them."""
    for name in names:
        config.compilation_config.static_forward_context[name] = AttentionModule(isa)
