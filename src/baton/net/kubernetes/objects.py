"""What all objects of Kubernetes' API have in common, and its own description of an error. No I/O.

Fields that are not named here are ignored.
"""

from __future__ import annotations

from typing import Annotated, Final, Generic, TypeAlias, TypeVar

import msgspec
from msgspec import Meta

from baton.errors import UNDECODABLE, ProtocolError

MAX_MESSAGE_CHARS: Final = 500
"""Of what the API server writes, in logs and errors."""

Name: TypeAlias = Annotated[str, Meta(max_length=253)]
T = TypeVar("T")


class ObjectMetadata(msgspec.Struct, frozen=True, rename="camel"):
    """Of one object."""

    name: Name = ""
    resource_version: Name = ""


class ListMetadata(msgspec.Struct, frozen=True, rename="camel"):
    """Of a list, or of one page of it: with `continue_token`, more pages follow."""

    resource_version: Name = ""
    continue_token: Annotated[str, Meta(max_length=4096)] = msgspec.field(
        name="continue", default=""
    )


class ObjectPage(msgspec.Struct, Generic[T], frozen=True):
    """One page of a list; the API writes null for an empty one."""

    metadata: ListMetadata
    items: tuple[T, ...] | None = None


class StatusDetails(msgspec.Struct, frozen=True, rename="camel"):
    """`retry_after_seconds` 0: the server does not state when to try again."""

    retry_after_seconds: int = 0


class Status(msgspec.Struct, frozen=True):
    """The API's own description of an error."""

    code: int = 0
    message: str = ""
    details: StatusDetails | None = None


def decode_object(body: bytes | msgspec.Raw, kind: type[T]) -> T:
    """An object of the API.

    Raises:
        ProtocolError: it is none of this kind.
    """
    try:
        return msgspec.json.decode(body, type=kind)
    except UNDECODABLE as exc:
        start = bytes(body)[:100]
        raise ProtocolError(
            f"the API server sent what is no {kind.__name__.strip('_')}: {exc}; it begins {start!r}"
        ) from exc


def decode_status(body: bytes | msgspec.Raw) -> Status:
    """An error as the API server describes it, cut to `MAX_MESSAGE_CHARS`; else what it sent."""
    try:
        status = msgspec.json.decode(body, type=Status)
    except UNDECODABLE:
        return Status(message=repr(bytes(body)[: MAX_MESSAGE_CHARS // 4]))
    return Status(status.code, status.message[:MAX_MESSAGE_CHARS], status.details)
