"""Signs of life in a store: what is new counts, what is old, foreign or damaged does not."""

from __future__ import annotations

import hashlib
from contextlib import nullcontext

import msgspec
import pytest

from baton.auth.ticket import Ticket, WorkerRef
from baton.clock import Instant
from baton.handoff.pool_mode.side_entries import (
    MAX_TICKETS,
    HeartbeatEntry,
    HeartbeatEntryReader,
    HeartbeatEntryWriter,
)
from baton.ids import Epoch, TicketId, WorkerId
from tests.unit.handoff.orders import make_ticket

INTERVAL_S = 1.0


class Entries(dict[bytes, bytes]):
    """A tier, as far as signs need one."""

    def find(self, names: tuple[bytes, ...]) -> int:
        return sum(name in self for name in names)

    def put(self, name: bytes, body: memoryview) -> None:
        assert name not in self, "an entry is not replaced by another of its name"
        self[name] = bytes(body)

    def discard(self, name: bytes) -> None:
        self.pop(name, None)

    def try_lease(self, name: bytes) -> object:
        body = self.get(name)
        if body is None:
            return None

        def try_read(into: memoryview) -> bool:
            into[:] = body
            return True

        return _Lease(len(body), try_read)


class _Lease(nullcontext[None]):
    def __init__(self, num_bytes: int, try_read: object) -> None:
        super().__init__()
        self.num_bytes, self.try_read = num_bytes, try_read


def ticket_of(epoch: str) -> Ticket:
    return make_ticket(WorkerRef(WorkerId("p"), Epoch(epoch), ""), mode="pool")


def poll(reader: HeartbeatEntryReader, tickets: list[Ticket], now: float) -> list[TicketId]:
    on_alive: list[TicketId] = []
    epochs = [ticket.prefill.epoch for ticket in tickets]
    reader.poll(epochs, Instant(now), on_alive.append)
    return on_alive


def start() -> tuple[Entries, HeartbeatEntryWriter, HeartbeatEntryReader]:
    store = Entries()
    return store, HeartbeatEntryWriter(store, INTERVAL_S), HeartbeatEntryReader(store, INTERVAL_S)  # type: ignore[arg-type]


def test_a_sign_counts_once_and_only_if_it_came_since_the_last_look() -> None:
    _, writer, reader = start()
    mine, foreign = ticket_of("p1"), ticket_of("p2")
    writer.write([mine], Instant(1.0))
    assert poll(reader, [mine, foreign], 10.0) == [], "it may be old"
    assert poll(reader, [mine, foreign], 11.0) == []
    writer.write([mine], Instant(12.0))
    assert poll(reader, [mine, foreign], 12.5) == [mine.id]
    assert poll(reader, [mine, foreign], 13.0) == []


def test_the_first_sign_after_none_counts() -> None:
    _, writer, reader = start()
    mine = ticket_of("p1")
    assert poll(reader, [mine], 0.0) == []
    writer.write([mine], Instant(1.0))
    assert poll(reader, [mine], 1.0) == [mine.id]


def test_one_entry_is_left_for_each_life_and_none_at_the_end() -> None:
    store, writer, _ = start()
    for second in range(5):
        writer.write([ticket_of("p1")], Instant(second / 4))
    name = hashlib.sha256(b"baton/pool-heartbeat/2p1").digest()
    assert msgspec.msgpack.decode(store[name], type=HeartbeatEntry).number == 2, "too often"
    writer.remove()
    assert not store


def test_a_queue_that_is_too_long_for_one_entry_names_its_head() -> None:
    store, writer, _ = start()
    tickets = [ticket_of("p1") for _ in range(MAX_TICKETS + 7)]
    writer.write(tickets, Instant(0.0))
    (body,) = store.values()
    found = msgspec.msgpack.decode(body, type=HeartbeatEntry).tickets
    assert found == tuple(ticket.id for ticket in tickets[:MAX_TICKETS])


@pytest.mark.parametrize(
    "body", [b"", b"\xc1", bytes(70_000), msgspec.msgpack.encode({"number": -1})]
)
def test_what_is_no_sign_says_nothing(body: bytes) -> None:
    store, writer, reader = start()
    mine = ticket_of("p1")
    poll(reader, [mine], 0.0)
    writer.write([mine], Instant(1.0))
    (name,) = store
    store[name] = body
    assert poll(reader, [mine], 1.0) == []
