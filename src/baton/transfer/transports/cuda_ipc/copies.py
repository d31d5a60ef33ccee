"""The seam between what peers agree on and what a GPU does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol, TypeAlias

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

HANDLE_BYTES: Final = 64
"""Of CUDA's IPC memory handle."""

Ticket: TypeAlias = object
"""What a device calls copies that it was given; nobody else looks inside."""


@dataclass(frozen=True, slots=True)
class Allocation:
    """Memory that CUDA allocated in one piece, as this process sees it."""

    address: int
    num_bytes: int

    def covers(self, address: int, num_bytes: int) -> bool:
        """Whether all of these bytes are in it."""
        return self.address <= address and address + num_bytes <= self.address + self.num_bytes


class CopyDevice(Protocol):
    """One device of this process, used for one peer. Owner thread: the transport's.

    Every method may raise `TransferError`: then it is of no more use and is to be closed.
    """

    def export(self, address: int) -> tuple[Allocation, bytes]:
        """The allocation that has this address, and the handle by which a peer may map it.

        A handle has `HANDLE_BYTES`. It needs not be given back.
        """
        ...

    def map(self, handle: bytes) -> Allocation:
        """A peer's allocation, in this process; `handle` is untrusted and may be refused."""
        ...

    def enqueue(self, runs: NDArray[np.uint64]) -> Ticket:
        """Begin to copy, in no order: uint64 `[r, 3]` of (source, destination, bytes).

        Addresses are checked already. Copies go beside those of others and beside computing.
        """
        ...

    def is_done(self, ticket: Ticket) -> bool:
        """Whether all of its copies are in place; does not wait. Asked until it is true, once."""
        ...

    def close(self) -> None:
        """Wait until nothing is under way, then unmap all that was mapped; idempotent.

        The wait is that of copies that were begun: the owner begins no new ones. It ends after a
        while in any case.

        Raises:
            TransferError: copies may still be under way, so nothing was unmapped.
        """
        ...
