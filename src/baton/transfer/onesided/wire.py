"""What crosses a one-sided transport's connection after the handshake (docs/wire/transfer.md).

Page bytes never do: the library moves them. `introduction` is the library's own description of the
owner's memory; nothing else in these messages is its business.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Final, TypeAlias

import msgspec
import numpy as np

from baton.errors import ProtocolError
from baton.transfer.interface import PageArray
from baton.transfer.messages import EpochText, IdBytes, NoticeBytes, Reason, decode

if TYPE_CHECKING:
    from numpy.typing import NDArray

MAX_BODY_BYTES: Final = 1 << 20
MAX_WINDOW_PAGES: Final = (MAX_BODY_BYTES - 64) // 4
MAX_INTRODUCTION_BYTES: Final = 1 << 16


class Attach(msgspec.Struct, frozen=True, tag="attach"):
    """Peer → owner, first: which life of a worker wants to write, or read, which region."""

    epoch: EpochText
    region: IdBytes


class Attached(msgspec.Struct, frozen=True, tag="attached"):
    """Owner → peer: the region's arrays, to compare, and the library's words about them."""

    arrays: tuple[PageArray, ...]
    introduction: Annotated[bytes, msgspec.Meta(max_length=MAX_INTRODUCTION_BYTES)]


class NotAttached(msgspec.Struct, frozen=True, tag="not_attached"):
    """Owner → peer: there is no such region here, or the library cannot serve another peer."""

    reason: Reason


class Opened(msgspec.Struct, frozen=True, tag="opened"):
    """Owner → peer: it may write these pages, packed u32 `[n]`, until it hears `Close`."""

    window: IdBytes
    pages: bytes


class Close(msgspec.Struct, frozen=True, tag="close"):
    """Owner → peer: it must not begin another write into this window."""

    window: IdBytes


class NotOpen(msgspec.Struct, frozen=True, tag="not_open"):
    """Owner → peer: the window it asked for is not open to it; else `Opened` was said."""

    window: IdBytes


class Notice(msgspec.Struct, frozen=True, tag="notice"):
    """Peer → owner: a write into this window is in place."""

    window: IdBytes
    notice: NoticeBytes


class Ask(msgspec.Struct, frozen=True, tag="ask"):
    """Peer → owner: it has a write for a window of which it has not heard."""

    window: IdBytes


class Closed(msgspec.Struct, frozen=True, tag="closed"):
    """Peer → owner: no write into this window is under way, nor will one begin."""

    window: IdBytes


class Moving(msgspec.Struct, frozen=True, tag="moving"):
    """Peer → owner: transfers are under way that the owner's library may have to serve."""


class Resting(msgspec.Struct, frozen=True, tag="resting"):
    """Peer → owner: none is any more."""


class Released(msgspec.Struct, frozen=True, tag="released"):
    """Peer → owner, last: its library has let go of the region."""


FromPeer: TypeAlias = Notice | Ask | Closed | Moving | Resting | Released
FirstFromOwner: TypeAlias = Attached | NotAttached
FromOwner: TypeAlias = Opened | Close | NotOpen

_attach = msgspec.msgpack.Decoder(Attach)
_from_peer: msgspec.msgpack.Decoder[FromPeer] = msgspec.msgpack.Decoder(FromPeer)
_first_from_owner: msgspec.msgpack.Decoder[FirstFromOwner] = msgspec.msgpack.Decoder(FirstFromOwner)
_from_owner: msgspec.msgpack.Decoder[FromOwner] = msgspec.msgpack.Decoder(FromOwner)
_PACKED: Final = np.dtype("<u4")


def decode_attach(body: bytes) -> Attach:
    """Read a peer's first message.

    Raises:
        ProtocolError: it is something else.
    """
    return decode(_attach, body)


def decode_from_peer(body: bytes) -> FromPeer:
    """Read a peer's later messages.

    Raises:
        ProtocolError: it is none of them.
    """
    return decode(_from_peer, body)


def decode_first_from_owner(body: bytes) -> FirstFromOwner:
    """Read an owner's answer to `Attach`.

    Raises:
        ProtocolError: it is something else.
    """
    return decode(_first_from_owner, body)


def decode_from_owner(body: bytes) -> FromOwner:
    """Read an owner's later messages.

    Raises:
        ProtocolError: it is none of them.
    """
    return decode(_from_owner, body)


def pack_pages(pages: NDArray[np.int64]) -> bytes:
    """Page indices as packed little-endian u32."""
    return pages.astype(_PACKED).tobytes()


def unpack_pages(packed: bytes) -> NDArray[np.int64]:
    """Page indices, int64 `[n]`.

    Raises:
        ProtocolError: the bytes end in the middle of one.
    """
    if len(packed) % _PACKED.itemsize:
        raise ProtocolError("packed pages end in the middle of a number")
    return np.frombuffer(packed, _PACKED).astype(np.int64)
