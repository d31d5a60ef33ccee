"""The packed arrays of one step, and attention over them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - the name that torch's own documentation uses
from transformers import AttentionInterface

from baton.kv.copies import count_blocks

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
    """One packed forward pass. Owned by the engine's thread, valid for one step.

    `input_ids`, `position_ids`: `[1, T]`. `write_blocks`, `write_offsets`: `[T]`, where each
    token's keys and values go. `written_pages`: int64, on the host, each of these blocks once.
    `read_blocks`: all blocks of all sequences, one after the other;
    gathered, they give each sequence's context, starting on a block boundary.
    `logits_rows`: rows of `[0, T)` whose logits are wanted, in the order of the spans.
    """

    def __init__(self, spans: Sequence[Span], block_size: int, device: torch.device) -> None:
        positions = [np.arange(s.start, s.context_tokens) for s in spans]
        used_blocks = [s.blocks[: count_blocks(s.context_tokens, block_size)] for s in spans]
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


IMPLEMENTATION: Final = "baton_paged"


def paged_attention(  # noqa: PLR0913, PLR0917 - the signature is transformers'
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    paged_step: Step,
    layer_windows: tuple[int | None, ...],
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """Attend from `query` `[1, heads, T, dim]` to what `PagedCache.update` returned.

    `key`, `value`: `[1, kv_heads, gathered tokens, dim]`. `s_aux` are attention sinks, `[heads]`.
    Returns `[1, T, heads, value dim]`.
    """
    del attention_mask  # never built: transformers has no mask function under our name
    window = layer_windows[module.layer_idx]  # type: ignore[index]  # Module attributes are untyped
    out = query.new_empty(1, query.shape[2], query.shape[1], value.shape[3])
    for extent in paged_step.extents:
        queries = slice(extent.q_start, extent.q_start + extent.q_tokens)
        keys = _visible_keys(extent, window)
        q, k, v = query[:, :, queries], key[:, :, keys], value[:, :, keys]
        if softcap is not None or s_aux is not None:
            mask = paged_step.mask(extent, window, torch.float32)
            part = _explicit(q, k, v, mask[:, -k.shape[2] :], scaling, softcap, s_aux)
        elif extent.q_tokens == 1:
            part = _single_query(q, k, v, scaling)
        elif extent.q_tokens == extent.k_tokens and window is None:
            part = F.scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=scaling, enable_gqa=True
            )
        else:
            mask = paged_step.mask(extent, window, q.dtype)
            part = F.scaled_dot_product_attention(q, k, v, mask, scale=scaling, enable_gqa=True)
        out[:, queries] = part.transpose(1, 2)
    return out, None


def builds_scores(model: Any) -> bool:  # noqa: ANN401 - transformers is untyped for us
    """Whether a step has all scores of a layer in memory, `[heads, queries, keys]`: `_explicit`."""
    text = model.config.get_text_config(decoder=True)
    has_cap = getattr(text, "attn_logit_softcapping", None) is not None
    return has_cap or any(name.endswith(".sinks") for name, _ in model.named_parameters())


def _visible_keys(extent: Extent, window: int | None) -> slice:
    """Keys that `extent` attends to: of a single query's, only those that its window lets it see.

    More than one query see different keys: then a mask is needed.
    """
    stop = extent.k_start + extent.k_tokens
    if extent.q_tokens == 1 and window is not None:
        return slice(stop - min(window, extent.k_tokens), stop)
    return slice(extent.k_start, stop)


def _single_query(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float | None
) -> torch.Tensor:
    """`[1, heads, 1, value dim]`: the heads of a group become rows, so keys are read once each."""
    _, num_heads, _, dim = q.shape
    grouped = q.reshape(1, k.shape[1], num_heads // k.shape[1], dim)
    out = F.scaled_dot_product_attention(grouped, k, v, scale=scaling)
    return out.reshape(1, num_heads, 1, v.shape[3])


def _explicit(  # noqa: PLR0913, PLR0917 - each is a term of the formula
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor,
    scaling: float | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention in plain operations, for capped scores and for sinks."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    scores = q @ k.transpose(2, 3) * (q.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.float() + mask
    if sinks is None:
        weights = scores.softmax(dim=-1)
    else:
        column = sinks.float().view(1, -1, 1, 1).expand(1, -1, scores.shape[2], 1)
        weights = torch.cat([scores, column], dim=-1).softmax(dim=-1)[..., :-1]
    return weights.to(v.dtype) @ v


def register() -> None:
    """Make `IMPLEMENTATION` known to transformers; idempotent."""
    AttentionInterface.register(IMPLEMENTATION, paged_attention)
