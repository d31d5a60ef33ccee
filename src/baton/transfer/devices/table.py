"""Whose extents are where in a device, and where there is room: pure.

The locks decide, the table describes what they protect: an extent without a lock is free even if
it is in the table. It is kept twice, and the older copy is overwritten: a process that is
killed while it writes leaves the newer one whole.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Final

import msgspec
from xxhash import xxh3_128_digest

from baton.errors import UNDECODABLE

if TYPE_CHECKING:
    from collections.abc import Sequence

TABLE_BYTES: Final = 1 << 21
COPY_BYTES: Final = TABLE_BYTES // 2
MAX_EXTENTS: Final = 2048
MAX_PROGRAM_CHARS: Final = 64

_MAGIC: Final = b"BATON\x00E1"
_HEADER_BYTES: Final = 8 + 16 + 4
_Offset = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]


class Extent(msgspec.Struct, frozen=True):
    """`[start, start + num_bytes)` of a device, and who claimed it. `id` is 16 random bytes."""

    id: Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
    start: _Offset
    num_bytes: _Offset
    pid: int
    program: Annotated[str, msgspec.Meta(max_length=MAX_PROGRAM_CHARS)]

    @property
    def end(self) -> int:
        """Its first byte behind."""
        return self.start + self.num_bytes


class LockPlace(msgspec.Struct, frozen=True):
    """On which file the locks are, in which life of the machine."""

    boot: Annotated[str, msgspec.Meta(max_length=64)]
    st_dev: int
    st_ino: int


class Table(msgspec.Struct, frozen=True):
    """All extents that were live when it was written. `sequence` grows by one each time."""

    sequence: Annotated[int, msgspec.Meta(ge=0)] = 0
    locks: LockPlace | None = None
    extents: Annotated[tuple[Extent, ...], msgspec.Meta(max_length=MAX_EXTENTS)] = ()

    def find(self, id_: bytes) -> Extent | None:
        """The extent of this id."""
        return next((extent for extent in self.extents if extent.id == id_), None)


_decoder: Final = msgspec.msgpack.Decoder(Table)


def read_table(memory: bytes) -> Table:
    """The newer whole copy in a device's first bytes; an empty one where there is none."""
    copies = [_read_copy(memory[at : at + COPY_BYTES]) for at in (0, COPY_BYTES)]
    return max((copy for copy in copies if copy), key=lambda t: t.sequence, default=Table())


def write_table(table: Table) -> tuple[int, bytes]:
    """Where in the first bytes the table goes, over the older copy, and its bytes."""
    body = msgspec.msgpack.encode(table)
    packed = _MAGIC + xxh3_128_digest(body) + len(body).to_bytes(4, "little") + body
    return table.sequence % 2 * COPY_BYTES, packed


def find_gap(taken: Sequence[Extent], num_bytes: int, start: int, end: int) -> int | None:
    """The first place in `[start, end)` where `num_bytes` overlap nothing that is taken."""
    for extent in sorted(taken, key=lambda each: each.start):
        if extent.start - start >= num_bytes:
            return start
        start = max(start, extent.end)
    return start if end - start >= num_bytes else None


def compute_largest_gap(taken: Sequence[Extent], start: int, end: int) -> int:
    """Bytes of the largest extent that there is room for."""
    largest = 0
    for extent in sorted(taken, key=lambda each: each.start):
        largest, start = max(largest, extent.start - start), max(start, extent.end)
    return max(largest, end - start)


def _read_copy(packed: bytes) -> Table | None:
    digest, length = packed[8:24], int.from_bytes(packed[24:_HEADER_BYTES], "little")
    body = packed[_HEADER_BYTES : _HEADER_BYTES + length]
    if packed[:8] != _MAGIC or len(body) != length or xxh3_128_digest(body) != digest:
        return None
    try:
        return _decoder.decode(body)
    except UNDECODABLE:
        return None
