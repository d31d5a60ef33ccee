"""Two transports in one process, their regions, and how to drive both by their readiness."""

from __future__ import annotations

import select
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from baton.ids import Epoch, TicketId, new_ticket_id
from baton.kv.copies import CopyGroup, PageCopies
from baton.transfer.interface import (
    PagedRegion,
    PageRead,
    PageWrite,
    RegionDescriptor,
    RemoteAttached,
    RemoteId,
    RemoteLost,
    TransferEvent,
    TransferId,
    Transport,
    WriteGrant,
    as_reader,
    as_viewer,
)
from baton.transfer.region import release_region, view_pages

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import ArrayLike, NDArray

TIMEOUT_S = 20.0
"""A bound: other processes have the cores meanwhile. On an idle machine all takes milliseconds."""
BLIND_POLL_S = 0.001

E = TypeVar("E")


@dataclass(slots=True)
class Side:
    """One transport with one exposed region."""

    transport: Transport
    epoch: Epoch
    region: PagedRegion
    descriptor: RegionDescriptor

    @classmethod
    def start(
        cls, transport: Transport, epoch: Epoch, region: PagedRegion, *, is_public: bool = True
    ) -> Side:
        """Expose the region, which peers may then read without a grant."""
        region = replace(region, is_public=is_public)
        return cls(transport, epoch, region, transport.expose(region))

    def pages(self, array: int = 0) -> NDArray[np.uint8]:
        """One array of the region, uint8 `[num_pages, page_bytes]`."""
        return view_pages(self.region.memory, self.region.arrays[array])

    def fill(self, seed: int) -> None:
        """Random bytes in the whole region."""
        flat = np.frombuffer(self.region.memory, np.uint8)
        flat[:] = np.random.default_rng(seed).integers(0, 256, len(flat), np.uint8)

    def paint(self, byte: int) -> None:
        """The same byte in all pages of the first array."""
        self.pages()[:] = byte

    def snapshot(self) -> bytes:
        """All bytes of the region."""
        return bytes(self.region.memory)

    def read(self, read: PageRead) -> TransferId:
        """Post a read, by a transport that reads."""
        return as_reader(self.transport).read(read)

    def view(self, remote: RemoteId, array: int = 0) -> NDArray[np.uint8]:
        """A peer's pages of one array, by a transport that shows them."""
        return as_viewer(self.transport).view(remote, array)

    def close(self) -> None:
        """Close the transport, then give the memory back."""
        self.transport.close()
        release_region(self.region)


@dataclass(slots=True)
class TransportPair:
    """`writer` attaches to `reader`'s region, and writes into grants of it (or reads from it).

    Each side's events, in order, are kept.
    """

    writer: Side
    reader: Side
    writer_events: list[TransferEvent]
    reader_events: list[TransferEvent]

    @classmethod
    def of(cls, writer: Side, reader: Side) -> TransportPair:
        """A pair in which nothing has happened yet."""
        return cls(writer, reader, [], [])

    def poll(self) -> None:
        """Poll both sides once."""
        self.writer_events += self.writer.transport.poll()
        self.reader_events += self.reader.transport.poll()

    def pump(self, until: Callable[[], bool], timeout_s: float = TIMEOUT_S) -> None:
        """Poll whenever a side is ready, until `until()`.

        A side that has something to do and is not ready runs into the timeout.
        """
        deadline = time.monotonic() + timeout_s  # noqa: TID251 -- real sockets, real time
        while not until():
            remaining_s = deadline - time.monotonic()  # noqa: TID251 -- see above
            assert remaining_s > 0, (
                f"nothing more happened: writer {self.writer_events[-5:]}, "
                f"reader {self.reader_events[-5:]}"
            )
            self._wait(remaining_s)
            self.poll()

    def poll_for(self, duration_s: float = 0.05) -> None:
        """Poll for so long: what should not happen has had its chance."""
        deadline = time.monotonic() + duration_s  # noqa: TID251 -- real sockets, real time
        while (remaining_s := deadline - time.monotonic()) > 0:  # noqa: TID251 -- see above
            self._wait(remaining_s)
            self.poll()

    def attach(self) -> RemoteId:
        """Attach the writer to the reader's region."""
        remote = self.writer.transport.attach(self.reader.descriptor)
        self.pump(lambda: any(is_about(event, remote) for event in self.writer_events))
        assert RemoteAttached(remote) in self.writer_events
        return remote

    def open_grant(self, pages: ArrayLike, *, is_announced: bool = False) -> TicketId:
        """Admit the writer into these pages of the reader's region."""
        self.reader.transport.open_grant(
            WriteGrant(
                grant := new_ticket_id(),
                self.reader.region.handle,
                self.writer.epoch,
                np.asarray(pages, np.int64),
                is_announced=is_announced,
            )
        )
        return grant

    def write(
        self,
        remote: RemoteId,
        grant: TicketId,
        groups: Sequence[CopyGroup],
        *,
        array: int = 0,
        num_arrays: int = 1,
        notification: bytes = b"",
    ) -> PageWrite:
        """A write from the writer's region; not submitted."""
        copies = PageCopies(array, tuple(groups), num_arrays)
        return PageWrite(remote, grant, self.writer.region.handle, copies, notification)

    def read(
        self,
        remote: RemoteId,
        groups: Sequence[CopyGroup],
        *,
        array: int = 0,
        num_arrays: int = 1,
    ) -> PageRead:
        """The other way round: from the reader's region into the writer's; not submitted."""
        copies = PageCopies(array, tuple(groups), num_arrays)
        return PageRead(remote, self.writer.region.handle, copies)

    def seen(self, kind: type[E]) -> list[E]:
        """All events of one type so far, the writer's first."""
        events = [*self.writer_events, *self.reader_events]
        return [event for event in events if isinstance(event, kind)]

    def close(self) -> None:
        """Close both sides."""
        self.writer.close()
        self.reader.close()

    def _wait(self, timeout_s: float) -> bool:
        """Whether a side became ready in time (one without a descriptor always may be)."""
        fds = [
            fd
            for side in (self.writer, self.reader)
            if (fd := side.transport.readiness_fd) is not None
        ]
        if len(fds) < 2:
            timeout_s = min(timeout_s, BLIND_POLL_S)
        return bool(select.select(fds, [], [], timeout_s)[0])


def is_about(event: TransferEvent, remote: RemoteId) -> bool:
    """Whether the event is the end of attaching to `remote`."""
    return isinstance(event, RemoteAttached | RemoteLost) and event.remote == remote


def whole_pages(src_pages: ArrayLike, dst_pages: ArrayLike, page_bytes: int) -> CopyGroup:
    """Copies of whole pages."""
    return spans_of_pages(src_pages, dst_pages, [(0, 0, page_bytes)])


def spans_of_pages(
    src_pages: ArrayLike, dst_pages: ArrayLike, spans: Sequence[tuple[int, int, int]]
) -> CopyGroup:
    """Copies of `(src_byte, dst_byte, num_bytes)` of each page."""
    return CopyGroup(
        np.asarray(src_pages, np.int64),
        np.asarray(dst_pages, np.int64),
        np.asarray(spans, np.int64).reshape(-1, 3),
    )
