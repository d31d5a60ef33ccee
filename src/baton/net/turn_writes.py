"""The writes of one turn of the event loop, one after the other at its end."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    import asyncio

log = logging.getLogger(__name__)


class Writer(Protocol):
    """Has parts for a transport, which are written unless it is `disconnected`."""

    held_back: list[bytes]
    disconnected: bool
    transport: asyncio.Transport


class TurnWrites:
    """Those of one server. Owner: the event loop's thread.

    A step of an engine gives each of its streams a part at once. System calls among the Python that
    passes these on would cost it the processor's caches each time, and have a client wake up for
    each part, where it reads the next ones while they are written.

    Who holds something back appends itself; the first one has the loop call `flush` soon.
    """

    def __init__(self) -> None:
        self.writers: Final[list[Writer]] = []

    def flush(self) -> None:
        """Write what all hold back."""
        writers = self.writers[:]
        self.writers.clear()
        for writer in writers:
            held_back, writer.held_back = writer.held_back, []
            try:
                if held_back and not writer.disconnected:
                    writer.transport.write(b"".join(held_back))
            except Exception:  # the others are written; this client sees that its answer is cut
                log.exception("a part of a response could not be written")
                writer.transport.abort()
