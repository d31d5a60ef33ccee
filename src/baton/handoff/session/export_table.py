"""What the prefill worker has lent, and to whom: pure.

    promise ──► PROMISED ── lend ──► LENT ── recall, or its time is over ──► RECALLED
                   │ forget            │                                        │ asked again
                   ▼                   └──────────── returned · ended ──────────┤ and again
                 (none)                                                         ▼
                                                              (none): ExportReleased, the engine's
                                                              again

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

REVOKE_INTERVAL_S: Final = 1.0
MAX_EXPORTS: Final = 4096


@dataclass(frozen=True, slots=True)
class ExportLimits:
    """Blocks that may be out, promised ones counted: to one borrower, and in all."""

    per_importer: int
    in_total: int

    @classmethod
    def of_block_pool(cls, num_blocks: int) -> ExportLimits:
        """Half of the pool to one, three quarters to all: the rest goes on prefilling."""
        return cls(num_blocks // 2, num_blocks * 3 // 4)


@dataclass(slots=True)
class _Export:
    importer: Epoch
    num_blocks: int
    revoke_at: Instant | None = None  # None: promised, not lent

    @property
    def is_exported(self) -> bool:
        return self.revoke_at is not None


class ExportTable:
    """Promises and loans by ticket. Owner: the agent's thread."""

    def __init__(self, limits: ExportLimits) -> None:
        self.limits = limits
        self._exports: dict[TicketId, _Export] = {}
        self._held: Counter[Epoch] = Counter()

    @property
    def num_blocks(self) -> int:
        """Blocks lent or promised."""
        return self._held.total()

    def holds(self, importer: Epoch) -> bool:
        """Whether this life of a worker has, or was promised, anything."""
        return self._held[importer] > 0

    def knows(self, ticket: TicketId) -> bool:
        """Whether something is promised or lent for a ticket."""
        return ticket in self._exports

    def reserve(self, ticket: TicketId, importer: Epoch, num_blocks: int) -> str | None:
        """Set aside a loan of that size; or why not."""
        if ticket in self._exports:
            return "it was lent before"
        if len(self._exports) >= MAX_EXPORTS:
            return f"{MAX_EXPORTS} loans are out"
        if self._held[importer] + num_blocks > self.limits.per_importer:
            return (
                f"{num_blocks} blocks more than the {self._held[importer]} that it has are over "
                f"the limit of {self.limits.per_importer}"
            )
        if self.num_blocks + num_blocks > self.limits.in_total:
            return f"{self.num_blocks} blocks are lent, at most {self.limits.in_total} may be"
        self._exports[ticket] = _Export(importer, num_blocks)
        self._held[importer] += num_blocks
        return None

    def forget(self, ticket: TicketId) -> None:
        """The handoff ended without lending. Loans, and unknown tickets, are ignored."""
        entry = self._exports.get(ticket)
        if entry is not None and not entry.is_exported:
            self._close(ticket)

    def export(self, ticket: TicketId, revoke_at: Instant) -> None:
        """What was promised is about to be lent; recalled by itself at that time."""
        self._exports[ticket].revoke_at = revoke_at

    def released(self, importer: Epoch, tickets: Iterable[TicketId]) -> list[TicketId]:
        """The borrower reads nothing any more of these: those of them that were its loans."""
        return [self._close(ticket) for ticket in tickets if self._is_exported_to(importer, ticket)]

    def importer_died(self, importer: Epoch) -> list[TicketId]:
        """The borrower's process is gone: all its loans. Promises wait for the link's end."""
        mine = [ticket for ticket in self._exports if self._is_exported_to(importer, ticket)]
        return [self._close(ticket) for ticket in mine]

    def revoke(self, now: Instant) -> dict[Epoch, list[TicketId]]:
        """Room is short: what to ask back of whom. What was asked for just now is left out."""
        for entry in self._exports.values():
            if entry.revoke_at is not None and entry.revoke_at > now + REVOKE_INTERVAL_S:
                entry.revoke_at = now
        return self.tick(now)

    def tick(self, now: Instant) -> dict[Epoch, list[TicketId]]:
        """Loans whose time is over: what to ask back of whom, once an interval."""
        due: dict[Epoch, list[TicketId]] = {}
        for ticket, entry in self._exports.items():
            if entry.revoke_at is not None and entry.revoke_at <= now:
                entry.revoke_at = Instant(now + REVOKE_INTERVAL_S)
                due.setdefault(entry.importer, []).append(ticket)
        return due

    def check_invariants(self) -> None:
        """Raise AssertionError where loans and counts disagree, or are over their limits."""
        held: Counter[Epoch] = Counter()
        for entry in self._exports.values():
            held[entry.importer] += entry.num_blocks
        if held != self._held:
            raise AssertionError(f"{held} blocks in loans, {self._held} counted")
        if any(count > self.limits.per_importer for count in held.values()):
            raise AssertionError("a borrower has more than it may")
        if held.total() > self.limits.in_total or len(self._exports) > MAX_EXPORTS:
            raise AssertionError("more is lent than may be")

    def _is_exported_to(self, importer: Epoch, ticket: TicketId) -> bool:
        entry = self._exports.get(ticket)
        return entry is not None and entry.is_exported and entry.importer == importer

    def _close(self, ticket: TicketId) -> TicketId:
        entry = self._exports.pop(ticket)
        self._held[entry.importer] -= entry.num_blocks
        return ticket
