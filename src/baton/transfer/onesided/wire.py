"""What crosses a one-sided transport's connection after the handshake (docs/wire/transfer.md).

Page bytes never do: the library moves them. `metadata` is the library's own description of the
owner's memory; nothing else in these messages is its business.
"""

from __future__ import annotations

from functools import partial
from typing import Annotated, Final, TypeAlias

import msgspec

from baton.net.framing import decode
from baton.transfer.grant_messages import FromOwner, GrantClosed, MemoryReleased, QueryGrant
from baton.transfer.interface import PageArray
from baton.transfer.messages import EpochText, IdBytes, NotAttached, NotificationBytes

MAX_METADATA_BYTES: Final = 1 << 16


class Attach(msgspec.Struct, frozen=True, tag="attach"):
    """Peer → owner, first: which incarnation of a worker wants to write, or read, which region."""

    epoch: EpochText
    region: IdBytes


class Attached(msgspec.Struct, frozen=True, tag="attached"):
    """Owner → peer: the region's arrays, to compare, and the library's words about them."""

    arrays: tuple[PageArray, ...]
    metadata: Annotated[bytes, msgspec.Meta(max_length=MAX_METADATA_BYTES)]


class WriteNotification(msgspec.Struct, frozen=True, tag="write_notification"):
    """Peer → owner: a write into this grant is in place."""

    grant: IdBytes
    notification: NotificationBytes


class TransfersActive(msgspec.Struct, frozen=True, tag="transfers_active"):
    """Peer → owner: transfers are under way that the owner's library may have to serve."""


class TransfersIdle(msgspec.Struct, frozen=True, tag="transfers_idle"):
    """Peer → owner: none is any more."""


FromPeer: TypeAlias = (
    WriteNotification | QueryGrant | GrantClosed | TransfersActive | TransfersIdle | MemoryReleased
)
FirstFromOwner: TypeAlias = Attached | NotAttached

decode_attach = partial(decode, msgspec.msgpack.Decoder(Attach))
"""A peer's first message. ProtocolError: it is something else."""
decode_from_peer: partial[FromPeer] = partial(decode, msgspec.msgpack.Decoder(FromPeer))
"""A peer's later messages. ProtocolError: it is none of them."""
decode_first_from_owner: partial[FirstFromOwner] = partial(
    decode, msgspec.msgpack.Decoder(FirstFromOwner)
)
"""An owner's answer to `Attach`. ProtocolError: it is none of them."""
decode_from_owner: partial[FromOwner] = partial(decode, msgspec.msgpack.Decoder(FromOwner))
"""An owner's later messages. ProtocolError: it is none of them."""
