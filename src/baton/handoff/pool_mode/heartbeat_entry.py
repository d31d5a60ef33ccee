"""Signs of life through the store: what a prefill worker's engine has yet to compute.

The two workers of a handoff through the store never meet, so this too is an entry, one for each
life of a prefill worker: replaced now and then while its engine computes, with another number in
it. What changes was written after the last look, so no clocks are compared (docs/wire/store.md).
"""

from __future__ import annotations

import hashlib
import logging
from typing import TYPE_CHECKING, Annotated, Final

import msgspec

from baton.clock import Instant
from baton.errors import StoreError
from baton.handoff.messages import Tickets
from baton.handoff.pool_mode.side_entry import read_side_entry
from baton.store.interface import EntryName

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from baton.auth.ticket import Ticket
    from baton.handoff.pool_mode.store_read import StoreRead
    from baton.ids import Epoch, TicketId
    from baton.store.interface import Tier

logger = logging.getLogger(__name__)

MAX_TICKETS: Final = 1024
"""In one entry: those that come first are computed first."""
LOOKS_PER_HEARTBEAT: Final = 2
_TAG: Final = b"baton/pool-heartbeat/2"


class HeartbeatEntry(msgspec.Struct, frozen=True):
    """These prompts are queued in the engine, or being computed. `number` is another each time."""

    number: Annotated[int, msgspec.Meta(ge=0)]
    tickets: Tickets


_decoder = msgspec.msgpack.Decoder(HeartbeatEntry)


class HeartbeatEntryWriter:
    """Prefill's side. Owner: the pool's thread."""

    def __init__(self, store: Tier, interval_s: float) -> None:
        self._store, self._interval_s = store, interval_s
        self._next_at = Instant(0.0)
        self._number = 0
        self._left: set[EntryName] = set()

    def write(self, prompts: Sequence[Ticket], at: Instant) -> None:
        """The engine computes, and has yet to compute these."""
        if at < self._next_at or not prompts:
            return
        self._next_at = Instant(at + self._interval_s)
        self._number += 1
        first = prompts[0].prefill.epoch
        tickets = [each.id for each in prompts if each.prefill.epoch == first]
        entry, name = HeartbeatEntry(self._number, tuple(tickets[:MAX_TICKETS])), _entry_name(first)
        try:
            self._store.discard(name)
            self._store.put(name, memoryview(msgspec.msgpack.encode(entry)))
        except StoreError as exc:
            logger.debug("pool: no sign of life: %s", exc)
        self._left.add(name)

    def remove(self) -> None:
        """Nothing will be computed any more."""
        for name in self._left:
            self._store.discard(name)


class HeartbeatEntryReader:
    """Decode's side: looks now and then for what changed. Owner: the pool's thread."""

    def __init__(self, store: Tier, interval_s: float) -> None:
        self._store, self._interval_s = store, interval_s / LOOKS_PER_HEARTBEAT
        self._next_at = Instant(0.0)
        self._seen: dict[Epoch, int | None] = {}

    def poll(
        self, store_reads: Iterable[StoreRead], now: Instant, on_alive: Callable[[TicketId], None]
    ) -> None:
        """Report which prompts' engines have given a sign since the last look."""
        if now < self._next_at:
            return
        self._next_at = Instant(now + self._interval_s)
        epochs = {each.order.ticket.prefill.epoch for each in store_reads}
        before, self._seen = self._seen, {}
        for epoch in epochs:
            entry = read_side_entry(self._store, _entry_name(epoch), _decoder)
            number = None if entry is None else entry.number
            self._seen[epoch] = before.get(epoch) if number is None else number
            # What stood there at the first look may be old.
            if entry is not None and epoch in before and before[epoch] != number:
                for ticket in entry.tickets:
                    on_alive(ticket)


def _entry_name(epoch: Epoch) -> EntryName:
    return EntryName(hashlib.sha256(_TAG + epoch.encode()).digest())
