"""A transport of the simulation: it keeps the contract of `transfer.interface`, and nothing more.

What the contract leaves open is drawn: when source pages are read, whether a page is stored in
two parts, in which order writes arrive, whether the notification of a write that was reported as
failed comes after all. Each `Kind` has the habits of a family of real ones:

    sim-shared  the writer stores; asked to stop, it answers when it runs again; reads; exports
    sim-rdma    the same by hardware: what was posted lands whatever becomes of its process
    sim-tcp     the receiver stores, and drops what comes for a closed grant; does not read
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from baton.errors import PeerLostError, PeerUnreachableError, TransferError
from baton.kv.copies import CopyGroup, PageCopies, apply_copies
from baton.transfer.interface import (
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
from baton.transfer.region import map_peer_memory, view_pages

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from baton.ids import Epoch, RegionHandle, TicketId
    from baton.sim.handoff.fabric import Fabric
    from baton.sim.handoff.process import SimProcess
    from baton.transfer.interface import PagedRegion, PageRead, PageWrite, TransferEvent, WriteGrant

COPY_S: Final = (0.0001, 0.001)
LATE_S: Final = 2.5
"""How long after its failure a posted write may still land; its second part, after the first."""


@dataclass(frozen=True, slots=True)
class SimTransportKind:
    """A family of transports. `receiver_stores`: else the writer does.

    `views`: peers on the same host can look at pages where they lie. `multi_array`: one write may
    be of several layers.
    """

    name: str
    reads: bool
    late_writes: bool
    receiver_stores: bool
    views: bool = False
    multi_array: bool = False


KINDS: Final = {
    kind.name: kind
    for kind in (
        SimTransportKind(
            "sim-shared",
            reads=True,
            late_writes=False,
            receiver_stores=False,
            views=True,
            multi_array=True,
        ),
        SimTransportKind("sim-rdma", reads=True, late_writes=True, receiver_stores=False),
        SimTransportKind(
            "sim-tcp", reads=False, late_writes=False, receiver_stores=True, multi_array=True
        ),
    )
}


@dataclass(slots=True, eq=False)
class SimRemote:
    """A peer's region, as one side attached it."""

    id: RemoteId
    descriptor: RegionDescriptor
    peer: SimTransport | None = None
    is_up: bool = False
    is_lost: bool = False
    mapping: mmap.mmap | None = None


@dataclass(slots=True, eq=False)
class OpenWindow:
    """A grant at its receiver, and the writers that have not confirmed that it is closed."""

    grant: WriteGrant
    pages: frozenset[int]
    is_closing: bool = False
    unconfirmed: list[SimTransport] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class SimWrite:
    """One write. `parts` are to be stored still; `source` is what was read, once it was.

    By layer.
    """

    id: TransferId
    poster: SimTransport
    remote: SimRemote
    order: PageWrite
    parts: list[PageCopies]
    target: SimTransport
    source: dict[int, NDArray[np.uint8]] | None = None
    has_failed: bool = False


@dataclass(slots=True, eq=False)
class SimRead:
    """One read that is under way."""

    id: TransferId
    remote: SimRemote
    order: PageRead


class SimTransport:  # noqa: PLR0904 -- the contract, and what its peers need
    """One transport of one process; implements `transfer.interface.Transport`."""

    readiness_fd: int | None = None

    def __init__(self, kind: SimTransportKind, process: SimProcess, fabric: Fabric) -> None:
        self.kind, self.traits = kind.name, kind
        self.capabilities = Capabilities(
            memory=("host", "shared"),
            same_host_only=False,
            reads=kind.reads,
            late_writes=kind.late_writes,
            views=kind.views,
            multi_array=kind.multi_array,
            admits_writes=not kind.receiver_stores,
        )
        self.process, self._fabric = process, fabric
        self.regions: dict[RegionHandle, PagedRegion] = {}
        self.grants: dict[TicketId, OpenWindow] = {}
        self._closed_unasked: dict[TicketId, OpenWindow] = {}
        """As writers know them still: nothing but their word keeps them out."""
        self.stop_requested: set[TicketId] = set()
        self.writes: dict[TransferId, SimWrite] = {}
        self.reads: dict[TransferId, SimRead] = {}
        self._remotes: dict[RemoteId, SimRemote] = {}
        self._events: list[TransferEvent] = []
        self._next_id = 0

    @property
    def num_under_way(self) -> int:
        """Grants, writes and reads that are not over."""
        return len(self.grants) + len(self.writes) + len(self.reads)

    def expose(self, region: PagedRegion) -> RegionDescriptor:
        """See `Transport`."""
        self.regions[region.handle] = region
        epoch = self.process.epoch
        self._fabric.exposed[self.kind, region.handle] = self
        return RegionDescriptor(self.kind, region.handle, epoch, region.arrays, self.process.name)

    def attach(self, descriptor: RegionDescriptor) -> RemoteId:
        """See `Transport`."""
        remote = SimRemote(RemoteId(self._give_id()), descriptor)
        self._remotes[remote.id] = remote
        self._fabric.later(self.process, descriptor.endpoint, lambda: self._attached(remote))
        return remote.id

    def detach(self, remote: RemoteId) -> None:
        """See `Transport`."""
        known = self._remotes.pop(remote, None)
        if known is not None:
            self._fail_all(known, "detached")

    def open_grant(self, grant: WriteGrant) -> None:
        """See `Transport`."""
        if grant.id in self.grants:
            raise TransferError("this grant is open already")
        if self._fabric.transfer_faults.is_blocked(self.process.name, self.kind):
            raise TransferError("no more grants")
        self.grants[grant.id] = OpenWindow(grant, frozenset(grant.pages.tolist()))

    def finish_grant(self, grant: TicketId) -> bool:
        """See `Transport`."""
        if self.traits.late_writes:
            self.close_grant(grant)
            return False
        opened = self.grants.pop(grant, None)
        if opened is not None and not self.traits.receiver_stores:
            self._closed_unasked[grant] = opened
        return True

    def close_grant(self, grant: TicketId) -> None:
        """See `Transport`."""
        opened = self.grants.get(grant)
        if opened is None or opened.is_closing:
            return
        opened.is_closing = True
        if not self.traits.receiver_stores:
            opened.unconfirmed = self._fabric.writers_of(self)
            for writer in opened.unconfirmed:
                self._fabric.ask_to_stop(writer, self, grant)
        self.settle(grant)

    def admit_writes(self, remote: RemoteId, grant: TicketId, pages: NDArray[np.int64]) -> None:
        """See `AdmitsWrites`: here a writer always knows which grants are open."""

    def forget_grant(self, remote: RemoteId, grant: TicketId) -> None:
        """See `AdmitsWrites`."""
        del remote
        if not self.traits.late_writes:
            self.stop_requested.add(grant)

    def submit(self, write: PageWrite) -> TransferId:
        """See `Transport`."""
        remote = self._find(write.remote)
        target = remote.peer
        if target is None:
            raise TransferError("it is still attaching")
        transfer = TransferId(self._give_id())
        posted = SimWrite(transfer, self, remote, write, self._fabric.split(write.copies), target)
        self.writes[transfer] = posted
        if remote.is_lost or self._fabric.transfer_faults.is_blocked(self.process.name, self.kind):
            self.fail(posted, "the connection is gone")
        else:
            self._fabric.carry(posted)
        return transfer

    def read(self, read: PageRead) -> TransferId:
        """See `ReadsPages`."""
        remote = self._find(read.remote)
        if not self.traits.reads or remote.peer is None:
            raise TransferError("it does not read, or is still attaching")
        transfer = TransferId(self._give_id())
        reading = self.reads[transfer] = SimRead(transfer, remote, read)
        host = remote.peer.process.name  # it waits where the way to the peer's pages is parted
        self._fabric.later(self.process, host, lambda: self._read(reading))
        return transfer

    def view(self, remote: RemoteId, array: int) -> NDArray[np.uint8]:
        """See `ViewsPages`: a mapping of the memory itself, which cannot be written."""
        known = self._find(remote)
        peer, handle = known.peer, known.descriptor.handle
        region = None if peer is None else peer.regions[handle]
        if not self.traits.views or region is None or region.fd is None or known.is_lost:
            raise TransferError("it does not export, is still attaching, or was lost")
        if known.mapping is None:
            known.mapping = map_peer_memory(region.fd, region.arrays, mmap.PROT_READ)
        return view_pages(known.mapping, region.arrays[array])

    def open_reader(self, reader: Epoch) -> int | None:
        """See `TracksReaders`: readable once the kernel has ended that process."""
        for peer in self._fabric.writers_of(self):
            if peer.process.epoch == reader and peer.has_attached(self):
                return peer.process.process_exit.open()
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

    def emit(self, event: TransferEvent) -> None:
        """Have `poll` return an event."""
        self._events.append(event)
        self.process.wake()

    def lose_connections(self, peer: SimProcess | None, reason: str) -> None:
        """The connections of this transport break: all, or those to one process."""
        for remote in tuple(self._remotes.values()):
            is_meant = peer is None or (remote.peer is not None and remote.peer.process is peer)
            if is_meant and remote.is_up and not remote.is_lost:
                remote.is_lost = True
                self.emit(RemoteLost(remote.id, PeerLostError(reason)))
                self._fail_all(remote, reason)

    def settle(self, grant: TicketId) -> None:
        """Report that a closed grant is quiescent, once it is."""
        opened = self.grants.get(grant)
        if opened is None or not opened.is_closing or opened.unconfirmed:
            return
        if not self.traits.receiver_stores and self._fabric.may_land(self, grant):
            return
        del self.grants[grant]
        self.emit(GrantQuiescent(grant))

    def on_stop_request(self, grant: TicketId) -> None:
        """This process was asked to stop writing into a grant: what has not left fails."""
        self.stop_requested.add(grant)
        for write in tuple(self.writes.values()):
            if write.order.grant == grant and write.source is None:
                self.fail(write, "the grant is closed")

    def on_stop_confirmed(self, writer: SimTransport, grant: TicketId) -> None:
        """A writer has stopped, or its process is proved dead."""
        opened = self.grants.get(grant)
        if opened is not None and writer in opened.unconfirmed:
            opened.unconfirmed.remove(writer)
            self.settle(grant)

    def allows(self, write: SimWrite) -> bool:
        """Whether a write may be stored here, as far as this side knows."""
        id_ = write.order.grant
        opened = self.grants.get(id_) or self._closed_unasked.get(id_)
        if opened is None or opened.grant.writer != write.poster.process.epoch:
            return False
        pages = {page for g in write.order.copies.groups for page in g.dst_pages.tolist()}
        return not opened.is_closing and pages <= opened.pages

    def completed(self, write: SimWrite) -> None:
        """The notification of a write was handed over, and its source pages may change."""
        if not write.has_failed and self.writes.pop(write.id, None) is not None:
            self.emit(WriteCompleted(write.id, write.order.copies.num_bytes))

    def pages(self, region: RegionHandle, layer: int) -> NDArray[np.uint8]:
        """The pages of one layer."""
        known = self.regions[region]
        return view_pages(known.memory, known.arrays[layer])

    def _attached(self, remote: SimRemote) -> None:
        if remote.id not in self._remotes:
            return
        peer = self._fabric.exposed.get((self.kind, remote.descriptor.handle))
        refused = self._fabric.transfer_faults.is_blocked(self.process.name, self.kind)
        if peer is None or not peer.process.is_alive or refused:
            remote.is_lost = True
            self.emit(RemoteLost(remote.id, PeerUnreachableError("no answer")))
            return
        remote.peer, remote.is_up = peer, True
        self._fabric.link(self, peer)
        self.emit(RemoteAttached(remote.id))

    def _read(self, reading: SimRead) -> None:
        """Copy the peer's pages as they are now."""
        remote, copies = reading.remote, reading.order.copies
        peer = remote.peer
        if reading.id not in self.reads or peer is None:
            return
        del self.reads[reading.id]
        if not peer.process.is_alive or self._fabric.transfer_faults.pop_failure(self.kind):
            self.emit(ReadFailed(reading.id, PeerLostError("the read failed")))
            return
        for each in copies.split():
            source = peer.pages(remote.descriptor.handle, each.layer).copy()
            self._fabric.transfer_faults.corrupt(source, each)
            self._fabric.check_read(self, reading.order.region, each)
            self._fabric.check_store(self, reading.order.region, each, None)
            apply_copies(each, source, self.pages(reading.order.region, each.layer))
        self.emit(ReadCompleted(reading.id, copies.num_bytes))

    def _fail_all(self, remote: SimRemote, reason: str) -> None:
        for write in tuple(self.writes.values()):
            if write.remote is remote:
                self.fail(write, reason)
        for reading in tuple(self.reads.values()):
            if reading.remote is remote:
                del self.reads[reading.id]
                self.emit(ReadFailed(reading.id, PeerLostError(reason)))

    def fail(self, write: SimWrite, reason: str) -> None:
        """A write does not complete."""
        if self.writes.pop(write.id, None) is None:
            return
        write.has_failed = True
        if write.source is None or not (self.traits.late_writes or self.traits.receiver_stores):
            self._fabric.drop(write)  # nothing of it is on its way
        self.emit(WriteFailed(write.id, PeerLostError(reason)))

    def _find(self, remote: RemoteId) -> SimRemote:
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
