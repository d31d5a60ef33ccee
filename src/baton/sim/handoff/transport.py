"""A transport of the simulation: it keeps the contract of `transfer.interface`, and nothing more.

What the contract leaves open is drawn: when source pages are read, whether a page is stored in
two parts, in which order writes arrive, whether the notice of a write that was reported as failed
comes after all. Each `Kind` has the habits of a family of real ones:

    sim-shared  the writer stores; it is asked to stop, and answers when it runs again; reads; lends
    sim-rdma    the same by hardware: what was posted lands whatever becomes of its process
    sim-tcp     the receiver stores, and drops what comes for a closed window; does not read
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from baton.errors import PeerLostError, PeerUnreachableError, TransferError
from baton.kv.copies import CopyGroup, PageCopies, apply_copies
from baton.transfer.interface import (
    Attached,
    Capabilities,
    ReadCompleted,
    ReadFailed,
    RegionDescriptor,
    RemoteId,
    RemoteLost,
    TransferId,
    WindowQuiescent,
    WriteCompleted,
    WriteFailed,
)
from baton.transfer.region import map_peer_memory, view_pages

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from baton.ids import Epoch, RegionHandle, TicketId
    from baton.sim.handoff.fabric import Fabric
    from baton.sim.handoff.process import SimProcess
    from baton.transfer.interface import PagedRegion, PageRead, PageWrite, TransferEvent, Window

COPY_S: Final = (0.0001, 0.001)
LATE_S: Final = 2.5
"""How long after its failure a posted write may still land; its second part, after the first."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A family of transports. `receiver_stores`: else the writer does.

    `lends`: peers on the same host can look at pages where they lie. `joins`: one write may be of
    several layers.
    """

    name: str
    reads: bool
    posts: bool
    receiver_stores: bool
    lends: bool = False
    joins: bool = False


KINDS: Final = {
    kind.name: kind
    for kind in (
        Kind("sim-shared", reads=True, posts=False, receiver_stores=False, lends=True, joins=True),
        Kind("sim-rdma", reads=True, posts=True, receiver_stores=False),
        Kind("sim-tcp", reads=False, posts=False, receiver_stores=True, joins=True),
    )
}


@dataclass(slots=True, eq=False)
class Remote:
    """A peer's region, as one side attached it."""

    id: RemoteId
    descriptor: RegionDescriptor
    peer: SimTransport | None = None
    is_up: bool = False
    is_lost: bool = False
    mapping: mmap.mmap | None = None


@dataclass(slots=True, eq=False)
class Opened:
    """A window at its receiver, and the writers that have not confirmed that it is closed."""

    window: Window
    pages: frozenset[int]
    is_closing: bool = False
    unconfirmed: list[SimTransport] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Write:
    """One write. `parts` are to be stored still; `source` is what was read, once it was.

    By layer.
    """

    id: TransferId
    poster: SimTransport
    remote: Remote
    order: PageWrite
    parts: list[PageCopies]
    target: SimTransport
    source: dict[int, NDArray[np.uint8]] | None = None
    has_failed: bool = False


@dataclass(slots=True, eq=False)
class Reading:
    """One read that is under way."""

    id: TransferId
    remote: Remote
    order: PageRead


class SimTransport:  # noqa: PLR0904 -- the contract, and what its peers need
    """One transport of one process; implements `transfer.interface.Transport`."""

    readiness_fd: int | None = None

    def __init__(self, kind: Kind, process: SimProcess, fabric: Fabric) -> None:
        self.kind, self.habits = kind.name, kind
        self.capabilities = Capabilities(
            memory=("host", "shared"),
            same_host_only=False,
            reads=kind.reads,
            posts=kind.posts,
            lends=kind.lends,
            joins=kind.joins,
        )
        self.process, self._fabric = process, fabric
        self.regions: dict[RegionHandle, PagedRegion] = {}
        self.windows: dict[TicketId, Opened] = {}
        self.told_to_stop: set[TicketId] = set()
        self.writes: dict[TransferId, Write] = {}
        self.reads: dict[TransferId, Reading] = {}
        self._remotes: dict[RemoteId, Remote] = {}
        self._events: list[TransferEvent] = []
        self._next_id = 0

    @property
    def num_under_way(self) -> int:
        """Windows, writes and reads that are not over."""
        return len(self.windows) + len(self.writes) + len(self.reads)

    def expose(self, region: PagedRegion) -> RegionDescriptor:
        """See `Transport`."""
        self.regions[region.handle] = region
        epoch = self.process.epoch
        self._fabric.exposed[self.kind, region.handle] = self
        return RegionDescriptor(self.kind, region.handle, epoch, region.arrays, self.process.name)

    def attach(self, descriptor: RegionDescriptor) -> RemoteId:
        """See `Transport`."""
        remote = Remote(RemoteId(self._give_id()), descriptor)
        self._remotes[remote.id] = remote
        self._fabric.later(self.process, descriptor.endpoint, lambda: self._attached(remote))
        return remote.id

    def detach(self, remote: RemoteId) -> None:
        """See `Transport`."""
        known = self._remotes.pop(remote, None)
        if known is not None:
            self._fail_all(known, "detached")

    def open_window(self, window: Window) -> None:
        """See `Transport`."""
        if window.id in self.windows:
            raise TransferError("this window is open already")
        if self._fabric.mishaps.refuses(self.process.name, self.kind):
            raise TransferError("no more windows")
        self.windows[window.id] = Opened(window, frozenset(window.pages.tolist()))

    def close_window(self, window: TicketId) -> None:
        """See `Transport`."""
        opened = self.windows.get(window)
        if opened is None or opened.is_closing:
            return
        opened.is_closing = True
        if not self.habits.receiver_stores:
            opened.unconfirmed = self._fabric.writers_of(self)
            for writer in opened.unconfirmed:
                self._fabric.ask_to_stop(writer, self, window)
        self.settle(window)

    def submit(self, write: PageWrite) -> TransferId:
        """See `Transport`."""
        remote = self._find(write.remote)
        target = remote.peer
        if target is None:
            raise TransferError("it is still attaching")
        transfer = TransferId(self._give_id())
        posted = Write(transfer, self, remote, write, self._fabric.split(write.copies), target)
        self.writes[transfer] = posted
        if remote.is_lost or self._fabric.mishaps.refuses(self.process.name, self.kind):
            self.fail(posted, "the connection is gone")
        else:
            self._fabric.carry(posted)
        return transfer

    def read(self, read: PageRead) -> TransferId:
        """See `Transport`."""
        remote = self._find(read.remote)
        if not self.habits.reads or remote.peer is None:
            raise TransferError("it does not read, or is still attaching")
        transfer = TransferId(self._give_id())
        reading = self.reads[transfer] = Reading(transfer, remote, read)
        host = remote.peer.process.name  # it waits where the way to the peer's pages is parted
        self._fabric.later(self.process, host, lambda: self._read(reading))
        return transfer

    def view(self, remote: RemoteId, array: int) -> NDArray[np.uint8]:
        """See `Transport`: a mapping of the memory itself, which cannot be written."""
        known = self._find(remote)
        peer, handle = known.peer, known.descriptor.handle
        region = None if peer is None else peer.regions[handle]
        if not self.habits.lends or region is None or region.fd is None or known.is_lost:
            raise TransferError("it does not lend, is still attaching, or was lost")
        if known.mapping is None:
            known.mapping = map_peer_memory(region.fd, region.arrays, mmap.PROT_READ)
        return view_pages(known.mapping, region.arrays[array])

    def open_reader(self, reader: Epoch) -> int | None:
        """See `WatchesReaders`: readable once the kernel has ended that process."""
        for peer in self._fabric.writers_of(self):
            if peer.process.epoch == reader and peer.has_attached(self):
                return peer.process.mortality.open()
        return None

    def has_attached(self, peer: SimTransport) -> bool:
        """Whether a region of a peer's is attached just now."""
        return any(each.peer is peer and not each.is_lost for each in self._remotes.values())

    def poll(self) -> list[TransferEvent]:
        """See `Transport`."""
        events, self._events = self._events, []
        return events

    def close(self) -> None:
        """See `Transport`."""
        self._events.clear()

    def say(self, event: TransferEvent) -> None:
        """Have `poll` return an event."""
        self._events.append(event)
        self.process.wake()

    def lose(self, peer: SimProcess | None, reason: str) -> None:
        """The connections of this transport break: all, or those to one process."""
        for remote in tuple(self._remotes.values()):
            is_meant = peer is None or (remote.peer is not None and remote.peer.process is peer)
            if is_meant and remote.is_up and not remote.is_lost:
                remote.is_lost = True
                self.say(RemoteLost(remote.id, PeerLostError(reason)))
                self._fail_all(remote, reason)

    def settle(self, window: TicketId) -> None:
        """Report that a closed window is quiescent, once it is."""
        opened = self.windows.get(window)
        if opened is None or not opened.is_closing or opened.unconfirmed:
            return
        if not self.habits.receiver_stores and self._fabric.may_land(self, window):
            return
        del self.windows[window]
        self.say(WindowQuiescent(window))

    def stops(self, window: TicketId) -> None:
        """This process was asked to stop writing into a window: what has not left fails."""
        self.told_to_stop.add(window)
        for write in tuple(self.writes.values()):
            if write.order.window == window and write.source is None:
                self.fail(write, "the window is closed")

    def confirmed(self, writer: SimTransport, window: TicketId) -> None:
        """A writer has stopped, or its process is proved dead."""
        opened = self.windows.get(window)
        if opened is not None and writer in opened.unconfirmed:
            opened.unconfirmed.remove(writer)
            self.settle(window)

    def admits(self, write: Write) -> bool:
        """Whether a write may be stored here, as far as this side can tell."""
        opened = self.windows.get(write.order.window)
        if opened is None or opened.window.writer != write.poster.process.epoch:
            return False
        pages = {page for g in write.order.copies.groups for page in g.dst_pages.tolist()}
        return not opened.is_closing and pages <= opened.pages

    def completed(self, write: Write) -> None:
        """The notice of a write was handed over, and its source pages may change."""
        if not write.has_failed and self.writes.pop(write.id, None) is not None:
            self.say(WriteCompleted(write.id, write.order.copies.num_bytes))

    def pages(self, region: RegionHandle, layer: int) -> NDArray[np.uint8]:
        """The pages of one layer."""
        known = self.regions[region]
        return view_pages(known.memory, known.arrays[layer])

    def _attached(self, remote: Remote) -> None:
        if remote.id not in self._remotes:
            return
        peer = self._fabric.exposed.get((self.kind, remote.descriptor.handle))
        refused = self._fabric.mishaps.refuses(self.process.name, self.kind)
        if peer is None or not peer.process.is_alive or refused:
            remote.is_lost = True
            self.say(RemoteLost(remote.id, PeerUnreachableError("nobody answers")))
            return
        remote.peer, remote.is_up = peer, True
        self._fabric.link(self, peer)
        self.say(Attached(remote.id))

    def _read(self, reading: Reading) -> None:
        """Copy the peer's pages as they are now."""
        remote, copies = reading.remote, reading.order.copies
        peer = remote.peer
        if reading.id not in self.reads or peer is None:
            return
        del self.reads[reading.id]
        if not peer.process.is_alive or self._fabric.mishaps.fails_next(self.kind):
            self.say(ReadFailed(reading.id, PeerLostError("the read failed")))
            return
        source = peer.pages(remote.descriptor.handle, copies.layer).copy()
        self._fabric.mishaps.spoil(source, copies)
        self._fabric.check_read(self, reading.order.region, copies)
        self._fabric.check_store(self, reading.order.region, copies, None)
        apply_copies(copies, source, self.pages(reading.order.region, copies.layer))
        self.say(ReadCompleted(reading.id, copies.num_bytes))

    def _fail_all(self, remote: Remote, reason: str) -> None:
        for write in tuple(self.writes.values()):
            if write.remote is remote:
                self.fail(write, reason)
        for reading in tuple(self.reads.values()):
            if reading.remote is remote:
                del self.reads[reading.id]
                self.say(ReadFailed(reading.id, PeerLostError(reason)))

    def fail(self, write: Write, reason: str) -> None:
        """A write does not complete."""
        if self.writes.pop(write.id, None) is None:
            return
        write.has_failed = True
        if write.source is None or not (self.habits.posts or self.habits.receiver_stores):
            self._fabric.drop(write)  # nothing of it is on its way
        self.say(WriteFailed(write.id, PeerLostError(reason)))

    def _find(self, remote: RemoteId) -> Remote:
        known = self._remotes.get(remote)
        if known is None:
            raise TransferError("unknown remote")
        return known

    def _give_id(self) -> int:
        self._next_id += 1
        return self._next_id


def split_copies(copies: PageCopies) -> list[PageCopies]:
    """A write in two parts, if it has more than one page."""
    first: list[CopyGroup] = []
    second: list[CopyGroup] = []
    for group in copies.groups:
        half = len(group.src_pages) // 2
        for part, some in ((first, slice(0, half)), (second, slice(half, None))):
            if len(group.src_pages[some]):
                part.append(CopyGroup(group.src_pages[some], group.dst_pages[some], group.spans))
    return [PageCopies(copies.layer, tuple(part)) for part in (first, second) if part]
