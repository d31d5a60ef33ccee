"""What the process tells its launcher: one JSON object a line, on an inherited descriptor.

loading (the address is known, nothing answers yet) ─► ready ─► draining
"""

from __future__ import annotations

import logging
import os
from typing import TypeAlias

import msgspec

logger = logging.getLogger(__name__)


class Loading(msgspec.Struct, frozen=True, tag="loading", tag_field="event"):
    """The process lives and loads `what`; it will answer at `url`."""

    url: str
    worker: str
    what: str
    pid: int


class Ready(msgspec.Struct, frozen=True, tag="ready", tag_field="event"):
    """The process answers at `url`, and hands over at `handoff_address` (`host:port`)."""

    url: str
    worker: str
    epoch: str
    role: str
    handoff_address: str
    pid: int


class Draining(msgspec.Struct, frozen=True, tag="draining", tag_field="event"):
    """The process takes no more requests and ends within `timeout_s`."""

    worker: str
    timeout_s: float
    pid: int


Announcement: TypeAlias = Loading | Ready | Draining


class Announcer:
    """Writes announcements to a descriptor that it does not own."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def say(self, announcement: Announcement) -> None:
        """Write one line; nobody listening any more is not an error."""
        try:
            os.write(self._fd, msgspec.json.encode(announcement) + b"\n")
        except OSError as exc:
            logger.warning("nobody reads what this worker announces: %s", exc)
