"""Blocks that the decode worker has imported, and its pending releases: pure.

    add ──► HELD ── release ──► PENDING ── take_pending ──► UNACKED ── acked ──► (none)
                                 ▲  ▲                         │
             queue_release ──────┘  └──────── link_lost ──────┘

    queue_release  a handoff that asked for an export failed: the peer may have exported

An exporter waits for the release of each export, so releases are sent until the exporter has
acknowledged them: over another link if one broke. `HELD` blocks stay in use even if the link or the
exporter is lost: their memory stays mapped.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from baton.ids import Epoch, TicketId


@dataclass(slots=True)
class _PerExporter:
    """With one exporter. `held`, `pending`, `unacked` are disjoint; `revoked` are held ones."""

    held: set[TicketId] = field(default_factory=set)
    pending: set[TicketId] = field(default_factory=set)
    unacked: set[TicketId] = field(default_factory=set)
    revoked: set[TicketId] = field(default_factory=set)

    @property
    def is_even(self) -> bool:
        return not (self.held or self.pending or self.unacked)


class ImportTable:
    """Imports by exporter and ticket. Owner: the agent's thread."""

    def __init__(self) -> None:
        self._accounts: dict[Epoch, _PerExporter] = {}
        self._exporter_of: dict[TicketId, Epoch] = {}

    @property
    def exporters(self) -> list[Epoch]:
        """Exporters with held blocks or pending releases."""
        return list(self._accounts)

    def holds(self, exporter: Epoch) -> bool:
        """Whether blocks of this exporter are in use."""
        return bool(self._account(exporter).held)

    def has_pending(self, exporter: Epoch) -> bool:
        """Whether a release to this exporter is not sent, or not acknowledged."""
        account = self._account(exporter)
        return bool(account.pending or account.unacked)

    def add(self, ticket: TicketId, exporter: Epoch) -> None:
        """From here the engine reads the exporter's blocks."""
        self._accounts.setdefault(exporter, _PerExporter()).held.add(ticket)
        self._exporter_of[ticket] = exporter

    def release(self, ticket: TicketId) -> Epoch | None:
        """The engine no longer reads them; the exporter, None if the ticket is unknown."""
        exporter = self._exporter_of.pop(ticket, None)
        if exporter is not None:
            account = self._accounts[exporter]
            account.held.discard(ticket)
            account.revoked.discard(ticket)
            account.pending.add(ticket)
        return exporter

    def queue_release(self, ticket: TicketId, exporter: Epoch) -> None:
        """Blocks that were or may have been exported will not be read: release them."""
        if self.release(ticket) is None:
            self._accounts.setdefault(exporter, _PerExporter()).pending.add(ticket)

    def take_pending(self, exporter: Epoch, num_tickets: int) -> list[TicketId]:
        """Releases to send now, at most that many."""
        account = self._account(exporter)
        taken = list(islice(account.pending, num_tickets))
        account.pending.difference_update(taken)
        account.unacked.update(taken)
        return taken

    def acked(self, exporter: Epoch, tickets: Iterable[TicketId]) -> None:
        """The exporter has acknowledged these."""
        self._account(exporter).unacked.difference_update(tickets)
        self._tidy(exporter)

    def link_lost(self, exporter: Epoch) -> None:
        """Unacknowledged releases may not have been received: send them again."""
        account = self._account(exporter)
        account.pending |= account.unacked
        account.unacked.clear()

    def drop_pending(self, exporter: Epoch) -> None:
        """The exporter is unreachable or has ended: drop its releases, keep held blocks."""
        account = self._account(exporter)
        account.pending.clear()
        account.unacked.clear()
        self._tidy(exporter)

    def revoked(self, exporter: Epoch, tickets: Iterable[TicketId]) -> list[TicketId]:
        """The exporter revokes blocks: those of them that are held, each once."""
        account = self._account(exporter)
        fresh = [each for each in tickets if each in account.held - account.revoked]
        account.revoked.update(fresh)
        return fresh

    def check_invariants(self) -> None:
        """Raise AssertionError where the tables disagree."""
        held = {ticket: name for name, each in self._accounts.items() for ticket in each.held}
        if held != self._exporter_of:
            raise AssertionError("an import is held from another exporter than recorded")
        for account in self._accounts.values():
            if account.is_even:
                raise AssertionError("an empty account is kept")
            if not account.revoked <= account.held:
                raise AssertionError("a released import is being revoked")
            if account.held & account.pending or account.pending & account.unacked:
                raise AssertionError("an import is in two states")

    def _account(self, exporter: Epoch) -> _PerExporter:
        return self._accounts.get(exporter) or _PerExporter()

    def _tidy(self, exporter: Epoch) -> None:
        if self._account(exporter).is_even:
            self._accounts.pop(exporter, None)
