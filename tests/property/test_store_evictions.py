"""Eviction policies: what each must do, and S3-FIFO against queues that are kept as queues."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.store.capacity import MAX_USES, StoredEntry, count_use
from baton.store.eviction import EVICTIONS, EvictionPolicy
from baton.store.evictions.s3fifo import SMALL_SHARE
from baton.store.interface import EntryName

KINDS = ("lru", "s3fifo")
CAPACITY = 8


def name_of(number: int) -> EntryName:
    return EntryName(hashlib.sha256(str(number).encode()).digest())


def build(kind: str) -> EvictionPolicy:
    return EVICTIONS.build(kind, {})


ENTRIES = st.lists(
    st.builds(
        StoredEntry,
        name=st.just(EntryName(b"")),
        num_bytes=st.integers(1, 40),
        used_at=st.integers(0, 5),
        queued_at=st.integers(0, 5),
        num_uses=st.integers(0, MAX_USES),
        is_protected=st.booleans(),
        is_pinned=st.booleans(),
    ),
    max_size=20,
).map(lambda found: [replace(entry, name=name_of(i)) for i, entry in enumerate(found)])


@pytest.mark.parametrize("kind", KINDS)
@given(entries=ENTRIES, needed=st.integers(0, 400))
def test_enough_goes_and_no_more_and_nothing_that_is_pinned(
    kind: str, entries: list[StoredEntry], needed: int
) -> None:
    eviction = build(kind).choose(entries, needed, 6.0)
    sizes = {entry.name: entry.num_bytes for entry in entries}
    victims = [victim.name for victim in eviction.victims]
    freed = sum(sizes[name] for name in victims)
    evictable = [entry for entry in entries if not entry.is_pinned]
    assert freed >= min(needed, sum(entry.num_bytes for entry in evictable))
    assert not victims or freed - sizes[victims[-1]] < needed
    assert len(set(victims)) == len(victims)
    assert set(victims) <= {entry.name for entry in evictable}
    stay = {entry.name: entry for entry in evictable if entry.name not in victims}
    for entry in eviction.requeued:
        assert entry.is_protected
        assert entry.num_uses < stay[entry.name].num_uses
        assert entry.used_at == stay[entry.name].used_at, "evicting is no use"


class Queues:
    """S3-FIFO as in the paper, for entries of one size."""

    def __init__(self) -> None:
        self.small: OrderedDict[int, int] = OrderedDict()
        self.protected: OrderedDict[int, int] = OrderedDict()
        self.evicted: set[int] = set()

    def use(self, number: int) -> None:
        for queue in (self.small, self.protected):
            if number in queue:
                queue[number] = min(queue[number] + 1, MAX_USES)
                return
        if len(self.small) + len(self.protected) >= CAPACITY:
            self.evict()
        queue = self.protected if number in self.evicted else self.small
        self.evicted.discard(number)
        queue[number] = 0

    def evict(self) -> None:
        while True:
            if len(self.small) >= SMALL_SHARE * CAPACITY or not self.protected:
                number, num_uses = self.small.popitem(last=False)
                if num_uses == 0:
                    self.evicted.add(number)
                    return
                self.protected[number] = 0
            else:
                number, num_uses = self.protected.popitem(last=False)
                if num_uses == 0:
                    return
                self.protected[number] = num_uses - 1


@given(st.lists(st.integers(0, 15), max_size=120))
def test_s3fifo_keeps_what_its_queues_would(numbers: list[int]) -> None:
    policy, queues = build("s3fifo"), Queues()
    kept: dict[EntryName, StoredEntry] = {}
    evicted: set[EntryName] = set()
    for now, number in enumerate(numbers, 1):
        queues.use(number)
        name = name_of(number)
        if name in kept:
            used = kept[name]
            kept[name] = replace(used, used_at=now, num_uses=count_use(used.num_uses))
        else:
            if len(kept) == CAPACITY:
                eviction = policy.choose(kept.values(), 1, now)
                kept |= {entry.name: entry for entry in eviction.requeued}
                for victim in eviction.victims:
                    del kept[victim.name]
                    evicted |= set() if victim.is_protected else {victim.name}
            # After what was requeued in this moment.
            kept[name] = StoredEntry(name, 1, now, now + 0.5, is_protected=name in evicted)
            evicted.discard(name)
        assert kept.keys() == {name_of(n) for n in (*queues.small, *queues.protected)}


def test_what_is_used_once_does_not_displace_what_is_used_again() -> None:
    used = [StoredEntry(name_of(i), 1, 0.0, 0.0, num_uses=1) for i in range(4)]
    once = [StoredEntry(name_of(10 + i), 1, 5.0, 5.0) for i in range(8)]
    lru = build("lru").choose([*used, *once], 3, 6.0)
    assert {victim.name for victim in lru.victims} <= {entry.name for entry in used}
    s3fifo = build("s3fifo").choose([*used, *once], 3, 6.0)
    assert {victim.name for victim in s3fifo.victims} <= {entry.name for entry in once}
