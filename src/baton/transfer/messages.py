"""Messages after the handshake: msgpack, one frozen struct each, checked where they are decoded."""

from __future__ import annotations

from typing import Annotated, Final, TypeAlias

import msgspec

from baton.transfer.interface import MAX_NOTIFICATION_BYTES

IdBytes: TypeAlias = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
"""A ticket id or a region handle."""
EpochText: TypeAlias = Annotated[str, msgspec.Meta(min_length=32, max_length=32)]
NotificationBytes: TypeAlias = Annotated[bytes, msgspec.Meta(max_length=MAX_NOTIFICATION_BYTES)]
Reason: TypeAlias = Annotated[str, msgspec.Meta(max_length=256)]
"""Text for the log of the other side; never for a decision."""

MAX_BODY_BYTES: Final = 1 << 20
"""Of one message, once its peer is authenticated."""


class NotAttached(msgspec.Struct, frozen=True, tag="not_attached"):
    """Owner → peer: there is no such region here, or it cannot be reached by another peer."""

    reason: Reason
