"""Blocks of this worker that others attend over: who has them, and what proves that they end.

Blocks are exported only to a worker whose end can be proved: such a transport has a descriptor
of the process that mapped the region (`TracksReaders`). The link proves nothing. `ExportTable` has
the state of each export:

    reserve ──► RESERVED ── export ──► EXPORTED ── revoke, or `revoke_at` passed ──► REVOKED
                   │ forget               │                                             │ sent again
                   ▼                      └──────────── released · ended ───────────────┤ and again
                 (none)                                                                 ▼
                                             (none): ExportReleased, the engine may reuse the blocks

    released  the importer sent its release, over any link
    ended     the importer's process is proved gone, and its mappings with it

Nothing else releases an export: not a lost link, as the peer's mapping outlives it, and not time,
as an importer that was stopped (SIGSTOP) may read the moment it continues. Time only triggers a
revoke. So the number of blocks that an importer may hold is bounded instead; a worker at its limit
refuses the export and is asked to write.
"""

from __future__ import annotations

import logging
import os
import select
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from baton.clock import Instant
from baton.handoff.grants import Granted, Incarnation, incarnation_of_peer
from baton.handoff.interface import ExportReleased
from baton.handoff.messages import MAX_BATCH, Release, ReleaseAck, Revoke
from baton.kv.copies import blocks_holding
from baton.transfer.interface import TracksReaders

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from baton.handoff.kv_views import AgentContext
    from baton.handoff.peers import Peer
    from baton.ids import TicketId

REVOKE_INTERVAL_S: Final = 1.0
MAX_EXPORTS: Final = 4096


@dataclass(frozen=True, slots=True)
class ExportLimits:
    """Blocks that may be exported, reserved ones counted: to one importer, and in all."""

    per_importer: int
    in_total: int

    @classmethod
    def of_block_pool(cls, num_blocks: int) -> ExportLimits:
        """Half of the pool to one, three quarters to all: the rest goes on prefilling."""
        return cls(num_blocks // 2, num_blocks * 3 // 4)


@dataclass(slots=True)
class _Export:
    importer: Incarnation
    num_blocks: int
    revoke_at: Instant | None = None  # None: reserved, not exported

    @property
    def is_exported(self) -> bool:
        return self.revoke_at is not None


class ExportTable:
    """Reservations and exports by ticket. Owner: the agent's thread."""

    def __init__(self, limits: ExportLimits) -> None:
        self.limits = limits
        self._exports: dict[TicketId, _Export] = {}
        self._held: Counter[Incarnation] = Counter()

    @property
    def num_blocks(self) -> int:
        """Blocks exported or reserved."""
        return self._held.total()

    def holds(self, importer: Incarnation) -> bool:
        """Whether this incarnation of a worker has exported or reserved blocks."""
        return self._held[importer] > 0

    def knows(self, ticket: TicketId) -> bool:
        """Whether blocks are reserved or exported for a ticket."""
        return ticket in self._exports

    def reserve(self, ticket: TicketId, importer: Incarnation, num_blocks: int) -> str | None:
        """Reserve an export of that many blocks; or why not."""
        if ticket in self._exports:
            return "it was exported before"
        if len(self._exports) >= MAX_EXPORTS:
            return f"{MAX_EXPORTS} exports are open"
        if self._held[importer] + num_blocks > self.limits.per_importer:
            return (
                f"{num_blocks} blocks more than the {self._held[importer]} that it has are over "
                f"the limit of {self.limits.per_importer}"
            )
        if self.num_blocks + num_blocks > self.limits.in_total:
            return f"{self.num_blocks} blocks are exported, at most {self.limits.in_total} may be"
        self._exports[ticket] = _Export(importer, num_blocks)
        self._held[importer] += num_blocks
        return None

    def forget(self, ticket: TicketId) -> None:
        """The handoff ended without an export. Exported and unknown tickets are ignored."""
        entry = self._exports.get(ticket)
        if entry is not None and not entry.is_exported:
            self._close(ticket)

    def export(self, ticket: TicketId, revoke_at: Instant) -> None:
        """The reserved blocks are about to be exported; `tick` revokes them at that time."""
        self._exports[ticket].revoke_at = revoke_at

    def released(self, importer: Incarnation, tickets: Iterable[TicketId]) -> list[TicketId]:
        """The importer no longer reads these: those of them that were exported to it."""
        return [self._close(ticket) for ticket in tickets if self._is_exported_to(importer, ticket)]

    def importer_died(self, importer: Incarnation) -> list[TicketId]:
        """The importer's process is gone: all its exports. Reservations last until link loss."""
        mine = [ticket for ticket in self._exports if self._is_exported_to(importer, ticket)]
        return [self._close(ticket) for ticket in mine]

    def revoke(self, now: Instant) -> dict[Incarnation, list[TicketId]]:
        """Blocks are short: what to revoke at which importer, except what was revoked just now."""
        for entry in self._exports.values():
            if entry.revoke_at is not None and entry.revoke_at > now + REVOKE_INTERVAL_S:
                entry.revoke_at = now
        return self.tick(now)

    def tick(self, now: Instant) -> dict[Incarnation, list[TicketId]]:
        """Exports whose `revoke_at` has passed, by importer; each once an interval."""
        due: dict[Incarnation, list[TicketId]] = {}
        for ticket, entry in self._exports.items():
            if entry.revoke_at is not None and entry.revoke_at <= now:
                entry.revoke_at = Instant(now + REVOKE_INTERVAL_S)
                due.setdefault(entry.importer, []).append(ticket)
        return due

    def check_invariants(self) -> None:
        """Raise AssertionError where exports and counts disagree, or are over their limits."""
        held: Counter[Incarnation] = Counter()
        for entry in self._exports.values():
            held[entry.importer] += entry.num_blocks
        if held != self._held:
            raise AssertionError(f"{held} blocks in exports, {self._held} counted")
        if any(count > self.limits.per_importer for count in held.values()):
            raise AssertionError("an importer has more blocks than its limit")
        if held.total() > self.limits.in_total or len(self._exports) > MAX_EXPORTS:
            raise AssertionError("more is exported than the limit")

    def _is_exported_to(self, importer: Incarnation, ticket: TicketId) -> bool:
        entry = self._exports.get(ticket)
        return entry is not None and entry.is_exported and entry.importer == importer

    def _close(self, ticket: TicketId) -> TicketId:
        entry = self._exports.pop(ticket)
        self._held[entry.importer] -= entry.num_blocks
        return ticket


logger = logging.getLogger(__name__)


class SharedBlockExporter:
    """The blocks that this worker exports. Owner: the agent's thread."""

    def __init__(self, context: AgentContext) -> None:
        self._context = context
        self.table = ExportTable(ExportLimits.of_block_pool(_count_blocks(context)))
        self._processes: dict[Incarnation, int] = {}

    def reserve(self, granted: Granted) -> str | None:
        """Whether a grant with op "NONE" can be served; why not, if not."""
        importer = incarnation_of_peer(granted.peer)
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
        num_blocks = len(blocks_holding(grant.start, grant.num_tokens, size))
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
        importer = incarnation_of_peer(peer)
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
            if not self.table.holds(importer):  # else what is reserved may yet be exported
                self._unwatch(importer)
            if lost:
                logger.info("handoff: an importer's process ended with %d exports", len(lost))
            self._end(lost)
        self._send_revokes(self.table.tick(self._context.clock.now()))

    def peer_gone(self, peer: Peer) -> None:
        """A link ended: its importer is watched for as long as it has exported blocks."""
        importer = incarnation_of_peer(peer)
        if importer is not None and not self.table.holds(importer):
            self._unwatch(importer)

    def close(self) -> None:
        """Stop watching. Exported blocks stay exported until this process ends."""
        for importer in tuple(self._processes):
            self._unwatch(importer)

    def _end(self, tickets: Sequence[TicketId]) -> None:
        for ticket in tickets:
            self._context.emit(ExportReleased(ticket))

    def _send_revokes(self, due: Mapping[Incarnation, list[TicketId]]) -> None:
        if not due:
            return
        for peer in self._context.peers:
            importer = incarnation_of_peer(peer)
            tickets = due.get(importer, []) if importer and peer.dialed is None else []
            for start in range(0, len(tickets), MAX_BATCH):
                self._context.peers.send(peer, Revoke(tuple(tickets[start : start + MAX_BATCH])))

    def _watch(self, importer: Incarnation) -> bool:
        if importer not in self._processes:
            _, epoch = importer
            for transport in self._context.transports:
                if isinstance(transport, TracksReaders):
                    process = transport.open_reader(epoch)
                    if process is not None:
                        self._processes[importer] = process
                        break
        return importer in self._processes

    def _unwatch(self, importer: Incarnation) -> None:
        process = self._processes.pop(importer, None)
        if process is not None:
            os.close(process)

    def _find_dead_importers(self) -> list[Incarnation]:
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
