"""One of the two processes of a trial: its transport, its region, and waiting for both."""

from __future__ import annotations

import select
from typing import TYPE_CHECKING, Final, Self, TypeVar

from baton.errors import TransferError
from baton.ops.doctor.transport_check_pages import (
    NUM_PAGES,
    PAGE_BYTES,
    choose_pages,
    describe_copies,
    random_pages,
)
from baton.transfer.interface import (
    PageRead,
    PageWrite,
    ReadCompleted,
    ReadFailed,
    RegionDescriptor,
    RemoteAttached,
    RemoteLost,
    WriteCompleted,
    WriteFailed,
)
from baton.transfer.region import (
    allocate_host_region,
    allocate_shared_region,
    release_region,
    view_pages,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    from numpy.typing import NDArray

    from baton.clock import Clock
    from baton.ids import TicketId
    from baton.ops.doctor.transport_check_channel import Channel
    from baton.transfer.devices.extents import AllocateRegion
    from baton.transfer.interface import (
        Capabilities,
        PagedRegion,
        RemoteId,
        TransferEvent,
        Transport,
    )

CHECK_TIMEOUT_S: Final = 8.0
BUSY_POLL_S: Final = 0.0005
POLL_S: Final = 0.1
NOTIFICATION: Final = b"baton doctor"

E = TypeVar("E")


class NotCheckedError(TransferError):
    """The transport moves only memory of kinds that the doctor does not allocate."""


class CheckEndpoint:
    """One side's transport and region. Events that no call waits for yet are kept.

    All that waits raises `TransferError` when the trial's time is over, or something failed.
    """

    def __init__(
        self,
        transport: Transport,
        clock: Clock,
        allocate: AllocateRegion = allocate_shared_region,
    ) -> None:
        self.transport, self._allocate = transport, allocate
        self._clock = clock
        self._deadline = clock.now() + CHECK_TIMEOUT_S
        self._events: list[TransferEvent] = []
        self._region: PagedRegion | None = None
        self.descriptor: RegionDescriptor

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.transport.close()
        if self._region is not None:
            release_region(self._region)

    @property
    def pages(self) -> NDArray[np.uint8]:
        """uint8 `[NUM_PAGES, PAGE_BYTES]`."""
        region = self.region
        return view_pages(region.memory, region.arrays[0])

    @property
    def region(self) -> PagedRegion:
        """What was exposed."""
        if self._region is None:
            raise TransferError("nothing is exposed yet")
        return self._region

    def expose(self, seed: int | None) -> PagedRegion:
        """Pages of 0, or of random bytes."""
        self._region = _allocate(self.transport.capabilities, self._allocate)
        self.pages[:] = 0 if seed is None else random_pages(seed)
        self.descriptor = self.transport.expose(self._region)
        return self._region

    def attach(self, descriptor: RegionDescriptor) -> RemoteId:
        """Attach, and wait for it."""
        remote = self.transport.attach(descriptor)
        self.wait_for(RemoteAttached, "attaching the other process's region")
        return remote

    def write(self, remote: RemoteId, grant: TicketId) -> None:
        """Write the pages of the trial, and wait for it."""
        copies = describe_copies(*choose_pages())
        self.transport.submit(PageWrite(remote, grant, self.region.handle, copies, NOTIFICATION))
        self.wait_for(WriteCompleted, "the write's completion")

    def read(self, remote: RemoteId) -> None:
        """Read them back, in another order, and wait for it."""
        src_pages, dst_pages = choose_pages()
        copies = describe_copies(dst_pages, src_pages[::-1])
        self.transport.read(PageRead(remote, self.region.handle, copies))
        self.wait_for(ReadCompleted, "the read's completion")

    def receive(self, channel: Channel, kind: type[E], what: str) -> E:
        """The next message, while the transport goes on."""
        received: list[object] = []

        def is_received() -> bool:
            if select.select([channel.fd], [], [], 0)[0]:
                received.append(channel.read())
            return bool(received) and received[-1] is not None

        self._pump(is_received, what, channel.fd)
        if not isinstance(received[-1], kind):
            raise TransferError(f"the other process sent another message: waited for {what}")
        return received[-1]

    def wait_for(self, kind: type[E], what: str) -> E:
        """The first event of a kind.

        Raises:
            TransferError: it did not happen in time, or something failed instead.
        """
        found: list[E] = []

        def is_found() -> bool:
            found.extend(event for event in self._events if isinstance(event, kind))
            return bool(found)

        self._pump(is_found, what)
        self._events = [event for event in self._events if event is not found[0]]
        return found[0]

    def serve_until(self, channel: Channel) -> None:
        """Keep the transport going until the other process hangs up."""
        self._pump(
            lambda: bool(select.select([channel.fd], [], [], 0)[0]),
            "the other process to end",
            channel.fd,
        )

    def _pump(self, is_done: Callable[[], bool], what: str, *fds: int) -> None:
        self._poll()
        while not is_done():
            if self._clock.now() >= self._deadline:
                raise TransferError(f"timed out waiting for {what} ({CHECK_TIMEOUT_S:g} s in all)")
            ready_fd = self.transport.readiness_fd
            watched = [*fds, *([] if ready_fd is None else [ready_fd])]
            select.select(watched, [], [], BUSY_POLL_S if ready_fd is None else POLL_S)
            self._poll()

    def _poll(self) -> None:
        for event in self.transport.poll():
            if isinstance(event, RemoteLost | WriteFailed | ReadFailed):
                raise event.error
            self._events.append(event)


def _allocate(capabilities: Capabilities, allocate_shared: AllocateRegion) -> PagedRegion:
    """Memory of the first kind that the transport takes and this process can allocate.

    Raises:
        NotCheckedError: there is no such kind.
        TransferError: there is not enough memory.
    """
    shapes = [(NUM_PAGES, PAGE_BYTES)]
    for kind in capabilities.memory:
        if kind == "shared":
            return allocate_shared(shapes)
        if kind == "host":
            return allocate_host_region(shapes)
    raise NotCheckedError(f"it moves {' and '.join(capabilities.memory)} memory only")
