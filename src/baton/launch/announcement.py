"""What a child says about itself: one JSON object a line on the pipe it inherited."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from baton.errors import ProtocolError


class Loading(msgspec.Struct, frozen=True, tag="loading", tag_field="event"):
    """The process lives and is getting ready; `url` is given once its port is known."""

    url: str | None = None


class Ready(msgspec.Struct, frozen=True, tag="ready", tag_field="event"):
    """The process answers at `url`. `handoff_address` (`host:port`) is a worker's only."""

    url: str
    epoch: str | None = None
    handoff_address: str | None = None


class Draining(msgspec.Struct, frozen=True, tag="draining", tag_field="event"):
    """The process was told to end and takes no more work."""


Announcement: TypeAlias = Loading | Ready | Draining

_decoder: msgspec.json.Decoder[Announcement] = msgspec.json.Decoder(Announcement)


def read_announcement(line: bytes) -> Announcement:
    """Decode one line.

    Raises:
        ProtocolError: the line is no announcement.
    """
    try:
        return _decoder.decode(line)
    except msgspec.MsgspecError as exc:
        raise ProtocolError(f"not an announcement: {line[:200]!r}: {exc}") from exc
