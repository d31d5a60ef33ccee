"""Copies that go wrong: two pages in each other's place, zeros, a bit that is another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import msgspec

from baton.kv.copies import CopyGroup, PageCopies

if TYPE_CHECKING:
    import random

    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class ByteRange:
    """Bytes `[start, stop)` of one page that copies touch."""

    page: int
    start: int
    stop: int


def choose_byte_range(
    copies: PageCopies, chance: random.Random, *, side: Literal[0, 1]
) -> ByteRange | None:
    """One span of one page of the source (side 0) or the destination (1); None if there is none."""
    groups = [group for group in copies.groups if group.num_bytes]
    if not groups:
        return None
    group = chance.choice(groups)
    page = int(chance.choice((group.src_pages, group.dst_pages)[side]))
    span = chance.choice(group.spans)
    return ByteRange(page, int(span[side]), int(span[side] + span[2]))


def swap_pages(copies: PageCopies, chance: random.Random) -> PageCopies | None:
    """The copies with two destinations exchanged; None if no group has two."""
    groups = list(copies.groups)
    for index, group in enumerate(groups):
        if len(group.dst_pages) >= 2:
            one, other = chance.sample(range(len(group.dst_pages)), 2)
            dst_pages = group.dst_pages.copy()
            dst_pages[[one, other]] = dst_pages[[other, one]]
            groups[index] = CopyGroup(group.src_pages, dst_pages, group.spans)
            return msgspec.structs.replace(copies, groups=tuple(groups))
    return None


def cut_short(copies: PageCopies) -> PageCopies | None:
    """The copies without the second half of each page's last span; None if it is too short."""
    groups: list[CopyGroup] = []
    for group in copies.groups:
        spans = group.spans.copy()
        if not len(spans) or spans[-1, 2] < 2:
            return None
        spans[-1, 2] //= 2
        groups.append(CopyGroup(group.src_pages, group.dst_pages, spans))
    return msgspec.structs.replace(copies, groups=tuple(groups)) if groups else None


def try_zero(pages: NDArray[np.uint8], piece: ByteRange) -> bool:
    """Make the piece zeros; False if it was already."""
    found = pages[piece.page, piece.start : piece.stop]
    if not found.any():
        return False
    found[:] = 0
    return True


def flip_bit(pages: NDArray[np.uint8], piece: ByteRange, chance: random.Random) -> None:
    """Change one bit of the piece."""
    at = piece.start + chance.randrange(piece.stop - piece.start)
    pages[piece.page, at] ^= 1 << chance.randrange(8)
