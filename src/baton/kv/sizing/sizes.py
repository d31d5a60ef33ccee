"""Parts, a format, a number of tokens → bytes. Pure.

Quantised formats keep scales beside their numbers, and those count: `fp8` has one scale for a whole
tensor. `fp8_token`, `int8_token` and `int4_token` keep a float32 for each token, head and plane,
inside the page, as vLLM does for its `…_per_token_head` types. `fp8_ds_mla` is DeepSeek's packed
row: 512 FP8 numbers, a float32 for each 128 of them, and the rotary part in bfloat16.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, assert_never

import msgspec

from baton.errors import ConfigError, InvalidLayoutError
from baton.kv.sizing.parts import Attention, Latent, ModelShape, Part, State

FormatName = Literal[
    "float32", "float16", "bfloat16", "fp8", "fp8_token", "int8_token", "int4_token", "fp8_ds_mla"
]
SCALE_BYTES: Final = 4
NUM_PER_SCALE: Final = 128
ROPE_NUMBER_BYTES: Final = 2


@dataclass(frozen=True, slots=True)
class Format:
    """How numbers of KV are kept: `num_bits` each, `scale_bytes` for each vector."""

    name: FormatName
    num_bits: int
    scale_bytes: int = 0

    def vector_bytes(self, num_numbers: int) -> int:
        """A vector of one token, head and plane."""
        return -(-num_numbers * self.num_bits // 8) + self.scale_bytes

    def latent_bytes(self, latent_dim: int, rope_dim: int) -> int:
        """MLA's vector of one token.

        Raises:
            ConfigError: no engine keeps latent vectors like that.
        """
        if self.name == "fp8_ds_mla":
            scales = -(-latent_dim // NUM_PER_SCALE) * SCALE_BYTES
            return latent_dim + scales + rope_dim * ROPE_NUMBER_BYTES
        if self.scale_bytes:
            raise ConfigError(
                f"--kv-dtype {self.name} is for heads: latent vectors (MLA) take fp8 or fp8_ds_mla"
            )
        return self.vector_bytes(latent_dim + rope_dim)


FORMATS: Final[dict[FormatName, Format]] = {
    "float32": Format("float32", 32),
    "float16": Format("float16", 16),
    "bfloat16": Format("bfloat16", 16),
    "fp8": Format("fp8", 8),
    "fp8_token": Format("fp8_token", 8, SCALE_BYTES),
    "int8_token": Format("int8_token", 8, SCALE_BYTES),
    "int4_token": Format("int4_token", 4, SCALE_BYTES),
    "fp8_ds_mla": Format("fp8_ds_mla", 8),
}


def index_key_bytes(index_dim: int) -> int:
    """The indexer's key of one token: FP8 with a float32 for each 128 numbers."""
    return index_dim + -(-index_dim // NUM_PER_SCALE) * SCALE_BYTES if index_dim else 0


MAX_TOKENS: Final = 1 << 40
STATE_FORMATS: Final = {"float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True, slots=True)
class Terms:
    """What a size is asked for: `num_shards` tensor-parallel workers, pages of `block_size` tokens.

    `kv_format` None: the model's own numbers.
    """

    num_tokens: int
    kv_format: FormatName | None = None
    num_shards: int = 1
    block_size: int = 16


class Sizes(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of one request's KV; of all workers together unless named for a rank.

    `token_bytes`: one more token, where every layer keeps it. `growing_token_bytes`: one more
    token once all windows are full. `kept_bytes`: every token in every layer, in whole blocks.
    `needed_bytes`: in whole blocks, what the next token attends to, and all states: what a handoff
    has to move. `rank_*`: of one worker, and what each of them sends; latent vectors are on all.
    """

    num_tokens: int
    num_blocks: int
    block_size: int
    kv_format: str
    num_shards: int
    token_bytes: int
    growing_token_bytes: int
    state_bytes: int
    kept_bytes: int
    needed_bytes: int
    rank_token_bytes: int
    rank_kept_bytes: int
    rank_needed_bytes: int
    layers: dict[str, int]


def compute_sizes(shape: ModelShape, terms: Terms) -> Sizes:
    """Sizes of one request.

    Raises:
        ConfigError: the numbers make no sense, or heads cannot be divided like that.
    """
    _check(terms)
    measure = _Measure(terms, _find_format(shape, terms), _state_number_bytes(shape))
    parts = [part for layer in shape.layers for part in layer]
    try:
        rank_needed = sum(measure.needed(part) for part in parts)
        rank_state = sum(measure.state(part) for part in parts)
    except InvalidLayoutError as exc:
        raise ConfigError(str(exc)) from exc
    rank_token = sum(measure.token(part) for part in parts)
    rank_growing = sum(measure.token(part) for part in parts if _sees_all(part))
    rank_kept = rank_token * measure.num_blocks * terms.block_size + rank_state
    num_shards = terms.num_shards
    return Sizes(
        num_tokens=terms.num_tokens,
        num_blocks=measure.num_blocks,
        block_size=terms.block_size,
        kv_format=measure.format.name,
        num_shards=num_shards,
        token_bytes=rank_token * num_shards,
        growing_token_bytes=rank_growing * num_shards,
        state_bytes=rank_state * num_shards,
        kept_bytes=rank_kept * num_shards,
        needed_bytes=rank_needed * num_shards,
        rank_token_bytes=rank_token,
        rank_kept_bytes=rank_kept,
        rank_needed_bytes=rank_needed,
        layers=_count_kinds(shape),
    )


@dataclass(frozen=True, slots=True)
class _Measure:
    """Bytes of one worker's share of a part."""

    terms: Terms
    format: Format
    state_number_bytes: int

    @property
    def num_blocks(self) -> int:
        return -(-self.terms.num_tokens // self.terms.block_size)

    def token(self, part: Part) -> int:
        """One token's."""
        match part:
            case Attention():
                vectors = sum(map(self.format.vector_bytes, (part.k_dim, part.v_dim)))
                return self._held_heads(part) * vectors
            case Latent():
                row = self.format.latent_bytes(part.latent_dim, part.rope_dim)
                return row + index_key_bytes(part.index_dim)
            case State():
                return 0
            case other:
                assert_never(other)

    def needed(self, part: Part) -> int:
        """In whole blocks, what the next token needs."""
        if isinstance(part, State):
            return self.state(part)
        first = part.first_needed(self.terms.num_tokens) if isinstance(part, Attention) else 0
        num_blocks = self.num_blocks - first // self.terms.block_size
        return max(0, num_blocks) * self.terms.block_size * self.token(part)

    def state(self, part: Part) -> int:
        """A state's."""
        if not isinstance(part, State):
            return 0
        number_bytes = 4 if part.recurrent_format == "float32" else self.state_number_bytes
        num_shards = self.terms.num_shards
        conv = part.conv_numbers(num_shards) * self.state_number_bytes
        return conv + part.recurrent_numbers_of(num_shards) * number_bytes

    def _held_heads(self, part: Attention) -> int:
        few, many = sorted((part.num_kv_heads, self.terms.num_shards))
        if not few or many % few:
            raise ConfigError(
                f"{part.num_kv_heads} kv heads cannot be divided among {self.terms.num_shards} "
                "tensor-parallel workers (--tp)"
            )
        return max(1, part.num_kv_heads // self.terms.num_shards)


def _check(terms: Terms) -> None:
    if not 1 <= terms.num_tokens <= MAX_TOKENS:
        raise ConfigError(f"--tokens: {terms.num_tokens} is not in [1, {MAX_TOKENS}]")
    if not 1 <= terms.block_size <= 65_536:  # noqa: PLR2004 - baton.kv.layout.MAX_BLOCK_SIZE
        raise ConfigError(f"--block-size: {terms.block_size} is not in [1, 65536]")
    if not 1 <= terms.num_shards <= 1024:  # noqa: PLR2004 - baton.kv.layout.MAX_SHARDS
        raise ConfigError(f"--tp: {terms.num_shards} is not in [1, 1024]")


def _find_format(shape: ModelShape, terms: Terms) -> Format:
    if terms.kv_format is not None:
        return FORMATS[terms.kv_format]
    for name in ("float32", "float16", "bfloat16"):
        if shape.dtype == name:
            return FORMATS[name]
    raise ConfigError(f"the model's dtype is {shape.dtype!r}: give KV's dtype (--kv-dtype)")


def _state_number_bytes(shape: ModelShape) -> int:
    return STATE_FORMATS.get(shape.dtype, 2)


def _sees_all(part: Part) -> bool:
    return not isinstance(part, Attention) or (
        part.window_tokens is None and part.chunk_tokens is None
    )


def _count_kinds(shape: ModelShape) -> dict[str, int]:
    counts: dict[str, int] = {}
    for layer in shape.layers:
        name = " and ".join(map(_describe, layer)) or "keeps nothing"
        counts[name] = counts.get(name, 0) + 1
    return counts


def _describe(part: Part) -> str:
    match part:
        case Attention():
            heads = f"{part.num_kv_heads} kv heads of {part.k_dim}"
            if part.v_dim != part.k_dim:
                heads += f" and {part.v_dim}"
            if part.window_tokens is not None:
                return f"{heads}, window {part.window_tokens}"
            return heads if part.chunk_tokens is None else f"{heads}, chunks {part.chunk_tokens}"
        case Latent():
            index = f", indexer {part.index_dim}" if part.index_dim else ""
            return f"latent {part.latent_dim} + {part.rope_dim}{index}"
        case State():
            return "a state"
        case other:
            assert_never(other)
