"""Decode's handoffs through the store: what has appeared is taken, a batch at a time.

`StoreRead` is the state of one of them:

waiting ──entries appear──► pieces in place ──all of them──► landed
   └──the marker is there, aborted, too late──► landed in part, or failed
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import numpy as np

from baton.encodings.interface import RAW
from baton.errors import HandoffError
from baton.handoff.interface import BlocksQuiescent, KVFailed, KVLanded
from baton.handoff.pool_mode.block_copier import BATCH_BYTES, allocate_bytes
from baton.handoff.pool_mode.load_costs import TierTime, add_times
from baton.handoff.pool_mode.side_entries import CompletionMarker, find_marker, remove_marker
from baton.handoff.pool_mode.store_access import StoreAccess, find_pieces, note_store_encoding
from baton.handoff.session.actions import extend
from baton.telemetry.trace import Stamp

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from baton.clock import Clock, Instant
    from baton.handoff.grants import Tombstone
    from baton.handoff.interface import (
        HandoffEvent,
        LoadOrder,
        ReceiveOrder,
        SampledToken,
        StreamPosition,
    )
    from baton.handoff.pool_mode.block_copier import BlockCopier, EntryBodies, TokenSegment
    from baton.ids import TicketId
    from baton.kv.copies import BlockTable
    from baton.store.interface import EntryName

UNGUARDED: Final = nullcontext()
"""The blocks are this thread's until it reports that they are not."""


@dataclass(frozen=True, slots=True)
class ReadBatch:
    """Adjacent pieces that were read, and the KV of each part of them: what was put, verified.

    `num_bytes` are of the entries that were read for it, as they are stored; `times` is what that
    took in each tier. `lost` is what the next piece took, which was there and could not be read.
    """

    segments: Sequence[TokenSegment]
    bodies: Sequence[EntryBodies]
    num_bytes: int
    times: Sequence[TierTime]
    lost: TierTime | None = None

    @property
    def timed_s(self) -> float:
        """Seconds of `times` and `lost`."""
        lost_s = 0.0 if self.lost is None else self.lost.seconds
        return lost_s + sum(each.seconds for each in self.times)

    @property
    def held_bytes(self) -> int:
        """Memory that it takes."""
        return sum(each.rows.nbytes for each in self.bodies)

    def part(self, start: int, stop: int) -> ReadBatch:
        """Pieces `[start, stop)` of it."""
        bodies = [each.part(start, stop) for each in self.bodies]
        return replace(self, segments=self.segments[start:stop], bodies=bodies)


class ReadMemory:
    """Memory of batches that were read, kept for the next one: a batch for each of `num_parts`.

    The kernel takes longer to give a process 8 MiB of new pages than a tier in memory takes to fill
    them (ADR 71). One thread takes, any may give back.
    """

    def __init__(self, num_parts: int) -> None:
        self._num_parts = num_parts
        self._spare: list[NDArray[np.uint8]] = []

    def take(self, num_bytes: int) -> NDArray[np.uint8]:
        """So many bytes, not zeroed."""
        if num_bytes > BATCH_BYTES:  # of one entry
            return allocate_bytes(num_bytes)
        memory = self._spare.pop() if self._spare else allocate_bytes(BATCH_BYTES)
        return memory[:num_bytes]

    def give_back(self, bodies: Sequence[EntryBodies]) -> None:
        """These, and what they are parts of, are read no more. Once."""
        for each in bodies:
            memory = each.rows.base
            if memory is None or memory.nbytes != BATCH_BYTES:
                continue
            if len(self._spare) < self._num_parts:
                self._spare.append(memory)


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
        self._encoding, self._decoded = access.encoding, access.decoded
        self._copier, self._clock, self._emit = copier, clock, emit
        self._memory = ReadMemory(len(copier.parts))

    def read_batch(self, store_read: StoreRead) -> bool:
        """Take one batch; whether there was one."""
        segments = store_read.pending_segments
        if not segments:
            return False
        order = store_read.order
        read = self.read_segments(segments, order.start, order.blocks, after=order.after)
        num_read = len(read.segments)
        if num_read == 0:
            return False
        store_read.add_landed(num_read)
        store_read.last_landed_at = self._clock.now()
        self._counts.num_loaded += num_read
        order.trace.num_bytes += read.num_bytes
        note_store_encoding(order.trace, self._encoding)
        order.trace.stamp(Stamp.FIRST_LAYER_LANDED, store_read.last_landed_at)
        return True

    def read_segments(
        self,
        segments: Sequence[TokenSegment],
        start: int,
        table: BlockTable,
        guard: AbstractContextManager[object] = UNGUARDED,
        *,
        after: StreamPosition | None = None,
    ) -> ReadBatch:
        """Put one batch of them, tokens from `start` on, into the blocks of `table`.

        `guard` is entered while the blocks are written, once the engine's GPU has reached `after`.

        Returns:
            The leading ones that were read: all of the batch that were there.

        Raises:
            ProtocolError: an entry is what was put, and nothing that `store.encoding` writes.
            TransferError: the GPU failed.
        """
        read = self.read_bodies(segments)
        if read.segments:
            if after is not None:
                after.wait()
            with guard:
                self._copier.scatter(
                    read.bodies, read.segments, start=start, table=table, after=after
                )
            self.release(read)
        return read

    def fits_one_batch(self, segments: Sequence[TokenSegment]) -> bool:
        """Whether `read_bodies` would read all of them, at least one, if they are there."""
        return len(self._copier.take_batch(segments)) == len(segments)

    def read_bodies(self, segments: Sequence[TokenSegment]) -> ReadBatch:
        """Read one batch of them, at least one, into memory of its own, verified and decoded.

        Raises:
            ProtocolError: an entry is what was put, and nothing that `store.encoding` writes.
        """
        started_at = self._clock.now()
        batch = self._copier.take_batch(segments)
        bodies = self._copier.allocate_bodies(batch, self._memory.take)
        encoded, reads, lost = self._read(batch, bodies)
        num_read = len(encoded[0])
        if num_read == 0:
            self._memory.give_back(bodies)
            return ReadBatch((), (), 0, (), lost)
        found = [each.part(0, num_read) for each in bodies]
        num_bytes = sum(len(body) for each in encoded for body in each)
        began_at = self._clock.now()
        if self._encoding.name != RAW:  # else they were read into place
            for each, part in zip(found, encoded, strict=True):
                self._encoding.decode(each.layout, part, each.rows)
        raw_bytes = sum(each.rows.nbytes for each in found)
        now = self._clock.now()
        self._decoded.add(raw_bytes, num_bytes, now - began_at)
        times: dict[str, TierTime] = {}
        read = ReadBatch(batch[:num_read], found, num_bytes, reads, lost)
        add_times(times, reads, now - started_at - read.timed_s)
        return replace(read, times=tuple(times.values()))

    def release(self, read: ReadBatch) -> None:
        """What was read, all of it, is not needed any more. Once; from any thread."""
        self._memory.give_back(read.bodies)

    def put_in_blocks(self, read: ReadBatch, order: LoadOrder) -> None:
        """Put what was read into an order's blocks, and release it. On the engine's thread.

        Raises:
            ProtocolError: the order's table does not cover it.
        """
        self._copier.scatter(
            read.bodies, read.segments, start=order.start, table=order.blocks, after=order.after
        )
        self.release(read)
        if order.trace is not None:
            note_store_encoding(order.trace, self._encoding)

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
        return next((marker for marker in found if marker.reason), found[0])

    def complete(self, store_read: StoreRead) -> None:
        """All is in place. A first token that is not here yet is not waited for."""
        marker = store_read.marker
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
        try:
            self.remove_markers(store_read.order.ticket.id)
        finally:  # an engine waits for these
            for event in events:
                self._emit(event)

    def _read(
        self, batch: Sequence[TokenSegment], bodies: Sequence[EntryBodies]
    ) -> tuple[list[list[NDArray[np.uint8]]], list[TierTime], TierTime | None]:
        """Of each part, the encoded bodies of as many leading pieces as are there in all parts.

        And what each of these pieces took, and the one behind them, if it could not be read. Looks
        before it asks: what has not come yet is no miss.
        """
        parts = self._copier.parts
        names = [
            self._entry_format.name(segment.block_hash, part) for segment in batch for part in parts
        ]
        runs = find_pieces(self._store, names, len(parts))
        rows = [self._rows_to_read(each) for each in bodies]
        found: list[list[NDArray[np.uint8]]] = [[] for _ in parts]
        reads: list[TierTime] = []
        tiers = (run.tier for run in runs for _ in range(run.num))
        for index, tier in enumerate(tiers):
            began_at = self._clock.now()
            some = [
                self._read_entry(names[index * len(parts) + at], each[index])
                for at, each in enumerate(rows)
            ]
            num_tokens = batch[index].stop - batch[index].start
            took = TierTime(tier, num_tokens, self._clock.now() - began_at)
            for body, part in zip(some, found, strict=True):
                if body is None:
                    return [each[:index] for each in found], reads, took
                part.append(body)
            reads.append(took)
        return found, reads, None

    def _rows_to_read(self, bodies: EntryBodies) -> NDArray[np.uint8]:
        """Room for encoded bodies, `[num_pieces, max_bytes]`; of raw ones, the bodies' own."""
        if self._encoding.name == RAW:
            return bodies.rows
        num_bytes = self._encoding.max_bytes(bodies.layout)
        return np.empty((len(bodies.rows), num_bytes), np.uint8)

    def _read_entry(self, name: EntryName, row: NDArray[np.uint8]) -> NDArray[np.uint8] | None:
        """An entry's body, in a row as long as any may be; None if it is missing or damaged."""
        lease = self._store.try_lease(name)
        if lease is None:
            return None
        with lease:
            num_bytes = lease.num_bytes
            is_fixed = self._encoding.grouping != "none"
            if num_bytes > len(row) or (is_fixed and num_bytes != len(row)):
                self._store.discard(name)  # its header is damaged: no put keeps another length
                return None
            body = row[:num_bytes]
            return body if lease.try_read(body.data) else None


class StoreRead:
    """What of one prompt has come. `segments` cover the prompt; those before `start` are not read.

    `tombstone` states why nothing more will come, once that was reported; `marker` is the prefill
    worker's completion marker, once it was seen: it may be evicted before the entries are read.
    `is_queued`: a heartbeat entry named it, so that the prefill worker has yet to compute it.
    """

    def __init__(
        self,
        order: ReceiveOrder,
        segments: Sequence[TokenSegment],
        *,
        started_at: Instant,
        deadline: Instant,
    ) -> None:
        self.order, self.deadline = order, deadline
        self.last_landed_at, self.is_queued = started_at, False
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
