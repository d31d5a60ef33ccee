"""Prefill's handoffs through the store: what is computed is kept, a batch at a time."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from baton.errors import HandoffError, StoreError
from baton.handoff.interface import KVSent, SendFailed
from baton.handoff.pool_mode.completion_marker import CompletionMarker, put_marker

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from baton.handoff.interface import HandoffEvent
    from baton.handoff.pool_mode.block_copier import BlockCopier
    from baton.handoff.pool_mode.store_access import StoreAccess
    from baton.handoff.pool_mode.store_write import StoreWrite
    from baton.handoff.pool_mode.token_segments import TokenSegment

logger = logging.getLogger(__name__)


class StoreWriter:
    """Works on one deposit at a time. Owner: the pool's thread."""

    def __init__(
        self, access: StoreAccess, copier: BlockCopier, emit: Callable[[HandoffEvent], None]
    ) -> None:
        self._store, self._entry_format, self._counts = (
            access.store,
            access.entry_format,
            access.counts,
        )
        self._copier, self._emit = copier, emit

    def write_batch(self, store_write: StoreWrite) -> bool:
        """Keep one batch; whether there was one."""
        segments = store_write.pending_segments()
        if not segments:
            return False
        batch = self._copier.take_batch(segments)
        present = self._count_present(batch)
        if present:  # delta: what the store has is not written again
            store_write.add_stored(present)
            self._counts.num_present += present
            return True
        for bodies, part in zip(
            self._copier.gather(batch, store_write.order.blocks), self._copier.parts, strict=True
        ):
            for segment, row in zip(batch, bodies.rows, strict=True):
                self._store.put(self._entry_format.name(segment.block_hash, part), memoryview(row))
            store_write.order.trace.num_bytes += bodies.rows.nbytes
        store_write.add_stored(len(batch))
        self._counts.num_stored += len(batch)
        return True

    def complete(self, store_write: StoreWrite) -> None:
        """All is kept: leave word of it."""
        self._put_marker(store_write, "")
        self._emit(KVSent(store_write.order.ticket.id))

    def fail(self, store_write: StoreWrite, reason: str, stage: str) -> None:
        """Nothing more will be kept: leave word of that."""
        self._put_marker(store_write, reason or "failed")
        ticket = store_write.order.ticket
        error = HandoffError(reason, stage=stage, peer=ticket.decode.worker)
        self._emit(SendFailed(ticket.id, error))

    def _count_present(self, batch: Sequence[TokenSegment]) -> int:
        """Leading pieces of which every part is in the store."""
        names = [
            self._entry_format.name(segment.block_hash, part)
            for segment in batch
            for part in self._copier.parts
        ]
        return self._store.find(names) // len(self._copier.parts)

    def _put_marker(self, store_write: StoreWrite, reason: str) -> None:
        order = store_write.order
        marker = CompletionMarker(
            order.prompt_hash, store_write.num_stored_tokens, store_write.first_token, reason[:2000]
        )
        try:
            for part in self._copier.parts:
                put_marker(self._store, order.ticket.id, part, marker)
        except StoreError as exc:
            logger.debug("pool: no note of ticket %s: %s", order.ticket.id.hex(), exc)
