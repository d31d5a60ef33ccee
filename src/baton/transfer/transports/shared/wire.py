"""What crosses a `shared` connection after the handshake (docs/wire/transfer.md).

Page bytes never do: the writer stores them into the receiver's memory, then says so.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Final, TypeAlias

import msgspec
import numpy as np

from baton.errors import ProtocolError
from baton.transfer.interface import PageArray
from baton.transfer.messages import EpochText, IdBytes, NoticeBytes, Reason, decode
from baton.transfer.region import MAX_ARRAYS

if TYPE_CHECKING:
    from numpy.typing import NDArray

MAX_BODY_BYTES: Final = 1 << 20
MAX_WINDOW_PAGES: Final = (MAX_BODY_BYTES - 64) // 4

ArrayIndex: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=MAX_ARRAYS)]


class Attach(msgspec.Struct, frozen=True, tag="attach"):
    """Writer → receiver, first: which life of a worker wants to write into which region.

    `holder` is one transport of one process. `is_only`: it has no other mapping of the region, so
    whatever it was told over connections that broke, it stores nothing any more.
    """

    epoch: EpochText
    region: IdBytes
    holder: IdBytes
    is_only: bool


class Attached(msgspec.Struct, frozen=True, tag="attached", omit_defaults=True):
    """Receiver → writer: the region's arrays, to compare with the description.

    Its memfd comes with it, or `extent` names its part of a device that both ends map.
    """

    arrays: tuple[PageArray, ...]
    extent: IdBytes | None = None


class NotAttached(msgspec.Struct, frozen=True, tag="not_attached"):
    """Receiver → writer: there is no such region here."""

    reason: Reason


class Opened(msgspec.Struct, frozen=True, tag="opened"):
    """Receiver → writer: it may write these pages, packed u32 `[n]`, until it hears `Close`."""

    window: IdBytes
    pages: bytes


class Close(msgspec.Struct, frozen=True, tag="close"):
    """Receiver → writer: it must not begin another write into this window."""

    window: IdBytes


class Notice(msgspec.Struct, frozen=True, tag="notice", omit_defaults=True):
    """Writer → receiver: a write into this window, of pages of array `layer`, is in place."""

    window: IdBytes
    notice: NoticeBytes
    layer: ArrayIndex = 0


class Ask(msgspec.Struct, frozen=True, tag="ask"):
    """Writer → receiver: it has a write for a window of which it has not heard."""

    window: IdBytes


class NotOpen(msgspec.Struct, frozen=True, tag="not_open"):
    """Receiver → writer: the window it asked for is not open to it; else `Opened` was said."""

    window: IdBytes


class Closed(msgspec.Struct, frozen=True, tag="closed"):
    """Writer → receiver: no write into this window is under way, nor will one begin."""

    window: IdBytes


class Released(msgspec.Struct, frozen=True, tag="released"):
    """Writer → receiver, last: it has unmapped the region, as far as it could write it."""


FromWriter: TypeAlias = Notice | Ask | Closed | Released
FirstFromReceiver: TypeAlias = Attached | NotAttached
FromReceiver: TypeAlias = Opened | Close | NotOpen

_attach = msgspec.msgpack.Decoder(Attach)
_from_writer: msgspec.msgpack.Decoder[FromWriter] = msgspec.msgpack.Decoder(FromWriter)
_first_from_receiver: msgspec.msgpack.Decoder[FirstFromReceiver] = msgspec.msgpack.Decoder(
    FirstFromReceiver
)
_from_receiver: msgspec.msgpack.Decoder[FromReceiver] = msgspec.msgpack.Decoder(FromReceiver)
_PACKED: Final = np.dtype("<u4")


def decode_attach(body: bytes) -> Attach:
    """Read a writer's first message.

    Raises:
        ProtocolError: it is something else.
    """
    return decode(_attach, body)


def decode_from_writer(body: bytes) -> FromWriter:
    """Read a writer's later messages.

    Raises:
        ProtocolError: it is none of them.
    """
    return decode(_from_writer, body)


def decode_first_from_receiver(body: bytes) -> FirstFromReceiver:
    """Read a receiver's answer to `Attach`.

    Raises:
        ProtocolError: it is something else.
    """
    return decode(_first_from_receiver, body)


def decode_from_receiver(body: bytes) -> FromReceiver:
    """Read a receiver's later messages.

    Raises:
        ProtocolError: it is none of them.
    """
    return decode(_from_receiver, body)


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
