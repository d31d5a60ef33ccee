"""LoRA adapters in PEFT's format for the model of these tests."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final

import numpy as np
from safetensors.numpy import save_file

from tests.e2e_vllm.cluster import NUM_LAYERS, SPEC

if TYPE_CHECKING:
    from pathlib import Path

RANK: Final = 4
KV_SIZE: Final = SPEC.num_kv_heads * SPEC.head_dim
SIZES: Final = {"q_proj": SPEC.hidden_size, "k_proj": KV_SIZE, "v_proj": KV_SIZE}
SCALE: Final = 0.5
"""Of random weights: with so large ones nearly every greedy token is another one."""


def make_adapter(folder: Path, seed: int) -> Path:
    """Write an adapter of random weights; the folder."""
    folder.mkdir()
    rng, tensors = np.random.default_rng(seed), {}
    for layer in range(NUM_LAYERS):
        for module, size in SIZES.items():
            name = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            inner = rng.normal(0, SCALE, (RANK, SPEC.hidden_size))
            outer = rng.normal(0, SCALE, (size, RANK))
            tensors[f"{name}.lora_A.weight"] = inner.astype(np.float32)
            tensors[f"{name}.lora_B.weight"] = outer.astype(np.float32)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": RANK,
        "lora_alpha": 2 * RANK,
        "target_modules": list(SIZES),
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config), encoding="ascii")
    return folder
