"""An entry as it rests in a file: 64 bytes of header, then the body (docs/wire/store.md)."""

from __future__ import annotations

import struct
from typing import Final

from xxhash import xxh3_128_digest

from baton.store.interface import MAX_BODY_BYTES, NAME_BYTES, Body, EntryName

MAGIC: Final = b"BATONKV1"
DIGEST_BYTES: Final = 16
_HEADER: Final = struct.Struct(f"<8s{NAME_BYTES}s{DIGEST_BYTES}sQ")
HEADER_BYTES: Final = _HEADER.size


def make_header(name: EntryName, body: Body) -> bytes:
    """The header of an entry."""
    return _HEADER.pack(MAGIC, name, xxh3_128_digest(body), len(body))


def read_digest(name: EntryName, header: bytes, file_bytes: int) -> bytes | None:
    """The digest that the body must have; None if this is not the whole entry of that name."""
    if len(header) != HEADER_BYTES:
        return None
    magic, named, digest, num_bytes = _HEADER.unpack(header)
    is_whole = num_bytes <= MAX_BODY_BYTES and file_bytes == HEADER_BYTES + num_bytes
    return digest if is_whole and (magic, named) == (MAGIC, name) else None


def has_digest(body: Body, digest: bytes) -> bool:
    """Whether these bytes are those that were put."""
    return xxh3_128_digest(body) == digest
