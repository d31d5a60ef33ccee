"""`local`: the owner's thread makes the copies, so a closed grant is quiescent at once.

`LocalRemote` is the end that requests them: one region of another transport of this process.
"""

from __future__ import annotations

import hmac
import logging
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Final, assert_never

import msgspec
import numpy as np

from baton.errors import PeerLostError, PeerUnreachableError, TransferError
from baton.kv.copies import PageCopies, apply_copies
from baton.transfer.base_transport import BaseRemote, BaseTransport, Reactor
from baton.transfer.grants import AdmittedGrants, GrantHolder
from baton.transfer.interface import (
    Capabilities,
    PageArray,
    PagedRegion,
    PageRead,
    PageWrite,
    ReadCompleted,
    ReadFailed,
    RegionDescriptor,
    RemoteId,
    TransferId,
    TransportContext,
    WriteCompleted,
    WriteFailed,
    WriteGrant,
)
from baton.transfer.region import check_array, view_pages
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
    from numpy.typing import NDArray

    from baton.ids import TicketId
    from baton.transfer.transports.local.mailbox import LocalMessage

_log = logging.getLogger(__name__)
_ENDPOINT: Final = re.compile(r"local-[0-9a-f]{32}")
_NO_PAGES: Final = np.empty(0, np.int64)


class LocalOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Options of the `local` transport.

    `connect_timeout_s`: until the other transport, which may be another thread's, has answered.
    """

    connect_timeout_s: Annotated[float, msgspec.Meta(gt=0)] = 5.0


@dataclass(frozen=True, slots=True)
class _Unfinished:
    num_bytes: int
    is_read: bool


class LocalRemote(BaseRemote):
    """See `BaseRemote`. `link` is None where there is no such transport in this process."""

    def __init__(
        self, id_: RemoteId, descriptor: RegionDescriptor, reactor: Reactor, link: LocalLink | None
    ) -> None:
        super().__init__(id_, descriptor, reactor)
        self.link = link
        self._memory: memoryview | None = None
        self._unfinished: dict[TransferId, _Unfinished] = {}

    def attached(self, arrays: tuple[PageArray, ...], memory: memoryview) -> None:
        """The owner admits this dialer, and gives it its memory (read-only)."""
        if self._loss is not None:
            return
        self._reactor.cancel_call(self.id)
        if arrays != self.descriptor.arrays:
            self.lose(TransferError("the peer's region differs from its descriptor"))
            return
        self._memory = memory
        self._set_attached()

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

    def _end(self, error: TransferError) -> None:
        """See `BaseRemote`. Waits for a copy that is in progress: the owner starts no other."""
        super()._end(error)
        self._memory = None
        self._reactor.cancel_call(self.id)
        if self.link is not None:
            with self.link.lock:
                self.link.is_over = True
            self.link.owner.post(Detached(self.link))
        for transfer in list(self._unfinished):
            self.done(transfer, error)


class LocalTransport(BaseTransport[LocalRemote]):
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
        super().__init__(context)
        self._options = options
        self._mailbox = Mailbox()
        self._reactor.watch(self._mailbox.fd, self._take_messages)
        self._grants = AdmittedGrants(self._reactor)
        self._links: dict[LocalLink, tuple[GrantHolder, PagedRegion]] = {}

    def open_grant(self, grant: WriteGrant) -> None:
        """See `Transport`."""
        self._grants.open(grant, self._find_region(grant.region))

    def finish_grant(self, grant: TicketId) -> bool:
        """See `Transport`."""
        self._grants.finish(grant)
        return True

    def close_grant(self, grant: TicketId) -> None:
        """See `Transport`."""
        self._grants.close(grant)

    def read(self, read: PageRead) -> TransferId:
        """See `ReadsPages`."""
        transfer, remote, region = self._check_read(read)
        remote.read(transfer, read.copies, region)
        return transfer

    def view(self, remote: RemoteId, array: int) -> NDArray[np.uint8]:
        """See `ViewsPages`."""
        return self._find_remote(remote).view(array)

    def _listen(self) -> str:
        return self._mailbox.name

    def _make_remote(self, id_: RemoteId, descriptor: RegionDescriptor) -> LocalRemote:
        if not _ENDPOINT.fullmatch(descriptor.endpoint):
            raise TransferError("this is no descriptor of the local transport")
        owner = find_mailbox(descriptor.endpoint)
        link = LocalLink(self._mailbox, owner) if owner is not None else None
        return LocalRemote(id_, descriptor, self._reactor, link)

    def _connect(self, remote: LocalRemote) -> None:
        link, context = remote.link, self._context
        if link is None:
            raise PeerUnreachableError("the region is not in this process")
        link.owner.post(Attach(link, context.credentials, context.epoch, remote.descriptor.handle))
        timeout = PeerUnreachableError("the other transport has not answered in time")
        self._reactor.call_after(
            remote.id, self._options.connect_timeout_s, lambda: remote.lose(timeout)
        )

    def _release(self) -> None:
        for link in self._links:
            link.dialer.post(LinkEnded(link, PeerLostError("the peer closed its end")))
        self._links.clear()
        self._mailbox.close()

    def _take_messages(self) -> None:
        for message in self._mailbox.take():
            self._handle(message)

    def _handle(self, message: LocalMessage) -> None:
        match message:
            case Attach():
                self._admit(message)
            case WriteRequest() | ReadRequest():
                self._answer(message)
            case Detached(link):
                self._links.pop(link, None)
            case Attached() | TransferDone() | LinkEnded():
                self._handle_answer(message)
            case unknown:
                assert_never(unknown)

    def _handle_answer(self, message: Attached | TransferDone | LinkEnded) -> None:
        """An owner's message to this dialer; ignored if the remote was detached."""
        for remote in self._remotes.values():
            if remote.link is message.link:
                break
        else:
            return
        match message:
            case Attached(_, arrays, memory):
                remote.attached(arrays, memory)
            case TransferDone(_, transfer, error):
                remote.done(transfer, error)
            case LinkEnded(_, error):
                remote.lose(error)
            case unknown:
                assert_never(unknown)

    def _admit(self, attach: Attach) -> None:
        region = self._regions.get(attach.region)
        if not hmac.compare_digest(
            attach.credentials.key.secret, self._context.credentials.key.secret
        ):
            _log.warning("refused a transport that holds another cluster key")
            error = TransferError("the peer holds another cluster key")
        elif region is None:
            error = PeerUnreachableError("the peer refused to attach: no such region")
        else:
            self._links[attach.link] = (GrantHolder(attach.epoch), region)
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

    def _write(self, write: WriteRequest, writer: GrantHolder, region: PagedRegion) -> None:
        for pages in [group.dst_pages for group in write.copies.groups] or [_NO_PAGES]:
            refusal = self._grants.find_refusal(write.grant, writer, region, pages)
            if refusal is not None:
                raise TransferError(f"the peer refused the write: {refusal}")
        _copy(write.copies, write.source, region)
        self._grants.report_arrived(write.grant, write.notification)


def _copy(copies: PageCopies, source: PagedRegion, target: PagedRegion) -> None:
    """Copies that both ends have checked."""
    array = copies.layer
    apply_copies(
        copies,
        view_pages(source.memory, source.arrays[array]),
        view_pages(target.memory, target.arrays[array]),
    )
