"""Blocks that handoffs use: pinned for a transfer, exported to peers, or imported from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from baton.engines.transformers.sequence import Sequence, is_pulled
from baton.handoff.block_guard import BlockGuard
from baton.handoff.interface import KeepOrder
from baton.ids import TicketId
from baton.kv.copies import BlockTable

if TYPE_CHECKING:
    from collections.abc import Sequence as Many

    from baton.kv.blocks import InFlightBlocks, QuarantinedBlocks, ReservedBlocks
    from baton.kv.pool import BlockPool


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
    def num_sending(self) -> int:
        """Handoffs whose blocks are pinned for sending."""
        return len(self._sending)

    @property
    def sending_tickets(self) -> tuple[TicketId, ...]:
        """Tickets whose blocks are pinned for sending, the oldest first."""
        return tuple(self._sending)

    def holds(self, ticket: TicketId) -> bool:
        """Whether a handoff of this ticket holds blocks here."""
        return any(ticket in held for held in (self._incoming, self._quarantined, self._sending))

    def grant(self, ticket: TicketId, sequence: Sequence, blocks: ReservedBlocks) -> None:
        """From here a peer may write into `blocks`."""
        self._incoming[ticket] = _Incoming(sequence, blocks.grant())

    def land(self, ticket: TicketId) -> tuple[Sequence, list[int]] | None:
        """All KV landed: the sequence, and its blocks, ready.

        None if the request has ended: then the blocks are freed, as no write is in flight.
        """
        incoming = self._incoming.pop(ticket, None)
        if incoming is None:
            self.release_quarantined(ticket)
            return None
        return incoming.sequence, incoming.blocks.settle().accept()

    def find_incoming(self, ticket: TicketId) -> tuple[Sequence, tuple[int, ...]] | None:
        """The sequence that waits for KV, and the blocks it is to land in."""
        incoming = self._incoming.get(ticket)
        return None if incoming is None else (incoming.sequence, incoming.blocks.blocks)

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
        """Unpin the sequence's blocks: no transfer reads them any more."""
        return self._sending.pop(ticket, None)


@dataclass(slots=True)
class _Kept:
    """`blocks`: none where they were given up, and the store has yet to answer."""

    blocks: list[int]
    guard: BlockGuard


class KeptBlocks:
    """Blocks that are being copied into the store. Owned by the engine's thread.

    They are full, so that nothing is written into them; a reference on each holds them, until they
    are copied, or until a request needs the room.
    """

    def __init__(self, pool: BlockPool, max_blocks: int) -> None:
        self._pool, self._max_blocks = pool, max_blocks
        self._kept: dict[TicketId, _Kept] = {}
        self._num_blocks = self._num_orders = self._num_refused_tokens = 0

    @property
    def num_blocks(self) -> int:
        """References that are held: others may use the same blocks."""
        return self._num_blocks

    def hold(self, sequence: Sequence, unit: int) -> KeepOrder | None:
        """What a sequence that ends has computed: an order to keep it, in entries of `unit` tokens.

        None where none of it is new, and where too much is being kept already.
        """
        num_tokens = sequence.num_computed // unit * unit
        if num_tokens <= sequence.num_cached_tokens:
            return None
        blocks = self._pool.acquire_cached(sequence.hashes(sequence.num_computed))
        num_tokens = min(num_tokens, len(blocks) * sequence.block_size // unit * unit)
        is_new = num_tokens > sequence.num_cached_tokens
        if is_new and len(blocks) > self._max_blocks:  # the beginning is of use, too
            most = min(num_tokens, self._max_blocks * sequence.block_size // unit * unit)
            self._pool.release(blocks[self._max_blocks :])
            blocks = blocks[: self._max_blocks]
            self._num_refused_tokens += num_tokens - most
            num_tokens, is_new = most, most > sequence.num_cached_tokens
        is_too_much = self._num_blocks + len(blocks) > self._max_blocks
        if not is_new or is_too_much:
            self._pool.release(blocks)
            self._num_refused_tokens += num_tokens if is_new else 0
            return None
        self._num_orders += 1
        # Tickets' ids are random: one that begins so does not happen.
        name = TicketId(b"keep" + self._num_orders.to_bytes(12, "big"))
        guard = BlockGuard()
        self._kept[name] = _Kept(blocks, guard)
        self._num_blocks += len(blocks)
        return KeepOrder(
            id=name,
            tenant_salt=sequence.request.tenant_salt,
            token_ids=sequence.token_ids(0, num_tokens).copy(),
            blocks=BlockTable(0, np.array(blocks, np.int64)),
            guard=guard,
        )

    def take_refused_tokens(self) -> int:
        """Tokens for which there was no room, since the last call."""
        refused, self._num_refused_tokens = self._num_refused_tokens, 0
        return refused

    def release(self, order: TicketId) -> bool:
        """It is kept, or cannot be: free its blocks. False where no such order is known."""
        kept = self._kept.pop(order, None)
        if kept is None:
            return False
        self._free(kept)
        return True

    def give_up_newest(self) -> bool:
        """Free the blocks of what was to be copied last; False: none are held.

        A request needs them. What is not copied by now is not kept.
        """
        newest = next((kept for kept in reversed(self._kept.values()) if kept.blocks), None)
        if newest is None:
            return False
        newest.guard.revoke()
        self._free(newest)
        return True

    def _free(self, kept: _Kept) -> None:
        self._num_blocks -= len(kept.blocks)
        self._pool.release(kept.blocks)
        kept.blocks = []


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
        """References held by exports; a block that is exported twice counts twice."""
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
        """Release what was exported: no peer reads it any more."""
        self._pool.release(self._exported.pop(ticket, []))

    def import_blocks(self, ticket: TicketId, sequence: Sequence) -> None:
        """The sequence attends over blocks of a peer's."""
        self._importers[ticket] = sequence

    def reject_import(self, ticket: TicketId) -> None:
        """Reject imported blocks that arrived after the request ended."""
        self._pending_releases.append(ticket)

    def release(self, sequence: Sequence) -> None:
        """A sequence ends, or restarts: free its own blocks, give back the others."""
        own = [block for block in sequence.restart() if block < self._pool.num_blocks]
        self._pool.release(own)
        for ticket in [name for name, each in self._importers.items() if each is sequence]:
            self._release_import(ticket)

    def revoke(self, ticket: TicketId) -> None:
        """The exporter revoked its blocks: they are copied as soon as there is room."""
        if ticket in self._importers:
            self._revoked.add(ticket)

    def try_copy_revoked(self, spare: int) -> list[tuple[list[int], list[int]]]:
        """Blocks to copy, `(imported, own)`, for revoked imports; `spare` free ones are not taken.

        The sequences hold their own from now on: copy before anything else is computed.
        """
        copies: list[tuple[list[int], list[int]]] = []
        # The smallest first: one for which there is no room keeps back only those as large.
        for ticket in sorted(self._revoked, key=self._size_of_import):
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
        """Imports to release: nothing reads them once this step is computed."""
        pending, self._pending_releases = self._pending_releases, []
        return pending

    def check_invariants(self) -> None:
        """Raise AssertionError where exports, imports and sequences disagree."""
        if not self._revoked <= self._importers.keys():
            raise AssertionError("what was given back is being recalled")
        for ticket, sequence in self._importers.items():
            range_in_table = [
                n for n, b in enumerate(sequence.blocks) if b >= self._pool.num_blocks
            ]
            if not range_in_table or range_in_table != list(sequence.imported):
                raise AssertionError(f"{ticket.hex()}: an export without its blocks")

    def _size_of_import(self, ticket: TicketId) -> tuple[int, TicketId]:
        return len(self._importers[ticket].imported), ticket

    def _release_import(self, ticket: TicketId) -> None:
        del self._importers[ticket]
        self._revoked.discard(ticket)
        self._pending_releases.append(ticket)
