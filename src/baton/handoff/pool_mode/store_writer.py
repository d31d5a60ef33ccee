"""Prefill's handoffs through the store: what is computed is kept, a batch at a time.

`StoreWrite` is the state of one of them:

offered ──layers ready──► pieces to keep ──kept, and finished──► left a note, over
   └──failed, aborted, too late──────────────────────────────────┘
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import numpy as np

from baton.errors import HandoffError, StoreError
from baton.handoff.interface import KVSent, SendFailed
from baton.handoff.pool_mode.side_entries import CompletionMarker, put_marker
from baton.handoff.pool_mode.store_access import StoreAccess, find_pieces, note_store_encoding
from baton.handoff.session.actions import extend
from baton.store.interface import EntryName, NamedBody

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from baton.clock import Clock, Instant
    from baton.handoff.block_guard import BlockGuard
    from baton.handoff.interface import HandoffEvent, SampledToken, SendOrder, StreamPosition
    from baton.handoff.pool_mode.block_copier import BlockCopier, EntryBodies, TokenSegment
    from baton.kv.copies import BlockTable
    from baton.kv.identity import BlockHash
    from baton.store.tiered import TierRun

logger = logging.getLogger(__name__)


class StoreWriter:
    """Works on one deposit at a time. Owner: the pool's thread."""

    def __init__(
        self,
        access: StoreAccess,
        copier: BlockCopier,
        *,
        clock: Clock,
        emit: Callable[[HandoffEvent], None],
    ) -> None:
        self._store, self._entry_format, self._counts = (
            access.store,
            access.entry_format,
            access.counts,
        )
        self._encoding, self._encoded = access.encoding, access.encoded
        self._label_tenant = access.label_tenant
        self._copier, self._clock, self._emit = copier, clock, emit

    def write_batch(self, store_write: StoreWrite) -> bool:
        """Keep one batch; whether there was one."""
        segments = store_write.pending_segments()
        if not segments:
            return False
        present = self.count_present(self._copier.take_batch(segments))
        if present:  # delta: what the store has is not written again
            store_write.add_stored(present)
            self._counts.num_present += present
            return True
        order = store_write.order
        salt = order.ticket.tenant_salt
        num_kept, num_bytes = self.keep_segments(
            segments, order.blocks, salt, order.guard, after=store_write.after
        )
        store_write.order.trace.num_bytes += num_bytes
        note_store_encoding(store_write.order.trace, self._encoding)
        store_write.add_stored(num_kept)
        self._counts.num_stored += num_kept
        return True

    def keep_segments(
        self,
        segments: Sequence[TokenSegment],
        table: BlockTable,
        tenant_salt: str,
        guard: BlockGuard,
        *,
        after: StreamPosition | None = None,
    ) -> tuple[int, int]:
        """Put one batch of them, from the engine's blocks in `table`, as the tenant's.

        `guard` is entered while the blocks are read, once the engine's GPU has reached `after`.

        Returns:
            How many leading ones were put, all at once, and the bytes of their entries.

        Raises:
            StoreError: there is no room, or they cannot be written; the blocks are the engine's
                again.
            TransferError: the GPU failed.
        """
        batch = self._copier.take_batch(segments)
        if after is not None:
            after.wait()
        with guard:
            gathered = self._copier.gather(batch, table, after)
        entries = [
            NamedBody(self._entry_format.name(segment.block_hash, part), body.data)
            for bodies, part in zip(gathered, self._copier.parts, strict=True)
            for segment, body in zip(batch, self._encode(bodies), strict=True)
        ]
        for outcome in self._store.put_many(entries, self._label_tenant(tenant_salt)):
            if isinstance(outcome, StoreError):
                raise outcome
        return len(batch), sum(len(entry.body) for entry in entries)

    def _encode(self, bodies: EntryBodies) -> Sequence[NDArray[np.uint8]]:
        began_at = self._clock.now()
        encoded = self._encoding.encode(bodies.layout, bodies.rows)
        num_bytes = sum(map(len, encoded))
        self._encoded.add(bodies.rows.nbytes, num_bytes, self._clock.now() - began_at)
        return encoded

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

    def count_present(self, batch: Sequence[TokenSegment]) -> int:
        """Leading pieces of which every part is in the store."""
        names = [name for segment in batch for name in self.name_parts(segment.block_hash)]
        return self._store.find(names) // len(self._copier.parts)

    def find_tiers(self, segments: Sequence[TokenSegment]) -> list[TierRun]:
        """The same by tiers: see `find_pieces`."""
        names = [name for segment in segments for name in self.name_parts(segment.block_hash)]
        return find_pieces(self._store, names, len(self._copier.parts))

    def name_parts(self, block_hash: BlockHash) -> list[EntryName]:
        """The entries of a block that this worker holds heads of."""
        return [self._entry_format.name(block_hash, part) for part in self._copier.parts]

    def _put_marker(self, store_write: StoreWrite, reason: str) -> None:
        order = store_write.order
        marker = CompletionMarker(
            order.prompt_hash, store_write.num_stored_tokens, store_write.first_token, reason[:2000]
        )
        try:
            for part in self._copier.parts:
                put_marker(self._store, order.ticket.id, part, marker)
        except Exception as exc:  # noqa: BLE001 - its engine is to be answered
            logger.debug("pool: no note of ticket %s: %s", order.ticket.id.hex(), exc)


class StoreWrite:
    """What of one prompt is computed, and what of that is kept. `segments` cover the prompt.

    At `after` the engine's GPU has computed all that was reported; None on CPUs.
    """

    def __init__(
        self,
        order: SendOrder,
        segments: Sequence[TokenSegment],
        *,
        num_layers: int,
        deadline: Instant,
    ) -> None:
        self.order, self.deadline = order, deadline
        self.first_token: SampledToken | None = None
        self.after: StreamPosition | None = None
        self._segments = segments
        self._ready = np.full(num_layers, order.num_ready_tokens, dtype=np.int64)
        self._num_stored = 0
        self._is_prefill_done = False

    @property
    def num_stored_tokens(self) -> int:
        """Tokens `[0, n)` that are in the store."""
        return self._segments[self._num_stored - 1].stop if self._num_stored else 0

    @property
    def is_done(self) -> bool:
        """Whether prefill is over and all of it is kept."""
        return self._is_prefill_done and self._num_stored == len(self._segments)

    def mark_layer_ready(self, layer: int, stop: int, after: StreamPosition | None = None) -> None:
        """Tokens `[0, stop)` of a layer are in place, or will be at `after`."""
        self._ready[layer] = max(self._ready[layer], stop)
        self.after = after

    def mark_prefill_done(self, first_token: SampledToken | None) -> None:
        """Nothing more will be computed."""
        self._is_prefill_done, self.first_token = True, first_token

    def extend_deadline(self, instant: Instant) -> None:
        """The engine works on it: wait for longer, but not beyond the request's deadline."""
        self.deadline = extend(self.deadline, instant, self.order.deadline)

    def pending_segments(self) -> Sequence[TokenSegment]:
        """What is complete in all layers and not kept yet, in order.

        Raises:
            TransferError: the GPU failed.
        """
        if self.after is not None and not self.after.is_done():
            return ()
        ready = int(self._ready.min())
        stop = self._num_stored
        while stop < len(self._segments) and self._segments[stop].stop <= ready:
            stop += 1
        return self._segments[self._num_stored : stop]

    def add_stored(self, num_segments: int) -> None:
        """So many of those are in the store."""
        self._num_stored += num_segments

    def check_invariants(self) -> None:
        """Raise AssertionError where more is kept than was computed."""
        if not 0 <= self._num_stored <= len(self._segments):
            raise AssertionError("more pieces are kept than there are")
        if self.num_stored_tokens > int(self._ready.min()):
            raise AssertionError("tokens are kept that were not computed")
