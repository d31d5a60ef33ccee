"""A prompt as the store keeps it: full blocks of the store's size, then a tail. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from baton.kv.identity import HashDomain, compute_block_hashes, compute_tail_hash

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from baton.kv.identity import BlockHash


@dataclass(frozen=True, slots=True)
class TokenSegment:
    """Tokens `[start, stop)` of a prompt, kept under one hash."""

    block_hash: BlockHash
    start: int
    stop: int


def hash_segments(domain: HashDomain, prompt_ids: NDArray[np.int32]) -> tuple[TokenSegment, ...]:
    """All pieces of a prompt, in order, without a gap. `domain` has the store's block size."""
    hashes = compute_block_hashes(domain, prompt_ids)
    size = domain.block_size
    segments = [TokenSegment(present, i * size, (i + 1) * size) for i, present in enumerate(hashes)]
    stop = len(hashes) * size
    if stop < len(prompt_ids):
        parent = hashes[-1] if hashes else None
        tail = compute_tail_hash(domain, prompt_ids[stop:], parent)
        segments.append(TokenSegment(tail, stop, len(prompt_ids)))
    return tuple(segments)
