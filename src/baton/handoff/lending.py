"""Blocks of this worker that others attend over: who has them, and what proves that they end.

Blocks are lent only to a worker whose end can be proved: a transport that lends keeps a descriptor
of the process that mapped the region (`WatchesReaders`). The link proves nothing.
"""

from __future__ import annotations

import logging
import os
import select
from typing import TYPE_CHECKING

from baton.handoff.grants import epoch_of
from baton.handoff.interface import LoanEnded
from baton.handoff.messages import MAX_BATCH, Recalled, Settled
from baton.handoff.session.lend import LoanBook, LoanLimits
from baton.transfer.readers import WatchesReaders

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from baton.clock import Instant
    from baton.handoff.desk import Desk
    from baton.handoff.grants import Granted
    from baton.handoff.messages import Returned
    from baton.handoff.peers import Peer
    from baton.ids import Epoch, TicketId

logger = logging.getLogger(__name__)


class LendingDesk:
    """What is lent by this worker. Owner: the agent's thread."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self.book = LoanBook(LoanLimits.of_pool(_count_blocks(desk)))
        self._processes: dict[Epoch, int] = {}

    def promise(self, granted: Granted) -> str | None:
        """Whether a grant with mover "nobody" can be served; why not, if not."""
        borrower = epoch_of(granted.peer)
        if borrower is None:
            raise AssertionError("a grant of somebody who has not introduced itself")
        served = self._desk.face_to(granted.peer)
        if served.face.annexes is None:
            return f"{self._desk.me.worker} lends no blocks: its engine or its memory cannot"
        if granted.peer.met.theirs.layout != served.face.layout:
            return "the pages of the two workers differ"
        if not self._watch(borrower):
            return "the end of the borrower's process could not be proved"
        size, grant = served.face.layout.block_size, granted.grant
        num_blocks = -(-grant.num_tokens // size) - grant.start // size
        return self.book.promise(granted.ticket.id, borrower, num_blocks)

    def has_promised(self, ticket: TicketId) -> bool:
        """Whether something is set aside for it, or lent."""
        return self.book.knows(ticket)

    def forget(self, ticket: TicketId) -> None:
        """A handoff is over; if it did not lend, nothing is set aside for it any more."""
        self.book.forget(ticket)

    def lend(self, ticket: TicketId, recall_at: Instant) -> None:
        """What was promised is on its way to the borrower."""
        self.book.lend(ticket, recall_at)

    def returned(self, peer: Peer, message: Returned) -> None:
        """A borrower reads these no more, and never will. Unknown ones are over already."""
        borrower = epoch_of(peer)
        if borrower is not None:
            self._end(self.book.returned(borrower, message.tickets))
            self._desk.peers.say(peer, Settled(message.tickets))

    def recall(self) -> None:
        """See `LoanPort.recall`."""
        self._ask(self.book.recall(self._desk.clock.now()))

    def tick(self) -> None:
        """End what a process took with it; recall what was out for too long."""
        for borrower in self._find_ended():
            lost = self.book.ended(borrower)
            self._unwatch(borrower)
            if lost:
                logger.info("handoff: a borrower's process ended with %d loans", len(lost))
            self._end(lost)
        self._ask(self.book.tick(self._desk.clock.now()))

    def peer_gone(self, peer: Peer) -> None:
        """A link ended: its borrower is watched for as long as it has something."""
        borrower = epoch_of(peer)
        if borrower is not None and not self.book.holds(borrower):
            self._unwatch(borrower)

    def close(self) -> None:
        """Watch nobody any more. What is lent stays lent, to this process' end."""
        for borrower in tuple(self._processes):
            self._unwatch(borrower)

    def _end(self, tickets: Sequence[TicketId]) -> None:
        for ticket in tickets:
            self._desk.emit(LoanEnded(ticket))

    def _ask(self, due: Mapping[Epoch, list[TicketId]]) -> None:
        if not due:
            return
        for peer in self._desk.peers:
            borrower = epoch_of(peer)
            tickets = due.get(borrower, []) if borrower and peer.dialed is None else []
            for start in range(0, len(tickets), MAX_BATCH):
                self._desk.peers.say(peer, Recalled(tuple(tickets[start : start + MAX_BATCH])))

    def _watch(self, borrower: Epoch) -> bool:
        if borrower not in self._processes:
            for transport in self._desk.transports:
                if isinstance(transport, WatchesReaders):
                    process = transport.open_reader(borrower)
                    if process is not None:
                        self._processes[borrower] = process
                        break
        return borrower in self._processes

    def _unwatch(self, borrower: Epoch) -> None:
        process = self._processes.pop(borrower, None)
        if process is not None:
            os.close(process)

    def _find_ended(self) -> list[Epoch]:
        if not self._processes:
            return []
        poll = select.poll()
        for process in self._processes.values():
            poll.register(process, select.POLLIN)
        ready = {fd for fd, _ in poll.poll(0)}
        return [borrower for borrower, process in self._processes.items() if process in ready]


def _count_blocks(desk: Desk) -> int:
    """Blocks of the engine's that could be lent: the smallest pool of a face that lends."""
    return min(
        (
            min(array.num_pages for array in served.face.region.arrays)
            for served in desk.faces
            if served.face.annexes is not None
        ),
        default=0,
    )
