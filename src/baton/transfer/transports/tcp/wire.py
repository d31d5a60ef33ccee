"""What crosses a `tcp` connection after the handshake (docs/wire/transfer.md).

A `Data` frame is followed by its payload, raw: for each page in order, for each span in order, its
bytes; so is a `Served` frame, with what its `Fetch` named. A write travels on one or more streams;
its *stripe* on each is one or more `Data` frames of one sequence number; the last has the
notification.
"""

from __future__ import annotations

from typing import Annotated, Final, TypeAlias

import msgspec

from baton.transfer.interface import PageArray
from baton.transfer.messages import EpochText, IdBytes, NotificationBytes, Reason, decode

MAX_BODY_BYTES: Final = 1 << 20
MAX_STREAMS: Final = 16

Natural: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
Stripes: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=MAX_STREAMS)]


class Attach(msgspec.Struct, frozen=True, tag="attach"):
    """Dialer → listener, first: which life of a worker wants to reach which region.

    `link` is the same for all streams of one remote, and of no other.
    """

    epoch: EpochText
    region: IdBytes
    link: IdBytes


class Attached(msgspec.Struct, frozen=True, tag="attached"):
    """Listener → dialer: go ahead; the region's arrays, to compare with the description."""

    arrays: tuple[PageArray, ...]


class NotAttached(msgspec.Struct, frozen=True, tag="not_attached"):
    """Listener → dialer: there is no such region here."""

    reason: Reason


class Data(msgspec.Struct, frozen=True, tag="data"):
    """Dialer → listener: one part of one stripe of a write, with its payload behind it.

    `dst_pages` is packed u32 `[n]`; `spans` is packed u32 `[s, 2]` of `(dst_byte, num_bytes)`.
    `stripes` is the number of streams that this write travels on. `notification` is None in every
    part
    but the last one of a stripe, and empty there in all stripes but one.
    """

    sequence: Natural
    grant: IdBytes
    array: Natural
    dst_pages: bytes
    spans: bytes
    notification: NotificationBytes | None
    stripes: Stripes = 1


class Fetch(msgspec.Struct, frozen=True, tag="fetch"):
    """Dialer → listener: send these bytes of the region.

    `src_pages` is packed u32 `[n]`; `spans` is packed u32 `[s, 2]` of `(src_byte, num_bytes)`.
    """

    sequence: Natural
    array: Natural
    src_pages: bytes
    spans: bytes


class WriteLanded(msgspec.Struct, frozen=True, tag="write_landed"):
    """Listener → dialer: all of this write is in place and its notification was taken."""

    sequence: Natural


class WriteRefused(msgspec.Struct, frozen=True, tag="write_refused"):
    """Listener → dialer: some of this write was dropped."""

    sequence: Natural
    reason: Reason


class FetchServed(msgspec.Struct, frozen=True, tag="fetch_served"):
    """Listener → dialer: the oldest fetch's bytes come right behind this."""

    sequence: Natural


FromDialer: TypeAlias = Data | Fetch
FromListener: TypeAlias = Attached | NotAttached | WriteLanded | WriteRefused | FetchServed

_attach = msgspec.msgpack.Decoder(Attach)
_from_dialer: msgspec.msgpack.Decoder[FromDialer] = msgspec.msgpack.Decoder(FromDialer)
_from_listener: msgspec.msgpack.Decoder[FromListener] = msgspec.msgpack.Decoder(FromListener)


def decode_attach(body: bytes) -> Attach:
    """Read a dialer's first message.

    Raises:
        ProtocolError: it is something else.
    """
    return decode(_attach, body)


def decode_from_dialer(body: bytes) -> FromDialer:
    """Read a dialer's later messages.

    Raises:
        ProtocolError: it is none of them.
    """
    return decode(_from_dialer, body)


def decode_from_listener(body: bytes) -> FromListener:
    """Read a listener's message.

    Raises:
        ProtocolError: it is none of them.
    """
    return decode(_from_listener, body)
