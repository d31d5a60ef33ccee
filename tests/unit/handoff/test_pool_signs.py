"""Signs of life in a store: what is new counts, what is old, foreign or damaged does not."""

from __future__ import annotations

import hashlib
from contextlib import nullcontext
from types import SimpleNamespace

import msgspec
import pytest

from baton.authority.ticket import Ticket, WorkerRef
from baton.clock import Instant
from baton.handoff.pooling.signs import MAX_TICKETS, Sign, SignsOfLife, SignsSeen
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


def look(seen: SignsSeen, tickets: list[Ticket], now: float) -> list[TicketId]:
    alive: list[TicketId] = []
    collections = [SimpleNamespace(order=SimpleNamespace(ticket=ticket)) for ticket in tickets]
    seen.look(collections, Instant(now), alive.append)  # type: ignore[arg-type]
    return alive


def start() -> tuple[Entries, SignsOfLife, SignsSeen]:
    store = Entries()
    return store, SignsOfLife(store, INTERVAL_S), SignsSeen(store, INTERVAL_S)  # type: ignore[arg-type]


def test_a_sign_counts_once_and_only_if_it_came_since_the_last_look() -> None:
    _, signs, seen = start()
    mine, foreign = ticket_of("p1"), ticket_of("p2")
    signs.lived([mine], Instant(1.0))
    assert look(seen, [mine, foreign], 10.0) == [], "it may be old"
    assert look(seen, [mine, foreign], 11.0) == []
    signs.lived([mine], Instant(12.0))
    assert look(seen, [mine, foreign], 12.5) == [mine.id]
    assert look(seen, [mine, foreign], 13.0) == []


def test_the_first_sign_after_none_counts() -> None:
    _, signs, seen = start()
    mine = ticket_of("p1")
    assert look(seen, [mine], 0.0) == []
    signs.lived([mine], Instant(1.0))
    assert look(seen, [mine], 1.0) == [mine.id]


def test_one_entry_is_left_for_each_life_and_none_at_the_end() -> None:
    store, signs, _ = start()
    for second in range(5):
        signs.lived([ticket_of("p1")], Instant(second / 4))
    name = hashlib.sha256(b"baton/pool-sign/1p1").digest()
    assert msgspec.msgpack.decode(store[name], type=Sign).number == 2, "too often"
    signs.end()
    assert not store


def test_a_queue_that_is_too_long_for_one_entry_names_its_head() -> None:
    store, signs, _ = start()
    tickets = [ticket_of("p1") for _ in range(MAX_TICKETS + 7)]
    signs.lived(tickets, Instant(0.0))
    (body,) = store.values()
    found = msgspec.msgpack.decode(body, type=Sign).tickets
    assert found == tuple(ticket.id for ticket in tickets[:MAX_TICKETS])


@pytest.mark.parametrize(
    "body", [b"", b"\xc1", bytes(70_000), msgspec.msgpack.encode({"number": -1})]
)
def test_what_is_no_sign_says_nothing(body: bytes) -> None:
    store, signs, seen = start()
    mine = ticket_of("p1")
    look(seen, [mine], 0.0)
    signs.lived([mine], Instant(1.0))
    (name,) = store
    store[name] = body
    assert look(seen, [mine], 1.0) == []
