"""How full a tier is: counts against a plain model, victims against the definition."""

from __future__ import annotations

import hashlib

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from baton.store.interface import EntryName
from baton.store.room import SLACK_PARTS, Held, Room, choose_victims

SIZES = st.integers(1, 40)


class Users(RuleBasedStateMachine):
    """Writers take, keep or give back, or die; removers remove, or die before they say so."""

    def __init__(self) -> None:
        super().__init__()
        self.room = Room(100)
        self.pending: list[int] = []
        self.kept: list[int] = []

    @rule(size=SIZES)
    def take(self, size: int) -> None:
        taken = self.room.try_take(size)
        assert (taken is None) == (self.room.shortage(size) > 0)
        if taken is not None:
            self.room = taken
            self.pending.append(size)

    @precondition(lambda self: self.pending)
    @rule()
    def keep(self) -> None:
        self.room = self.room.keep(self.pending[-1])
        self.kept.append(self.pending.pop())

    @precondition(lambda self: self.pending)
    @rule(is_killed=st.booleans())
    def give_back(self, is_killed: bool) -> None:
        size = self.pending.pop()
        if not is_killed:
            self.room = self.room.give_back(size)

    @precondition(lambda self: self.kept)
    @rule(is_killed=st.booleans())
    def remove(self, is_killed: bool) -> None:
        size = self.kept.pop(0)
        if not is_killed:
            self.room = self.room.remove(size)

    @rule()
    def recount(self) -> None:
        self.room = Room(self.room.capacity_bytes, sum(self.kept), self.room.pending_bytes)

    @invariant()
    def it_is_never_fuller_than_counted_and_never_too_full(self) -> None:
        counted = self.room.kept_bytes + self.room.pending_bytes
        assert sum(self.kept) + sum(self.pending) <= counted <= self.room.capacity_bytes

    @invariant()
    def what_must_go_makes_room(self) -> None:
        for size in (1, 40, 100):
            gone = min(self.room.shortage(size), self.room.kept_bytes)
            after = self.room.remove(gone)
            assert after.try_take(size) is not None or after.kept_bytes == 0


TestUsers = Users.TestCase


@given(
    st.lists(st.tuples(SIZES, st.integers(0, 5)), max_size=20),
    st.integers(0, 400),
)
def test_victims_are_the_least_recently_used_and_no_more_than_needed(
    entries: list[tuple[int, int]], needed: int
) -> None:
    held = [
        Held(EntryName(hashlib.sha256(bytes((i,))).digest()), size, used_at)
        for i, (size, used_at) in enumerate(entries)
    ]
    victims = choose_victims(held, needed)
    freed = sum(victim.num_bytes for victim in victims)
    assert freed >= min(needed, sum(entry.num_bytes for entry in held))
    if victims:
        assert freed - victims[-1].num_bytes < needed
        spared = [entry for entry in held if entry not in victims]
        youngest = max(victim.used_at for victim in victims)
        assert all(entry.used_at >= youngest for entry in spared)
    assert len(set(victims)) == len(victims)


def test_slack_is_bounded() -> None:
    room = Room(1600, kept_bytes=1600)
    assert room.shortage(1) == 1 + 1600 // SLACK_PARTS
    assert Room(1600).shortage(1600) == 0
