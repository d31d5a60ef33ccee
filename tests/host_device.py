"""`CopyDevice` without a GPU: memory of this host, copied by a thread, late and in two halves.

A second implementation of `cuda_ipc`'s seam, for its tests: bytes really move between processes,
and copies are really under way for a while. A handle names a memfd of a process.

`python -m tests.host_device` is `baton.testing.transport_peer` over it.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import queue
import re
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from baton.errors import TransferError
from baton.testing.transport_peer import PeerSetup, fill_region, main
from baton.transfer.interface import DeviceMemory, PagedRegion, TransportFactory
from baton.transfer.region import allocate_shared_region
from baton.transfer.transports.cuda_ipc import make_transport
from baton.transfer.transports.cuda_ipc.session import HANDLE_BYTES, Allocation, CudaIpcOptions

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from baton.transfer.transports.cuda_ipc.session import Ticket

DELAY_S: Final = 0.001
JOIN_TIMEOUT_S: Final = 5.0

_HANDLE: Final = re.compile(rb"(\d{1,9}) (\d{1,9}) *")
_allocated: Final[dict[int, tuple[Allocation, int]]] = {}
"""Address → the allocation that begins there, and its descriptor."""


def allocate_region(shapes: Sequence[tuple[int, int]]) -> PagedRegion:
    """A `cuda` region whose memory can be looked at, too: one array for each of `shapes`."""
    region = allocate_shared_region(shapes)
    address = address_of(region.memory)
    allocation = Allocation(address, len(region.memory))
    for earlier in [at for at in _allocated if allocation.covers(at, 1)]:
        del _allocated[earlier]  # released since
    if region.fd is not None:
        _allocated[address] = allocation, region.fd
    return replace(region, kind="cuda", device=DeviceMemory(0, address))


def address_of(memory: memoryview | mmap.mmap) -> int:
    """Where it begins in this process."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


@dataclass(slots=True, eq=False)
class HostCopies:
    """Runs that were enqueued."""

    runs: list[tuple[int, int, int]]
    is_done: threading.Event = field(default_factory=threading.Event)


class HostDevice:
    """See `CopyDevice`."""

    def __init__(self, number: int) -> None:
        assert number == 0, "there is one device"
        self._mapped: list[mmap.mmap] = []
        self._queue: queue.SimpleQueue[HostCopies | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def export(self, address: int) -> tuple[Allocation, bytes]:
        for allocation, fd in reversed(_allocated.values()):  # the latest at an address
            if allocation.covers(address, 1):
                return allocation, f"{os.getpid()} {fd}".encode().ljust(HANDLE_BYTES)
        raise TransferError("nothing was allocated there")

    def map(self, handle: bytes) -> Allocation:
        named = _HANDLE.fullmatch(handle)
        if named is None:
            raise TransferError("this is no handle")
        try:
            with Path(f"/proc/{int(named[1])}/fd/{int(named[2])}").open("r+b") as file:
                mapping = mmap.mmap(file.fileno(), 0)
        except OSError as exc:
            raise TransferError(f"cannot map the peer's memory: {exc}") from exc
        self._mapped.append(mapping)
        return Allocation(address_of(mapping), len(mapping))

    def enqueue(self, runs: NDArray[np.uint64]) -> Ticket:
        copies = HostCopies([(s, d, n) for s, d, n in runs.tolist()])
        if self._thread is None:
            self._thread = threading.Thread(target=self._copy, daemon=True)
            self._thread.start()
        self._queue.put(copies)
        return copies

    def is_done(self, ticket: Ticket) -> bool:
        assert isinstance(ticket, HostCopies)
        return ticket.is_done.is_set()

    def close(self) -> None:
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(JOIN_TIMEOUT_S)
            if self._thread.is_alive():
                raise TransferError("copies do not end")
            self._thread = None
        while self._mapped:
            with suppress(BufferError):
                self._mapped.pop().close()

    def _copy(self) -> None:
        while (copies := self._queue.get()) is not None:
            half = len(copies.runs) // 2
            for part in (copies.runs[:half], copies.runs[half:]):
                time.sleep(DELAY_S / 2)
                for source, destination, num_bytes in part:
                    ctypes.memmove(destination, source, num_bytes)
            copies.is_done.set()


def build_transport(kind: str, options: Mapping[str, object]) -> TransportFactory:
    """`cuda_ipc` over host memory; a stand-in for `TRANSPORTS.build`."""
    assert (kind, dict(options)) == ("cuda_ipc", {})
    return partial(make_transport, HostDevice, CudaIpcOptions())


if __name__ == "__main__":
    main(PeerSetup(build_transport, lambda *_: allocate_region, fill_region))
