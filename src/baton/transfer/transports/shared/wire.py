"""What crosses a `shared` connection after the handshake (docs/wire/transfer.md).

Page bytes never do: the writer stores them into the receiver's memory, then sends a notification.
"""

from __future__ import annotations

from functools import partial
from typing import Annotated, TypeAlias

import msgspec

from baton.net.framing import decode
from baton.transfer.grant_messages import FromOwner, GrantClosed, MemoryReleased, QueryGrant
from baton.transfer.interface import PageArray
from baton.transfer.messages import EpochText, IdBytes, NotAttached, NotificationBytes
from baton.transfer.region import MAX_ARRAYS

ArrayIndex: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=MAX_ARRAYS)]
ArrayCount: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=MAX_ARRAYS)]


class Attach(msgspec.Struct, frozen=True, tag="attach"):
    """Writer → receiver, first: which incarnation of a worker wants to write into which region.

    `holder` is one transport of one process. `is_only`: it has no other mapping of the region, so
    whatever it was sent over connections that broke, it stores nothing any more.
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


class WriteNotification(msgspec.Struct, frozen=True, tag="write_notification", omit_defaults=True):
    """Writer → receiver: a write into this grant is in place.

    Of pages of `num_layers` arrays from `layer` on.
    """

    grant: IdBytes
    notification: NotificationBytes
    layer: ArrayIndex = 0
    num_layers: ArrayCount = 1


FromWriter: TypeAlias = WriteNotification | QueryGrant | GrantClosed | MemoryReleased
FirstFromReceiver: TypeAlias = Attached | NotAttached

decode_attach = partial(decode, msgspec.msgpack.Decoder(Attach))
"""A writer's first message. ProtocolError: it is something else."""
decode_from_writer: partial[FromWriter] = partial(decode, msgspec.msgpack.Decoder(FromWriter))
"""A writer's later messages. ProtocolError: it is none of them."""
decode_first_from_receiver: partial[FirstFromReceiver] = partial(
    decode, msgspec.msgpack.Decoder(FirstFromReceiver)
)
"""A receiver's answer to `Attach`. ProtocolError: it is none of them."""
decode_from_receiver: partial[FromOwner] = partial(decode, msgspec.msgpack.Decoder(FromOwner))
"""A receiver's later messages. ProtocolError: it is none of them."""
