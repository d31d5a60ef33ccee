"""What a layer keeps for a request. A layer may keep several things, or nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from baton.errors import InvalidLayoutError

NumberFormat = Literal["model", "float32"]


@dataclass(frozen=True, slots=True)
class Attention:
    """Keys and values of every kv head, for each token.

    `window_tokens` counts the token itself (baton.kv.layout); `chunk_tokens`: only tokens of the
    same run of so many are seen. At most one of them is set.
    """

    num_kv_heads: int
    k_dim: int
    v_dim: int
    window_tokens: int | None = None
    chunk_tokens: int | None = None

    def first_needed(self, num_tokens: int) -> int:
        """The first of tokens `[0, num_tokens)` that the token after them attends to."""
        if self.window_tokens is not None:
            return max(0, num_tokens + 1 - self.window_tokens)
        if self.chunk_tokens is not None:
            return num_tokens // self.chunk_tokens * self.chunk_tokens
        return 0


@dataclass(frozen=True, slots=True)
class Latent:
    """One vector for each token (MLA), on every tensor-parallel worker.

    `index_dim`: the key of a sparse attention's indexer beside it; 0: there is none.
    """

    latent_dim: int
    rope_dim: int
    index_dim: int = 0


@dataclass(frozen=True, slots=True)
class State:
    """A state of one size, however many tokens there were.

    Numbers of the convolution: `conv_steps * (conv_dim + num_groups * group_dim)`, divided among
    workers; groups are repeated where they do not divide. `recurrent_numbers` are divided too.
    """

    conv_steps: int
    conv_dim: int
    recurrent_numbers: int
    recurrent_format: NumberFormat = "model"
    num_groups: int = 0
    group_dim: int = 0

    def conv_numbers(self, num_shards: int) -> int:
        """Of one worker."""
        num_groups = self.num_groups
        if num_groups % num_shards:
            num_groups = num_shards
        return self.conv_steps * _share(self.conv_dim + num_groups * self.group_dim, num_shards)

    def recurrent_numbers_of(self, num_shards: int) -> int:
        """Of one worker."""
        return _share(self.recurrent_numbers, num_shards)


Part: TypeAlias = Attention | Latent | State
Layer: TypeAlias = tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A model, as far as its KV depends on it. `dtype`: that of its weights, by its config."""

    family: str
    layers: tuple[Layer, ...]
    dtype: str
    max_context_tokens: int | None
    notes: tuple[str, ...]


def _share(numbers: int, num_shards: int) -> int:
    if numbers % num_shards:
        raise InvalidLayoutError(
            f"a state of {numbers} numbers cannot be divided among {num_shards} workers"
        )
    return numbers // num_shards
