"""The seam on a real GPU: a stream of our own, and events that are asked, never waited for.

Short runs are copied by a kernel on few multiprocessors, long ones by the copy engines.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Final

from baton.errors import TransferError
from baton.transfer.transports.cuda_ipc.copy_kernel import CopyKernel, suits_kernel

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from baton.transfer.transports.cuda_ipc.driver import Driver
    from baton.transfer.transports.cuda_ipc.session import Allocation, Ticket

logger: Final = logging.getLogger(__name__)

MAX_BATCH: Final = 4096
"""Copies that the driver gets at once."""
CLOSE_TIMEOUT_S: Final = 5.0
"""A second's worth of copies is far more than is ever under way."""
CLOSE_POLL_S: Final = 50e-6

_exported: Final[dict[bytes, tuple[int, Allocation]]] = {}
"""Handles that this process made, with the device: CUDA opens them in other processes only."""


class CudaDevice:
    """See `CopyDevice`. Stream and kernel are made when they are first needed."""

    def __init__(self, driver: Driver, multiprocessors: int, number: int) -> None:
        """Device `number` of this process, whose kernel takes so many of its multiprocessors.

        Raises:
            TransferError: there is none, it is out of order, or MPS runs its work: then the end of
                a process would not prove that its copies have ended.
        """
        if driver.is_shared_by_mps(number):
            raise TransferError("cuda_ipc does not work with CUDA's MPS")
        self._driver, self._number = driver, number
        self._context = driver.retain_context(number)
        self._multiprocessors = multiprocessors
        self._kernel: CopyKernel | None = None
        self._stream: int | None = None
        self._events: set[int] = set()
        self._mapped: list[int] = []
        self._is_open = True

    def export(self, address: int) -> tuple[Allocation, bytes]:
        """See `CopyDevice`."""
        with self._driver.current(self._context):
            allocation = self._driver.find_allocation(address)
            handle = self._driver.get_ipc_handle(allocation.address)
        _exported[handle] = self._number, allocation
        return allocation, handle

    def map(self, handle: bytes) -> Allocation:
        """See `CopyDevice`."""
        ours = _exported.get(handle)
        if ours is not None:
            number, allocation = ours
            if number != self._number:  # a kernel has no access to it, a copy engine has
                self._multiprocessors = 0
            return allocation
        with self._driver.current(self._context):
            address = self._driver.open_ipc_handle(handle)
            self._mapped.append(address)
            return self._driver.find_allocation(address)

    def enqueue(self, runs: NDArray[np.uint64]) -> Ticket:
        """See `CopyDevice`."""
        with self._driver.current(self._context):
            if self._stream is None:
                self._stream = self._driver.create_stream()
            if self._multiprocessors and suits_kernel(runs) and (kernel := self._load_kernel()):
                kernel.enqueue(runs, self._stream)
            else:
                for at in range(0, len(runs), MAX_BATCH):
                    self._driver.copy_batch(runs[at : at + MAX_BATCH], self._stream)
            event = self._driver.record_event(self._stream)
        self._events.add(event)
        return event

    def is_done(self, ticket: Ticket) -> bool:
        """See `CopyDevice`."""
        if not isinstance(ticket, int) or ticket not in self._events:
            raise TransferError("this device was not given these copies")
        with self._driver.current(self._context):
            if not self._driver.has_happened(ticket):
                return False
            self._events.discard(ticket)
            self._driver.call("cuEventDestroy_v2", ticket)
            return True

    def close(self) -> None:
        """See `CopyDevice`."""
        if not self._is_open:
            return
        self._is_open = False
        with self._driver.current(self._context):
            if self._stream is not None:
                self._drain(self._stream)
                self._driver.call("cuStreamDestroy_v2", self._stream)
            for address in self._mapped:
                self._driver.call("cuIpcCloseMemHandle", address)
            if self._kernel is not None:
                self._kernel.close()
        self._driver.release_context(self._number)

    def _load_kernel(self) -> CopyKernel | None:
        """None, from then on, where the driver cannot compile it: copy engines do it all."""
        if self._kernel is None:
            try:
                self._kernel = CopyKernel(self._driver, self._multiprocessors)
            except TransferError as exc:
                self._multiprocessors = 0
                logger.warning(
                    "cuda_ipc copies scattered pages by copy engines, which is slower: "
                    "its kernel needs a driver for CUDA 12.1 and a GPU of compute capability 8.0 "
                    "or later (%s)",
                    exc,
                )
        return self._kernel

    def _drain(self, stream: int) -> None:
        """Wait, a little at a time, for all that the stream was given, also without an event.

        Raises:
            TransferError: it does not end.
        """
        last = self._driver.record_event(stream)
        for _ in range(int(CLOSE_TIMEOUT_S / CLOSE_POLL_S)):
            if self._driver.has_happened(last):
                break
            time.sleep(CLOSE_POLL_S)
        else:
            raise TransferError("copies between GPUs do not end")
        for event in (*self._events, last):
            self._driver.call("cuEventDestroy_v2", event)
        self._events.clear()
