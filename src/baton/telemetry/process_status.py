"""What a process reports to its launcher: one JSON object a line, on an inherited descriptor.

loading (its address is known, nothing answers yet) ─► ready ─► draining
"""

from __future__ import annotations

import logging
import os
from typing import Final, TypeAlias

import msgspec

from baton.errors import UNDECODABLE, ProtocolError

logger = logging.getLogger(__name__)

STANDARD_OUTPUT: Final = 1
STANDARD_ERROR: Final = 2


class Loading(msgspec.Struct, frozen=True, tag="loading", tag_field="event"):
    """The process lives and loads `what`; it will answer at `url`.

    Reported again whenever `phase` changes: in a few words, what takes the time.
    """

    url: str | None = None
    what: str | None = None
    phase: str | None = None


class Ready(msgspec.Struct, frozen=True, tag="ready", tag_field="event"):
    """The process answers at `url`; the rest is a worker's, `handoff_address` as `host:port`."""

    url: str
    worker: str | None = None
    epoch: str | None = None
    role: str | None = None
    handoff_address: str | None = None


class Draining(msgspec.Struct, frozen=True, tag="draining", tag_field="event"):
    """The process takes no more requests and ends within `timeout_s`.

    `preempted`: its machine will be taken, and why; it is not to be started again here.
    """

    timeout_s: float | None = None
    preempted: str | None = None


ProcessStatus: TypeAlias = Loading | Ready | Draining

_decoder: msgspec.json.Decoder[ProcessStatus] = msgspec.json.Decoder(ProcessStatus)


class StatusReporter:
    """Writes status_messages to a descriptor that it does not own."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def report(self, status: ProcessStatus) -> None:
        """Write one line; a launcher that no longer reads is not an error."""
        try:
            os.write(self._fd, msgspec.json.encode(status) + b"\n")
        except BrokenPipeError:  # it reads no more, as of a process of several once that is ready
            return
        except OSError as exc:
            logger.warning("cannot report this process's status to its launcher: %s", exc)


def claim_standard_output(fd: int) -> int:
    """Where to announce instead of `fd`, if that is standard output, which libraries print to too.

    What they print goes to standard error from now on.
    """
    if fd != STANDARD_OUTPUT:
        return fd
    claimed = os.dup(STANDARD_OUTPUT)
    os.dup2(STANDARD_ERROR, STANDARD_OUTPUT)
    return claimed


def read_status(line: bytes) -> ProcessStatus:
    """Decode one line.

    Raises:
        ProtocolError: the line is no status.
    """
    try:
        return _decoder.decode(line)
    except UNDECODABLE as exc:
        raise ProtocolError(f"no status line: {line[:200]!r}: {exc}") from exc
