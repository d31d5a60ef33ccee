"""transformers' `Cache`, kept in pages: the hook through which a model meets them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from transformers import Cache

if TYPE_CHECKING:
    from collections.abc import Callable

    from baton.engines.transformers.pages import KVPages
    from baton.engines.transformers.step import Step


class PagedCache(Cache):  # type: ignore[misc]  # transformers is untyped for us
    """Writes a step's keys and values into pages, and returns all that the step attends to.

    `on_layer(layer)` is called as soon as the keys and values of all the step's tokens are in the
    pages of that layer, where peers see them: in the middle of the forward pass, or, where an
    accelerator is behind, in `finish_step`. Owned by the engine's thread.
    """

    def __init__(self, pages: KVPages) -> None:
        super().__init__(layers=[])
        self._pages = pages
        self._step: Step | None = None
        self._on_layer: Callable[[int], None] = lambda _: None
        self._gathered = tuple(_Workspace() for _ in range(2))

    def begin_step(self, step: Step, on_layer: Callable[[int], None]) -> None:
        """Take `step`'s arrays for the forward pass that follows."""
        for _ in self._pages.wait_published():
            continue  # of a pass that failed
        self._step, self._on_layer = step, on_layer

    def finish_step(self) -> None:
        """The pass has been given out: tell of the layers that were not in their pages yet."""
        for layer in self._pages.wait_published():
            self._on_layer(layer)

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *_: object,
        **__: object,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store `[1, heads, T, dim]` each; return `[1, heads, gathered tokens, dim]` each.

        What is returned is valid until the next layer's update.

        Args:
            key_states: new keys of the step's packed tokens.
            value_states: new values of the step's packed tokens.
            layer_idx: the layer.
        """
        step = self._step
        if step is None:
            raise RuntimeError("update() before begin_step()")
        gathered = []
        planes = self._pages.planes[layer_idx]
        for plane, new, workspace in zip(
            planes, (key_states, value_states), self._gathered, strict=True
        ):
            plane[step.write_blocks, step.write_offsets] = new[0].transpose(0, 1)
            gathered.append(workspace.gather(plane, step.read_blocks))
        self._pages.publish_layer(layer_idx, step.written_pages)
        for layer in self._pages.poll_published():
            self._on_layer(layer)
        return gathered[0], gathered[1]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Nothing is seen yet, for a model that asks: positions are always given to it."""
        del layer_idx
        return 0


class _Workspace:
    """Memory that all layers gather into: fresh memory for each would cost more than the copy."""

    def __init__(self) -> None:
        self._flat: torch.Tensor | None = None

    def gather(self, plane: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
        """Pages `blocks` of `plane`, `[1, heads, len(blocks) * block_size, dim]`, as one run."""
        _, block_size, num_heads, dim = plane.shape
        num_elements = len(blocks) * block_size * num_heads * dim
        if self._flat is None or len(self._flat) < num_elements:
            self._flat = torch.empty(
                num_elements + num_elements // 2, dtype=plane.dtype, device=plane.device
            )
        out = self._flat[:num_elements].view(len(blocks), block_size, num_heads, dim)
        torch.index_select(plane, 0, blocks, out=out)
        return out.view(-1, num_heads, dim).transpose(0, 1)[None]
