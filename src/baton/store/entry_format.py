"""An entry's bytes: KV of some tokens in canonical order, and its file's 64-byte header."""

from __future__ import annotations

import hashlib
import hmac
import struct
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Final, Self

import msgspec
from blake3 import blake3

from baton.errors import ConfigError
from baton.kv.layout import KVLayout, TensorParallelShard
from baton.store.interface import MAX_BODY_BYTES, NAME_BYTES, Body, EntryName

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
        entry_format.part_layout(0)  # raises with the reason
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


MAGIC: Final = b"BATONKV2"
DIGEST_BYTES: Final = 16
_HEADER: Final = struct.Struct(f"<8s{NAME_BYTES}s{DIGEST_BYTES}sQ")
HEADER_BYTES: Final = _HEADER.size


def make_header(key: bytes, name: EntryName, body: Body) -> bytes:
    """The header of an entry. `key`: the 32 bytes of `TierContext.key`."""
    return _HEADER.pack(MAGIC, name, _digest(key, name, body), len(body))


def read_digest(name: EntryName, header: bytes, file_bytes: int) -> bytes | None:
    """The digest that the body must have; None if this is not the whole entry of that name."""
    if len(header) != HEADER_BYTES:
        return None
    magic, named, digest, num_bytes = _HEADER.unpack(header)
    is_whole = num_bytes <= MAX_BODY_BYTES and file_bytes == HEADER_BYTES + num_bytes
    return digest if is_whole and (magic, named) == (MAGIC, name) else None


def has_digest(key: bytes, name: EntryName, body: Body, digest: bytes) -> bool:
    """Whether these bytes were put under this name, by a holder of the key."""
    return hmac.compare_digest(_digest(key, name, body), digest)


def _digest(key: bytes, name: EntryName, body: Body) -> bytes:
    """Keyed BLAKE3: who may write to a tier's folder cannot make entries without the key."""
    return blake3(name, key=key).update(body).digest(DIGEST_BYTES)
