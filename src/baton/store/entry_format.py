"""What an entry holds: some tokens' KV in canonical order, whatever engine computed it.

An entry is one block of the *store's* size (or the tail of a prompt), all layers, of one part of
the heads. Its body is, for each layer, `[plane][token][head][dim]`: what a canonical page of so
many tokens holds (`kv.canonical`). Workers whose blocks, page orders and tensor-parallel degrees
differ exchange KV through it; another dtype, model shape, block size or number of parts is another
form, whose entries have unrelated names.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Final, Self

import msgspec

from baton.errors import ConfigError
from baton.kv.layout import KVLayout, TensorParallelShard
from baton.store.interface import EntryName

if TYPE_CHECKING:
    from baton.kv.identity import BlockHash

_ENTRY_TAG: Final = b"baton/entry/1"


@dataclass(frozen=True, slots=True)
class EntryFormat:
    """The form of all entries of one model in one store.

    `full_layout` is the canonical layout of all heads in blocks of the store's size. Part i of
    `num_parts` has the heads that tensor-parallel rank i of so many would hold.
    """

    full_layout: KVLayout
    num_parts: int

    @classmethod
    def of(cls, layout: KVLayout, *, block_size: int, num_parts: int) -> Self:
        """The form in which a worker with `layout` keeps its KV.

        Raises:
            ConfigError: heads cannot be divided so, or the worker does not hold whole parts.
        """
        if num_parts % layout.shard.size:
            raise ConfigError(
                f"a worker of {layout.shard.size} tensor-parallel ranks cannot use a store whose "
                f"entries have {num_parts} parts: set store.num_parts to a multiple"
            )
        full_layout = KVLayout(layout.layers, block_size, layout.dtype)
        entry_format = cls(full_layout, num_parts)
        entry_format.part_layout(0)  # says why, if it cannot be
        return entry_format

    @property
    def block_size(self) -> int:
        """Tokens in a full entry."""
        return self.full_layout.block_size

    def parts_of_shard(self, shard: TensorParallelShard) -> range:
        """The parts whose heads a worker of this shard holds."""
        share = self.num_parts // shard.size
        return range(shard.rank * share, (shard.rank + 1) * share)

    def part_layout(self, part: int, num_tokens: int | None = None) -> KVLayout:
        """How one part's body lies, page by page; of a tail, with `num_tokens`."""
        return _part_layout(self, part, num_tokens or self.block_size)

    def body_bytes(self, part: int, num_tokens: int) -> int:
        """Bytes of a body."""
        return self.part_layout(part).bytes_per_token * num_tokens

    def name(self, block_hash: BlockHash, part: int) -> EntryName:
        """What an entry is called: model, tenant and tokens are in the hash, all else is here."""
        return EntryName(hashlib.sha256(_prefix(self, part) + block_hash).digest())


@lru_cache(maxsize=1024)
def _part_layout(entry_format: EntryFormat, part: int, num_tokens: int) -> KVLayout:
    shard = TensorParallelShard(part, entry_format.num_parts)
    return msgspec.structs.replace(entry_format.full_layout, block_size=num_tokens, shard=shard)


@lru_cache(maxsize=256)
def _prefix(entry_format: EntryFormat, part: int) -> bytes:
    return _ENTRY_TAG + bytes.fromhex(entry_format.part_layout(part).fingerprint())
