"""What a block is called: hashes that two workers compute alike without talking (ADR 0004).

A `BlockHash` commits to the model, the tenant, the block size and every token up to the block's
end. Formats and golden vectors: docs/wire/block-hash.md, tests/vectors/kv.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NewType

from baton.errors import ConfigError
from baton.kv.layout import MAX_BLOCK_SIZE

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

BlockHash = NewType("BlockHash", bytes)
"""32 bytes: the chained SHA-256 of a block, never truncated."""

_BLOCK_TAG: Final = b"baton/block/1"
_TAIL_TAG: Final = b"baton/tail/1"
_PROMPT_TAG: Final = b"baton/prompt/1"
_ADAPTER_TAG: Final = b"baton/adapter/1"
_TOKEN_BYTES: Final = 4


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter that a model's KV is computed with.

    `digest`, of its weights, is its identity. `name` is what clients of one server call it.
    """

    name: str
    digest: str


def adapt_fingerprint(model_fingerprint: str, adapter: Adapter | None) -> str:
    """The fingerprint of a model with an adapter; the model's own where there is none."""
    if adapter is None:
        return model_fingerprint
    both = _length_prefixed(model_fingerprint) + _length_prefixed(adapter.digest)
    return hashlib.sha256(_ADAPTER_TAG + both).hexdigest()


@dataclass(frozen=True, slots=True)
class HashDomain:
    """Whose blocks: equal tokens in two domains have unrelated hashes.

    `model_fingerprint` covers whatever changes KV for equal tokens (weights, dtype; an adapter by
    `adapt_fingerprint`);
    `tenant_salt` keeps one tenant from probing what another has cached.

    Raises:
        ConfigError: `block_size` is not in `[1, 65536]`.
    """

    model_fingerprint: str
    tenant_salt: str
    block_size: int

    def __post_init__(self) -> None:
        if not 1 <= self.block_size <= MAX_BLOCK_SIZE:
            raise ConfigError(f"block_size {self.block_size} is not in [1, {MAX_BLOCK_SIZE}]")

    @property
    def root(self) -> BlockHash:
        """The parent of every sequence's first block."""
        domain = (
            _BLOCK_TAG
            + _length_prefixed(self.model_fingerprint)
            + _length_prefixed(self.tenant_salt)
            + self.block_size.to_bytes(4, "little")
        )
        return BlockHash(hashlib.sha256(domain).digest())


def compute_block_hashes(
    domain: HashDomain, token_ids: NDArray[np.int32], parent: BlockHash | None = None
) -> list[BlockHash]:
    """Name the full blocks of a sequence; a last partial block has no name.

    `token_ids` has shape `[num_tokens]`. `parent` is the hash of the block just before them, so
    that a growing sequence extends its chain; None where they start the sequence.

    Raises:
        TypeError: `token_ids` does not fit int32.
    """
    block_bytes = domain.block_size * _TOKEN_BYTES
    tokens = _token_bytes(token_ids)
    stop = len(tokens) - len(tokens) % block_bytes
    sha256 = hashlib.sha256
    previous: bytes = domain.root if parent is None else parent
    hashes: list[BlockHash] = []
    for at in range(0, stop, block_bytes):
        previous = sha256(previous + tokens[at : at + block_bytes]).digest()
        hashes.append(BlockHash(previous))
    return hashes


def compute_tail_hash(
    domain: HashDomain, token_ids: NDArray[np.int32], parent: BlockHash | None
) -> BlockHash:
    """Name what follows a sequence's last full block: `[num_tokens]`, fewer than a block.

    `parent` is that block's hash; None where there is none. No block has such a name.

    Raises:
        ConfigError: no tokens, or a full block of them.
        TypeError: `token_ids` does not fit int32.
    """
    if not 0 < len(token_ids) < domain.block_size:
        raise ConfigError(f"a tail of {len(token_ids)} tokens in blocks of {domain.block_size}")
    previous: bytes = domain.root if parent is None else parent
    return BlockHash(hashlib.sha256(_TAIL_TAG + previous + _token_bytes(token_ids)).digest())


def compute_prompt_hash(
    model_fingerprint: str, tenant_salt: str, token_ids: NDArray[np.int32]
) -> bytes:
    """Commit to all tokens of a prompt: 32 bytes, the same whatever the block size.

    Two workers with different block sizes compare it to know that they talk of the same prompt.

    Raises:
        TypeError: `token_ids` does not fit int32.
    """
    tokens = _token_bytes(token_ids)
    num_tokens = len(tokens) // _TOKEN_BYTES
    return hashlib.sha256(
        _PROMPT_TAG
        + _length_prefixed(model_fingerprint)
        + _length_prefixed(tenant_salt)
        + num_tokens.to_bytes(8, "little")
        + tokens
    ).digest()


def _length_prefixed(text: str) -> bytes:
    raw = text.encode()
    return len(raw).to_bytes(4, "little") + raw


def _token_bytes(token_ids: NDArray[np.int32]) -> bytes:
    # "safe" refuses int64: a token id that wrapped around would share another prompt's identity.
    return token_ids.astype("<i4", casting="safe", copy=False).tobytes()
