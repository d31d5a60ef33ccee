"""What crosses a `file` connection after the handshake (docs/wire/transfer.md)."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Final, TypeAlias

import msgspec

from baton.net.framing import decode
from baton.transfer.interface import PageArray
from baton.transfer.messages import EpochText, IdBytes, NotAttached, NotificationBytes, Reason

MAX_PART_FILES: Final = 32
"""Of one connection, that were announced and not answered."""

Natural: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
SpoolName: TypeAlias = Annotated[str, msgspec.Meta(pattern=r"^baton-[0-9a-f]{32}-[0-9a-f]{16}$")]


class Attach(msgspec.Struct, frozen=True, tag="attach"):
    """Writer → receiver, first: which incarnation of a worker wants to write into which region.

    `link` begins the names of this connection's part files.
    """

    epoch: EpochText
    region: IdBytes
    link: IdBytes


class Attached(msgspec.Struct, frozen=True, tag="attached"):
    """Receiver → writer: leave part files in folder `spool`, whose file `proof` has these bytes."""

    arrays: tuple[PageArray, ...]
    spool: SpoolName
    proof: IdBytes


class PartFile(msgspec.Struct, frozen=True, tag="part_file"):
    """Writer → receiver: one part of a write lies in the file of this number, whole.

    `dst_pages` is packed u32 `[n]`; `spans` is packed u32 `[s, 2]` of `(dst_byte, num_bytes)`.
    Part files of a write follow each other; `notification` is None in all but the last one.
    """

    number: Natural
    grant: IdBytes
    array: Natural
    dst_pages: bytes
    spans: bytes
    notification: NotificationBytes | None


class WriteAbandoned(msgspec.Struct, frozen=True, tag="write_abandoned"):
    """Writer → receiver: the write whose part files came last has no more."""


class PartLanded(msgspec.Struct, frozen=True, tag="part_landed"):
    """Receiver → writer: this part file is in place, and gone."""

    number: Natural


class PartRefused(msgspec.Struct, frozen=True, tag="part_refused"):
    """Receiver → writer: this part file was dropped, and so is the rest of its write."""

    number: Natural
    reason: Reason


FromWriter: TypeAlias = PartFile | WriteAbandoned
FromReceiver: TypeAlias = Attached | NotAttached | PartLanded | PartRefused

decode_attach = partial(decode, msgspec.msgpack.Decoder(Attach))
"""A writer's first message. ProtocolError: it is something else."""
decode_from_writer: partial[FromWriter] = partial(decode, msgspec.msgpack.Decoder(FromWriter))
"""A writer's later messages. ProtocolError: it is none of them."""
decode_from_receiver: partial[FromReceiver] = partial(decode, msgspec.msgpack.Decoder(FromReceiver))
"""A receiver's message. ProtocolError: it is none of them."""


def part_file_name(link: bytes, number: int) -> str:
    """The file's name in the spool. While it is being written, it ends in `.part` as well."""
    return f"{link.hex()}-{number}"
