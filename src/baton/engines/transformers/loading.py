"""From a folder to a model: checks first, then weights; every refusal says what to do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from baton.engines.checkpoint import compute_fingerprint, find_weights
from baton.engines.transformers.attention import register
from baton.engines.transformers.pages import TORCH_DTYPES
from baton.engines.transformers.selfcheck import verify_paged_attention
from baton.engines.transformers.shape import check_layer_kinds, discover_shape
from baton.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

    from baton.engines.transformers.options import TransformersOptions
    from baton.engines.transformers.shape import ModelShape
    from baton.kv.layout import DType


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run over pages, and what others must know about it."""

    model: Any
    shape: ModelShape
    dtype: DType
    fingerprint: str
    vocab_size: int
    max_context_tokens: int
    eos_token_ids: tuple[int, ...]


def load_model(folder: Path, options: TransformersOptions) -> LoadedModel:
    """Load a checkpoint in Hugging Face's format from a local folder. Nothing is downloaded.

    Raises:
        ConfigError: no such checkpoint, a corrupt one, or one that this engine cannot serve.
    """
    weights = find_weights(folder)
    config = _read_config(folder)
    check_layer_kinds(config)
    max_context_tokens = _choose_context(config, options)
    model = _read_weights(folder, config, options)
    dtype = _dtype_name(model.dtype)
    register()
    shape = discover_shape(model)
    verify_paged_attention(model, shape, dtype)
    return LoadedModel(
        model=model,
        shape=shape,
        dtype=dtype,
        fingerprint=compute_fingerprint([folder / "config.json", *weights]),
        vocab_size=config.get_text_config(decoder=True).vocab_size,
        max_context_tokens=max_context_tokens,
        eos_token_ids=_find_eos(model),
    )


def _read_config(folder: Path) -> Any:  # noqa: ANN401 - transformers is untyped for us
    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (ValueError, OSError, KeyError, TypeError, AttributeError) as exc:
        raise ConfigError(f"cannot read {folder / 'config.json'}: {exc}") from exc


def _read_weights(folder: Path, config: Any, options: TransformersOptions) -> Any:  # noqa: ANN401
    """The model in evaluation mode on its device, every weight from the checkpoint."""
    disable_progress_bar()  # a worker's standard error is a log
    dtype = "auto" if options.dtype == "auto" else TORCH_DTYPES[options.dtype]
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            attn_implementation="eager",
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
        )
    except Exception as exc:  # whatever it is, the operator must learn which file
        raise ConfigError(f"cannot load the weights in {folder}: {exc}") from exc
    if report["missing_keys"] or report["mismatched_keys"]:
        wrong = sorted(map(str, [*report["missing_keys"], *report["mismatched_keys"]]))
        raise ConfigError(
            f"the weights in {folder} lack {len(wrong)} of the model's tensors or give them "
            f"another shape, {wrong[0]} for one: the checkpoint is incomplete or not of this config"
        )
    model.eval()
    return model.to(_choose_device(options))


def _choose_device(options: TransformersOptions) -> torch.device:
    if options.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if options.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            'device = "cuda", but torch sees no CUDA device; set device = "cpu" or install a '
            "CUDA build of torch"
        )
    return torch.device(options.device)


def _dtype_name(dtype: torch.dtype) -> DType:
    for name, known in TORCH_DTYPES.items():
        if known == dtype:
            return name
    raise ConfigError(
        f"the checkpoint is in {dtype}, this engine keeps KV in {', '.join(TORCH_DTYPES)}; "
        'set dtype = "bfloat16"'
    )


def _choose_context(config: Any, options: TransformersOptions) -> int:  # noqa: ANN401
    longest: int | None = getattr(
        config.get_text_config(decoder=True), "max_position_embeddings", None
    )
    chosen = options.max_context_tokens or longest
    if chosen is None:
        raise ConfigError("the model's config.json names no context length; set max_context_tokens")
    if longest is not None and chosen > longest:
        raise ConfigError(
            f"max_context_tokens = {chosen}, but the model was made for {longest}; lower it"
        )
    return chosen


def _find_eos(model: Any) -> tuple[int, ...]:  # noqa: ANN401
    eos = model.generation_config.eos_token_id
    if eos is None:
        eos = model.config.get_text_config(decoder=True).eos_token_id
    match eos:
        case None:
            return ()
        case int():
            return (eos,)
        case _:
            return tuple(int(token) for token in eos)
