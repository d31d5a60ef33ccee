"""How full a tier is: counts against a plain model, victims against the definition."""

from __future__ import annotations

import hashlib

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from baton.store.capacity import (
    MAX_SLACK_PARTS,
    SLACK_ENTRIES,
    Capacity,
    StoredEntry,
    choose_victims,
)
from baton.store.interface import EntryName

SIZES = st.integers(1, 40)


class Users(RuleBasedStateMachine):
    """Writers take, keep or give back, or die; removers remove, or die before they say so."""

    def __init__(self) -> None:
        super().__init__()
        self.capacity = Capacity(100)
        self.pending: list[int] = []
        self.kept: list[int] = []

    @rule(size=SIZES)
    def take(self, size: int) -> None:
        reserved = self.capacity.try_reserve(size)
        assert (reserved is None) == (self.capacity.shortage(size) > 0)
        if reserved is not None:
            self.capacity = reserved
            self.pending.append(size)

    @precondition(lambda self: self.pending)
    @rule()
    def commit(self) -> None:
        self.capacity = self.capacity.commit(self.pending[-1])
        self.kept.append(self.pending.pop())

    @precondition(lambda self: self.pending)
    @rule(is_killed=st.booleans())
    def release(self, is_killed: bool) -> None:
        size = self.pending.pop()
        if not is_killed:
            self.capacity = self.capacity.commit(size).remove(size)

    @precondition(lambda self: self.kept)
    @rule(is_killed=st.booleans())
    def remove(self, is_killed: bool) -> None:
        size = self.kept.pop(0)
        if not is_killed:
            self.capacity = self.capacity.remove(size)

    @rule()
    def recount(self) -> None:
        self.capacity = Capacity(
            self.capacity.capacity_bytes, sum(self.kept), self.capacity.reserved_bytes
        )

    @invariant()
    def it_is_never_fuller_than_counted_and_never_too_full(self) -> None:
        counted = self.capacity.committed_bytes + self.capacity.reserved_bytes
        assert sum(self.kept) + sum(self.pending) <= counted <= self.capacity.capacity_bytes

    @invariant()
    def what_must_go_makes_room(self) -> None:
        for size in (1, 40, 100):
            gone = min(self.capacity.shortage(size), self.capacity.committed_bytes)
            after = self.capacity.remove(gone)
            assert after.try_reserve(size) is not None or after.committed_bytes == 0


TestUsers = Users.TestCase


@given(
    st.lists(st.tuples(SIZES, st.integers(0, 5)), max_size=20),
    st.integers(0, 400),
)
def test_victims_are_the_least_recently_used_and_no_more_than_needed(
    entries: list[tuple[int, int]], needed: int
) -> None:
    entries = [
        StoredEntry(EntryName(hashlib.sha256(bytes((i,))).digest()), size, used_at)
        for i, (size, used_at) in enumerate(entries)
    ]
    victims = choose_victims(entries, needed)
    freed = sum(victim.num_bytes for victim in victims)
    assert freed >= min(needed, sum(entry.num_bytes for entry in entries))
    if victims:
        assert freed - victims[-1].num_bytes < needed
        spared = [entry for entry in entries if entry not in victims]
        youngest = max(victim.used_at for victim in victims)
        assert all(entry.used_at >= youngest for entry in spared)
    assert len(set(victims)) == len(victims)


def test_slack_is_bounded() -> None:
    capacity = Capacity(1600, committed_bytes=1600)
    assert capacity.shortage(1) == 1 + SLACK_ENTRIES
    assert capacity.shortage(100) == 100 + 1600 // MAX_SLACK_PARTS
    assert Capacity(1600).shortage(1600) == 0
