"""Victims that wait: entries go in the order of a policy that looks at all of them each time."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.store import victims
from baton.store.capacity import StoredEntry
from baton.store.eviction import EVICTIONS
from baton.store.interface import EntryName
from baton.store.victims import WaitingVictims, is_unused

if TYPE_CHECKING:
    from collections.abc import Generator

CAPACITY = 40
NAMES = st.integers(0, 79).map(lambda number: EntryName(bytes((number,))))


class Tier:
    """Entries of one byte, evicted as a folder does."""

    def __init__(self) -> None:
        self.entries: dict[EntryName, StoredEntry] = {}
        self.waiting = WaitingVictims(EVICTIONS.build("lru", {}), CAPACITY)
        self.num_lists_at_once = self.num_lists_of_pieces = 0

    def use(self, name: EntryName, now: float) -> None:
        if name in self.entries:
            self.entries[name] = replace(self.entries[name], used_at=now)
            return
        if len(self.entries) == CAPACITY:
            self.evict(now)
        self.entries[name] = StoredEntry(name, 1, now, now)

    def evict(self, now: float) -> None:
        if not self.evict_waiting(now):
            self.num_lists_at_once += 1
            self.waiting.choose(list(self.entries.values()), 1, now)
            assert self.evict_waiting(now)

    def evict_waiting(self, now: float) -> bool:
        is_done, num_gone = False, 0
        while not is_done and (victim := self.waiting.pop()) is not None:
            num_gone += 1
            if victim.name in self.entries and is_unused(victim, self.entries[victim.name]):
                del self.entries[victim.name]
                is_done = True
        if self.waiting.is_short:
            listed = self.waiting.look_on(self.list_all, num_gone)
            if listed is not None:
                self.num_lists_of_pieces += 1
                self.waiting.choose(listed, 0, now)
        return is_done

    def list_all(self) -> Generator[StoredEntry]:
        for name in list(self.entries):  # what comes later is not seen
            if name in self.entries:
                yield self.entries[name]


@pytest.fixture(autouse=True, scope="module")
def small_lists_fixture() -> Generator[None]:
    """A list of ten victims is made in pieces, too."""
    before = victims.MIN_CHOSEN
    vars(victims)["MIN_CHOSEN"] = 5
    yield
    vars(victims)["MIN_CHOSEN"] = before


@given(st.lists(NAMES, max_size=300))
def test_the_least_recently_used_goes_whatever_was_used_while_victims_waited(
    names: list[EntryName],
) -> None:
    tier, order = Tier(), dict[EntryName, None]()
    for now, name in enumerate(names):
        tier.use(name, float(now))
        order.pop(name, None)
        order[name] = None
        if len(order) > CAPACITY:
            del order[next(iter(order))]
        assert tier.entries.keys() == order.keys()


def test_most_lists_are_made_in_pieces() -> None:
    tier = Tier()
    for number in range(20 * CAPACITY):
        tier.use(EntryName(number.to_bytes(32, "little")), float(number))
    assert tier.num_lists_of_pieces > 50
    assert 1 < tier.num_lists_at_once < tier.num_lists_of_pieces / 8
    tier.waiting.stop_looking()
    assert len(tier.entries) == CAPACITY
