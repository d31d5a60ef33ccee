"""Prefill's handoffs through the store: what is computed is kept, a batch at a time."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from baton.errors import HandoffError, StoreError
from baton.handoff.interface import KVSent, SendFailed
from baton.handoff.pooling.note import Note, leave_note

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from baton.handoff.interface import HandoffEvent
    from baton.handoff.pooling.carrying import Carrier
    from baton.handoff.pooling.deposit import Deposit
    from baton.handoff.pooling.pieces import Piece
    from baton.handoff.pooling.pool import Pool

logger = logging.getLogger(__name__)


class Keeper:
    """Works on one deposit at a time. Owner: the pool's thread."""

    def __init__(self, pool: Pool, carrier: Carrier, emit: Callable[[HandoffEvent], None]) -> None:
        self._store, self._form, self._tally = pool.store, pool.form, pool.tally
        self._carrier, self._emit = carrier, emit

    def step(self, deposit: Deposit) -> bool:
        """Keep one batch; whether there was one."""
        pieces = deposit.next_pieces()
        if not pieces:
            return False
        batch = self._carrier.take_batch(pieces)
        known = self._count_known(batch)
        if known:  # delta: what the store has is not written again
            deposit.kept(known)
            self._tally.num_known += known
            return True
        for bodies, part in zip(
            self._carrier.gather(batch, deposit.order.blocks), self._carrier.parts, strict=True
        ):
            for piece, row in zip(batch, bodies.rows, strict=True):
                self._store.put(self._form.name(piece.block_hash, part), memoryview(row))
            deposit.order.trace.num_bytes += bodies.rows.nbytes
        deposit.kept(len(batch))
        self._tally.num_kept += len(batch)
        return True

    def finish(self, deposit: Deposit) -> None:
        """All is kept: leave word of it."""
        self._leave_note(deposit, "")
        self._emit(KVSent(deposit.order.ticket.id))

    def fail(self, deposit: Deposit, reason: str, stage: str) -> None:
        """Nothing more will be kept: leave word of that."""
        self._leave_note(deposit, reason or "failed")
        ticket = deposit.order.ticket
        error = HandoffError(reason, stage=stage, peer=ticket.decode.worker)
        self._emit(SendFailed(ticket.id, error))

    def _count_known(self, batch: Sequence[Piece]) -> int:
        """Leading pieces of which every part is in the store."""
        names = [
            self._form.name(piece.block_hash, part)
            for piece in batch
            for part in self._carrier.parts
        ]
        return self._store.find(names) // len(self._carrier.parts)

    def _leave_note(self, deposit: Deposit, reason: str) -> None:
        order = deposit.order
        note = Note(order.prompt_hash, deposit.num_kept_tokens, deposit.first_token, reason[:2000])
        try:
            for part in self._carrier.parts:
                leave_note(self._store, order.ticket.id, part, note)
        except StoreError as exc:
            logger.debug("pool: no note of ticket %s: %s", order.ticket.id.hex(), exc)
