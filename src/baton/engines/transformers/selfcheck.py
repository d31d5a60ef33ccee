"""Does this model, over pages, give the numbers that transformers gives? Asked at each start.

A model that hides state elsewhere, ignores positions or attends in a way of its own fails here,
with a word to the operator, instead of giving wrong answers later.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from baton.engines.transformers.attention import IMPLEMENTATION
from baton.engines.transformers.forward import PagedModel
from baton.engines.transformers.pages import allocate_pages
from baton.engines.transformers.step import Span
from baton.errors import ConfigError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from baton.engines.transformers.shape import ModelShape
    from baton.kv.layout import DType

_BLOCK_SIZE: Final = 4
_NUM_BLOCKS: Final = 6
_TOLERANCE: Final[dict[torch.dtype, float]] = {torch.float32: 1e-3}
_HALF_PRECISION_TOLERANCE: Final = 0.15


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
