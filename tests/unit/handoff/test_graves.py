"""What is remembered of tickets that ended before this side had heard of them."""

from __future__ import annotations

from baton.handoff.graves import MAX_GRAVES, Grave, Graves
from baton.ids import Epoch, new_ticket_id

LIFE, OTHER = Epoch("a" * 32), Epoch("b" * 32)
GRAVE = Grave("it failed", "decode")


def test_what_another_life_says_of_a_ticket_changes_nothing() -> None:
    graves, ticket = Graves(), new_ticket_id()
    graves.bury(ticket, GRAVE, by=OTHER)
    assert graves.take(ticket, LIFE) is None
    graves.bury(ticket, GRAVE, by=LIFE)
    graves.bury(ticket, Grave("forged", "decode"), by=OTHER)
    assert graves.take(ticket, LIFE) == GRAVE


def test_what_this_side_buried_counts_whoever_the_peer_is_and_only_once() -> None:
    graves, ticket = Graves(), new_ticket_id()
    graves.bury(ticket, GRAVE)
    assert graves.take(ticket, LIFE) == GRAVE
    assert graves.take(ticket, LIFE) is None


def test_the_oldest_are_forgotten() -> None:
    graves, first = Graves(), new_ticket_id()
    graves.bury(first, GRAVE)
    for _ in range(MAX_GRAVES):
        graves.bury(new_ticket_id(), GRAVE)
    assert graves.take(first) is None
