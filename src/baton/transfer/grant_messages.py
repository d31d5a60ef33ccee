"""Grant messages between owner and peer, where the peer writes the pages itself.

Of `shared` and of every one-sided transport (docs/wire/transfer.md). A grant is opened by the
owner of the pages; the peer writes into it, and sends a `WriteNotification` for each write that is
in place.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeAlias

import msgspec
import numpy as np

from baton.errors import ProtocolError
from baton.kv.copies import pack_indices
from baton.transfer.messages import MAX_BODY_BYTES, IdBytes

if TYPE_CHECKING:
    from numpy.typing import NDArray


MAX_GRANT_PAGES: Final = (MAX_BODY_BYTES - 128) // 4
_PACKED: Final = np.dtype("<u4")


class GrantOpened(msgspec.Struct, frozen=True, tag="grant_opened", omit_defaults=True):
    """Owner → peer: it may write these pages, packed u32 `[n]`, until it receives `CloseGrant`.

    `is_announced`: the handoff announces the grant too, over its own connection, perhaps later.
    """

    grant: IdBytes
    pages: bytes
    is_announced: bool = False


class CloseGrant(msgspec.Struct, frozen=True, tag="close_grant"):
    """Owner → peer: it must not begin another write into this grant."""

    grant: IdBytes


class GrantNotOpen(msgspec.Struct, frozen=True, tag="grant_not_open"):
    """Owner → peer: the grant it asked for is not open to it; else `GrantOpened` was sent."""

    grant: IdBytes


class QueryGrant(msgspec.Struct, frozen=True, tag="query_grant"):
    """Peer → owner: it has a write for a grant that was not sent to it yet."""

    grant: IdBytes


class GrantClosed(msgspec.Struct, frozen=True, tag="grant_closed"):
    """Peer → owner: no write into this grant is under way, nor will one begin."""

    grant: IdBytes


class MemoryReleased(msgspec.Struct, frozen=True, tag="memory_released"):
    """Peer → owner, last: it can no longer write the region by any way that it had."""


FromOwner: TypeAlias = GrantOpened | CloseGrant | GrantNotOpen


def pack_pages(pages: NDArray[np.int64]) -> bytes:
    """Page indices as packed little-endian u32."""
    return pack_indices(pages)


def unpack_pages(packed: bytes) -> NDArray[np.int64]:
    """Page indices, int64 `[n]`.

    Raises:
        ProtocolError: the bytes end in the middle of one.
    """
    if len(packed) % _PACKED.itemsize:
        raise ProtocolError("packed pages end in the middle of a number")
    return np.frombuffer(packed, _PACKED).astype(np.int64)
