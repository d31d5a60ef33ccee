"""The end that asks: one region of another transport of this process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from baton.errors import PeerLostError, TransferError
from baton.transfer.bounds import check_array
from baton.transfer.interface import (
    ReadCompleted,
    ReadFailed,
    RemoteAttached,
    RemoteLost,
    WriteCompleted,
    WriteFailed,
)
from baton.transfer.region import view_pages
from baton.transfer.transports.local.messages import Detached, ReadRequest, WriteRequest

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from baton.kv.copies import PageCopies
    from baton.transfer.interface import (
        PageArray,
        PagedRegion,
        PageWrite,
        RegionDescriptor,
        RemoteId,
        TransferId,
    )
    from baton.transfer.reactor import Reactor
    from baton.transfer.transports.local.messages import LocalLink


@dataclass(frozen=True, slots=True)
class _Unfinished:
    num_bytes: int
    is_read: bool


class LocalRemote:
    """A region as this dialer sees it: attaching, attached or lost. Owner thread: the transport's.

    `link` is None where there is no such transport in this process.
    """

    def __init__(
        self, id_: RemoteId, descriptor: RegionDescriptor, link: LocalLink | None, reactor: Reactor
    ) -> None:
        self.id, self.descriptor, self.link = id_, descriptor, link
        self._reactor = reactor
        self._memory: memoryview | None = None
        self._unfinished: dict[TransferId, _Unfinished] = {}
        self._loss: TransferError | None = None

    @property
    def is_attaching(self) -> bool:
        """Neither attached nor lost yet."""
        return self._memory is None and self._loss is None

    def attached(self, arrays: tuple[PageArray, ...], memory: memoryview) -> None:
        """The owner admits this dialer, and shows its memory (read-only)."""
        if self._loss is not None:
            return
        if arrays != self.descriptor.arrays:
            self.lose(TransferError("the region does not match its description"))
            return
        self._memory = memory
        self._reactor.report(RemoteAttached(self.id))

    def submit(self, transfer: TransferId, write: PageWrite, region: PagedRegion) -> None:
        """Ask the owner to carry out a checked write."""
        self._unfinished[transfer] = _Unfinished(write.copies.num_bytes, is_read=False)
        if self._loss is not None or self.link is None:
            self.done(transfer, self._loss)
            return
        message = WriteRequest(
            self.link, transfer, write.grant, write.copies, region, write.notification
        )
        self.link.owner.post(message)

    def read(self, transfer: TransferId, copies: PageCopies, region: PagedRegion) -> None:
        """Ask the owner to carry out a checked read."""
        self._unfinished[transfer] = _Unfinished(copies.num_bytes, is_read=True)
        if self._loss is not None or self.link is None:
            self.done(transfer, self._loss)
            return
        self.link.owner.post(ReadRequest(self.link, transfer, copies, region))

    def view(self, array: int) -> NDArray[np.uint8]:
        """One array of the region, in place and read-only.

        Raises:
            PeerLostError: the region is out of reach.
            TransferError: it is not attached yet, or has no such array.
        """
        if self._loss is not None:
            raise PeerLostError(f"the peer's pages are out of reach: {self._loss}")
        if self._memory is None:
            raise TransferError("this remote is not attached yet")
        check_array(array, self.descriptor.arrays)
        return view_pages(self._memory, self.descriptor.arrays[array])

    def done(self, transfer: TransferId, error: TransferError | None) -> None:
        """A transfer is over. Unknown ones are ignored: they have failed already."""
        unfinished = self._unfinished.pop(transfer, None)
        if unfinished is None:
            return
        if error is not None:
            failed = ReadFailed if unfinished.is_read else WriteFailed
            self._reactor.report(failed(transfer, error))
        else:
            completed = ReadCompleted if unfinished.is_read else WriteCompleted
            self._reactor.report(completed(transfer, unfinished.num_bytes))

    def lose(self, error: TransferError) -> None:
        """The region is out of reach: report it and every unfinished transfer, once."""
        if self._loss is None:
            self._reactor.report(RemoteLost(self.id, error))
            self._end(error)

    def detach(self) -> None:
        """This side is done: its memory is left alone from now on; unfinished transfers fail.

        Waits for a copy that is under way.
        """
        if self._loss is None:
            self._end(PeerLostError("the remote was detached"))

    def _end(self, error: TransferError) -> None:
        self._loss, self._memory = error, None
        if self.link is not None:
            with self.link.lock:
                self.link.is_over = True
            self.link.owner.post(Detached(self.link))
        for transfer in list(self._unfinished):
            self.done(transfer, error)
