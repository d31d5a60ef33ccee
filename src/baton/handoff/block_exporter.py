"""Blocks of this worker that others attend over: who has them, and what proves that they end.

Blocks are exported only to a worker whose end can be proved: such a transport has a descriptor
of the process that mapped the region (`TracksReaders`). The link proves nothing.
"""

from __future__ import annotations

import logging
import os
import select
from typing import TYPE_CHECKING

from baton.handoff.grants import epoch_of
from baton.handoff.interface import ExportReleased
from baton.handoff.messages import MAX_BATCH, ReleaseAck, Revoke
from baton.handoff.session.export_table import ExportLimits, ExportTable
from baton.transfer.interface import TracksReaders

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from baton.clock import Instant
    from baton.handoff.context import AgentContext
    from baton.handoff.grants import Granted
    from baton.handoff.messages import Release
    from baton.handoff.peers import Peer
    from baton.ids import Epoch, TicketId

logger = logging.getLogger(__name__)


class SharedBlockExporter:
    """The blocks that this worker exports. Owner: the agent's thread."""

    def __init__(self, context: AgentContext) -> None:
        self._context = context
        self.table = ExportTable(ExportLimits.of_block_pool(_count_blocks(context)))
        self._processes: dict[Epoch, int] = {}

    def reserve(self, granted: Granted) -> str | None:
        """Whether a grant with op "NONE" can be served; why not, if not."""
        importer = epoch_of(granted.peer)
        if importer is None:
            raise AssertionError("a grant of a peer that sent no Hello")
        served = self._context.view_to(granted.peer)
        if served.view.peer_mappings is None:
            return f"{self._context.me.worker} cannot export blocks: its engine or memory cannot"
        if granted.peer.negotiated.theirs.layout != served.view.layout:
            return "the pages of the two workers differ"
        if not self._watch(importer):
            return "the end of the importer's process could not be proved"
        size, grant = served.view.layout.block_size, granted.grant
        num_blocks = -(-grant.num_tokens // size) - grant.start // size
        return self.table.reserve(granted.ticket.id, importer, num_blocks)

    def is_reserved(self, ticket: TicketId) -> bool:
        """Whether blocks are promised or exported for it."""
        return self.table.knows(ticket)

    def forget(self, ticket: TicketId) -> None:
        """A handoff is over; if it exported nothing, its promise ends."""
        self.table.forget(ticket)

    def export(self, ticket: TicketId, revoke_at: Instant) -> None:
        """The promised blocks are announced to the importer."""
        self.table.export(ticket, revoke_at)

    def released(self, peer: Peer, message: Release) -> None:
        """An importer released these. Unknown tickets are over already."""
        importer = epoch_of(peer)
        if importer is not None:
            self._end(self.table.released(importer, message.tickets))
            self._context.peers.send(peer, ReleaseAck(message.tickets))

    def revoke_exported(self) -> None:
        """See `SharedBlockPort.revoke_exported`."""
        self._send_revokes(self.table.revoke(self._context.clock.now()))

    def tick(self) -> None:
        """End what a process took with it; recall what was out for too long."""
        for importer in self._find_dead_importers():
            lost = self.table.importer_died(importer)
            self._unwatch(importer)
            if lost:
                logger.info("handoff: an importer's process ended with %d exports", len(lost))
            self._end(lost)
        self._send_revokes(self.table.tick(self._context.clock.now()))

    def peer_gone(self, peer: Peer) -> None:
        """A link ended: its importer is watched for as long as it has exported blocks."""
        importer = epoch_of(peer)
        if importer is not None and not self.table.holds(importer):
            self._unwatch(importer)

    def close(self) -> None:
        """Stop watching. Exported blocks stay exported until this process ends."""
        for importer in tuple(self._processes):
            self._unwatch(importer)

    def _end(self, tickets: Sequence[TicketId]) -> None:
        for ticket in tickets:
            self._context.emit(ExportReleased(ticket))

    def _send_revokes(self, due: Mapping[Epoch, list[TicketId]]) -> None:
        if not due:
            return
        for peer in self._context.peers:
            importer = epoch_of(peer)
            tickets = due.get(importer, []) if importer and peer.dialed is None else []
            for start in range(0, len(tickets), MAX_BATCH):
                self._context.peers.send(peer, Revoke(tuple(tickets[start : start + MAX_BATCH])))

    def _watch(self, importer: Epoch) -> bool:
        if importer not in self._processes:
            for transport in self._context.transports:
                if isinstance(transport, TracksReaders):
                    process = transport.open_reader(importer)
                    if process is not None:
                        self._processes[importer] = process
                        break
        return importer in self._processes

    def _unwatch(self, importer: Epoch) -> None:
        process = self._processes.pop(importer, None)
        if process is not None:
            os.close(process)

    def _find_dead_importers(self) -> list[Epoch]:
        if not self._processes:
            return []
        poll = select.poll()
        for process in self._processes.values():
            poll.register(process, select.POLLIN)
        ready = {fd for fd, _ in poll.poll(0)}
        return [importer for importer, process in self._processes.items() if process in ready]


def _count_blocks(context: AgentContext) -> int:
    """Blocks of the engine that can be exported: the smallest pool of a view with peer mappings."""
    return min(
        (
            min(array.num_pages for array in served.view.region.arrays)
            for served in context.views
            if served.view.peer_mappings is not None
        ),
        default=0,
    )
