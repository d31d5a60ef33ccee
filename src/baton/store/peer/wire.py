"""Messages of a connection to a peer's `host` tier, after the handshake (docs/wire/store.md).

One request at a time; each has one answer, but `Put`: `SendValue` is followed by the value, and
that by a second answer. A value is raw, behind its frame; the entry's own tag authenticates it.
"""

from __future__ import annotations

from typing import Annotated, Final, TypeAlias

import msgspec

from baton.store.entry_format import HEADER_BYTES
from baton.store.interface import MAX_BODY_BYTES, NAME_BYTES

PURPOSE: Final = "store"
"""Of the handshake: a proof made for another kind of connection opens none of these."""
MAX_NAMES: Final = 4096
"""In one question."""
MAX_LISTED: Final = 2048
"""Entries in one answer."""
MAX_REQUEST_BYTES: Final = MAX_NAMES * NAME_BYTES + 256
MAX_ANSWER_BYTES: Final = 1 << 18
_MAX_TEXT_CHARS: Final = 256

Name: TypeAlias = Annotated[bytes, msgspec.Meta(min_length=NAME_BYTES, max_length=NAME_BYTES)]
Natural: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
ValueBytes: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=HEADER_BYTES + MAX_BODY_BYTES)]
Text: TypeAlias = Annotated[str, msgspec.Meta(max_length=_MAX_TEXT_CHARS)]


class FindEntries(msgspec.Struct, frozen=True, tag="find"):
    """Which entries are there? `names` one after the other."""

    names: Annotated[bytes, msgspec.Meta(max_length=MAX_NAMES * NAME_BYTES)]


class ReadEntry(msgspec.Struct, frozen=True, tag="read"):
    """Send a value, cut off after `max_bytes`."""

    name: Name
    max_bytes: ValueBytes


class UseEntry(msgspec.Struct, frozen=True, tag="use"):
    """The same; it counts as the entry's last use."""

    name: Name
    max_bytes: ValueBytes


class PutEntry(msgspec.Struct, frozen=True, tag="put"):
    """Keep a value of so many bytes, which is sent once the answer asks for it."""

    name: Name
    num_bytes: Annotated[int, msgspec.Meta(ge=HEADER_BYTES, le=HEADER_BYTES + MAX_BODY_BYTES)]


class DeleteEntry(msgspec.Struct, frozen=True, tag="delete"):
    """Remove an entry, if it is there."""

    name: Name


class ListEntries(msgspec.Struct, frozen=True, tag="list"):
    """The next entries by name, after this one (empty: from the beginning)."""

    after: Annotated[bytes, msgspec.Meta(max_length=NAME_BYTES)]


class ReportStatus(msgspec.Struct, frozen=True, tag="report"):
    """How full is it, and does it take entries?"""


class Found(msgspec.Struct, frozen=True, tag="found"):
    """A byte for each name: 1 where the entry is there, 0 where it is not."""

    flags: Annotated[bytes, msgspec.Meta(max_length=MAX_NAMES)]


class Value(msgspec.Struct, frozen=True, tag="value"):
    """So many bytes of the value follow."""

    num_bytes: ValueBytes


class Missing(msgspec.Struct, frozen=True, tag="missing"):
    """The entry is not there."""


class SendValue(msgspec.Struct, frozen=True, tag="send"):
    """There is room: send the value."""


class Stored(msgspec.Struct, frozen=True, tag="stored"):
    """The entry is there; `is_new`: by this request."""

    is_new: bool


class Deleted(msgspec.Struct, frozen=True, tag="deleted"):
    """The entry is not there any more."""


class ListedValue(msgspec.Struct, frozen=True, array_like=True):
    """An entry, the bytes that it takes up, and its last use (UNIX time)."""

    name: Name
    num_bytes: ValueBytes
    used_at: float


class Listing(msgspec.Struct, frozen=True, tag="listing"):
    """Entries by name; none: there are no more."""

    entries: Annotated[list[ListedValue], msgspec.Meta(max_length=MAX_LISTED)]


class Status(msgspec.Struct, frozen=True, tag="status"):
    """Sizes are of bodies. `takes_entries`: others may put entries here."""

    version: Text
    used_bytes: Natural
    capacity_bytes: Natural
    takes_entries: bool


class NoRoom(msgspec.Struct, frozen=True, tag="full"):
    """The entry is not taken: there is no room for it, or this tier takes none of others."""

    reason: Text


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """The request is not carried out."""

    reason: Text


Request: TypeAlias = (
    FindEntries | ReadEntry | UseEntry | PutEntry | DeleteEntry | ListEntries | ReportStatus
)
Answer: TypeAlias = (
    Found | Value | Missing | SendValue | Stored | Deleted | Listing | Status | NoRoom | Refused
)

request_decoder: Final = msgspec.msgpack.Decoder(Request)
answer_decoder: Final = msgspec.msgpack.Decoder(Answer)


def cut_text(text: str) -> str:
    """So much of a text as a message takes."""
    return text[:_MAX_TEXT_CHARS]
