"""One step through the model: spans in, logits out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from baton.engines.transformers.paged_cache import PagedCache
from baton.engines.transformers.step import Step

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from baton.engines.transformers.pages import KVPages
    from baton.engines.transformers.shape import ModelShape
    from baton.engines.transformers.step import Span


class PagedModel:
    """A transformers model over pages. Owned by the engine's thread."""

    def __init__(self, model: Any, shape: ModelShape, pages: KVPages, block_size: int) -> None:  # noqa: ANN401
        self._model, self._windows, self._block_size = model, shape.windows, block_size
        self._cache = PagedCache(pages)

    def run(self, spans: Sequence[Span], on_layer: Callable[[int], None]) -> torch.Tensor:
        """Compute the spans' tokens, filling their pages.

        Returns:
            Logits `[spans that need them, vocabulary]`, in the spans' order.
        """
        step = Step(spans, self._block_size, self._model.device)
        self._cache.begin_step(step, on_layer)
        with torch.inference_mode():
            output = self._model(
                input_ids=step.input_ids,
                position_ids=step.position_ids,
                past_key_values=self._cache,
                use_cache=True,
                logits_to_keep=step.logits_rows,
                paged_step=step,
                layer_windows=self._windows,
            )
        self._cache.finish_step()
        logits: torch.Tensor = output.logits[0]
        return logits
