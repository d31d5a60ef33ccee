"""What is sent over the control socket: one JSON object a line, one request a connection.

request   {"verb": "scale", "size": {"decode": 4}}
answers   {"kind": "progress", "text": "decode-2 starts"} … {"kind": "alive"} …
          {"kind": "done"}, or {"kind": "refused", "message": "…"}
"""

from __future__ import annotations

from typing import Annotated, Final, TypeAlias, TypeVar

import msgspec
from msgspec import Meta

from baton.errors import UNDECODABLE, ProtocolError
from baton.launch.fleet import FleetSize, FleetStatus

MAX_REQUEST_BYTES: Final = 4096
MAX_ANSWER_BYTES: Final = 16 << 20
ALIVE_S: Final = 5.0
"""How often the launcher shows that it works on a request which takes long."""

Name: TypeAlias = Annotated[str, Meta(min_length=1, max_length=128)]


class StatusRequest(msgspec.Struct, frozen=True, tag="status", tag_field="verb"):
    """All processes and their states."""


class ScaleRequest(msgspec.Struct, frozen=True, tag="scale", tag_field="verb"):
    """So many workers of each role."""

    size: FleetSize


class DrainRequest(msgspec.Struct, frozen=True, tag="drain", tag_field="verb"):
    """Take one worker out."""

    worker: Name


class UpgradeRequest(msgspec.Struct, frozen=True, tag="upgrade", tag_field="verb"):
    """Replace every process."""


class DownRequest(msgspec.Struct, frozen=True, tag="down", tag_field="verb"):
    """Drain and end everything."""


Change: TypeAlias = ScaleRequest | DrainRequest | UpgradeRequest
Request: TypeAlias = StatusRequest | Change | DownRequest


class Progress(msgspec.Struct, frozen=True, tag="progress", tag_field="kind"):
    """One step, for people."""

    text: str


class Alive(msgspec.Struct, frozen=True, tag="alive", tag_field="kind"):
    """The request is still worked on."""


class StatusAnswer(msgspec.Struct, frozen=True, tag="status", tag_field="kind"):
    """What was asked."""

    status: FleetStatus


class Done(msgspec.Struct, frozen=True, tag="done", tag_field="kind"):
    """The last answer: it was done."""


class Refused(msgspec.Struct, frozen=True, tag="refused", tag_field="kind"):
    """The last answer: it was not done, or not all of it; `message` has the cause."""

    message: str


Answer: TypeAlias = Progress | Alive | StatusAnswer | Done | Refused

_requests: msgspec.json.Decoder[Request] = msgspec.json.Decoder(Request)
_answers: msgspec.json.Decoder[Answer] = msgspec.json.Decoder(Answer)
_M = TypeVar("_M")


def encode(message: Request | Answer) -> bytes:
    """One line."""
    return msgspec.json.encode(message) + b"\n"


def decode_request(line: bytes) -> Request:
    """Decode and bounds-check.

    Raises:
        ProtocolError: not what the format allows.
    """
    return _decode(_requests, line)


def decode_answer(line: bytes) -> Answer:
    """Decode and bounds-check.

    Raises:
        ProtocolError: not what the format allows.
    """
    return _decode(_answers, line)


def _decode(decoder: msgspec.json.Decoder[_M], line: bytes) -> _M:
    try:
        return decoder.decode(line)
    except UNDECODABLE as exc:
        raise ProtocolError(
            f"no message of a fleet's control: {exc}; were both programs installed from the same "
            "version?"
        ) from exc
