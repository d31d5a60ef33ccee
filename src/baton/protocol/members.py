"""The members file: which workers there are, written by a launcher, read by gateways.

    {"version": 1, "workers": [{"url": "https://10.0.0.2:8101", "role": "prefill"}]}

Whoever writes it replaces it at once (`os.replace`). Unknown fields are ignored, so that a writer
may be newer than its readers; another version is refused.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from baton.errors import UNDECODABLE, ProtocolError
from baton.protocol.worker_http import Role

MAX_MEMBERS: Final = 4096
"""Workers of one source."""
MAX_MEMBERS_FILE_BYTES: Final = 1 << 20


class Member(msgspec.Struct, frozen=True, omit_defaults=True):
    """One worker. `draining`: it gets nothing new, and its streams move to others."""

    url: Annotated[str, Meta(min_length=1, max_length=512)]
    role: Role
    draining: bool = False


class MembersFile(msgspec.Struct, frozen=True, kw_only=True):
    """The whole file. Both fields must be there: an empty object is no empty fleet."""

    version: Literal[1]
    workers: Annotated[tuple[Member, ...], Meta(max_length=MAX_MEMBERS)]


_decoder = msgspec.json.Decoder(MembersFile)


def decode_members(content: bytes) -> MembersFile:
    """Decode and bounds-check.

    Raises:
        ProtocolError: too large, or not what the format allows.
    """
    if len(content) > MAX_MEMBERS_FILE_BYTES:
        raise ProtocolError(f"it has more than {MAX_MEMBERS_FILE_BYTES} bytes")
    try:
        return _decoder.decode(content)
    except UNDECODABLE as exc:
        raise ProtocolError(f"it is no members file: {exc}") from exc


def encode_members(file: MembersFile) -> bytes:
    """Indented JSON."""
    return msgspec.json.format(msgspec.json.encode(file))
