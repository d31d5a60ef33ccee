"""A registered transport, measured as a handoff agent uses it: submit, then poll."""

from __future__ import annotations

import select
from typing import TYPE_CHECKING, Final, TypeVar

import msgspec
import numpy as np

from baton.bench.contender import Traits
from baton.bench.pool import allocate_pool
from baton.errors import TransferError
from baton.ids import Epoch, TicketId, new_epoch, new_ticket_id
from baton.transfer.interface import (
    TRANSPORTS,
    Attached,
    PageRead,
    PageWrite,
    ReadCompleted,
    ReadFailed,
    RegionDescriptor,
    RemoteId,
    RemoteLost,
    TransportContext,
    Window,
    WriteCompleted,
    WriteFailed,
)
from baton.transfer.region import release_region

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from baton.bench.contender import CallWaiting, Surroundings
    from baton.bench.workload import Direction, Move

TRANSFER_TIMEOUT_S: Final = 30.0
BLIND_POLL_S: Final = 0.0005
POLL_S: Final = 0.2
NUM_IDLE_POLLS: Final = 128
"""As many as an agent makes in some seconds: transports get ready for a peer in idle polls."""
NOTICE: Final = b"baton bench"

E = TypeVar("E")


class Introduction(msgspec.Struct, frozen=True):
    """A side's region, the life that will write, and the window that the owner opens for it."""

    descriptor: RegionDescriptor
    epoch: Epoch
    window: TicketId


class OverTransport:
    """See `Contender`. Every page of the pool is in one window, open all the time."""

    def __init__(self, kind: str, options: Mapping[str, object], around: Surroundings) -> None:
        self._around, self._epoch, self._window = around, new_epoch(), new_ticket_id()
        context = TransportContext(around.key, self._epoch, around.host, around.clock)
        self._transport = TRANSPORTS.build(kind, options)(context)
        capabilities = self._transport.capabilities
        self.traits = Traits(
            self._transport.kind,
            ("push", "pull") if capabilities.reads else ("push",),
            "memcpy" if capabilities.same_host_only else "tuned socket",
        )
        self.region = self.target = allocate_pool(
            capabilities.memory, around.num_pages, around.page_bytes
        )
        self._remote = RemoteId(-1)

    def introduce(self) -> bytes:
        """See `Contender`."""
        descriptor = self._transport.expose(self.region)
        return msgspec.msgpack.encode(Introduction(descriptor, self._epoch, self._window))

    def meet(self, introduction: bytes) -> None:
        """See `Contender`. The window's name is the owner's, its writer the driver."""
        told = msgspec.msgpack.decode(introduction, type=Introduction)
        if self._around.role == "owner":
            pages = np.arange(self._around.num_pages)
            self._transport.open_window(Window(self._window, self.region.handle, told.epoch, pages))
            return
        self._window = told.window
        self._remote = self._transport.attach(told.descriptor)
        self._wait_for(Attached)
        for _ in range(NUM_IDLE_POLLS):
            self._transport.poll()

    def prepare(self, move: Move, direction: Direction) -> Callable[[], None]:
        """See `Contender`. The index arrays are ready: the handoff keeps them for all layers."""
        transport, copies = self._transport, move.copies
        if direction == "push":
            write = PageWrite(self._remote, self._window, self.region.handle, copies, NOTICE)

            def push() -> None:
                transport.submit(write)
                self._wait_for(WriteCompleted)

            return push
        read = PageRead(self._remote, self.region.handle, copies)

        def pull() -> None:
            transport.read(read)
            self._wait_for(ReadCompleted)

        return pull

    def rest(self) -> None:
        """See `Contender`: the owner sees orders itself."""

    def serve(self, call: CallWaiting) -> None:
        """See `Contender`."""
        while not call():
            self._transport.poll()
            ready_fd = self._transport.readiness_fd
            watched = [call.fd] if ready_fd is None else [call.fd, ready_fd]
            select.select(watched, [], [], BLIND_POLL_S if ready_fd is None else POLL_S)

    def close(self) -> None:
        """See `Contender`."""
        self._transport.close()
        release_region(self.region)

    def _wait_for(self, kind: type[E]) -> None:
        transport, clock = self._transport, self._around.clock
        deadline = clock.now() + TRANSFER_TIMEOUT_S
        while True:
            for event in transport.poll():
                if isinstance(event, kind):
                    return
                if isinstance(event, RemoteLost | WriteFailed | ReadFailed):
                    raise event.error
            if clock.now() >= deadline:
                raise TransferError(f"no {kind.__name__} within {TRANSFER_TIMEOUT_S:g} s")
            fd = transport.readiness_fd
            select.select(
                [] if fd is None else [fd], [], [], BLIND_POLL_S if fd is None else POLL_S
            )
