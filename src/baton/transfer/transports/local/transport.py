"""`local`: the owner's thread makes the copies, so a closed window is quiescent at once."""

from __future__ import annotations

import hmac
import logging
import re
from typing import TYPE_CHECKING, Final, assert_never

from baton.errors import PeerLostError, PeerUnreachableError, TransferError
from baton.kv.copies import apply_copies
from baton.transfer.bounds import check_copies, check_notice
from baton.transfer.interface import (
    Arrived,
    Capabilities,
    RegionDescriptor,
    RemoteId,
    TransferId,
    WindowQuiescent,
)
from baton.transfer.reactor import Reactor
from baton.transfer.region import check_arrays, view_pages
from baton.transfer.transports.local.letters import (
    Attach,
    Attached,
    Detached,
    Done,
    Link,
    Over,
    Read,
    Write,
)
from baton.transfer.transports.local.mailbox import Mailbox, find_mailbox
from baton.transfer.transports.local.remote import Remote
from baton.transfer.windows import PageSet, check_window_pages

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from baton.ids import Epoch, RegionHandle, TicketId
    from baton.kv.copies import PageCopies
    from baton.transfer.interface import (
        PagedRegion,
        PageRead,
        PageWrite,
        TransferEvent,
        TransportContext,
        Window,
    )
    from baton.transfer.transports.local.letters import Letter
    from baton.transfer.transports.local.options import LocalOptions

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
        lends=True,
    )

    def __init__(self, options: LocalOptions, context: TransportContext) -> None:
        self._options, self._context = options, context
        self._reactor = Reactor(context.clock)
        self.readiness_fd: int | None = self._reactor.fd
        self._mailbox = Mailbox()
        self._reactor.watch(self._mailbox.fd, self._take_letters)
        self._regions: dict[RegionHandle, PagedRegion] = {}
        self._windows: dict[TicketId, tuple[Window, PageSet]] = {}
        self._remotes: dict[RemoteId, Remote] = {}
        self._links: dict[Link, tuple[Epoch, PagedRegion]] = {}
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
        link = Link(self._mailbox, owner) if owner is not None else None
        remote = self._remotes[id_] = Remote(id_, descriptor, link, self._reactor)
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

    def open_window(self, window: Window) -> None:
        """See `Transport`."""
        if window.id in self._windows:
            raise TransferError("this window is open already")
        region = self._find_region(window.region)
        check_window_pages(window.pages, region.arrays)
        self._windows[window.id] = (window, PageSet(window.pages))

    def close_window(self, window: TicketId) -> None:
        """See `Transport`."""
        if self._windows.pop(window, None) is not None:
            self._reactor.report(WindowQuiescent(window))

    def submit(self, write: PageWrite) -> TransferId:
        """See `Transport`."""
        remote, region = self._find_remote(write.remote), self._find_region(write.region)
        check_copies(write.copies, region.arrays, remote.descriptor.arrays)
        check_notice(write.notice)
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
            link.dialer.post(Over(link, PeerLostError("the peer closed its end")))
        self._links.clear()
        self._reactor.close()
        self._mailbox.close()
        self.readiness_fd = None

    def _take_letters(self) -> None:
        for letter in self._mailbox.take():
            self._take(letter)

    def _take(self, letter: Letter) -> None:
        match letter:
            case Attach():
                self._admit(letter)
            case Write() | Read():
                self._answer(letter)
            case Detached(link):
                self._links.pop(link, None)
            case Attached() | Done() | Over():
                self._hear(letter)
            case unknown:
                assert_never(unknown)

    def _hear(self, letter: Attached | Done | Over) -> None:
        """What an owner says to this dialer; nothing that was detached cares any more."""
        for remote in self._remotes.values():
            if remote.link is letter.link:
                break
        else:
            return
        match letter:
            case Attached(_, arrays, memory):
                self._reactor.cancel_call(remote.id)
                remote.attached(arrays, memory)
            case Done(_, transfer, error):
                remote.done(transfer, error)
            case Over(_, error):
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
        attach.link.dialer.post(Over(attach.link, error))

    def _answer(self, letter: Write | Read) -> None:
        """Carry out what a dialer asks for, unless it is gone."""
        known = self._links.get(letter.link)
        if known is None:
            return
        error: TransferError | None = None
        with letter.link.lock:
            if letter.link.is_over:
                return
            try:
                match letter:
                    case Write():
                        self._write(letter, *known)
                    case Read():
                        _copy(letter.copies, known[1], letter.target)
                    case unknown:
                        assert_never(unknown)
            except TransferError as exc:
                error = exc
        letter.link.dialer.post(Done(letter.link, letter.transfer, error))

    def _write(self, write: Write, writer: Epoch, region: PagedRegion) -> None:
        found = self._windows.get(write.window)
        if found is None:
            raise TransferError("the peer refused the write: the window is not open")
        window, pages = found
        if window.writer != writer or window.region != region.handle:
            raise TransferError("the peer refused the write: the window is for another writer")
        if not all(pages.covers(group.dst_pages) for group in write.copies.groups):
            raise TransferError("the peer refused the write: a page is outside the window")
        _copy(write.copies, write.source, region)
        self._reactor.report(Arrived(write.window, write.notice))

    def _new_transfer(self) -> TransferId:
        self._num_transfers += 1
        return TransferId(self._num_transfers)

    def _find_remote(self, id_: RemoteId) -> Remote:
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


def _give_up(remote: Remote) -> None:
    if remote.is_attaching:
        remote.lose(PeerUnreachableError("the other transport has not answered in time"))
