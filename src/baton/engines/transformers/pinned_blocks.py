"""Blocks that a handoff holds: nobody may free them before it says so."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from baton.engines.transformers.sequence import is_pulled

if TYPE_CHECKING:
    from baton.engines.transformers.sequence import Sequence
    from baton.ids import TicketId
    from baton.kv.guards import InFlightBlocks, QuarantinedBlocks, ReservedBlocks


@dataclass(frozen=True, slots=True)
class _Incoming:
    sequence: Sequence
    blocks: InFlightBlocks


class PinnedBlocks:
    """Who waits for, or holds blocks for, which ticket. Owned by the engine's thread.

    incoming ──landed──► the sequence     └─lost──► quarantined ──quiescent──► free
    outgoing ──returned──► the sequence
    """

    def __init__(self) -> None:
        self._incoming: dict[TicketId, _Incoming] = {}
        self._quarantined: dict[TicketId, QuarantinedBlocks] = {}
        self._sending: dict[TicketId, Sequence] = {}

    @property
    def num_incoming(self) -> int:
        """Sequences that wait for KV."""
        return len(self._incoming)

    @property
    def sending_tickets(self) -> tuple[TicketId, ...]:
        """Tickets whose sequences were lent and not given back, the oldest first."""
        return tuple(self._sending)

    def holds(self, ticket: TicketId) -> bool:
        """Whether a handoff of this ticket holds blocks here."""
        return any(ticket in held for held in (self._incoming, self._quarantined, self._sending))

    def grant(self, ticket: TicketId, sequence: Sequence, blocks: ReservedBlocks) -> None:
        """From here a peer may write into `blocks`."""
        self._incoming[ticket] = _Incoming(sequence, blocks.grant())

    def land(self, ticket: TicketId) -> tuple[Sequence, list[int]] | None:
        """All KV landed: the sequence, and its blocks, ready.

        None where nobody waits any more: then the blocks are freed, for nothing more can land.
        """
        incoming = self._incoming.pop(ticket, None)
        if incoming is None:
            self.release_quarantined(ticket)
            return None
        return incoming.sequence, incoming.blocks.settle().accept()

    def quarantine(self, ticket: TicketId) -> Sequence | None:
        """Stop waiting: the blocks stay untouched until they are quiescent."""
        incoming = self._incoming.pop(ticket, None)
        if incoming is None:
            return None
        self._quarantined[ticket] = incoming.blocks.quarantine()
        return incoming.sequence

    def release_quarantined(self, ticket: TicketId) -> None:
        """Nothing can land any more: free the blocks."""
        quarantined = self._quarantined.pop(ticket, None)
        if quarantined is not None:
            quarantined.release()

    @property
    def num_held_blocks(self) -> int:
        """Blocks of prompts that wait, or will, until their decode workers pull them."""
        return sum(len(s.blocks) for s in self._sending.values() if is_pulled(s))

    def pin(self, ticket: TicketId, sequence: Sequence) -> None:
        """A peer may read the sequence's blocks from here on."""
        self._sending[ticket] = sequence

    def find_sending(self, ticket: TicketId) -> Sequence | None:
        """Whose blocks a handoff holds."""
        return self._sending.get(ticket)

    def unpin(self, ticket: TicketId) -> Sequence | None:
        """Nobody reads the sequence's blocks any more."""
        return self._sending.pop(ticket, None)
