"""What crosses a `file` connection after the handshake (docs/wire/transfer.md)."""

from __future__ import annotations

from typing import Annotated, Final, TypeAlias

import msgspec

from baton.transfer.interface import PageArray
from baton.transfer.messages import EpochText, IdBytes, NoticeBytes, Reason, decode

MAX_BODY_BYTES: Final = 1 << 20
MAX_PARCELS: Final = 32
"""Of one connection, that were told of and not answered."""

Natural: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
SpoolName: TypeAlias = Annotated[str, msgspec.Meta(pattern=r"^baton-[0-9a-f]{32}-[0-9a-f]{16}$")]


class Attach(msgspec.Struct, frozen=True, tag="attach"):
    """Writer → receiver, first: which life of a worker wants to write into which region.

    `link` begins the names of this connection's parcels.
    """

    epoch: EpochText
    region: IdBytes
    link: IdBytes


class Attached(msgspec.Struct, frozen=True, tag="attached"):
    """Receiver → writer: leave parcels in folder `spool`, whose file `proof` has these bytes."""

    arrays: tuple[PageArray, ...]
    spool: SpoolName
    proof: IdBytes


class NotAttached(msgspec.Struct, frozen=True, tag="not_attached"):
    """Receiver → writer: there is no such region here."""

    reason: Reason


class Parcel(msgspec.Struct, frozen=True, tag="parcel"):
    """Writer → receiver: one part of a write lies in the file of this number, whole.

    `dst_pages` is packed u32 `[n]`; `spans` is packed u32 `[s, 2]` of `(dst_byte, num_bytes)`.
    Parcels of a write follow each other; `notice` is None in all but the last one.
    """

    number: Natural
    window: IdBytes
    array: Natural
    dst_pages: bytes
    spans: bytes
    notice: NoticeBytes | None


class Abandoned(msgspec.Struct, frozen=True, tag="abandoned"):
    """Writer → receiver: the write whose parcels came last has no more."""


class Landed(msgspec.Struct, frozen=True, tag="landed"):
    """Receiver → writer: this parcel is in place, and gone."""

    number: Natural


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """Receiver → writer: this parcel was dropped, and so is the rest of its write."""

    number: Natural
    reason: Reason


FromWriter: TypeAlias = Parcel | Abandoned
FromReceiver: TypeAlias = Attached | NotAttached | Landed | Refused

_attach = msgspec.msgpack.Decoder(Attach)
_from_writer: msgspec.msgpack.Decoder[FromWriter] = msgspec.msgpack.Decoder(FromWriter)
_from_receiver: msgspec.msgpack.Decoder[FromReceiver] = msgspec.msgpack.Decoder(FromReceiver)


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


def decode_from_receiver(body: bytes) -> FromReceiver:
    """Read a receiver's message.

    Raises:
        ProtocolError: it is none of them.
    """
    return decode(_from_receiver, body)


def parcel_name(link: bytes, number: int) -> str:
    """The file's name in the spool. While it is being written, it ends in `.part` as well."""
    return f"{link.hex()}-{number}"
