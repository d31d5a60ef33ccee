"""Names of prefixes by one secret: 64 bits for each full block, of all tokens up to its end.

Engines name blocks in ways of their own, with hashes that are slow or seeded; their events carry
the tokens, too. So a gateway names blocks itself, in numpy, for events and for prompts alike:

    term(i) = mix(sum over the block's tokens of token * factor  xor  place[i mod 4096])
    name(i) = upper 52 bits of (root + term(0) + … + term(i)), lower 12 bits: i mod 4096

A name is all that is needed to go on from a block. The factors come from a secret (of a gateway's
process for what engines report, of the cluster for entries of stores, which workers name so):
no client can construct prompts whose names collide (multilinear hashing; Carter and Wegman 1979). A
collision by chance costs a wrong guess of what a worker has cached, never a wrong answer.
"""

from __future__ import annotations

import hashlib
import struct
from functools import lru_cache
from operator import mul
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

PLACE_BITS: Final = 12
NUM_PLACES: Final = 1 << PLACE_BITS
_BEFORE_FIRST: Final = NUM_PLACES - 1
_UPPER: Final = 0xFFFF_FFFF_FFFF_FFFF ^ (NUM_PLACES - 1)
FEW_TOKENS: Final = 64
"""So many are named without numpy, whose calls cost more than what they compute."""
_ALL: Final = (1 << 64) - 1
_HALF: Final = np.uint64(32)
_UPPER_MASK: Final = np.uint64(_UPPER)
_PLACE_MASK: Final = np.uint64(_BEFORE_FIRST)
_PLACES_TWICE: Final = np.tile(np.arange(NUM_PLACES, dtype=np.uint64), 2)


def salt_of_adapter(tenant_salt: str, adapter: str) -> str:
    """The salt of sequences that are computed with an adapter of this name; "" for none."""
    return f"{tenant_salt}/{adapter}" if adapter else tenant_salt


class PrefixNames:
    """Names blocks. `secret` has 16 bytes or more; the same secret gives the same names."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._places = np.tile(self._draw(b"places", NUM_PLACES), 2)
        self._mix = self._draw(b"mix", 2) | np.uint64(1)
        self._factors = lru_cache(maxsize=8)(self._draw_factors)
        self._few_places: list[int] = self._places[:NUM_PLACES].tolist()
        self._few_mix: list[int] = self._mix.tolist()
        self._few_factors = lru_cache(maxsize=8)(self._list_factors)

    def root(self, salt: str) -> int:
        """What a sequence's first block follows: of a cache salt, an adapter, or both."""
        digest = hashlib.blake2b(salt.encode(), key=self._secret[:64], digest_size=8).digest()
        return int.from_bytes(digest, "little") & _UPPER | _BEFORE_FIRST

    def of(self, token_ids: NDArray[np.int32], block_size: int, after: int) -> list[int]:
        """Name the full blocks among `token_ids` `[num_tokens]`, which follow the block `after`."""
        num_blocks = len(token_ids) // block_size
        blocks = token_ids[: num_blocks * block_size].reshape(num_blocks, block_size)
        terms = blocks.astype(np.uint64).dot(self._factors(block_size))
        first = ((after & _BEFORE_FIRST) + 1) & _BEFORE_FIRST
        if num_blocks > NUM_PLACES:
            places = np.arange(first, first + num_blocks, dtype=np.uint64) & _PLACE_MASK
            terms ^= self._places[places]
        else:  # what most events and prompts need is there already
            places = _PLACES_TWICE[first : first + num_blocks]
            terms ^= self._places[first : first + num_blocks]
        for factor in self._mix:
            terms *= factor
            terms ^= terms >> _HALF
        terms &= _UPPER_MASK
        names = terms.cumsum()
        names += np.uint64(after & _UPPER)
        names |= places
        named: list[int] = names.tolist()
        return named

    def of_packed(self, packed_ids: bytes, block_size: int, after: int) -> list[int]:
        """As `of`, of ids as little-endian int32: of an event, which often is of one block."""
        if len(packed_ids) > 4 * FEW_TOKENS:
            return self.of(np.frombuffer(packed_ids, "<i4"), block_size, after)
        factors, places = self._few_factors(block_size), self._few_places
        ids = struct.unpack(f"<{len(packed_ids) // 4}i", packed_ids)
        names = []
        for end in range(block_size, len(ids) + 1, block_size):
            place = (after + 1) & _BEFORE_FIRST
            term = sum(map(mul, ids[end - block_size : end], factors)) & _ALL ^ places[place]
            for factor in self._few_mix:
                term = term * factor & _ALL
                term ^= term >> 32
            after = (term & _UPPER) + (after & _UPPER) & _ALL | place
            names.append(after)
        return names

    def _list_factors(self, block_size: int) -> list[int]:
        factors: list[int] = self._factors(block_size).tolist()
        return factors

    def _draw_factors(self, block_size: int) -> NDArray[np.uint64]:
        return self._draw(b"tokens", block_size) | np.uint64(1)

    def _draw(self, what: bytes, num: int) -> NDArray[np.uint64]:
        raw = hashlib.shake_256(what + b"\0" + self._secret).digest(8 * num)
        return np.frombuffer(raw, dtype="<u8").astype(np.uint64)
