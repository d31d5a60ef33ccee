"""Decode's handoffs through the store: what has appeared is taken, a batch at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from baton.handoff.pool_mode.completion_marker import find_marker, remove_marker
from baton.telemetry.trace import Stamp

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from baton.clock import Clock
    from baton.handoff.interface import HandoffEvent, ReceiveOrder
    from baton.handoff.pool_mode.block_copier import BlockCopier, EntryBodies
    from baton.handoff.pool_mode.completion_marker import CompletionMarker
    from baton.handoff.pool_mode.store_access import StoreAccess
    from baton.handoff.pool_mode.store_read import StoreRead
    from baton.handoff.pool_mode.token_segments import TokenSegment
    from baton.ids import TicketId


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
        batch = self._copier.take_batch(segments)
        bodies = self._copier.allocate_bodies(batch)
        num_read = self._read(batch, bodies)
        if num_read == 0:
            return False
        order = store_read.order
        self._copier.scatter(
            [each.leading(num_read) for each in bodies],
            batch[:num_read],
            start=order.start,
            table=order.blocks,
        )
        store_read.add_landed(num_read)
        self._counts.num_loaded += num_read
        order.trace.num_bytes += sum(each.rows[:num_read].nbytes for each in bodies)
        order.trace.stamp(Stamp.FIRST_LAYER_LANDED, self._clock.now())
        return True

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
