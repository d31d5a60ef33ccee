"""Blocks that are lent to peers, and those borrowed from them. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence as Many

    from baton.engines.transformers.sequence import Sequence
    from baton.ids import TicketId
    from baton.kv.pool import BlockPool


class Loans:
    """Who has what. Owned by the engine's thread.

    lent ──ended──► released to the pool
    borrowed ──the sequence needs it no more, or has a copy──► to be given back

    A lent block keeps the reference of the sequence that computed it: it is in nobody else's way
    but the pool's, and may be found by its hash and shared, for all only read it.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._lent: dict[TicketId, list[int]] = {}
        self._borrowers: dict[TicketId, Sequence] = {}
        self._recalled: set[TicketId] = set()
        self._due: list[TicketId] = []

    @property
    def num_lent_blocks(self) -> int:
        """References of loans; a block that is lent twice counts twice."""
        return sum(map(len, self._lent.values()))

    @property
    def num_borrowed_blocks(self) -> int:
        """Blocks of peers that sequences attend over."""
        return sum(len(each.borrowed) for each in self._borrowers.values())

    def knows(self, ticket: TicketId) -> bool:
        """Whether something is lent or borrowed for this ticket."""
        return ticket in self._lent or ticket in self._borrowers

    def lend(self, ticket: TicketId, sequence: Sequence, blocks: Many[int]) -> None:
        """A peer attends over these blocks of an offered sequence, which holds them no more."""
        lent = set(blocks)
        self._lent[ticket] = [block for block in sequence.blocks if block in lent]
        sequence.blocks = [block for block in sequence.blocks if block not in lent]

    def end(self, ticket: TicketId) -> None:
        """Nobody reads what was lent."""
        self._pool.release(self._lent.pop(ticket, []))

    def borrow(self, ticket: TicketId, sequence: Sequence) -> None:
        """The sequence attends over blocks of a peer's."""
        self._borrowers[ticket] = sequence

    def refuse(self, ticket: TicketId) -> None:
        """What was borrowed came too late: nobody reads it."""
        self._due.append(ticket)

    def release(self, sequence: Sequence) -> None:
        """A sequence ends, or restarts: free its own blocks, give back the others."""
        own = [block for block in sequence.restart() if block < self._pool.num_blocks]
        self._pool.release(own)
        for ticket in [name for name, each in self._borrowers.items() if each is sequence]:
            self._give_back(ticket)

    def recall(self, ticket: TicketId) -> None:
        """The lender wants its blocks: they are copied as soon as there is room."""
        if ticket in self._borrowers:
            self._recalled.add(ticket)

    def try_redeem(self, spare: int) -> list[tuple[list[int], list[int]]]:
        """Blocks to copy, `(borrowed, own)`, for recalled loans; `spare` free ones are not taken.

        The sequences hold their own from now on: copy before anything else is computed.
        """
        copies: list[tuple[list[int], list[int]]] = []
        for ticket in sorted(self._recalled):
            sequence = self._borrowers[ticket]
            places = sequence.borrowed
            borrowed = sequence.blocks[places.start : places.stop]
            if len(borrowed) + spare > self._pool.num_free:
                break
            own = self._pool.try_allocate(len(borrowed))
            if own is None:
                break
            sequence.blocks[places.start : places.stop] = own
            sequence.borrowed = range(0)
            copies.append((borrowed, own))
            self._give_back(ticket)
        return copies

    def take_due(self) -> list[TicketId]:
        """Loans to be given back: nothing reads them once this step is computed."""
        due, self._due = self._due, []
        return due

    def check_invariants(self) -> None:
        """Raise AssertionError where loans and sequences disagree."""
        if not self._recalled <= self._borrowers.keys():
            raise AssertionError("what was given back is being recalled")
        for ticket, sequence in self._borrowers.items():
            places = [n for n, b in enumerate(sequence.blocks) if b >= self._pool.num_blocks]
            if not places or places != list(sequence.borrowed):
                raise AssertionError(f"{ticket.hex()}: a loan without its blocks")

    def _give_back(self, ticket: TicketId) -> None:
        del self._borrowers[ticket]
        self._recalled.discard(ticket)
        self._due.append(ticket)
