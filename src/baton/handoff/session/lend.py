"""What the prefill worker has lent, and to whom: pure.

    promise ──► PROMISED ── lend ──► LENT ── recall, or its time is over ──► RECALLED
                   │ forget            │                                        │ asked again
                   ▼                   └──────────── returned · ended ──────────┤ and again
                 (none)                                                         ▼
                                                              (none): LoanEnded, the engine's again

    returned  the borrower said so, over whichever link
    ended     its process is proved gone, and its mappings with it

Nothing else ends a loan: not the link, which tells nothing of a mapping, and not time, for a
borrower that was stopped may read the moment it goes on. What time does is to recall. So what a
borrower may hold is bounded in blocks instead; a worker that lends no more is asked to write.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from baton.clock import Instant

if TYPE_CHECKING:
    from collections.abc import Iterable

    from baton.ids import Epoch, TicketId

RECALL_INTERVAL_S: Final = 1.0
MAX_LOANS: Final = 4096


@dataclass(frozen=True, slots=True)
class LoanLimits:
    """Blocks that may be out, promised ones counted: to one borrower, and in all."""

    per_borrower: int
    in_all: int

    @classmethod
    def of_pool(cls, num_blocks: int) -> LoanLimits:
        """Half of the pool to one, three quarters to all: the rest goes on prefilling."""
        return cls(num_blocks // 2, num_blocks * 3 // 4)


@dataclass(slots=True)
class _Loan:
    borrower: Epoch
    num_blocks: int
    recall_at: Instant | None = None  # None: promised, not lent

    @property
    def is_lent(self) -> bool:
        return self.recall_at is not None


class LoanBook:
    """Promises and loans by ticket. Owner: the agent's thread."""

    def __init__(self, limits: LoanLimits) -> None:
        self.limits = limits
        self._loans: dict[TicketId, _Loan] = {}
        self._held: Counter[Epoch] = Counter()

    @property
    def num_blocks(self) -> int:
        """Blocks lent or promised."""
        return self._held.total()

    def holds(self, borrower: Epoch) -> bool:
        """Whether this life of a worker has, or was promised, anything."""
        return self._held[borrower] > 0

    def knows(self, ticket: TicketId) -> bool:
        """Whether something is promised or lent for a ticket."""
        return ticket in self._loans

    def promise(self, ticket: TicketId, borrower: Epoch, num_blocks: int) -> str | None:
        """Set aside a loan of that size; or why not."""
        if ticket in self._loans:
            return "it was lent before"
        if len(self._loans) >= MAX_LOANS:
            return f"{MAX_LOANS} loans are out"
        if self._held[borrower] + num_blocks > self.limits.per_borrower:
            return (
                f"{num_blocks} blocks more than the {self._held[borrower]} that it has are over "
                f"the limit of {self.limits.per_borrower}"
            )
        if self.num_blocks + num_blocks > self.limits.in_all:
            return f"{self.num_blocks} blocks are lent, at most {self.limits.in_all} may be"
        self._loans[ticket] = _Loan(borrower, num_blocks)
        self._held[borrower] += num_blocks
        return None

    def forget(self, ticket: TicketId) -> None:
        """The handoff ended without lending. Loans, and unknown tickets, are ignored."""
        loan = self._loans.get(ticket)
        if loan is not None and not loan.is_lent:
            self._close(ticket)

    def lend(self, ticket: TicketId, recall_at: Instant) -> None:
        """What was promised is about to be lent; recalled by itself at that time."""
        self._loans[ticket].recall_at = recall_at

    def returned(self, borrower: Epoch, tickets: Iterable[TicketId]) -> list[TicketId]:
        """The borrower reads nothing any more of these: those of them that were its loans."""
        return [self._close(ticket) for ticket in tickets if self._is_loan_to(borrower, ticket)]

    def ended(self, borrower: Epoch) -> list[TicketId]:
        """The borrower's process is gone: all its loans. Promises wait for the link's end."""
        mine = [ticket for ticket in self._loans if self._is_loan_to(borrower, ticket)]
        return [self._close(ticket) for ticket in mine]

    def recall(self, now: Instant) -> dict[Epoch, list[TicketId]]:
        """Room is short: what to ask back of whom. What was asked for just now is left out."""
        for loan in self._loans.values():
            if loan.recall_at is not None and loan.recall_at > now + RECALL_INTERVAL_S:
                loan.recall_at = now
        return self.tick(now)

    def tick(self, now: Instant) -> dict[Epoch, list[TicketId]]:
        """Loans whose time is over: what to ask back of whom, once an interval."""
        due: dict[Epoch, list[TicketId]] = {}
        for ticket, loan in self._loans.items():
            if loan.recall_at is not None and loan.recall_at <= now:
                loan.recall_at = Instant(now + RECALL_INTERVAL_S)
                due.setdefault(loan.borrower, []).append(ticket)
        return due

    def check_invariants(self) -> None:
        """Raise AssertionError where loans and counts disagree, or are over their limits."""
        held: Counter[Epoch] = Counter()
        for loan in self._loans.values():
            held[loan.borrower] += loan.num_blocks
        if held != self._held:
            raise AssertionError(f"{held} blocks in loans, {self._held} counted")
        if any(count > self.limits.per_borrower for count in held.values()):
            raise AssertionError("a borrower has more than it may")
        if held.total() > self.limits.in_all or len(self._loans) > MAX_LOANS:
            raise AssertionError("more is lent than may be")

    def _is_loan_to(self, borrower: Epoch, ticket: TicketId) -> bool:
        loan = self._loans.get(ticket)
        return loan is not None and loan.is_lent and loan.borrower == borrower

    def _close(self, ticket: TicketId) -> TicketId:
        loan = self._loans.pop(ticket)
        self._held[loan.borrower] -= loan.num_blocks
        return ticket
