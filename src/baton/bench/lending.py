"""By reference: what the driver says of the pages that it lends, and what the owner then has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Final

import msgspec
import numpy as np
import xxhash

from baton.errors import ProtocolError
from baton.kv.copies import pack_indices
from baton.transfer.bounds import are_pages_inside
from baton.transfer.messages import decode, encode

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from baton.bench.workload import Move

MAX_ANNOUNCED_PAGES: Final = 8192
"""Of one notification, which may have 64 KiB: larger transfers take several."""


class Announcement(msgspec.Struct, frozen=True):
    """These pages are yours to look at: number `part` of `num_parts`.

    `pages` are packed little-endian u32, as the handoff's are. Of the last page of all
    `num_last_bytes` are meant.
    """

    array: int
    pages: bytes
    part: Annotated[int, msgspec.Meta(ge=0)]
    num_parts: int
    num_last_bytes: Annotated[int, msgspec.Meta(ge=0)]

    @property
    def is_last(self) -> bool:
        """Whether no more follows."""
        return self.part + 1 == self.num_parts


_announcements: Final = msgspec.msgpack.Decoder(Announcement)


@dataclass(frozen=True, slots=True)
class Borrowed:
    """Pages in view: what a kernel that reads paged KV is given, a base and a block table.

    `view` is uint8 `[num_pages, page_bytes]`, `pages` int64 `[n]`, known to be inside.
    """

    view: NDArray[np.uint8]
    pages: NDArray[np.int64]
    num_last_bytes: int


def announce(move: Move) -> Iterator[bytes]:
    """The notifications that lend a move's source pages."""
    step, num_pages = MAX_ANNOUNCED_PAGES, len(move.src_pages)
    num_parts = -(-num_pages // step)
    for part in range(num_parts):
        pages = pack_indices(move.src_pages[part * step : (part + 1) * step])
        last = move.num_last_bytes if part + 1 == num_parts else move.array.page_bytes
        yield encode(Announcement(move.layer, pages, part, num_parts, last))


def read_announcement(notification: bytes) -> Announcement:
    """A notification of `announce`.

    Raises:
        ProtocolError: it is none.
    """
    return decode(_announcements, notification)


def borrow(said: Announcement, view: NDArray[np.uint8]) -> Borrowed:
    """The announced pages of a peer's array, in place. No byte of them is touched.

    Raises:
        ProtocolError: one of them is not in the array.
    """
    if not said.pages or len(said.pages) % 4 or said.num_last_bytes > view.shape[1]:
        raise ProtocolError("an announcement that makes no sense")
    pages = np.frombuffer(said.pages, "<u4").astype(np.int64)
    if not are_pages_inside(pages, len(view)):
        raise ProtocolError("an announcement names a page that is not there")
    return Borrowed(view, pages, said.num_last_bytes)


def digest_borrowed(parts: Sequence[Borrowed]) -> str:
    """XXH3-128 of all announced bytes, read where they lie, in the order of announcing."""
    hasher = xxhash.xxh3_128()
    for borrowed in parts:
        *whole, last = borrowed.pages.tolist()
        for page in whole:
            hasher.update(borrowed.view[page].data)
        hasher.update(borrowed.view[last, : borrowed.num_last_bytes].data)
    return hasher.hexdigest()
