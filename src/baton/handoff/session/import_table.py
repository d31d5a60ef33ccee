"""What the decode worker has borrowed, and what it owes word of: pure.

    borrow ──► HELD ── release ──► PENDING ── take_pending ──► UNACKED ── acked ──► (none)
                                      ▲  ▲                  │
      a handoff that asked to be lent ┘  └──── link_lost ───┘
      and failed: it may have been lent

A lender counts on hearing of each loan, so it is told until it has said that it heard: over
another link if one broke. `HELD` blocks are in use whatever becomes of link and lender: their
memory stays mapped.
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
    """With one lender. The three sets are disjoint; `recalled` are held ones."""

    held: set[TicketId] = field(default_factory=set)
    pending: set[TicketId] = field(default_factory=set)
    unacked: set[TicketId] = field(default_factory=set)
    revoked: set[TicketId] = field(default_factory=set)

    @property
    def is_even(self) -> bool:
        return not (self.held or self.pending or self.unacked)


class ImportTable:
    """Loans by lender and ticket. Owner: the agent's thread."""

    def __init__(self) -> None:
        self._accounts: dict[Epoch, _PerExporter] = {}
        self._exporter_of: dict[TicketId, Epoch] = {}

    @property
    def exporters(self) -> list[Epoch]:
        """Those with whom something is open."""
        return list(self._accounts)

    def holds(self, exporter: Epoch) -> bool:
        """Whether blocks of this lender are in use."""
        return bool(self._account(exporter).held)

    def has_pending(self, exporter: Epoch) -> bool:
        """Whether this lender has not heard, or not said that it heard, of a return."""
        account = self._account(exporter)
        return bool(account.pending or account.unacked)

    def add(self, ticket: TicketId, exporter: Epoch) -> None:
        """From here the engine reads the lender's blocks."""
        self._accounts.setdefault(exporter, _PerExporter()).held.add(ticket)
        self._exporter_of[ticket] = exporter

    def release(self, ticket: TicketId) -> Epoch | None:
        """The engine reads them no more; whose they are, None if they are nobody's."""
        exporter = self._exporter_of.pop(ticket, None)
        if exporter is not None:
            account = self._accounts[exporter]
            account.held.discard(ticket)
            account.revoked.discard(ticket)
            account.pending.add(ticket)
        return exporter

    def queue_release(self, ticket: TicketId, exporter: Epoch) -> None:
        """Nothing of what was or may have been lent will be read; the lender is to know."""
        if self.release(ticket) is None:
            self._accounts.setdefault(exporter, _PerExporter()).pending.add(ticket)

    def take_pending(self, exporter: Epoch, num_tickets: int) -> list[TicketId]:
        """Returns to be said now, at most that many."""
        account = self._account(exporter)
        taken = list(islice(account.pending, num_tickets))
        account.pending.difference_update(taken)
        account.unacked.update(taken)
        return taken

    def acked(self, exporter: Epoch, tickets: Iterable[TicketId]) -> None:
        """The lender has heard of these."""
        self._account(exporter).unacked.difference_update(tickets)
        self._tidy(exporter)

    def link_lost(self, exporter: Epoch) -> None:
        """What was said last may not have been heard."""
        account = self._account(exporter)
        account.pending |= account.unacked
        account.unacked.clear()

    def drop_pending(self, exporter: Epoch) -> None:
        """The lender cannot be told any more, or has ended: held blocks stay in use."""
        account = self._account(exporter)
        account.pending.clear()
        account.unacked.clear()
        self._tidy(exporter)

    def revoked(self, exporter: Epoch, tickets: Iterable[TicketId]) -> list[TicketId]:
        """The lender wants blocks back: those of them that are held, each once."""
        account = self._account(exporter)
        fresh = [each for each in tickets if each in account.held - account.revoked]
        account.revoked.update(fresh)
        return fresh

    def check_invariants(self) -> None:
        """Raise AssertionError where the books disagree."""
        held = {ticket: name for name, each in self._accounts.items() for ticket in each.held}
        if held != self._exporter_of:
            raise AssertionError("a loan is held from another lender than it says")
        for account in self._accounts.values():
            if account.is_even:
                raise AssertionError("an account with nothing in it is kept")
            if not account.revoked <= account.held:
                raise AssertionError("what was given back is being recalled")
            if account.held & account.pending or account.pending & account.unacked:
                raise AssertionError("a loan is in two states")

    def _account(self, exporter: Epoch) -> _PerExporter:
        return self._accounts.get(exporter) or _PerExporter()

    def _tidy(self, exporter: Epoch) -> None:
        if self._account(exporter).is_even:
            self._accounts.pop(exporter, None)
