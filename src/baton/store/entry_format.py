"""An entry's bytes: KV of some tokens in canonical order, and its file's 92-byte header."""

from __future__ import annotations

import hashlib
import hmac
import os
import struct
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Final, Self

import msgspec
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import GCM

from baton.errors import ConfigError
from baton.kv.layout import KVLayout, TensorParallelShard
from baton.store.interface import (
    MAX_BODY_BYTES,
    NAME_BYTES,
    NO_TENANT,
    TENANT_BYTES,
    Body,
    EntryName,
    TenantLabel,
)

if TYPE_CHECKING:
    from baton.kv.identity import BlockHash

_ENTRY_TAG: Final = b"baton/entry/1"
_ENCODED_TAG: Final = b"baton/entry/2"


@dataclass(frozen=True, slots=True)
class EntryFormat:
    """The form of all entries of one model in one store.

    `full_layout` is the canonical layout of all heads in blocks of the store's size. Part i of
    `num_parts` has the heads that tensor-parallel rank i of so many would hold.

    `encodings` are those that the KV may have gone through, each as `use=name/version`: of the
    entries themselves (`store`), and of what workers of this store receive (`handoff`). They are
    part of every entry's name, so that no worker finds KV less exact than it asks for.
    """

    full_layout: KVLayout
    num_parts: int
    encodings: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        layout: KVLayout,
        *,
        block_size: int,
        num_parts: int,
        encodings: tuple[str, ...] = (),
    ) -> Self:
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
        entry_format = cls(full_layout, num_parts, encodings)
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
    fingerprint = bytes.fromhex(entry_format.part_layout(part).fingerprint())
    if not entry_format.encodings:
        return _ENTRY_TAG + fingerprint
    text = ",".join(entry_format.encodings).encode()
    return _ENCODED_TAG + len(text).to_bytes(1, "little") + text + fingerprint


MAGIC: Final = b"BATONKV4"
POOLED_MAGIC: Final = b"BATONKP4"
"""Of a file whose body lies in the folder's pool (`store.folder.body_pool`)."""
NONCE_BYTES: Final = 12
TAG_BYTES: Final = 16
DIGEST_BYTES: Final = NONCE_BYTES + TAG_BYTES
_HEADER: Final = struct.Struct(f"<8s{NAME_BYTES}s{DIGEST_BYTES}s{TENANT_BYTES}sQQ")
HEADER_BYTES: Final = _HEADER.size
MAX_EXPANSION: Final = 64
"""A body that is compressed is at most so many times as long: readers get memory before they know
that it is authentic."""
_LENGTHS: Final = struct.Struct("<QQ")


@dataclass(frozen=True, slots=True)
class EntryHeader:
    """What an entry states of itself; the digest authenticates it together with the body.

    `whole_bytes`: where the tier has compressed the body, of how many bytes it was made; else 0.
    """

    name: EntryName
    num_bytes: int
    digest: bytes
    tenant: TenantLabel = NO_TENANT
    whole_bytes: int = 0


def make_header(
    key: bytes,
    name: EntryName,
    body: Body,
    nonce: bytes | None = None,
    *,
    tenant: TenantLabel = NO_TENANT,
    whole_bytes: int = 0,
) -> bytes:
    """The header of an entry. `key`: the 32 bytes of `TierContext.key`.

    `nonce`: 12 bytes, never used with this key before; None: random ones.
    """
    seal = BodySeal(key, name, len(body), nonce, tenant=tenant, whole_bytes=whole_bytes)
    seal.add(body)
    return seal.make_header(MAGIC)


def parse_header(raw: bytes, magic: bytes = MAGIC) -> EntryHeader | None:
    """The header of any entry; None if it is none, or one of another version."""
    if len(raw) != HEADER_BYTES:
        return None
    begins, name, digest, tenant, whole_bytes, num_bytes = _HEADER.unpack(raw)
    if begins != magic or num_bytes > MAX_BODY_BYTES or whole_bytes > MAX_EXPANSION * num_bytes:
        return None
    return EntryHeader(EntryName(name), num_bytes, digest, TenantLabel(tenant), whole_bytes)


def read_header(
    name: EntryName, raw: bytes, file_bytes: int, magic: bytes = MAGIC
) -> EntryHeader | None:
    """The header of an entry's file; None if this is not the whole entry of that name."""
    header = parse_header(raw, magic)
    if header is None or header.name != name or file_bytes != HEADER_BYTES + header.num_bytes:
        return None
    return header


def has_digest(key: bytes, header: EntryHeader, body: Body) -> bool:
    """Whether these bytes were put under this header, by a holder of the key."""
    check = BodyCheck(key, header)
    check.add(body)
    return len(body) == header.num_bytes and check.is_passed()


class BodySeal:
    """The header of an entry whose body comes in pieces; see `make_header`."""

    def __init__(
        self,
        key: bytes,
        name: EntryName,
        num_bytes: int,
        nonce: bytes | None = None,
        *,
        tenant: TenantLabel = NO_TENANT,
        whole_bytes: int = 0,
    ) -> None:
        self._name, self._tenant, self._lengths = name, tenant, (whole_bytes, num_bytes)
        self._nonce = os.urandom(NONCE_BYTES) if nonce is None else nonce
        self._mac = _Mac(key, self._nonce, _pack_stated(name, tenant, *self._lengths))

    def add(self, piece: Body) -> None:
        """The next bytes."""
        self._mac.add(piece)

    def make_header(self, magic: bytes) -> bytes:
        """After the last one; once."""
        digest = self._nonce + self._mac.finish()
        return _HEADER.pack(magic, self._name, digest, self._tenant, *self._lengths)


class BodyCheck:
    """Whether a body is what was put under a header, by a holder of the key: it comes in pieces."""

    def __init__(self, key: bytes, header: EntryHeader) -> None:
        lengths = header.whole_bytes, header.num_bytes
        stated = _pack_stated(header.name, header.tenant, *lengths)
        self._expected = header.digest[NONCE_BYTES:]
        self._mac = _Mac(key, header.digest[:NONCE_BYTES], stated)

    def add(self, piece: Body) -> None:
        """The next bytes."""
        self._mac.add(piece)

    def is_passed(self) -> bool:
        """After the last one; once."""
        return hmac.compare_digest(self._mac.finish(), self._expected)


class _Mac:
    """GMAC (NIST SP 800-38D) with AES-256: who has not the key cannot make entries.

    A quarter of the time of keyed BLAKE3. Random nonces are safe for 2^32 entries of a key.
    """

    def __init__(self, key: bytes, nonce: bytes, stated: bytes) -> None:
        self._encryptor = Cipher(_cipher(key), GCM(nonce)).encryptor()
        self.add(stated)

    def add(self, piece: Body) -> None:
        self._encryptor.authenticate_additional_data(piece)

    def finish(self) -> bytes:
        self._encryptor.finalize()
        return self._encryptor.tag


def _pack_stated(name: EntryName, tenant: TenantLabel, whole_bytes: int, num_bytes: int) -> bytes:
    """What a tag covers besides the body."""
    return name + tenant + _LENGTHS.pack(whole_bytes, num_bytes)


@lru_cache(maxsize=16)
def _cipher(key: bytes) -> AES:
    return AES(key)
