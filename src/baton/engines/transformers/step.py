"""The arrays of one step: all scheduled tokens of all sequences, packed into one row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens `[start, start + len(token_ids))` of one sequence, computed in this step.

    `blocks`, int64, holds tokens `[0, start + len(token_ids))` at least. `needs_logits`: the last
    of these tokens is the last one known, so the next one is to be sampled.
    """

    token_ids: NDArray[np.int64]
    start: int
    blocks: NDArray[np.int64]
    needs_logits: bool

    @property
    def num_tokens(self) -> int:
        """Tokens computed in this step."""
        return len(self.token_ids)

    @property
    def context_tokens(self) -> int:
        """Tokens that are in the pages once the step is done."""
        return self.start + self.num_tokens


@dataclass(frozen=True, slots=True)
class Extent:
    """Where one sequence lies in the step's packed row, and in the gathered keys and values.

    Queries `[q_start, q_start + q_tokens)` of the row attend to keys
    `[k_start, k_start + k_tokens)`; the queries are the last of the keys' positions.
    """

    q_start: int
    q_tokens: int
    k_start: int
    k_tokens: int


class Step:
    """One packed forward pass. Owned by the engine's thread, lives for one step.

    `input_ids`, `position_ids`: `[1, T]`. `write_blocks`, `write_offsets`: `[T]`, where each
    token's keys and values go. `written_pages`: int64, on the host, each of these blocks once.
    `read_blocks`: all blocks of all sequences, one after the other;
    gathered, they give each sequence's context, starting on a block boundary.
    `logits_rows`: rows of `[0, T)` whose logits are wanted, in the order of the spans.
    """

    def __init__(self, spans: Sequence[Span], block_size: int, device: torch.device) -> None:
        positions = [np.arange(s.start, s.context_tokens) for s in spans]
        used_blocks = [s.blocks[: -(-s.context_tokens // block_size)] for s in spans]
        write_blocks = [s.blocks[p // block_size] for s, p in zip(spans, positions, strict=True)]
        flat_positions = np.concatenate(positions)

        def tensor(array: NDArray[np.int64]) -> torch.Tensor:
            return torch.from_numpy(array).to(device)

        self.device = device
        self.input_ids = tensor(np.concatenate([s.token_ids for s in spans]))[None]
        self.position_ids = tensor(flat_positions)[None]
        flat_blocks = np.concatenate(write_blocks)
        self.write_blocks = tensor(flat_blocks)
        self.written_pages = np.unique(flat_blocks)
        self.write_offsets = tensor(flat_positions % block_size)
        self.read_blocks = tensor(np.concatenate(used_blocks))
        self.extents = _extents(spans, [len(b) * block_size for b in used_blocks])
        self.logits_rows = tensor(
            np.array(
                [
                    extent.q_start + extent.q_tokens - 1
                    for extent, span in zip(self.extents, spans, strict=True)
                    if span.needs_logits
                ],
                dtype=np.int64,
            )
        )
        self._masks: dict[tuple[Extent, int | None, torch.dtype], torch.Tensor] = {}

    def mask(self, extent: Extent, window: int | None, dtype: torch.dtype) -> torch.Tensor:
        """What is added to the scores of `extent`, `[q_tokens, k_tokens]`; one for all layers."""
        key = (extent, window, dtype)
        if key not in self._masks:
            keys = torch.arange(extent.k_tokens, device=self.device)
            queries = keys[extent.k_tokens - extent.q_tokens :, None]
            hidden = keys > queries
            if window is not None:
                hidden |= keys <= queries - window
            self._masks[key] = torch.zeros(
                hidden.shape, dtype=dtype, device=self.device
            ).masked_fill_(hidden, float("-inf"))
        return self._masks[key]


def _extents(spans: Sequence[Span], gathered_tokens: Sequence[int]) -> tuple[Extent, ...]:
    extents = []
    q_start = k_start = 0
    for span, num_gathered in zip(spans, gathered_tokens, strict=True):
        extents.append(Extent(q_start, span.num_tokens, k_start, span.context_tokens))
        q_start += span.num_tokens
        k_start += num_gathered
    return tuple(extents)
