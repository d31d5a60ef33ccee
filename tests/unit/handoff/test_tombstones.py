"""What is remembered of tickets that ended before this side had heard of them."""

from __future__ import annotations

from baton.auth.ticket import WorkerRef
from baton.handoff.grants import MAX_TOMBSTONES, Tombstone, Tombstones
from baton.ids import Epoch, WorkerId, new_ticket_id

LIFE, OTHER = (WorkerRef(WorkerId("d"), Epoch(digit * 32), "127.0.0.1:2") for digit in "ab")
THIEF = WorkerRef(WorkerId("x"), LIFE.epoch, "127.0.0.1:3")
TOMBSTONE = Tombstone("it failed", "decode")


def test_what_another_life_says_of_a_ticket_changes_nothing() -> None:
    tombstones, ticket = Tombstones(), new_ticket_id()
    for stranger in (OTHER, THIEF):
        tombstones.add(ticket, TOMBSTONE, by=stranger)
    assert tombstones.take(ticket, LIFE) is None
    tombstones.add(ticket, TOMBSTONE, by=LIFE)
    tombstones.add(ticket, Tombstone("forged", "decode"), by=OTHER)
    assert tombstones.take(ticket, LIFE) == TOMBSTONE


def test_what_this_side_buried_counts_whoever_the_peer_is_and_only_once() -> None:
    tombstones, ticket = Tombstones(), new_ticket_id()
    tombstones.add(ticket, TOMBSTONE)
    assert tombstones.take(ticket, LIFE) == TOMBSTONE
    assert tombstones.take(ticket, LIFE) is None


def test_the_oldest_are_forgotten() -> None:
    tombstones, first = Tombstones(), new_ticket_id()
    tombstones.add(first, TOMBSTONE)
    for _ in range(MAX_TOMBSTONES):
        tombstones.add(new_ticket_id(), TOMBSTONE)
    assert tombstones.take(first) is None
