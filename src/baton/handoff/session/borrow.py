"""What the decode worker has borrowed, and what it owes word of: pure.

    borrow ──► HELD ── give_back ──► OWED ── take_owed ──► SAID ── settled ──► (none)
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
class _Account:
    """With one lender. The three sets are disjoint; `recalled` are held ones."""

    held: set[TicketId] = field(default_factory=set)
    owed: set[TicketId] = field(default_factory=set)
    said: set[TicketId] = field(default_factory=set)
    recalled: set[TicketId] = field(default_factory=set)

    @property
    def is_even(self) -> bool:
        return not (self.held or self.owed or self.said)


class BorrowBook:
    """Loans by lender and ticket. Owner: the agent's thread."""

    def __init__(self) -> None:
        self._accounts: dict[Epoch, _Account] = {}
        self._lender_of: dict[TicketId, Epoch] = {}

    @property
    def lenders(self) -> list[Epoch]:
        """Those with whom something is open."""
        return list(self._accounts)

    def holds(self, lender: Epoch) -> bool:
        """Whether blocks of this lender are in use."""
        return bool(self._account(lender).held)

    def owes(self, lender: Epoch) -> bool:
        """Whether this lender has not heard, or not said that it heard, of a return."""
        account = self._account(lender)
        return bool(account.owed or account.said)

    def borrow(self, ticket: TicketId, lender: Epoch) -> None:
        """From here the engine reads the lender's blocks."""
        self._accounts.setdefault(lender, _Account()).held.add(ticket)
        self._lender_of[ticket] = lender

    def give_back(self, ticket: TicketId) -> Epoch | None:
        """The engine reads them no more; whose they are, None if they are nobody's."""
        lender = self._lender_of.pop(ticket, None)
        if lender is not None:
            account = self._accounts[lender]
            account.held.discard(ticket)
            account.recalled.discard(ticket)
            account.owed.add(ticket)
        return lender

    def owe(self, ticket: TicketId, lender: Epoch) -> None:
        """Nothing of what was or may have been lent will be read; the lender is to know."""
        if self.give_back(ticket) is None:
            self._accounts.setdefault(lender, _Account()).owed.add(ticket)

    def take_owed(self, lender: Epoch, num_tickets: int) -> list[TicketId]:
        """Returns to be said now, at most that many."""
        account = self._account(lender)
        taken = list(islice(account.owed, num_tickets))
        account.owed.difference_update(taken)
        account.said.update(taken)
        return taken

    def settled(self, lender: Epoch, tickets: Iterable[TicketId]) -> None:
        """The lender has heard of these."""
        self._account(lender).said.difference_update(tickets)
        self._tidy(lender)

    def link_lost(self, lender: Epoch) -> None:
        """What was said last may not have been heard."""
        account = self._account(lender)
        account.owed |= account.said
        account.said.clear()

    def write_off(self, lender: Epoch) -> None:
        """The lender cannot be told any more, or has ended: held blocks stay in use."""
        account = self._account(lender)
        account.owed.clear()
        account.said.clear()
        self._tidy(lender)

    def recalled(self, lender: Epoch, tickets: Iterable[TicketId]) -> list[TicketId]:
        """The lender wants blocks back: those of them that are held, each once."""
        account = self._account(lender)
        fresh = [each for each in tickets if each in account.held - account.recalled]
        account.recalled.update(fresh)
        return fresh

    def check_invariants(self) -> None:
        """Raise AssertionError where the books disagree."""
        held = {ticket: name for name, each in self._accounts.items() for ticket in each.held}
        if held != self._lender_of:
            raise AssertionError("a loan is held from another lender than it says")
        for account in self._accounts.values():
            if account.is_even:
                raise AssertionError("an account with nothing in it is kept")
            if not account.recalled <= account.held:
                raise AssertionError("what was given back is being recalled")
            if account.held & account.owed or account.owed & account.said:
                raise AssertionError("a loan is in two states")

    def _account(self, lender: Epoch) -> _Account:
        return self._accounts.get(lender) or _Account()

    def _tidy(self, lender: Epoch) -> None:
        if self._account(lender).is_even:
            self._accounts.pop(lender, None)
