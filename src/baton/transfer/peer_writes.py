"""What transports have in common whose peers write the pages themselves: `shared`, one-sided ones.

The owner of the pages cannot stop a peer's write. Every writer learns of the grants that concern
it, from the handoff (`AdmitsWrites`) or from here (`GrantOpened`). Later the owner asks it to stop
(`CloseGrant`), and takes a grant for quiescent only when each has answered (`GrantClosed`), or can
be proved to write no more (`GrantLedger`). A writer that has reported its last write is not asked.

The owner's side: `PeerWritesTransport`, and a `WriterConnection` for each peer.
The writer's side: `PeerWritesRemote`, whose `PeerGrants` hold a write back until its grant is open.
"""

from __future__ import annotations

import os
import select
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final, Generic, TypeVar, assert_never

from baton.errors import PeerLostError, ProtocolError, TransferError
from baton.ids import Epoch, TicketId
from baton.net.framing import encode
from baton.record import Record
from baton.transfer.base_transport import A, ConnectedRemote, ConnectedTransport, Reactor
from baton.transfer.grant_messages import (
    MAX_GRANT_PAGES,
    CloseGrant,
    GrantClosed,
    GrantNotOpen,
    GrantOpened,
    MemoryReleased,
    QueryGrant,
    pack_pages,
    unpack_pages,
)
from baton.transfer.grants import GrantHolder, GrantLedger, PageSet, WriterId, check_grant_pages
from baton.transfer.interface import (
    GrantQuiescent,
    PagedRegion,
    PageWrite,
    RegionDescriptor,
    RemoteId,
    TransferId,
    TransportContext,
    WriteCompleted,
    WriteFailed,
    WriteGrant,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    from numpy.typing import NDArray

    from baton.net.channel import Channel
    from baton.net.connection import Connection
    from baton.transfer.grant_messages import FromOwner

MAX_GRANTS: Final = 65_536
MAX_OPEN_PAGES: Final = 1 << 24
"""Of all grants of one remote: what a peer can make this side remember."""
MAX_EARLY_CLOSES: Final = 65_536
"""Grants that were closed before the handoff announced them here. A connection with more is ended:
none of them may be forgotten."""
RELEASE_TIMEOUT_S: Final = 5.0
MAX_FINAL_STEPS: Final = 64
MAX_REASON_CHARS: Final = 256


class HeldWrite(Record, frozen=True):
    """A checked write from pages of `region`, whose grant is not known to be open."""

    transfer: TransferId
    write: PageWrite
    region: PagedRegion


class PeerGrants:
    """Of one remote. Owner thread: the transport's.

    `begin` is called with each write that lies in an open grant, within `submit` or when the peer
    opens its grant.
    """

    def __init__(
        self, reactor: Reactor, begin: Callable[[TransferId, PageWrite, PagedRegion], None]
    ) -> None:
        self._reactor, self._begin = reactor, begin
        self._open: dict[TicketId, PageSet] = {}
        self._num_pages = 0
        self._closing: set[TicketId] = set()
        self._unadmitted: set[TicketId] = set()
        """Open by the peer's own message; that of the handoff may still be on its way."""
        self._announced_early: set[TicketId] = set()
        """Announced by the handoff before this side was attached: only the peer opens them here."""
        self._closed_early: set[TicketId] = set()
        self._held: dict[TicketId, list[HeldWrite]] = {}

    def try_begin(self, transfer: TransferId, write: PageWrite, region: PagedRegion) -> bool:
        """Begin a write, or report that it leaves its grant; False if that is not open here."""
        grant = self._open.get(write.grant)
        if grant is None:
            return False
        for group in write.copies.groups:
            if not grant.covers(group.dst_pages):
                error = TransferError("a page is outside the grant")
                self._reactor.report(WriteFailed(transfer, error))
                return True
        self._begin(transfer, write, region)
        return True

    def hold(self, held: HeldWrite, connection: Connection | None) -> None:
        """Keep a write until its grant is open, and ask the peer whether it is."""
        grant = held.write.grant
        waiting = self._held.setdefault(grant, [])
        waiting.append(held)
        if len(waiting) == 1 and connection is not None:
            connection.send_body(encode(QueryGrant(grant)))

    def handle(self, message: FromOwner) -> TicketId | None:
        """Handle a message of the peer; the grant that it wants closed, if it is that.

        Raises:
            ProtocolError: it opened or closed too many, or opened one that it is closing.
        """
        match message:
            case GrantOpened(grant, packed, is_announced):
                if grant not in self._open:
                    self._opened(TicketId(grant), PageSet(unpack_pages(packed)))
                    if is_announced and grant not in self._announced_early:
                        self._unadmitted.add(TicketId(grant))
            case GrantNotOpen(grant):
                self._refuse_held(TicketId(grant))
            case CloseGrant(grant):
                return self._close(TicketId(grant))
            case unknown:
                assert_never(unknown)
        return None

    def note(self, grant: TicketId) -> None:
        """The handoff announces a grant, and this side is not attached yet.

        The peer may close it before it knows this side, and then asks nothing: it is not opened.
        One that is still open comes with `Attached`, or is asked for when a write needs it.

        Raises:
            ProtocolError: too many were announced.
        """
        if len(self._announced_early) >= MAX_GRANTS:
            raise ProtocolError("the peer announced more grants than can be remembered")
        self._announced_early.add(grant)

    def admit(self, grant: TicketId, pages: NDArray[np.int64]) -> None:
        """The handoff announces a grant: begin what was held for it, unless it was closed since.

        Raises:
            ProtocolError: too many are open, or it is closing this one.
        """
        if grant in self._announced_early:
            return
        if grant in self._open:
            self._unadmitted.discard(grant)
            return
        if grant in self._closed_early:  # its close came by another connection, and first
            self._closed_early.discard(grant)
            self._refuse_held(grant)
            return
        self._opened(grant, PageSet(pages))

    def forget(self, grant: TicketId) -> None:
        """The peer has closed it, and will not ask. Unknown ids are ignored."""
        pages = self._open.pop(grant, None)
        if pages is not None:
            self._num_pages -= len(pages)
            self._unadmitted.discard(grant)

    def is_closing(self, grant: TicketId) -> bool:
        """Whether the peer waits for `GrantClosed` of this grant."""
        return grant in self._closing

    def mark_closed(self, grant: TicketId) -> None:
        """`GrantClosed` was sent: the peer may open the grant again."""
        self._closing.discard(grant)

    def end(self, error: TransferError) -> None:
        """Forget all of them; what was held fails."""
        self._open.clear()
        self._closing.clear()
        self._unadmitted.clear()
        self._announced_early.clear()
        self._closed_early.clear()
        for held in [each for waiting in self._held.values() for each in waiting]:
            self._reactor.report(WriteFailed(held.transfer, error))
        self._held.clear()

    def _opened(self, grant: TicketId, pages: PageSet) -> None:
        self._num_pages += len(pages)
        if len(self._open) >= MAX_GRANTS or self._num_pages > MAX_OPEN_PAGES:
            raise ProtocolError("the peer opened more grants than can be remembered")
        if grant in self._closing:
            raise ProtocolError("the peer opened a grant again that it is closing")
        self._open[grant] = pages
        for held in self._held.pop(grant, []):
            if not self.try_begin(held.transfer, held.write, held.region):
                error = PeerLostError("the peer was lost as an earlier write began")
                self._reactor.report(WriteFailed(held.transfer, error))

    def _close(self, grant: TicketId) -> TicketId:
        is_announced = grant in self._open or grant in self._announced_early
        if not is_announced or grant in self._unadmitted:
            if len(self._closed_early) >= MAX_EARLY_CLOSES:
                raise ProtocolError("the peer closed more grants than can be remembered")
            self._closed_early.add(grant)
        self.forget(grant)
        self._closing.add(grant)
        return grant

    def _refuse_held(self, grant: TicketId) -> None:
        error = TransferError("the grant is not open")
        for held in self._held.pop(grant, []):
            self._reactor.report(WriteFailed(held.transfer, error))


class PeerWritesRemote(ConnectedRemote):
    """See `BaseRemote`. A write starts (`_start_write`) once its grant is known to be open."""

    def __init__(self, id_: RemoteId, descriptor: RegionDescriptor, reactor: Reactor) -> None:
        super().__init__(id_, descriptor, reactor)
        self._grants = PeerGrants(reactor, self._start_write)
        self._unsent: dict[TransferId, int] = {}
        """Bytes of each write that is in place and whose notification has not left."""
        self._has_released = True

    @property
    def is_gone(self) -> bool:
        """Nothing is left of it, not even an unanswered `MemoryReleased`."""
        return self._loss is not None and (self._connection is None or not self._connection.is_open)

    def admit_writes(self, grant: TicketId, pages: NDArray[np.int64]) -> None:
        """See `AdmitsWrites`."""
        if self._connection is None or self._loss is not None:
            return
        try:
            if self.is_attaching:
                self._grants.note(grant)
            else:
                self._grants.admit(grant, pages)
        except ProtocolError as exc:
            self._connection.fail(exc)

    def forget_grant(self, grant: TicketId) -> None:
        """See `AdmitsWrites`."""
        self._grants.forget(grant)

    def detach(self) -> None:
        """This side is done: stop writing, and send `MemoryReleased` if that is certain."""
        if self._loss is None:
            self._end(PeerLostError("the remote was detached"))
            self._send_memory_released()

    def close(self) -> None:
        """Detach, and do not wait for the owner to answer `MemoryReleased`."""
        self.detach()
        if self._connection is not None:
            self._connection.close()

    def submit(self, transfer: TransferId, write: PageWrite, region: PagedRegion) -> None:
        """Begin a checked write, or hold it until its grant is opened.

        What the peer sent since is read first where the grant is not open here, or the remote is
        lost: else a write begins without a look. Its pages are the writer's until it has answered
        `CloseGrant`, which it does not while a write is in progress.
        """
        if self._loss is None:
            if self._grants.try_begin(transfer, write, region):
                return
            self._poll_inbound()
        if self._loss is not None:
            self._reactor.report(WriteFailed(transfer, self._loss))
        elif not self._grants.try_begin(transfer, write, region):
            self._grants.hold(HeldWrite(transfer, write, region), self._connection)

    def _poll_inbound(self) -> None:
        """Read what the peer has sent: a grant may just have been opened, or the peer be lost."""
        raise NotImplementedError

    def _start_write(self, transfer: TransferId, write: PageWrite, region: PagedRegion) -> None:
        """Begin a write that lies in an open grant."""
        raise NotImplementedError

    def _release_memory(self, error: TransferError) -> bool:
        """Stop what is in progress and report it as failed; whether nothing writes any more."""
        raise NotImplementedError

    def _end(self, error: TransferError) -> None:
        super()._end(error)
        self._has_released = self._release_memory(error)
        for transfer in self._unsent:
            self._reactor.report(WriteFailed(transfer, error))
        self._unsent.clear()
        self._grants.end(error)

    def _notification_sent(self, transfer: TransferId) -> None:
        """A write's notification has left; a lost remote's write was reported already."""
        num_bytes = self._unsent.pop(transfer, None)
        if num_bytes is not None:
            self._reactor.report(WriteCompleted(transfer, num_bytes))

    def _send_memory_released(self) -> None:
        """If that is not true, close instead: the owner waits for the end of this process."""
        connection = self._connection
        if connection is None or not connection.is_open:
            return
        if not self._has_released:
            connection.close()
            return
        connection.set_handlers(_ignore_bodies, _ignore_loss)
        connection.fail_after(RELEASE_TIMEOUT_S, "the peer's answer to memory_released")
        connection.send_body(encode(MemoryReleased()))


def _ignore_bodies(channel: Channel) -> None:
    channel.receive_bodies()


def _ignore_loss(error: TransferError) -> None:
    del error


@dataclass(frozen=True, slots=True)
class AdmittedWriter:
    """A peer that attached to a region, and what its `WriterConnection` reports to."""

    id: WriterId
    connection: Connection
    region: PagedRegion
    ledger: GrantLedger
    reactor: Reactor
    on_over: Callable[[WriterId], None]


class WriterConnection:
    """The owner's end of one connection: a peer's messages, and whether it can still write here.

    Where the peer's own process writes (`process`, a pidfd), this outlives the connection until
    that process is dead. `on_over` is called once, when nothing of the peer can land any more.
    Owner thread: the transport's.
    """

    def __init__(self, writer: AdmittedWriter, process: int | None) -> None:
        self._writer, self._connection, self._region = writer.id, writer.connection, writer.region
        self._ledger, self._reactor, self._on_over = writer.ledger, writer.reactor, writer.on_over
        self._process = process
        if process is not None:
            self._reactor.watch(process, self._process_ended)

    def start(self, grants: list[WriteGrant]) -> None:
        """Send the memory and the grants that are already open."""
        self._connection.cancel_deadline()
        self._connection.set_handlers(self._read, self._disconnected)
        self._send_attached()
        for grant in grants:
            self.send_grant_opened(grant)

    def send_grant_opened(self, grant: WriteGrant) -> None:
        """The peer may write into this grant from now on."""
        opened = GrantOpened(grant.id, pack_pages(grant.pages), grant.is_announced)
        self._connection.send_body(encode(opened))

    def send_close_grant(self, grant: TicketId) -> None:
        """The peer must begin no other write into this grant, and answer when none is left."""
        self._connection.send_body(encode(CloseGrant(grant)))

    def finish(self) -> None:
        """It is proved that the peer writes no more. What it sent before still counts."""
        for _ in range(MAX_FINAL_STEPS):
            if not self._connection.is_open:
                break
            self._connection.step()
        self._finish()

    def _process_ended(self) -> None:
        """Finish, if it has: the reactor may call on behalf of one whose number this one has now.

        What it found ready before was closed by another handler of the same round.
        """
        if self._process is not None:
            process = select.poll()
            process.register(self._process, select.POLLIN)
            if process.poll(0):
                self.finish()

    def close(self) -> None:
        """Stop watching: nothing is known of this peer from now on. Idempotent."""
        self._connection.close()
        if self._process is not None:
            self._reactor.unwatch(self._process)
            os.close(self._process)
            self._process = None

    def _send_attached(self) -> None:
        raise NotImplementedError

    def _read(self, channel: Channel) -> None:
        """Handle the peer's messages: its own kinds, and `_handle_grant_message` for the others."""
        raise NotImplementedError

    def _handle_grant_message(self, message: QueryGrant | GrantClosed | MemoryReleased) -> None:
        match message:
            case QueryGrant(grant):
                opened = self._ledger.find_open(self._writer, TicketId(grant))
                if opened is None:
                    self._connection.send_body(encode(GrantNotOpen(grant)))
                elif opened.is_announced:  # the other `GrantOpened` are on their way already
                    self.send_grant_opened(opened)
            case GrantClosed(grant):
                self._ledger.confirm_closed(self._writer, TicketId(grant))
            case MemoryReleased():
                self._finish()
            case unknown:
                assert_never(unknown)

    def _disconnected(self, error: TransferError) -> None:
        """That the peer is out of reach does not mean that it writes no more."""
        del error
        if not self._ledger.disconnect(self._writer):
            self._finish()

    def _finish(self) -> None:
        self.close()
        self._ledger.release(self._writer)
        self._on_over(self._writer)


G = TypeVar("G", bound=PeerWritesRemote)
W = TypeVar("W", bound=WriterConnection)


class PeerWritesTransport(ConnectedTransport[G, A], Generic[G, A, W]):
    """See `Transport`: grants, and the peers that may write into them."""

    def __init__(
        self, context: TransportContext, *, connect_timeout_s: float, max_connections: int
    ) -> None:
        super().__init__(
            context, connect_timeout_s=connect_timeout_s, max_connections=max_connections
        )
        self._ledger = GrantLedger()
        self._writers: dict[WriterId, W] = {}
        self._leaving: list[G] = []
        self._num_writers = 0

    def detach(self, remote: RemoteId) -> None:
        """See `Transport`."""
        known = self._remotes.get(remote)
        super().detach(remote)
        if known is not None:
            self._leaving = [each for each in (*self._leaving, known) if not each.is_gone]

    def open_grant(self, grant: WriteGrant) -> None:
        """See `Transport`."""
        region = self._find_region(grant.region)
        check_grant_pages(grant.pages, region.arrays)
        if len(grant.pages) > MAX_GRANT_PAGES:
            raise TransferError(f"a grant of more than {MAX_GRANT_PAGES} pages")
        for writer in self._ledger.open_grant(grant):
            if not grant.is_announced:
                self._writers[writer].send_grant_opened(grant)

    def admit_writes(self, remote: RemoteId, grant: TicketId, pages: NDArray[np.int64]) -> None:
        """See `AdmitsWrites`."""
        known = self._remotes.get(remote)
        if known is not None:
            known.admit_writes(grant, pages)

    def forget_grant(self, remote: RemoteId, grant: TicketId) -> None:
        """See `AdmitsWrites`: where writes land late, the owner asks in any case."""
        known = self._remotes.get(remote)
        if known is not None and not self.capabilities.late_writes:
            known.forget_grant(grant)

    def finish_grant(self, grant: TicketId) -> bool:
        """See `Transport`."""
        if not self.capabilities.late_writes and self._ledger.finish_grant(grant):
            return True
        self.close_grant(grant)
        return False

    def close_grant(self, grant: TicketId) -> None:
        """See `Transport`."""
        for writer in self._ledger.close_grant(grant):
            self._writers[writer].send_close_grant(grant)
        for quiescent in self._ledger.take_quiescent():
            self._reactor.report(GrantQuiescent(quiescent))

    def _make_writer(self, writer: AdmittedWriter, attach: A) -> W:
        """The owner's end for a peer that attached.

        Raises:
            TransferError: the region cannot be reached; the peer gets the reason.
        """
        raise NotImplementedError

    def _admit(self, connection: Connection, attach: A, region: PagedRegion) -> None:
        self._num_writers += 1
        id_ = WriterId(self._num_writers)
        on_over = partial(self._writer_over, connection)
        admitted = AdmittedWriter(id_, connection, region, self._ledger, self._reactor, on_over)
        try:
            writer = self._make_writer(admitted, attach)
        except TransferError as exc:
            self._refuse(connection, "attach", str(exc)[:MAX_REASON_CHARS])
            return
        self._writers[id_] = writer
        holder = GrantHolder(Epoch(attach.epoch), connection.channel.peer)
        writer.start(self._ledger.add_writer(id_, holder, region.handle))

    def _writer_over(self, connection: Connection, writer: WriterId) -> None:
        if self._listener is not None:
            self._listener.forget(connection)
        self._writers.pop(writer, None)

    def _release(self) -> None:
        for remote in self._leaving:
            remote.close()
        super()._release()
        for writer in self._writers.values():
            writer.close()
        self._writers.clear()
