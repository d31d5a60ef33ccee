"""Blocks that are exported to peers, and those imported from them. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence as Many

    from baton.engines.transformers.sequence import Sequence
    from baton.ids import TicketId
    from baton.kv.pool import BlockPool


class SharedBlocks:
    """Who has what. Owned by the engine's thread.

    exported ──ended──► released to the pool
    imported ──the sequence needs it no more, or has a copy──► to be given back

    An exported block keeps the reference of the sequence that computed it; the prefix cache may
    share it, for all only read it.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._exported: dict[TicketId, list[int]] = {}
        self._importers: dict[TicketId, Sequence] = {}
        self._revoked: set[TicketId] = set()
        self._pending_releases: list[TicketId] = []

    @property
    def num_exported_blocks(self) -> int:
        """References of loans; a block that is exported twice counts twice."""
        return sum(map(len, self._exported.values()))

    @property
    def num_imported_blocks(self) -> int:
        """Blocks of peers that sequences attend over."""
        return sum(len(each.imported) for each in self._importers.values())

    def holds(self, ticket: TicketId) -> bool:
        """Whether something is exported or imported for this ticket."""
        return ticket in self._exported or ticket in self._importers

    def export_blocks(self, ticket: TicketId, sequence: Sequence, blocks: Many[int]) -> None:
        """A peer attends over these blocks of an offered sequence, which holds them no more."""
        exported = set(blocks)
        self._exported[ticket] = [block for block in sequence.blocks if block in exported]
        sequence.blocks = [block for block in sequence.blocks if block not in exported]

    def end_export(self, ticket: TicketId) -> None:
        """Nobody reads what was exported."""
        self._pool.release(self._exported.pop(ticket, []))

    def import_blocks(self, ticket: TicketId, sequence: Sequence) -> None:
        """The sequence attends over blocks of a peer's."""
        self._importers[ticket] = sequence

    def reject_import(self, ticket: TicketId) -> None:
        """What was imported came too late: nobody reads it."""
        self._pending_releases.append(ticket)

    def release(self, sequence: Sequence) -> None:
        """A sequence ends, or restarts: free its own blocks, give back the others."""
        own = [block for block in sequence.restart() if block < self._pool.num_blocks]
        self._pool.release(own)
        for ticket in [name for name, each in self._importers.items() if each is sequence]:
            self._release_import(ticket)

    def revoke(self, ticket: TicketId) -> None:
        """The lender wants its blocks: they are copied as soon as there is room."""
        if ticket in self._importers:
            self._revoked.add(ticket)

    def try_copy_revoked(self, spare: int) -> list[tuple[list[int], list[int]]]:
        """Blocks to copy, `(imported, own)`, for recalled loans; `spare` free ones are not taken.

        The sequences hold their own from now on: copy before anything else is computed.
        """
        copies: list[tuple[list[int], list[int]]] = []
        for ticket in sorted(self._revoked):
            sequence = self._importers[ticket]
            range_in_table = sequence.imported
            imported = sequence.blocks[range_in_table.start : range_in_table.stop]
            if len(imported) + spare > self._pool.num_free:
                break
            own = self._pool.try_allocate(len(imported))
            if own is None:
                break
            sequence.blocks[range_in_table.start : range_in_table.stop] = own
            sequence.imported = range(0)
            copies.append((imported, own))
            self._release_import(ticket)
        return copies

    def take_pending_releases(self) -> list[TicketId]:
        """Loans to be given back: nothing reads them once this step is computed."""
        pending, self._pending_releases = self._pending_releases, []
        return pending

    def check_invariants(self) -> None:
        """Raise AssertionError where loans and sequences disagree."""
        if not self._revoked <= self._importers.keys():
            raise AssertionError("what was given back is being recalled")
        for ticket, sequence in self._importers.items():
            range_in_table = [
                n for n, b in enumerate(sequence.blocks) if b >= self._pool.num_blocks
            ]
            if not range_in_table or range_in_table != list(sequence.imported):
                raise AssertionError(f"{ticket.hex()}: a loan without its blocks")

    def _release_import(self, ticket: TicketId) -> None:
        del self._importers[ticket]
        self._revoked.discard(ticket)
        self._pending_releases.append(ticket)
