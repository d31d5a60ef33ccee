"""Attention for a packed step: each sequence alone, over its own part of the gathered pages.

Registered under transformers' public attention interface, so that no model is patched. A
sequence's numbers come from its own queries, keys and values only, whatever else is in the step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
import torch.nn.functional as F  # noqa: N812 - the name that torch's own documentation uses
from transformers import AttentionInterface

if TYPE_CHECKING:
    from baton.engines.transformers.step import Extent, Step

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


def _visible_keys(extent: Extent, window: int | None) -> slice:
    """Keys that `extent` attends to: of a single query's, only those that its window lets it see.

    More than one query see different keys: there the mask says which.
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
