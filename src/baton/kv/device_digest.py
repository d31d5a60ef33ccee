"""Digests of KV in memory that the host cannot read: computed where it lies, by both sides.

`sum128` of a piece (`baton.kv.digest.Pieces`) covers the bytes that its xxh3_128 does, in the same
order: little-endian 64-bit words d[i], the last one padded with zeros. Modulo 2^64:

    z[i] = (i + 1) * 0x9E3779B97F4A7C15                  a Weyl sequence, as in SplitMix64
    m[i] = (z[i] ^ (z[i] >> 33)) * 0xFF51AFD7ED558CCD    half of MurmurHash3's fmix64
    k[i] = m[i] ^ (m[i] >> 33)
    A = sum of low32(d[i] ^ k[i]) * high32(d[i] ^ k[i])  the step of XXH3, as in NH (UMAC)
    B = sum of d[i] * (k[i] | 1)                         multilinear, with odd multipliers

The digest is A and B, 8 bytes each, little-endian. Sums can be made in any order, so that every
thread of a GPU adds what it has read. A change within one word always changes B, since an odd
factor has an inverse. For other accidental changes (torn, stale, exchanged or misplaced pages) no
bound is proved: both sums would have to stay the same. It has no key: whoever chooses the bytes can
choose equal digests. So it is used only within one host, where no process but the two workers can
change what is moved.

Sources: Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014; Appleby,
MurmurHash3; Collet, XXH3's accumulate step (xxhash.h); RFC 4418 (NH); Lemire and Kaser, "Strongly
universal string hashing is fast", 2014.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal, Protocol, TypeAlias

import numpy as np

from baton.errors import ProtocolError
from baton.kv.digest import Pieces, find_parts
from baton.record import Record

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from baton.kv.geometry import PageGeometry

DigestKind: TypeAlias = Literal["xxh3", "sum128"]
"""How a KV view's pages are digested: both ends of a handoff must do the same."""

WORD_BYTES: Final = 8


class PieceParts(Record, frozen=True):
    """The bytes of pieces in pages of one array: runs of them, several for one piece.

    `runs` is int64 `[k, 5]`: of which piece, in which page, from which byte of it, how many bytes,
    and the first one's place among the piece's bytes, a multiple of `WORD_BYTES`. All but the last
    run of a piece have a multiple of that many bytes, too.
    """

    runs: NDArray[np.int64]
    num_pieces: int


class DigestsParts(Protocol):
    """What is asked of a `DeviceAccess` here."""

    def digest(self, layers: range, parts: PieceParts) -> bytes:
        """See `baton.transfer.interface.DeviceAccess`."""
        ...


class DevicePieceDigests:
    """The digests of one handoff's pieces, in a device's memory. Owner thread: the handoff's.

    Keeps where the last pieces are: a handoff's layers have the same ones.
    """

    def __init__(self, pages: DigestsParts) -> None:
        self._pages = pages
        self._last: tuple[PageGeometry, Pieces, PieceParts] | None = None

    def compute(
        self, geometry: PageGeometry, layers: range, pieces: Pieces, heads: range | None
    ) -> bytes:
        """`DIGEST_BYTES` for each piece of each layer; arguments as of `compute_digests`.

        Raises:
            ProtocolError: see `locate_parts`.
        """
        last = self._last
        if last is None or last[0] is not geometry or last[1] is not pieces:
            last = self._last = geometry, pieces, locate_parts(geometry, pieces, heads)
        return self._pages.digest(layers, last[2])


def locate_parts(geometry: PageGeometry, pieces: Pieces, heads: range | None) -> PieceParts:
    """Where the bytes of pieces are, in canonical order.

    Raises:
        ProtocolError: they do not lie so that a device could read them in words.
    """
    runs: list[tuple[int, int, int, int, int]] = []
    located = zip(pieces.blocks, pieces.firsts, pieces.lengths, strict=True)
    for piece, (block, first, length) in enumerate(located):
        parts = find_parts(geometry, heads, first, length)
        if parts is None:
            raise ProtocolError("these pages cannot be digested on a device: their order differs")
        position = 0
        for part in parts:
            if position % WORD_BYTES:
                raise ProtocolError(
                    "these pages cannot be digested on a device: a token's keys are no multiple of "
                    f"{WORD_BYTES} bytes"
                )
            num_bytes = part.stop - part.start
            runs.append((piece, block, part.start, num_bytes, position))
            position += num_bytes
    return PieceParts(np.array(runs, np.int64).reshape(-1, 5), len(pieces.blocks))
