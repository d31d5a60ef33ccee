"""Decode's handoffs through the store: what has appeared is taken, a batch at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from baton.handoff.pooling.note import find_note, remove_note
from baton.telemetry.trace import Stamp

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from baton.clock import Clock
    from baton.handoff.interface import HandoffEvent, ReceiveOrder
    from baton.handoff.pooling.carrying import Bodies, Carrier
    from baton.handoff.pooling.collection import Collection
    from baton.handoff.pooling.note import Note
    from baton.handoff.pooling.pieces import Piece
    from baton.handoff.pooling.pool import Pool
    from baton.ids import TicketId


class Taker:
    """Works on one collection at a time. Owner: the pool's thread."""

    def __init__(
        self,
        pool: Pool,
        carrier: Carrier,
        *,
        clock: Clock,
        emit: Callable[[HandoffEvent], None],
    ) -> None:
        self._store, self._form, self._tally = pool.store, pool.form, pool.tally
        self._carrier, self._clock, self._emit = carrier, clock, emit

    def step(self, collection: Collection) -> bool:
        """Take one batch; whether there was one."""
        pieces = collection.next_pieces
        if not pieces:
            return False
        batch = self._carrier.take_batch(pieces)
        bodies = self._carrier.make_bodies(batch)
        num_read = self._read(batch, bodies)
        if num_read == 0:
            return False
        order = collection.order
        self._carrier.scatter(
            [each.leading(num_read) for each in bodies],
            batch[:num_read],
            start=order.start,
            table=order.blocks,
        )
        collection.landed(num_read)
        self._tally.num_taken += num_read
        order.trace.num_bytes += sum(each.rows[:num_read].nbytes for each in bodies)
        order.trace.stamp(Stamp.FIRST_LAYER_LANDED, self._clock.now())
        return True

    def find_word(self, collection: Collection) -> Note | None:
        """The prefill worker's last word, once each of its ranks has left it; it is remembered."""
        if collection.word is None:
            collection.word = self._look_for_word(collection.order)
        return collection.word

    def _look_for_word(self, order: ReceiveOrder) -> Note | None:
        notes = [find_note(self._store, order.ticket.id, part) for part in self._carrier.parts]
        found = [note for note in notes if note is not None]
        if len(found) < len(notes):
            return None
        if any(note.prompt_hash != order.prompt_hash for note in found):
            return None  # of another prompt: it says nothing about this one
        return found[0]

    def complete(self, collection: Collection) -> None:
        """All is in place. A first token that is not here yet is not waited for."""
        word = self.find_word(collection)
        collection.order.trace.stamp(Stamp.LAST_LAYER_LANDED, self._clock.now())
        self._end(collection, collection.complete(None if word is None else word.first_token))

    def end_early(self, collection: Collection, reason: str, stage: str) -> None:
        """Nothing more will come."""
        self._tally.num_missing += len(collection.next_pieces)
        self._end(collection, collection.end_early(reason, stage))

    def forget(self, ticket: TicketId) -> None:
        """Remove a ticket's notes: nobody else reads them."""
        for part in self._carrier.parts:
            remove_note(self._store, ticket, part)

    def _end(self, collection: Collection, events: Sequence[HandoffEvent]) -> None:
        self.forget(collection.order.ticket.id)
        for event in events:
            self._emit(event)

    def _read(self, batch: Sequence[Piece], bodies: Sequence[Bodies]) -> int:
        """How many leading pieces were read, in all parts, and are what was put.

        Looks before it asks: what has not come yet is no miss.
        """
        parts = self._carrier.parts
        names = [self._form.name(piece.block_hash, part) for piece in batch for part in parts]
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
