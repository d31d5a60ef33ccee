"""Random-weight Llamas of any size, for benchmarks: the shapes of a real model, none of its sense.

They speak through the demo model's tokenizer. The weights are scaled so that greedy answers vary
along the sequence and depend on the whole context: a page of KV that is lost or damaged changes
what comes out, as it would with a trained model.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, TypeAlias

import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from baton.errors import ConfigError, mapped
from baton.models import DEMO_MODEL_PATH

WeightDtype: TypeAlias = Literal["float32", "bfloat16", "float16"]

_TORCH_DTYPES: Final[dict[WeightDtype, torch.dtype]] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
_TOKENIZER_FILES: Final = ("tokenizer.json", "chat_template.jinja")
_TOKENIZER_CONFIG: Final = "tokenizer_config.json"
_ROPE_THETA: Final = 100_000.0
_INTERMEDIATE_MULTIPLE: Final = 64
_ATTENTION_GAIN: Final = 2.0
"""Of queries and of keys. Attention over random weights is else an average over all tokens, whose
size fades with the length of the context; with this gain a few tokens dominate at any length."""
_LOGIT_GAIN: Final = 3.0
"""Standard deviation of the logits: samples at temperature 1 favour some hundreds of tokens."""


@dataclass(frozen=True, slots=True)
class RandomModelSpec:
    """The shape of a model to make.

    `intermediate_size` None is 8/3 of the hidden size, as Llama has it. `vocab_size` None is the
    tokenizer's; what is larger adds rows that are computed, but hardly ever chosen.

    Raises:
        ConfigError: no Llama has this shape.
    """

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    intermediate_size: int | None = None
    vocab_size: int | None = None
    max_context_tokens: int = 8192
    dtype: WeightDtype = "bfloat16"
    seed: int = 0

    def __post_init__(self) -> None:
        self._check_positive()
        if self.dtype not in _TORCH_DTYPES:
            raise ConfigError(f"dtype {self.dtype!r} is none of {', '.join(_TORCH_DTYPES)}")
        if self.hidden_size % self.num_heads:
            raise ConfigError(
                f"hidden size {self.hidden_size} is not divisible by {self.num_heads} heads"
            )
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"{self.num_heads} heads are not divisible by {self.num_kv_heads} KV heads"
            )
        if self.head_dim % 2:
            raise ConfigError(f"head dimension {self.head_dim} is odd: rotary positions need pairs")

    def _check_positive(self) -> None:
        counts = {
            "layers": self.num_layers,
            "hidden size": self.hidden_size,
            "heads": self.num_heads,
            "KV heads": self.num_kv_heads,
            "intermediate size": self.intermediate_size,
            "vocabulary": self.vocab_size,
            "context": self.max_context_tokens,
        }
        for name, count in counts.items():
            if count is not None and count < 1:
                raise ConfigError(f"{name} must be at least 1, not {count}")

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.hidden_size // self.num_heads

    @property
    def mlp_width(self) -> int:
        """The intermediate size, also where the spec leaves it open."""
        if self.intermediate_size is not None:
            return self.intermediate_size
        return -(-self.hidden_size * 8 // (3 * _INTERMEDIATE_MULTIPLE)) * _INTERMEDIATE_MULTIPLE


def make_random_model(path: Path, spec: RandomModelSpec) -> None:
    """Write a random-weight Llama as a Hugging Face folder at `path`.

    The same spec gives the same weights. `path` appears whole or not at all; it may exist as an
    empty folder. Needs memory for the weights once, in their own dtype.

    Raises:
        ConfigError: `path` is taken or cannot be written, or the vocabulary is smaller than the
            tokenizer's.
    """
    with mapped({OSError: ConfigError}):
        if path.exists() and not (path.is_dir() and not any(path.iterdir())):
            raise ConfigError(f"{path} exists and is not an empty folder")
        model = _build_model(spec)
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}-") as temporary:
            folder = Path(temporary) / "model"
            model.save_pretrained(folder)
            _copy_tokenizer(folder, spec)
            for weights in folder.glob("*.safetensors"):
                shutil.copymode(folder / "config.json", weights)  # written for the owner alone
            folder.rename(path)


def _build_model(spec: RandomModelSpec) -> LlamaForCausalLM:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(DEMO_MODEL_PATH)
    num_decodable = len(tokenizer)
    if spec.vocab_size is not None and spec.vocab_size < num_decodable:
        raise ConfigError(
            f"vocabulary {spec.vocab_size} is smaller than the tokenizer's {num_decodable}"
        )
    special = {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    config = LlamaConfig(
        vocab_size=spec.vocab_size or num_decodable,
        hidden_size=spec.hidden_size,
        intermediate_size=spec.mlp_width,
        num_hidden_layers=spec.num_layers,
        num_attention_heads=spec.num_heads,
        num_key_value_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        max_position_embeddings=spec.max_context_tokens,
        rope_parameters={"rope_type": "default", "rope_theta": _ROPE_THETA},
        tie_word_embeddings=False,  # tied, a random model repeats its last token endlessly
        dtype=spec.dtype,
        **special,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model.to(_TORCH_DTYPES[spec.dtype]).to_empty(device="cpu")
    model.generation_config = GenerationConfig(**special)
    _draw_weights(model, spec.seed)
    _mask_tokens(model, [*tokenizer.all_special_ids, *range(num_decodable, config.vocab_size)])
    return model


@torch.no_grad()
def _draw_weights(model: LlamaForCausalLM, seed: int) -> None:
    """Normal weights that keep activations near unit size through every layer."""
    generator = torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        if "norm" in name:
            weight.fill_(1.0)
        elif "embed_tokens" in name:
            weight.normal_(0.0, 1.0, generator=generator)
        else:
            std = _gain(name) / weight.shape[1] ** 0.5
            weight.normal_(0.0, std, generator=generator)


def _gain(name: str) -> float:
    if "q_proj" in name or "k_proj" in name:
        return _ATTENTION_GAIN
    return _LOGIT_GAIN if "lm_head" in name else 1.0


@torch.no_grad()
def _mask_tokens(model: LlamaForCausalLM, token_ids: list[int]) -> None:
    """Keep the greedy choice off tokens without text, the end among them: answers run on."""
    model.lm_head.weight[token_ids] = 0.0


def _copy_tokenizer(folder: Path, spec: RandomModelSpec) -> None:
    for name in _TOKENIZER_FILES:
        shutil.copyfile(DEMO_MODEL_PATH / name, folder / name)
    settings = json.loads((DEMO_MODEL_PATH / _TOKENIZER_CONFIG).read_text(encoding="utf-8"))
    settings["model_max_length"] = spec.max_context_tokens
    (folder / _TOKENIZER_CONFIG).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
