"""`local`: the owner's thread makes the copies, so a closed grant is quiescent at once."""

from __future__ import annotations

import hmac
import logging
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Final, assert_never

import msgspec

from baton.errors import PeerLostError, PeerUnreachableError, TransferError
from baton.kv.copies import apply_copies
from baton.transfer.grants import PageSet, check_grant_pages
from baton.transfer.interface import (
    Arrived,
    Capabilities,
    GrantQuiescent,
    ReadCompleted,
    ReadFailed,
    RegionDescriptor,
    RemoteAttached,
    RemoteId,
    RemoteLost,
    TransferId,
    WriteCompleted,
    WriteFailed,
)
from baton.transfer.reactor import Reactor
from baton.transfer.region import (
    check_array,
    check_arrays,
    check_copies,
    check_notification,
    view_pages,
)
from baton.transfer.transports.local.mailbox import (
    Attach,
    Attached,
    Detached,
    LinkEnded,
    LocalLink,
    Mailbox,
    ReadRequest,
    TransferDone,
    WriteRequest,
    find_mailbox,
)

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from baton.ids import Epoch, RegionHandle, TicketId
    from baton.kv.copies import PageCopies
    from baton.transfer.interface import (
        PageArray,
        PagedRegion,
        PageRead,
        PageWrite,
        TransferEvent,
        TransportContext,
        WriteGrant,
    )
    from baton.transfer.transports.local.mailbox import LocalMessage


class LocalOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Options of the `local` transport.

    `connect_timeout_s`: until the other transport, which may be another thread's, has answered.
    """

    connect_timeout_s: Annotated[float, msgspec.Meta(gt=0)] = 5.0


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


_log = logging.getLogger(__name__)
_ENDPOINT: Final = re.compile(r"local-[0-9a-f]{32}")


class LocalTransport:
    """See `Transport`. Owner thread: whoever calls `poll`, which makes the copies.

    Other transports of this process may belong to other threads; `detach` and `close` wait for a
    copy that another one is making from or to this one's memory.
    """

    kind = "local"
    capabilities = Capabilities(
        memory=("host", "shared"),
        same_host_only=True,
        same_process_only=True,
        reads=True,
        views=True,
    )

    def __init__(self, options: LocalOptions, context: TransportContext) -> None:
        self._options, self._context = options, context
        self._reactor = Reactor(context.clock)
        self.readiness_fd: int | None = self._reactor.fd
        self._mailbox = Mailbox()
        self._reactor.watch(self._mailbox.fd, self._take_messages)
        self._regions: dict[RegionHandle, PagedRegion] = {}
        self._grants: dict[TicketId, tuple[WriteGrant, PageSet]] = {}
        self._remotes: dict[RemoteId, LocalRemote] = {}
        self._links: dict[LocalLink, tuple[Epoch, PagedRegion]] = {}
        self._num_remotes = self._num_transfers = 0

    def expose(self, region: PagedRegion) -> RegionDescriptor:
        """See `Transport`."""
        if region.kind not in self.capabilities.memory:
            raise TransferError(f"local cannot expose {region.kind} memory")
        check_arrays(region.arrays)
        self._regions[region.handle] = region
        return RegionDescriptor(
            self.kind, region.handle, self._context.epoch, region.arrays, self._mailbox.name
        )

    def attach(self, descriptor: RegionDescriptor) -> RemoteId:
        """See `Transport`."""
        if descriptor.transport != self.kind or not _ENDPOINT.fullmatch(descriptor.endpoint):
            raise TransferError("this is no descriptor of the local transport")
        check_arrays(descriptor.arrays)
        self._num_remotes += 1
        id_, owner = RemoteId(self._num_remotes), find_mailbox(descriptor.endpoint)
        link = LocalLink(self._mailbox, owner) if owner is not None else None
        remote = self._remotes[id_] = LocalRemote(id_, descriptor, link, self._reactor)
        if link is None:
            remote.lose(PeerUnreachableError("the region is not in this process"))
            return id_
        key, epoch = self._context.key, self._context.epoch
        link.owner.post(Attach(link, key, epoch, descriptor.handle))
        self._reactor.call_after(id_, self._options.connect_timeout_s, lambda: _give_up(remote))
        return id_

    def detach(self, remote: RemoteId) -> None:
        """See `Transport`."""
        known = self._remotes.pop(remote, None)
        if known is not None:
            self._reactor.cancel_call(remote)
            known.detach()

    def open_grant(self, grant: WriteGrant) -> None:
        """See `Transport`."""
        if grant.id in self._grants:
            raise TransferError("this grant is open already")
        region = self._find_region(grant.region)
        check_grant_pages(grant.pages, region.arrays)
        self._grants[grant.id] = (grant, PageSet(grant.pages))

    def close_grant(self, grant: TicketId) -> None:
        """See `Transport`."""
        if self._grants.pop(grant, None) is not None:
            self._reactor.report(GrantQuiescent(grant))

    def submit(self, write: PageWrite) -> TransferId:
        """See `Transport`."""
        remote, region = self._find_remote(write.remote), self._find_region(write.region)
        check_copies(write.copies, region.arrays, remote.descriptor.arrays)
        check_notification(write.notification)
        transfer = self._new_transfer()
        remote.submit(transfer, write, region)
        return transfer

    def read(self, read: PageRead) -> TransferId:
        """See `Transport`."""
        remote, region = self._find_remote(read.remote), self._find_region(read.region)
        check_copies(read.copies, remote.descriptor.arrays, region.arrays)
        transfer = self._new_transfer()
        remote.read(transfer, read.copies, region)
        return transfer

    def view(self, remote: RemoteId, array: int) -> NDArray[np.uint8]:
        """See `Transport`."""
        return self._find_remote(remote).view(array)

    def poll(self) -> list[TransferEvent]:
        """See `Transport`."""
        return self._reactor.poll()

    def close(self) -> None:
        """See `Transport`."""
        if self.readiness_fd is None:
            return
        for remote in self._remotes.values():
            remote.detach()
        for link in self._links:
            link.dialer.post(LinkEnded(link, PeerLostError("the peer closed its end")))
        self._links.clear()
        self._reactor.close()
        self._mailbox.close()
        self.readiness_fd = None

    def _take_messages(self) -> None:
        for message in self._mailbox.take():
            self._take(message)

    def _take(self, message: LocalMessage) -> None:
        match message:
            case Attach():
                self._admit(message)
            case WriteRequest() | ReadRequest():
                self._answer(message)
            case Detached(link):
                self._links.pop(link, None)
            case Attached() | TransferDone() | LinkEnded():
                self._hear(message)
            case unknown:
                assert_never(unknown)

    def _hear(self, message: Attached | TransferDone | LinkEnded) -> None:
        """What an owner says to this dialer; nothing that was detached cares any more."""
        for remote in self._remotes.values():
            if remote.link is message.link:
                break
        else:
            return
        match message:
            case Attached(_, arrays, memory):
                self._reactor.cancel_call(remote.id)
                remote.attached(arrays, memory)
            case TransferDone(_, transfer, error):
                remote.done(transfer, error)
            case LinkEnded(_, error):
                self._reactor.cancel_call(remote.id)
                remote.lose(error)
            case unknown:
                assert_never(unknown)

    def _admit(self, attach: Attach) -> None:
        region = self._regions.get(attach.region)
        if not hmac.compare_digest(attach.key.secret, self._context.key.secret):
            _log.warning("refused a transport that holds another cluster key")
            error = TransferError("the peer holds another cluster key")
        elif region is None:
            error = PeerUnreachableError("the peer refused to attach: no such region")
        else:
            self._links[attach.link] = (attach.epoch, region)
            readable = region.memory.toreadonly()
            attach.link.dialer.post(Attached(attach.link, region.arrays, readable))
            return
        attach.link.dialer.post(LinkEnded(attach.link, error))

    def _answer(self, message: WriteRequest | ReadRequest) -> None:
        """Carry out what a dialer asks for, unless it is gone."""
        known = self._links.get(message.link)
        if known is None:
            return
        error: TransferError | None = None
        with message.link.lock:
            if message.link.is_over:
                return
            try:
                match message:
                    case WriteRequest():
                        self._write(message, *known)
                    case ReadRequest():
                        _copy(message.copies, known[1], message.target)
                    case unknown:
                        assert_never(unknown)
            except TransferError as exc:
                error = exc
        message.link.dialer.post(TransferDone(message.link, message.transfer, error))

    def _write(self, write: WriteRequest, writer: Epoch, region: PagedRegion) -> None:
        found = self._grants.get(write.grant)
        if found is None:
            raise TransferError("the peer refused the write: the grant is not open")
        grant, pages = found
        if grant.writer != writer or grant.region != region.handle:
            raise TransferError("the peer refused the write: the grant is for another writer")
        if not all(pages.covers(group.dst_pages) for group in write.copies.groups):
            raise TransferError("the peer refused the write: a page is outside the grant")
        _copy(write.copies, write.source, region)
        self._reactor.report(Arrived(write.grant, write.notification))

    def _new_transfer(self) -> TransferId:
        self._num_transfers += 1
        return TransferId(self._num_transfers)

    def _find_remote(self, id_: RemoteId) -> LocalRemote:
        remote = self._remotes.get(id_)
        if remote is None or remote.is_attaching:
            raise TransferError("this remote is not attached")
        return remote

    def _find_region(self, handle: RegionHandle) -> PagedRegion:
        region = self._regions.get(handle)
        if region is None:
            raise TransferError("this region was not exposed")
        return region


def _copy(copies: PageCopies, source: PagedRegion, target: PagedRegion) -> None:
    """Copies that both ends have checked."""
    array = copies.layer
    apply_copies(
        copies,
        view_pages(source.memory, source.arrays[array]),
        view_pages(target.memory, target.arrays[array]),
    )


def _give_up(remote: LocalRemote) -> None:
    if remote.is_attaching:
        remote.lose(PeerUnreachableError("the other transport has not answered in time"))
