"""Decode's handoffs through the store: what has appeared is taken, a batch at a time.

`StoreRead` is the state of one of them:

waiting ──entries appear──► pieces in place ──all of them──► landed
   └──the marker is there, aborted, too late──► landed in part, or failed
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Final

from baton.errors import HandoffError
from baton.handoff.interface import BlocksQuiescent, KVFailed, KVLanded
from baton.handoff.pool_mode.side_entries import find_marker, remove_marker
from baton.handoff.session.actions import extend
from baton.telemetry.trace import Stamp

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from baton.clock import Clock, Instant
    from baton.handoff.grants import Tombstone
    from baton.handoff.interface import HandoffEvent, ReceiveOrder, SampledToken
    from baton.handoff.pool_mode.block_copier import BlockCopier, EntryBodies, TokenSegment
    from baton.handoff.pool_mode.side_entries import CompletionMarker
    from baton.handoff.pool_mode.store_access import StoreAccess
    from baton.ids import TicketId
    from baton.kv.copies import BlockTable

UNGUARDED: Final = nullcontext()
"""The blocks are this thread's until it reports that they are not."""


class StoreReader:
    """Works on one collection at a time. Owner: the pool's thread."""

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
        self._copier, self._clock, self._emit = copier, clock, emit

    def read_batch(self, store_read: StoreRead) -> bool:
        """Take one batch; whether there was one."""
        segments = store_read.pending_segments
        if not segments:
            return False
        order = store_read.order
        num_read, num_bytes = self.read_segments(segments, order.start, order.blocks)
        if num_read == 0:
            return False
        store_read.add_landed(num_read)
        self._counts.num_loaded += num_read
        order.trace.num_bytes += num_bytes
        order.trace.stamp(Stamp.FIRST_LAYER_LANDED, self._clock.now())
        return True

    def read_segments(
        self,
        segments: Sequence[TokenSegment],
        start: int,
        table: BlockTable,
        guard: AbstractContextManager[object] = UNGUARDED,
    ) -> tuple[int, int]:
        """Put one batch of them, tokens from `start` on, into the blocks of `table`.

        `guard` is entered while the blocks are written.

        Returns:
            How many leading ones were read, all that were there, and their bytes.
        """
        batch = self._copier.take_batch(segments)
        bodies = self._copier.allocate_bodies(batch)
        num_read = self._read(batch, bodies)
        if num_read == 0:
            return 0, 0
        found = [each.leading(num_read) for each in bodies]
        with guard:
            self._copier.scatter(found, batch[:num_read], start=start, table=table)
        return num_read, sum(each.rows[:num_read].nbytes for each in bodies)

    def find_marker(self, store_read: StoreRead) -> CompletionMarker | None:
        """The prefill worker's last word, once each of its ranks has left it; it is remembered."""
        if store_read.marker is None:
            store_read.marker = self._read_markers(store_read.order)
        return store_read.marker

    def _read_markers(self, order: ReceiveOrder) -> CompletionMarker | None:
        markers = [find_marker(self._store, order.ticket.id, part) for part in self._copier.parts]
        found = [marker for marker in markers if marker is not None]
        if len(found) < len(markers):
            return None
        if any(marker.prompt_hash != order.prompt_hash for marker in found):
            return None  # of another prompt: no information about this one
        return found[0]

    def complete(self, store_read: StoreRead) -> None:
        """All is in place. A first token that is not here yet is not waited for."""
        marker = self.find_marker(store_read)
        store_read.order.trace.stamp(Stamp.LAST_LAYER_LANDED, self._clock.now())
        self._end(store_read, store_read.complete(None if marker is None else marker.first_token))

    def end_early(self, store_read: StoreRead, reason: str, stage: str) -> None:
        """Nothing more will come."""
        self._counts.num_missing += len(store_read.pending_segments)
        self._end(store_read, store_read.end_early(reason, stage))

    def remove_markers(self, ticket: TicketId) -> None:
        """Remove a ticket's completion markers: they have no other reader."""
        for part in self._copier.parts:
            remove_marker(self._store, ticket, part)

    def _end(self, store_read: StoreRead, events: Sequence[HandoffEvent]) -> None:
        self.remove_markers(store_read.order.ticket.id)
        for event in events:
            self._emit(event)

    def _read(self, batch: Sequence[TokenSegment], bodies: Sequence[EntryBodies]) -> int:
        """How many leading pieces were read, in all parts, and are what was put.

        Looks before it asks: what has not come yet is no miss.
        """
        parts = self._copier.parts
        names = [
            self._entry_format.name(segment.block_hash, part) for segment in batch for part in parts
        ]
        num_there = self._store.find(names) // len(parts)
        for index in range(num_there):
            for at, each in enumerate(bodies, index * len(parts)):
                row = memoryview(each.rows[index])
                lease = self._store.try_lease(names[at])
                if lease is None:
                    return index
                with lease:
                    if lease.num_bytes != len(row) or not lease.try_read(row):
                        return index
        return num_there


class StoreRead:
    """What of one prompt has come. `segments` cover the prompt; those before `start` are not read.

    `tombstone` states why nothing more will come, once that was reported; `marker` is the prefill
    worker's completion marker, once it was seen: it may be evicted before the entries are read.
    """

    def __init__(
        self, order: ReceiveOrder, segments: Sequence[TokenSegment], *, deadline: Instant
    ) -> None:
        self.order, self.deadline = order, deadline
        self.tombstone: Tombstone | None = None
        self.marker: CompletionMarker | None = None
        self._segments = tuple(segment for segment in segments if segment.stop > order.start)
        self._num_landed = 0

    @property
    def pending_segments(self) -> Sequence[TokenSegment]:
        """What is missing, in order."""
        return self._segments[self._num_landed :]

    @property
    def num_tokens(self) -> int:
        """Tokens `[0, n)` that are in place here."""
        if self._num_landed == 0:
            return self.order.start
        return self._segments[self._num_landed - 1].stop

    def extend_deadline(self, instant: Instant) -> None:
        """Its engine works on it: wait for longer, but not beyond the request's deadline."""
        self.deadline = extend(self.deadline, instant, self.order.deadline)

    def add_landed(self, num_segments: int) -> None:
        """So many of the missing pieces are in place, and are what was put."""
        self._num_landed += num_segments

    def complete(self, first_token: SampledToken | None) -> list[HandoffEvent]:
        """Everything is in place."""
        return [KVLanded(self.order.ticket.id, first_token)]

    def end_early(self, reason: str, stage: str) -> list[HandoffEvent]:
        """Nothing more will come: what is in place is of use, if it is anything."""
        ticket = self.order.ticket
        if self._num_landed:
            return [KVLanded(ticket.id, None, self.num_tokens)]
        error = HandoffError(reason, stage=stage, peer=ticket.prefill.worker)
        return [KVFailed(ticket.id, error), BlocksQuiescent(ticket.id)]
