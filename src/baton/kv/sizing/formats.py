"""Numbers → bytes. Quantised formats keep scales beside their numbers, and those count.

`fp8` has one scale for a whole tensor. `fp8_token`, `int8_token` and `int4_token` keep a float32
for each token, head and plane, inside the page, as vLLM does for its `…_per_token_head` types.
`fp8_ds_mla` is DeepSeek's packed row: 512 FP8 numbers, a float32 for each 128 of them, and the
rotary part in bfloat16.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from baton.errors import ConfigError

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
