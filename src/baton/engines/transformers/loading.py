"""Loads a model from a folder: checks its configuration, reads weights, checks paged attention."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from baton.config.bfloat16 import CPU_INFO, computes_bfloat16
from baton.engines.checkpoint import compute_fingerprint, find_weights, list_ropes
from baton.engines.interface import SamplingDefaults
from baton.engines.transformers.attention import IMPLEMENTATION, Span, register
from baton.engines.transformers.model_runner import PagedModel
from baton.engines.transformers.pages import TORCH_DTYPES, allocate_pages
from baton.engines.transformers.shape import ModelShape, check_layer_kinds, discover_shape
from baton.errors import ConfigError
from baton.tokenizer.chat_template import read_special_tokens
from baton.tokenizer.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from baton.engines.transformers.options import TransformersOptions
    from baton.kv.layout import DType

_log = logging.getLogger(__name__)

_BLOCK_SIZE: Final = 4
_NUM_BLOCKS: Final = 6
_TOLERANCE: Final[dict[torch.dtype, float]] = {torch.float32: 1e-3}
_HALF_PRECISION_TOLERANCE: Final = 0.15
_PENALTIES_OFF: Final = {
    "repetition_penalty": 1,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "min_p": 0,
}
"""What vLLM takes from a checkpoint's sampling defaults and this engine cannot apply."""


def verify_paged_attention(model: Any, shape: ModelShape, dtype: DType) -> None:  # noqa: ANN401
    """Compare two prompts, packed and in two steps, with each of them alone in plain transformers.

    Leaves the model with the paged attention switched on.

    Raises:
        ConfigError: the numbers differ by more than rounding.
    """
    vocab_size = model.config.get_text_config(decoder=True).vocab_size
    first, second = (_tokens(count, vocab_size) for count in (11, 6))
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        expected = torch.stack([
            model(torch.from_numpy(prompt)[None].to(model.device), use_cache=False).logits[0, row]
            for prompt, row in ((first, 6), (second, 4), (first, 10), (second, 5))
        ])
    model.set_attn_implementation(IMPLEMENTATION)
    try:
        actual = _run_paged(model, shape, dtype, (first, second))
    except Exception as exc:  # whatever a model does with arguments that it does not know
        raise ConfigError(
            f"model type {model.config.model_type!r} does not run over paged KV: it does not call "
            "transformers' attention interface; serve it with the vllm engine"
        ) from exc
    difference = float((actual - expected).float().norm() / expected.float().norm())
    if not difference <= _TOLERANCE.get(expected.dtype, _HALF_PRECISION_TOLERANCE):
        raise ConfigError(
            f"model type {model.config.model_type!r} gives other numbers over paged KV than in "
            f"plain transformers (relative difference {difference:.1e}): this engine cannot "
            "serve it; serve it with the vllm engine"
        )


def _run_paged(
    model: Any,  # noqa: ANN401
    shape: ModelShape,
    dtype: DType,
    prompts: tuple[NDArray[np.int64], NDArray[np.int64]],
) -> torch.Tensor:
    layout = shape.to_layout(_BLOCK_SIZE, dtype)
    pages = allocate_pages(shape, layout, _NUM_BLOCKS, model.device)
    paged = PagedModel(model, shape, pages, _BLOCK_SIZE)
    first, second = prompts
    blocks = np.array([4, 1, 5]), np.array([0, 3])
    steps = (
        (Span(first[:7], 0, blocks[0], True), Span(second[:5], 0, blocks[1], True)),  # noqa: FBT003
        (Span(first[7:], 7, blocks[0], True), Span(second[5:], 5, blocks[1], True)),  # noqa: FBT003
    )
    return torch.cat([paged.run(spans, lambda _: None) for spans in steps])


def _tokens(count: int, vocab_size: int) -> NDArray[np.int64]:
    return (np.arange(1, count + 1, dtype=np.int64) * 7919) % vocab_size


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
    sampling_defaults: SamplingDefaults = field(default_factory=SamplingDefaults)


def load_model(folder: Path, options: TransformersOptions) -> LoadedModel:
    """Load a checkpoint in Hugging Face's format from a local folder. Nothing is downloaded.

    Raises:
        ConfigError: no such checkpoint, a corrupt one, or one that this engine cannot serve.
    """
    weights = find_weights(folder)
    config = _read_config(folder)
    check_layer_kinds(config)
    max_context_tokens = _choose_context(config, options)
    _check_rope(config, max_context_tokens)
    model = _read_weights(folder, config, options)
    dtype = _dtype_name(model.dtype)
    _warn_of_slow_dtype(model)
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
        eos_token_ids=_find_eos(folder, model),
        sampling_defaults=_find_sampling_defaults(model),
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


def _warn_of_slow_dtype(model: Any) -> None:  # noqa: ANN401
    if model.device.type != "cpu" or model.dtype != torch.bfloat16:
        return
    if not computes_bfloat16(Path("/", CPU_INFO).read_text("ascii", "replace")):
        _log.warning(
            "the model is in bfloat16, which this CPU has to convert: prompts take several times "
            "as long as with engine.dtype=float32 (to be set for all workers)"
        )


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


def _check_rope(config: Any, max_context_tokens: int) -> None:  # noqa: ANN401
    """Refuse positions that transformers turns by the longest sequence of a pass.

    Then KV of equal tokens differs with what is computed beside them, and from vLLM's.

    Raises:
        ConfigError: `dynamic` scaling, or `longrope` with contexts for which it has long factors.
    """
    for rope in list_ropes(config.get_text_config(decoder=True)):
        if rope.kind == "longrope" and max_context_tokens > rope.original_tokens:
            raise ConfigError(
                "this engine serves longrope models up to the context before scaling: set "
                f"max_context_tokens = {rope.original_tokens}, or serve it with the vllm engine"
            )
        if rope.kind == "dynamic":
            raise ConfigError(
                "this engine cannot serve a model with dynamic RoPE scaling: serve it with the "
                "vllm engine"
            )


def _find_eos(folder: Path, model: Any) -> tuple[int, ...]:  # noqa: ANN401
    """The tokens that end an answer in vLLM: generation_config.json's and the tokenizer's.

    Raises:
        ConfigError: the tokenizer's files cannot be read.
    """
    config = model.config.get_text_config(decoder=True)
    stated = model.generation_config.eos_token_id
    if stated is None and not (folder / "generation_config.json").exists():
        stated = config.eos_token_id  # as in vLLM, not where that file names none
    found = [stated] if isinstance(stated, int) else [*(stated or ())]
    text = read_special_tokens(folder).get("eos_token")
    if text is not None and (token := load_tokenizer(folder).token_id(text)) is not None:
        found.append(token)
    eos = tuple(token for token in dict.fromkeys(found) if 0 <= token < config.vocab_size)
    if outside := set(found).difference(eos):  # `min_tokens` would ban what has no logit
        _log.warning(
            "the model's files name the end tokens %s, but its ids are 0 to %d: answers do not end "
            "there",
            *(sorted(outside), config.vocab_size - 1),
        )
    return eos


def _find_sampling_defaults(model: Any) -> SamplingDefaults:  # noqa: ANN401
    """What the checkpoint's generation_config.json states, as vLLM reads it.

    Raises:
        ConfigError: a value is none that tokens can be chosen by.
    """
    stated: dict[str, object] = model.generation_config.to_diff_dict()
    stated = {name: value for name, value in stated.items() if value is not None}
    for name, off in _PENALTIES_OFF.items():
        if stated.get(name, off) != off:
            _log.warning(
                "the model's generation_config.json has %s = %s, which this engine cannot apply: "
                "its answers differ from vLLM's, which does",
                name,
                stated[name],
            )
    try:
        return msgspec.convert(stated, SamplingDefaults)
    except msgspec.ValidationError as exc:
        raise ConfigError(f"the model's generation_config.json cannot be used: {exc}") from exc
