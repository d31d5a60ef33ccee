"""What an operator may set for this engine."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

PositiveInt = Annotated[int, msgspec.Meta(ge=1)]


class TransformersOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of `[engine] kind = "transformers"`.

    `num_blocks` None takes as many blocks as fit `kv_cache_bytes`. `max_context_tokens` None is the
    model's, or fewer where the blocks hold fewer.
    `dtype` "auto" is the checkpoint's own; answers are the same for every batch, block size and
    worker in float32 only. `device` "auto" takes CUDA where there is one. `num_threads` None leaves
    torch's own choice.
    Prompts that wait to be pulled may hold `max_held_share` of the blocks; more are refused. What
    is being copied into the store may hold `max_kept_share`; more is not kept.
    A prompt part of fewer than `min_handoff_tokens` (None: one block) is computed, not received.
    """

    block_size: PositiveInt = 16
    num_blocks: PositiveInt | None = None
    kv_cache_bytes: PositiveInt = 512 * 1024 * 1024
    max_batch_tokens: PositiveInt = 512
    max_num_seqs: PositiveInt = 64
    max_waiting: PositiveInt = 256
    max_context_tokens: PositiveInt | None = None
    min_handoff_tokens: PositiveInt | None = None
    max_held_share: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.5
    max_kept_share: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.25
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    num_threads: PositiveInt | None = None
