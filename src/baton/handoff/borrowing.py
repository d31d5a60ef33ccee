"""Peers' blocks that this worker's engine attends over: mapped beside its own, and given back.

    attach (a transport that lends) ──► its pages, mapped as an annex ──► blocks borrowed from it
                                                                              │ given back
    the link is gone and nothing is held: unmapped, detached ◄────────────────┘

A mapping needs neither link nor transport nor the lender's process: an answer that was begun over
borrowed blocks ends well whatever becomes of the lender.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from baton.clock import Instant
from baton.errors import BatonError, ProtocolError
from baton.handoff.interface import LoanRecalled
from baton.handoff.messages import MAX_BATCH, Returned, unpack_blocks
from baton.handoff.routes import Reach
from baton.transfer.region import view_pages

if TYPE_CHECKING:
    from baton.authority.ticket import WorkerRef
    from baton.handoff.desk import Desk
    from baton.handoff.faces import Face
    from baton.handoff.interface import ReceiveOrder
    from baton.handoff.messages import Lent
    from baton.handoff.peers import Peer
    from baton.handoff.session.borrow import BorrowBook
    from baton.ids import Epoch, TicketId
    from baton.transfer.annexes import Annex, Annexes
    from baton.transfer.interface import RegionDescriptor, RemoteId, Transport

logger = logging.getLogger(__name__)

REDIAL_S: Final = 2.0
REATTACH_S: Final = 1.0
LONGEST_PAUSE_S: Final = 60.0
"""Pages that were lost while the link lasts are attached again after a pause, doubled each time."""
TELLING_TIMEOUT_S: Final = 60.0
"""How long a lender out of reach is dialed; it is told over the next link, if there is one."""
MAX_SILENT_LENDERS: Final = 64
"""Of those: beyond, the oldest are forgotten, which have died by all appearance."""


@dataclass(slots=True, eq=False)
class _Lender:
    """One life of a worker: its pages, attached by `remote`, mapped as `annex`; or why not.

    `reason` holds until `retry_at`.
    """

    ref: WorkerRef
    face: Face
    annexes: Annexes
    transport: Transport
    peer: Peer | None
    remote: RemoteId | None = None
    annex: Annex | None = None
    reason: str = ""
    retry_at: float = 0.0
    num_failures: int = 0
    tell_before: Instant | None = None
    redial_at: float = 0.0


class BorrowingDesk:
    """What this worker borrows. Owner: the agent's thread."""

    def __init__(self, desk: Desk, book: BorrowBook) -> None:
        self._desk, self.book = desk, book
        self._lenders: dict[Epoch, _Lender] = {}

    def reach(self, peer: Peer) -> Reach:
        """Whether a peer's blocks can be attended over; `is_attached` tells when one waits."""
        lender = self._find(peer)
        if lender is None or lender.reason:
            return Reach.NONE
        is_mapped = lender.annex is not None and lender.remote is not None
        return Reach.READY if is_mapped else Reach.WAITING

    def explain(self, peer: Peer) -> str:
        """Why they cannot."""
        lender = None if peer.hello is None else self._lenders.get(peer.hello.epoch)
        return lender.reason if lender is not None else self._why_not(peer)

    def attached(self, transport: Transport, remote: RemoteId) -> Peer | None:
        """A transport says that a remote can be looked at: whose it is, if it is a lender's."""
        lender = self._of_remote(transport, remote)
        if lender is None:
            return None
        try:
            if lender.annex is None:
                lender.annex = lender.annexes.attach([
                    transport.view(remote, n) for n in range(len(lender.face.region.arrays))
                ])
        except BatonError as exc:
            self._fail(lender, str(exc))
        else:
            lender.num_failures = 0
        return lender.peer

    def lost(self, transport: Transport, remote: RemoteId, error: BatonError) -> Peer | None:
        """A transport says that a remote is out of reach: whose it is, if it is a lender's."""
        lender = self._of_remote(transport, remote)
        if lender is None:
            return None
        self._fail(lender, str(error))
        return lender.peer

    def borrow(self, peer: Peer, order: ReceiveOrder, lent: Lent) -> tuple[int, ...]:
        """Check what a peer lends and copy the block with the last token: the borrowed others.

        Raises:
            ProtocolError: it lends other blocks than were asked for, or some that it has not.
        """
        lender = None if peer.hello is None else self._lenders.get(peer.hello.epoch)
        if lender is None or lender.annex is None:
            raise ProtocolError("blocks are lent by a worker whose pages are not mapped here")
        blocks = unpack_blocks(lent.blocks)
        if lent.first_block != order.blocks.first or len(blocks) != len(order.blocks.blocks):
            raise ProtocolError("other blocks are lent than were asked for")
        if int(blocks.max()) >= lender.annex.num_pages:
            raise ProtocolError("a block is lent that the peer does not have")
        self._copy(lender, int(blocks[-1]), int(order.blocks.blocks[-1]))
        borrowed = tuple(int(block) for block in lender.annex.first + blocks[:-1])
        if borrowed:
            self.book.borrow(order.ticket.id, order.ticket.prefill.epoch)
        else:
            self.owe(order.ticket.id, order.ticket.prefill.epoch)
        return borrowed

    def owe(self, ticket: TicketId, lender: Epoch) -> None:
        """Nothing of what may have been lent for this ticket will be read."""
        self.book.owe(ticket, lender)
        self._tell(lender)

    def give_back(self, ticket: TicketId) -> None:
        """See `LoanPort.give_back`."""
        epoch = self.book.give_back(ticket)
        if epoch is not None:
            self._tell(epoch)
            self._tidy(epoch)

    def settled(self, peer: Peer, tickets: tuple[TicketId, ...]) -> None:
        """The lender has heard of returns."""
        if peer.hello is not None:
            self.book.settled(peer.hello.epoch, tickets)

    def recalled(self, peer: Peer, tickets: tuple[TicketId, ...]) -> None:
        """The lender wants blocks back."""
        if peer.hello is not None:
            for ticket in self.book.recalled(peer.hello.epoch, tickets):
                self._desk.emit(LoanRecalled(ticket))

    def peer_up(self, peer: Peer) -> None:
        """A link is there (again): say what the lender has not heard."""
        lender = None if peer.hello is None else self._lenders.get(peer.hello.epoch)
        if lender is not None and peer.dialed is not None:
            lender.peer, lender.tell_before = peer, None
            if lender.reason:
                self._drop(lender)  # it may be attached once more
            self._tell(lender.ref.epoch)

    def peer_gone(self, peer: Peer) -> None:
        """A link ended. What is held stays in use."""
        if peer.dialed is None:
            return
        epoch = peer.dialed.epoch
        self.book.link_lost(epoch)
        lender = self._lenders.get(epoch)
        if lender is not None and lender.peer is peer:
            lender.peer = None
            self._tidy(epoch)

    def tick(self) -> None:
        """Reach for lenders that are to be told something and are not linked."""
        for served in self._desk.faces:
            if served.face.annexes is not None:
                served.face.annexes.prefault()
        now = self._desk.clock.now()
        silent: list[Epoch] = []
        for epoch in self.book.lenders:
            lender = self._lenders.get(epoch)
            if lender is None or lender.peer is not None or not self.book.owes(epoch):
                continue
            if lender.tell_before is None:
                lender.tell_before = Instant(now + TELLING_TIMEOUT_S)
            if now >= lender.tell_before:
                silent.append(epoch)
            elif now >= lender.redial_at:
                lender.redial_at = now + REDIAL_S
                self._desk.peers.dial(lender.ref)
        for epoch in silent[:-MAX_SILENT_LENDERS]:
            logger.info("handoff: %s was not told what it has back", epoch)
            self.book.write_off(epoch)
            self._tidy(epoch)

    def _find(self, peer: Peer) -> _Lender | None:
        """The record of a peer, made now if its pages can be looked at here."""
        if peer.hello is None or peer.dialed is None:
            return None
        known = self._lenders.get(peer.hello.epoch)
        if known is None:
            if self._why_not(peer):
                return None
            face = self._desk.face_to(peer).face
            transport = self._lending(peer)[0][0]
            if face.annexes is None:
                return None
            known = _Lender(peer.dialed, face, face.annexes, transport, peer)
            self._lenders[peer.hello.epoch] = known
        known.peer = peer
        if self._desk.clock.now() >= known.retry_at:
            known.reason = ""
        if known.remote is None and not known.reason:
            try:
                known.remote = known.transport.attach(self._lending(peer)[0][1])
            except BatonError as exc:
                self._fail(known, str(exc))
        return known

    def _why_not(self, peer: Peer) -> str:
        face = self._desk.face_to(peer).face
        if face.annexes is None:
            return f"{self._desk.me.worker} borrows no blocks: its engine or its memory cannot"
        if peer.met.theirs.layout != face.layout:
            return "the pages of the two workers differ (block size, dtype or arrangement)"
        if not self._lending(peer):
            return f"no transport in common with {peer.name} lends"
        return ""

    def _lending(self, peer: Peer) -> list[tuple[Transport, RegionDescriptor]]:
        """Transports by which a peer's pages can be looked at, in this worker's order."""
        regions = {region.transport: region for region in peer.met.theirs.regions}
        return [
            (transport, regions[transport.kind])
            for transport in self._desk.transports
            if transport.capabilities.lends and transport.kind in regions
        ]

    def _copy(self, lender: _Lender, source: int, target: int) -> None:
        """One block of the lender's into one of the engine's own, all layers."""
        if lender.annex is None:
            raise AssertionError("nothing is lent before it is mapped")
        region = lender.face.region
        for layer, array in enumerate(region.arrays):
            theirs = lender.annexes.view(layer)[lender.annex.first + source]
            view_pages(region.memory, array)[target] = theirs

    def _tell(self, epoch: Epoch) -> None:
        lender = self._lenders.get(epoch)
        if lender is None or lender.peer is None or lender.peer.hello is None:
            return
        while tickets := self.book.take_owed(epoch, MAX_BATCH):
            self._desk.peers.say(lender.peer, Returned(tuple(tickets)))

    def _fail(self, lender: _Lender, reason: str) -> None:
        """Nothing can be borrowed from it for a while. What is mapped and held stays in use."""
        pause_s = min(LONGEST_PAUSE_S, REATTACH_S * 2**lender.num_failures)
        lender.reason, lender.retry_at = reason, self._desk.clock.now() + pause_s
        lender.num_failures = min(lender.num_failures + 1, 16)
        if lender.remote is not None:
            lender.transport.detach(lender.remote)
            lender.remote = None

    def _tidy(self, epoch: Epoch) -> None:
        """Let go of a lender that is not linked and of which nothing is held."""
        lender = self._lenders.get(epoch)
        if lender is not None and lender.peer is None and not self.book.holds(epoch):
            self._drop(lender)
            if not self.book.owes(epoch):
                del self._lenders[epoch]

    def _drop(self, lender: _Lender) -> None:
        """Unmap and detach, if nothing is held."""
        lender.reason = ""
        if lender.remote is not None:
            lender.transport.detach(lender.remote)
            lender.remote = None
        if lender.annex is not None and not self.book.holds(lender.ref.epoch):
            lender.annexes.detach(lender.annex)
            lender.annex = None

    def _of_remote(self, transport: Transport, remote: RemoteId) -> _Lender | None:
        for lender in self._lenders.values():
            if lender.transport is transport and lender.remote == remote:
                return lender
        return None
