"""A registered transport, driven as a handoff agent drives it: submit, then poll.

By reference nothing is copied: the driver announces pages in notices, the owner maps and reads
them in place, and notifies the driver.
"""

from __future__ import annotations

import select
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Final

import msgspec
import numpy as np
import xxhash

from baton.errors import ProtocolError, TransferError
from baton.ids import Epoch, TicketId, new_epoch, new_ticket_id
from baton.kv.copies import PageCopies, pack_indices
from baton.net.framing import decode, encode
from baton.rig.backend import Backend, BackendContext, StopRequested, Traits
from baton.rig.machine import find_open_listeners
from baton.rig.pages import Direction, Move, allocate_pool
from baton.transfer.adaptive_wait import MAX_SPIN_S, AdaptiveWaiter
from baton.transfer.devices.extents import choose_allocation
from baton.transfer.interface import (
    TRANSPORTS,
    Arrived,
    GrantQuiescent,
    PageRead,
    PageWrite,
    ReadCompleted,
    ReadFailed,
    RegionDescriptor,
    RemoteAttached,
    RemoteId,
    RemoteLost,
    TransportContext,
    WriteCompleted,
    WriteFailed,
    WriteGrant,
    as_reader,
    as_viewer,
)
from baton.transfer.region import are_pages_inside

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from baton.transfer.interface import Capabilities, TransferEvent

TRANSFER_TIMEOUT_S: Final = 30.0
BLIND_POLL_S: Final = 0.0005
POLL_S: Final = 0.2
NUM_IDLE_POLLS: Final = 256
"""As many as an agent makes in some seconds: transports prepare for a peer in idle polls."""
ACK: Final = b"baton bench"
NO_COPIES: Final = PageCopies(0, ())
MAX_ANNOUNCED_PAGES: Final = 8192
"""In one notice of at most 64 KiB; larger transfers take several."""


class Metadata(msgspec.Struct, frozen=True):
    """One side's region, the epoch that writes to it, and the grant that is open for writes."""

    descriptor: RegionDescriptor
    epoch: Epoch
    grant: TicketId


class PageAnnouncement(msgspec.Struct, frozen=True):
    """Pages that the owner may read in place: number `part` of `num_parts` announcements.

    `pages` are packed little-endian u32, as in the handoff. Of the last page `num_last_bytes`
    belong to the transfer.
    """

    array: int
    pages: bytes
    part: Annotated[int, msgspec.Meta(ge=0)]
    num_parts: int
    num_last_bytes: Annotated[int, msgspec.Meta(ge=0)]

    @property
    def is_last(self) -> bool:
        """Whether this transfer's last announcement."""
        return self.part + 1 == self.num_parts


_announcements: Final = msgspec.msgpack.Decoder(PageAnnouncement)


@dataclass(frozen=True, slots=True)
class ReferencedPages:
    """Mapped pages, as a kernel that reads paged KV takes them: a base and a block table.

    `view` is uint8 `[num_pages, page_bytes]`, `pages` int64 `[n]`, checked to be inside.
    """

    view: NDArray[np.uint8]
    pages: NDArray[np.int64]
    num_last_bytes: int


def announce_pages(move: Move) -> Iterator[bytes]:
    """The notices that announce a move's source pages."""
    step, num_pages = MAX_ANNOUNCED_PAGES, len(move.src_pages)
    num_parts = -(-num_pages // step)
    for part in range(num_parts):
        pages = pack_indices(move.src_pages[part * step : (part + 1) * step])
        last = move.num_last_bytes if part + 1 == num_parts else move.array.page_bytes
        yield encode(PageAnnouncement(move.layer, pages, part, num_parts, last))


def decode_announcement(notification: bytes) -> PageAnnouncement:
    """Decode a notice of `announce_pages`.

    Raises:
        ProtocolError: it is no announcement.
    """
    return decode(_announcements, notification)


def map_announced(announcement: PageAnnouncement, view: NDArray[np.uint8]) -> ReferencedPages:
    """The announced pages of a peer's array, in place; reads no byte of them.

    Raises:
        ProtocolError: one of them is not in the array.
    """
    pages_bytes, num_last_bytes = announcement.pages, announcement.num_last_bytes
    if not pages_bytes or len(pages_bytes) % 4 or num_last_bytes > view.shape[1]:
        raise ProtocolError("an invalid announcement of pages")
    pages = np.frombuffer(pages_bytes, "<u4").astype(np.int64)
    if not are_pages_inside(pages, len(view)):
        raise ProtocolError("an announcement names a page that is not there")
    return ReferencedPages(view, pages, num_last_bytes)


def digest_referenced(parts: Sequence[ReferencedPages]) -> str:
    """XXH3-128 of all announced bytes, read in place, in the order of the announcements."""
    hasher = xxhash.xxh3_128()
    for part in parts:
        *whole, last = part.pages.tolist()
        for page in whole:
            hasher.update(part.view[page].data)
        hasher.update(part.view[last, : part.num_last_bytes].data)
    return hasher.hexdigest()


class TransportBackend(Backend):
    """See `Backend`. One grant over every page of the pool is open all the time.

    `is_reused`: each transfer is made once when it is prepared, so that what is derived from its
    page indices is there when it is timed, as for all layers of a handoff but the first.
    """

    def __init__(
        self,
        kind: str,
        options: Mapping[str, object],
        context: BackendContext,
        *,
        is_reused: bool = False,
    ) -> None:
        self._is_reused = is_reused
        self._context, self._epoch, self._grant = context, new_epoch(), new_ticket_id()
        self._transport = TRANSPORTS.build(kind, options)(
            TransportContext(context.credentials, self._epoch, context.host, context.clock)
        )
        capabilities = self._transport.capabilities
        self.traits = Traits(
            self._transport.kind,
            _directions(capabilities, is_reused=is_reused),
            "memcpy" if capabilities.same_host_only else "tuned socket",
        )
        pool = allocate_pool(
            capabilities.memory,
            context.num_pages,
            context.page_bytes,
            allocate_shared=choose_allocation({kind: options}),
        )
        self.region = self.target = replace(pool, is_public=True)
        self._remote = RemoteId(-1)
        self._peer_grant = self._grant
        self._waiting = AdaptiveWaiter(context.clock, MAX_SPIN_S)
        self._referenced: list[ReferencedPages] = []

    def local_metadata(self) -> bytes:
        """See `Backend`."""
        descriptor = self._transport.expose(self.region)
        return msgspec.msgpack.encode(Metadata(descriptor, self._epoch, self._grant))

    def connect(self, metadata: bytes) -> None:
        """See `Backend`. The owner's grant admits the driver's writes."""
        remote = msgspec.msgpack.decode(metadata, type=Metadata)
        refers, pages = self._transport.capabilities.views, np.arange(self._context.num_pages)
        self._peer_grant = remote.grant
        if self._context.role == "owner" or refers:
            grant = WriteGrant(self._grant, self.region.handle, remote.epoch, pages)
            self._transport.open_grant(grant)
        if self._context.role == "driver" or refers:
            self._remote = self._transport.attach(remote.descriptor)
        if self._context.role == "owner":
            return
        self._wait_for(RemoteAttached, *([Arrived] if refers else []))
        self._poll_idle()

    def prepare(self, move: Move, direction: Direction) -> Callable[[], None]:
        """See `Backend`. Index arrays exist beforehand: the handoff shares them by all layers."""
        if direction == "reference":
            return lambda: self._refer(move)
        transfer = self._prepare_copy(move, direction)
        if self._is_reused:
            transfer()
        return transfer

    def _prepare_copy(self, move: Move, direction: Direction) -> Callable[[], None]:
        transport, copies = self._transport, move.copies
        if direction == "push":
            write = PageWrite(self._remote, self._peer_grant, self.region.handle, copies, ACK)

            def push() -> None:
                transport.submit(write)
                self._complete(WriteCompleted)

            return push
        read = PageRead(self._remote, self.region.handle, copies)

        reader = as_reader(transport)

        def pull() -> None:
            reader.read(read)
            self._complete(ReadCompleted)

        return pull

    def serve(self, stop: StopRequested) -> None:
        """See `Backend`."""
        while not stop():
            for event in self._transport.poll():
                self._handle(event)
            fd = self._transport.readiness_fd
            watched = [stop.fd] if fd is None else [stop.fd, fd]
            self._sleep(watched, BLIND_POLL_S if fd is None else POLL_S)

    def call(self, name: str, payload: bytes) -> bytes:
        """See `Backend`.

        `close_grant`: no more writes; returns once nothing can land any more. `listeners`: JSON,
        the sockets of this process that listen outside loopback.
        """
        if name == "listeners":
            return msgspec.json.encode(find_open_listeners())
        if name == "close_grant":
            self._transport.close_grant(self._grant)
            self._wait_for(GrantQuiescent)
            return b""
        return super().call(name, payload)

    def digest_referenced_pages(self) -> str:
        """See `ReferenceReader`."""
        return digest_referenced(self._referenced)

    def close(self) -> None:
        """See `Backend`."""
        self._referenced.clear()
        self._transport.close()
        super().close()

    def _refer(self, move: Move) -> None:
        """Driver: announce pages; return when the owner has mapped all and notified."""
        *notifications, last = announce_pages(move)
        for notification in notifications:
            self._notify(notification)
            self._wait_for(WriteCompleted)
        self._notify(last)
        self._wait_for(WriteCompleted, Arrived)

    def _handle(self, event: TransferEvent) -> None:
        """Owner: map the driver's region when it is attached, and pages when they are announced."""
        if isinstance(event, RemoteAttached):
            as_viewer(self._transport).view(self._remote, 0)
            self._poll_idle()
            self._notify(ACK)
        elif isinstance(event, Arrived) and event.notification != ACK:
            announcement = decode_announcement(event.notification)
            if announcement.part == 0:
                self._referenced.clear()
            view = as_viewer(self._transport).view(self._remote, announcement.array)
            self._referenced.append(map_announced(announcement, view))
            if announcement.is_last:
                self._notify(ACK)

    def _poll_idle(self) -> None:
        """No transfer is in flight: let the transport prepare itself."""
        for _ in range(NUM_IDLE_POLLS):
            self._transport.poll()

    def _notify(self, notification: bytes) -> None:
        """Send a notice without any bytes of pages."""
        write = PageWrite(
            self._remote, self._peer_grant, self.region.handle, NO_COPIES, notification
        )
        self._transport.submit(write)

    def _complete(self, kind: type[TransferEvent]) -> None:
        """Poll until the only transfer under way is complete; most are by the first poll."""
        events = self._transport.poll()
        if not (len(events) == 1 and type(events[0]) is kind):
            self._wait_for(kind, events=events)

    def _wait_for(self, *kinds: type[TransferEvent], events: Sequence[TransferEvent] = ()) -> None:
        """Poll until an event of each kind has come. `events` came already."""
        transport, clock = self._transport, self._context.clock
        deadline, missing = clock.now() + TRANSFER_TIMEOUT_S, set(kinds)
        while True:
            for event in (*events, *transport.poll()):
                missing.discard(type(event))
                if isinstance(event, RemoteLost | WriteFailed | ReadFailed):
                    raise event.error
            if not missing:
                return
            if clock.now() >= deadline:
                names = ", ".join(sorted(kind.__name__ for kind in missing))
                raise TransferError(f"no {names} within {TRANSFER_TIMEOUT_S:g} s")
            events, fd = (), transport.readiness_fd
            self._sleep([] if fd is None else [fd], BLIND_POLL_S if fd is None else POLL_S)

    def _sleep(self, fds: list[int], timeout_s: float) -> None:
        """Wait until one of these is readable, as an agent's thread does."""
        self._waiting.wait(lambda limit_s: select.select(fds, [], [], limit_s)[0], timeout_s)


def _directions(capabilities: Capabilities, *, is_reused: bool) -> tuple[Direction, ...]:
    directions: list[Direction] = ["push"]
    directions += ["pull"] if capabilities.reads else []
    directions += ["reference"] if capabilities.views and not is_reused else []
    return tuple(directions)
