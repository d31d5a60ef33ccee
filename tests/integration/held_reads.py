"""A transport whose reads wait until the test lets them go."""

from __future__ import annotations

import threading
from itertools import count
from typing import TYPE_CHECKING

from baton.errors import PeerLostError
from baton.transfer.interface import (
    ReadCompleted,
    ReadFailed,
    TransferId,
    as_admitter,
    as_reader,
    as_viewer,
)

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from baton.ids import TicketId
    from baton.transfer.interface import (
        PagedRegion,
        PageRead,
        PageWrite,
        RegionDescriptor,
        RemoteId,
        TransferEvent,
        Transport,
        WriteGrant,
    )


class HeldReads:
    """Wraps a transport: a read is posted to it after `let_go`, or fails when it is detached.

    Owned by the agent's thread; the test calls `let_go` and `wait_until_held`.
    """

    def __init__(self, inner: Transport) -> None:
        self._inner = inner
        self.kind, self.capabilities = inner.kind, inner.capabilities
        self.num_attached = 0
        self._names = count(1_000_000)
        self._held: dict[TransferId, PageRead] = {}
        self._posted: dict[TransferId, TransferId] = {}
        self._failed: list[TransferEvent] = []
        self._num_held = threading.Semaphore(0)
        self._free = threading.Event()

    def let_go(self) -> None:
        """From now on reads are reads."""
        self._free.set()

    def wait_until_held(self, num_layers: int) -> None:
        """Until reads of so many layers wait (since the last call)."""
        for _ in range(num_layers):
            is_held = self._num_held.acquire(timeout=30.0)
            assert is_held, f"reads of fewer than {num_layers} layers came"

    @property
    def readiness_fd(self) -> int | None:
        return self._inner.readiness_fd

    def expose(self, region: PagedRegion) -> RegionDescriptor:
        return self._inner.expose(region)

    def attach(self, descriptor: RegionDescriptor) -> RemoteId:
        self.num_attached += 1
        return self._inner.attach(descriptor)

    def detach(self, remote: RemoteId) -> None:
        for name, read in tuple(self._held.items()):
            if read.remote == remote:
                del self._held[name]
                self._failed.append(ReadFailed(name, PeerLostError("detached")))
        self._inner.detach(remote)

    def open_grant(self, grant: WriteGrant) -> None:
        self._inner.open_grant(grant)

    def close_grant(self, grant: TicketId) -> None:
        self._inner.close_grant(grant)

    def finish_grant(self, grant: TicketId) -> bool:
        return self._inner.finish_grant(grant)

    def admit_writes(self, remote: RemoteId, grant: TicketId, pages: NDArray[np.int64]) -> None:
        if (admitter := as_admitter(self._inner)) is not None:
            admitter.admit_writes(remote, grant, pages)

    def forget_grant(self, remote: RemoteId, grant: TicketId) -> None:
        if (admitter := as_admitter(self._inner)) is not None:
            admitter.forget_grant(remote, grant)

    def submit(self, write: PageWrite) -> TransferId:
        return self._inner.submit(write)

    def read(self, read: PageRead) -> TransferId:
        name = TransferId(next(self._names))
        self._held[name] = read
        self._num_held.release(read.copies.num_layers)
        return name

    def view(self, remote: RemoteId, array: int) -> NDArray[np.uint8]:
        return as_viewer(self._inner).view(remote, array)

    def poll(self) -> list[TransferEvent]:
        if self._free.is_set():
            for name, read in self._held.items():
                self._posted[as_reader(self._inner).read(read)] = name
            self._held.clear()
        failed, self._failed = self._failed, []
        return failed + [self._rename(event) for event in self._inner.poll()]

    def close(self) -> None:
        self._inner.close()

    def _rename(self, event: TransferEvent) -> TransferEvent:
        match event:
            case ReadCompleted(transfer, num_bytes):
                return ReadCompleted(self._posted.pop(transfer), num_bytes)
            case ReadFailed(transfer, error):
                return ReadFailed(self._posted.pop(transfer), error)
            case _:
                return event


class HeldReadsFactory:
    """Wraps transports as they are made, and keeps them for the test."""

    def __init__(self) -> None:
        self.made: list[HeldReads] = []

    def __call__(self, inner: Transport) -> HeldReads:
        self.made.append(HeldReads(inner))
        return self.made[-1]
