"""One connection to a peer's region: what it carries, and the bytes that come back over it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from baton.errors import ProtocolError
from baton.net.channel import skip_bytes
from baton.transfer.messages import encode
from baton.transfer.scatter_gather import Geometry, write_batches
from baton.transfer.transports.tcp.wire import Fetch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from baton.kv.copies import CopyGroup
    from baton.net.channel import Channel
    from baton.net.connection import Connection
    from baton.transfer.interface import PagedRegion, TransferId

MAX_FETCHES_IN_FLIGHT: Final = 4
"""On one stream: enough that the peer always has the next one at hand."""
MAX_STEP_BYTES: Final = 8 << 20
"""Page bytes read before other connections get their turn."""


@dataclass(slots=True)
class PendingRead:
    """A read under way."""

    transfer: TransferId
    num_bytes: int
    num_missing_parts: int


@dataclass(frozen=True, slots=True)
class FetchPart:
    """One part of a read: what is asked of the peer at once, and where it goes."""

    sequence: int
    pending: PendingRead
    part: CopyGroup
    array: int
    region: PagedRegion

    def encode(self) -> bytes:
        """The body that asks for it."""
        pages, spans = self.part.packed_sources
        return encode(Fetch(self.sequence, self.array, pages, spans))

    def landing_batches(self) -> Iterator[list[memoryview]]:
        """Where the answer's bytes go."""
        geometry = Geometry(self.part.dst_pages, self.part.spans[:, 1], self.part.spans[:, 2])
        return write_batches(geometry, self.region.memory, self.region.arrays[self.array])


class TcpStream:
    """A connection that has proved itself. `on_landed` is told of each part that is in place."""

    def __init__(self, connection: Connection, on_landed: Callable[[FetchPart], None]) -> None:
        self.connection, self._on_landed = connection, on_landed
        self.is_attached = False
        self.num_unanswered_bytes = 0
        self._asked: deque[FetchPart] = deque()
        self._batches: Iterator[list[memoryview]] = iter(())
        self._batch: list[memoryview] = []
        self._num_missing_bytes = 0

    @property
    def num_asked(self) -> int:
        """Parts that the peer has been asked for and that are not in place."""
        return len(self._asked)

    def ask(self, fetch_part: FetchPart) -> None:
        """Ask for one more; the answers come in this order."""
        self._asked.append(fetch_part)
        self.connection.send_body(fetch_part.encode())

    def take_served(self, sequence: int) -> None:
        """The bytes of the oldest part come next.

        Raises:
            ProtocolError: the peer sends something else than that.
        """
        if not self._asked or self._asked[0].sequence != sequence:
            raise ProtocolError("the peer answered what was not asked")
        self._batches = self._asked[0].landing_batches()
        self._num_missing_bytes = self._asked[0].part.num_bytes
        self._advance()

    def bodies(self, channel: Channel) -> Iterator[bytes]:
        """Frames that have come; page bytes between them go to their places. A bounded amount."""
        budget = MAX_STEP_BYTES
        while budget > 0:
            if self._batch:
                num_bytes = channel.receive_into(self._batch)
                if num_bytes == 0:
                    return
                budget -= num_bytes
                self._num_missing_bytes -= num_bytes
                channel.expect_bytes(self._num_missing_bytes)
                self._batch = skip_bytes(self._batch, num_bytes)
                if not self._batch:
                    self._advance()
            else:
                body = channel.receive_body()
                if body is None:
                    return
                budget -= len(body)
                yield body

    def _advance(self) -> None:
        self._batch = next(self._batches, [])
        if not self._batch:
            self._batches = iter(())
            self._on_landed(self._asked.popleft())
