"""What a load is charged, and what a lookup's answer is used for. The store is a list of pieces."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from baton.handoff.interface import KVLanded, LoadOrder, LookupOrder, PrefixFound
from baton.handoff.pool_mode.block_copier import EntryBodies
from baton.handoff.pool_mode.load_costs import FORGETTING, TierTime
from baton.handoff.pool_mode.prefix_store import (
    ELSEWHERE_S,
    MAX_READ_BYTES,
    REPORT_WAIT_S,
    StoredPrefixes,
)
from baton.handoff.pool_mode.store_reader import ReadBatch
from baton.handoff.read_prefixes import ReadOrder
from baton.ids import TicketId
from baton.kv.copies import BlockTable
from baton.store.tiered import TierRun
from baton.testing.clocks import ManualClock

if TYPE_CHECKING:
    from collections.abc import Sequence

    from baton.handoff.interface import HandoffEvent
    from baton.handoff.pool_mode.block_copier import TokenSegment

SIZE = 16
NUM_ENTRIES = 6
BATCH_S = 2**-10
TOKEN_S = 2 * BATCH_S / SIZE
"""Computing takes twice as long as loading."""


@dataclass
class TimedStore:
    """In place of `StoreReader` and `StoreWriter`: a batch is one entry, and takes `BATCH_S`.

    What is read before it is loaded is one batch of up to `num_at_once` entries.
    """

    clock: ManualClock
    num_present: int = NUM_ENTRIES
    num_looks: int = 0
    num_at_once: int = NUM_ENTRIES
    num_readable: int = NUM_ENTRIES
    entry_bytes: int = 1
    tiers: Sequence[TierRun] = (TierRun("shared", NUM_ENTRIES),)
    entry_s: dict[str, float] = field(default_factory=lambda: {"shared": BATCH_S})
    loaded: list[tuple[int, int]] = field(default_factory=list)
    read_from: list[int] = field(default_factory=list)

    def find_tiers(self, segments: Sequence[TokenSegment]) -> list[TierRun]:
        self.num_looks += 1
        self.clock.advance(BATCH_S)
        left, runs = min(self.num_present, len(segments)), []
        for tier, num in self.tiers:
            if left > 0:
                runs.append(TierRun(tier, min(left, num)))
            left -= num
        return runs

    def read_segments(self, segments: Sequence[TokenSegment], *_: object, after: None) -> ReadBatch:
        """One entry; of the time, half is spent after the read."""
        assert after is None
        at = segments[0].start // SIZE
        self.read_from.append(segments[0].start)
        tiers = [run.tier for run in self.tiers for _ in range(run.num)]
        entry_s = self.entry_s[tiers[at]]
        self.clock.advance(entry_s)
        return ReadBatch(segments[:1], [], 1, (TierTime(tiers[at], SIZE, entry_s / 2),))

    def fits_one_batch(self, segments: Sequence[TokenSegment]) -> bool:
        return len(segments) <= self.num_at_once

    def read_bodies(self, segments: Sequence[TokenSegment]) -> ReadBatch:
        self.clock.advance(BATCH_S)
        read = segments[: self.num_readable]
        rows = np.zeros((len(read), 1), np.uint8).repeat(self.entry_bytes, 1)
        times = (TierTime("shared", len(read) * SIZE, BATCH_S),) if read else ()
        return ReadBatch(read, [EntryBodies(None, rows)] if read else [], 1, times)

    def release(self, _: ReadBatch) -> None:
        """Nothing is kept for the next one."""

    def put_in_blocks(self, read: ReadBatch, _: LoadOrder) -> None:
        self.loaded.append((read.segments[0].start, read.segments[-1].stop))


@dataclass
class Setting:
    clock: ManualClock = field(default_factory=ManualClock)
    events: list[HandoffEvent] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.store = TimedStore(self.clock)
        entry_format = SimpleNamespace(block_size=SIZE)
        access = SimpleNamespace(
            entry_format=entry_format,
            journal=None,
            keep_share=1.0,
            admission="always",
            store=SimpleNamespace(promote_waiting=lambda: False),
        )
        self.prefixes = StoredPrefixes(access, "f", self.clock, lambda call: call())
        self.prefixes.open(self.events.append, self.store, self.store)

    def load(
        self, number: int, num_tokens: int = NUM_ENTRIES * SIZE, token_s: float = TOKEN_S
    ) -> LoadOrder:
        ids = np.full(num_tokens, number, np.int32)
        order = LoadOrder(name(number), "", ids, 0, token_s, BlockTable(0, np.arange(NUM_ENTRIES)))
        self.prefixes.start_load(order)
        return order

    def look_up(self, number: int, start: int = 0) -> None:
        ids = np.full(NUM_ENTRIES * SIZE, number, np.int32)
        self.prefixes.start_lookup(LookupOrder(name(number), "", ids, start, TOKEN_S))

    def read(self, number: int, start: int = 0) -> PrefixFound:
        ids = np.full(NUM_ENTRIES * SIZE, number, np.int32)
        self.prefixes.start_lookup(ReadOrder(name(number), "", ids, start, TOKEN_S))
        found = self.events.pop()
        assert isinstance(found, PrefixFound)
        return found

    def put_in_blocks(self, number: int, start: int = 0, stop: int = NUM_ENTRIES * SIZE) -> int:
        ids = np.full(stop, number, np.int32)
        table = BlockTable(0, np.arange(NUM_ENTRIES))
        return self.prefixes.put_in_blocks(LoadOrder(name(number), "", ids, start, TOKEN_S, table))

    def run(self) -> None:
        while self.prefixes.step() is not None:
            pass


def name(number: int) -> TicketId:
    return TicketId(number.to_bytes(16, "big"))


@pytest.mark.parametrize("num_loads", [1, 2, 8])
def test_loads_at_once_are_charged_their_own_share(num_loads: int) -> None:
    it = Setting()
    for number in range(num_loads):
        it.load(number)
    it.run()
    assert it.clock.now() >= num_loads * NUM_ENTRIES * BATCH_S, "they took turns"
    assert it.events == [KVLanded(name(n), None, NUM_ENTRIES * SIZE) for n in range(num_loads)]
    counts = it.prefixes.counts
    assert (counts.num_whole, counts.num_given_up) == (num_loads, 0)
    assert it.prefixes.costs.predict("shared", SIZE) == pytest.approx(BATCH_S)


def test_a_load_that_is_itself_slower_than_computing_is_given_up() -> None:
    it = Setting()
    ids = np.zeros(NUM_ENTRIES * SIZE, np.int32)
    table = BlockTable(0, np.arange(NUM_ENTRIES))
    it.prefixes.start_load(LoadOrder(name(0), "", ids, 0, BATCH_S / SIZE / 2, table))
    it.run()
    assert it.events == [KVLanded(name(0), None, SIZE)]
    assert it.prefixes.counts.num_given_up == 1


def test_a_load_that_makes_progress_is_not_late() -> None:
    """The engine gives up what has made none for `LOAD_TIMEOUT_S`; a tier may be slower."""
    it = Setting()
    it.store.entry_s = {"shared": 1.0}
    order = it.load(1, token_s=2.0 / SIZE)
    seen = []
    while it.prefixes.step() is not None:
        seen.append(order.progress.last_at)
    end = it.clock.now()
    assert seen[1:] == [end - left for left in (5, 4, 3, 2, 1)], "one entry a second"
    assert order.progress.last_at == end
    assert it.events == [KVLanded(name(1), None, NUM_ENTRIES * SIZE)]


@pytest.mark.parametrize(
    ("token_s", "num_loaded"),
    [
        (2.0 / SIZE, {3: 2, 4: 2, 5: 2, 6: 2, 7: 2, 0: 3, 1: 3, 2: 3}),  # 12 s
        (0.0, {1: 1, 2: 1, 3: 1, 4: 1, 5: 1, 6: 1, 7: 1, 0: 2}),  # not known: 2 s
    ],
)
def test_loads_together_take_no_longer_than_computing(
    token_s: float, num_loaded: dict[int, int]
) -> None:
    """By number, how many entries each has put in place by then: they are used."""
    it = Setting()
    it.store.entry_s = {"shared": 1.0}
    for number in range(8):
        it.load(number, token_s=token_s)
    it.run()
    assert it.events == [KVLanded(name(n), None, num * SIZE) for n, num in num_loaded.items()]
    assert it.prefixes.counts.num_given_up == 8
    assert it.prefixes.costs.predict("shared", SIZE) == pytest.approx(1.0)


def test_what_is_reported_is_looked_at_while_loads_go_on() -> None:
    """Each quarter of a second; not before a load that is quicker."""
    it = Setting()
    it.store.name_parts, looks = None, []
    it.prefixes.access.journal = SimpleNamespace(
        step=lambda _: looks.append(it.clock.now()), reports=lambda _: True
    )
    it.load(1)
    it.run()
    assert len(looks) == 1, "after it"
    it.store.entry_s = {"shared": 1.0}
    it.load(2, token_s=2.0 / SIZE)
    it.run()
    assert len(looks) == 1 + NUM_ENTRIES


def set_tiers(it: Setting, *tiers: TierRun, object_s: float = 8 * BATCH_S) -> None:
    """Of an entry, computing takes `2 * BATCH_S`, `shared` half of that, `object` more."""
    it.store.tiers = tiers
    it.store.entry_s = {"shared": BATCH_S, "object": object_s}


def test_what_lies_in_a_slow_tier_is_computed_and_what_is_before_it_is_loaded() -> None:
    it = Setting()
    set_tiers(it, TierRun("shared", 4), TierRun("object", 2))
    it.load(1)  # nothing is known of either
    it.run()
    it.load(2)
    it.run()
    assert it.events == [KVLanded(name(1), None, 5 * SIZE), KVLanded(name(2), None, 4 * SIZE)]
    counts = it.prefixes.counts
    assert (counts.num_given_up, counts.num_whole) == (1, 1)
    assert counts.tiers["object"].refused_tokens == 2 * SIZE
    shared = counts.tiers["shared"]
    assert (shared.loaded_s, shared.predicted_s) == pytest.approx((4 * BATCH_S, 4 * BATCH_S))
    expected_s = it.prefixes.costs.predict("object", SIZE)
    assert expected_s == pytest.approx(FORGETTING * 8 * BATCH_S), "it is tried again some time"
    assert it.prefixes.costs.predict("shared", SIZE) == pytest.approx(BATCH_S)


def test_what_lies_in_a_slow_tier_is_loaded_for_what_is_behind_it() -> None:
    it = Setting()
    set_tiers(it, TierRun("shared", 5), TierRun("object", 1), object_s=4 * BATCH_S)
    it.load(1)
    it.run()
    it.events.clear()
    it.store.tiers = (TierRun("object", 1), TierRun("shared", 5))
    it.load(2)
    it.run()
    assert it.events == [KVLanded(name(2), None, NUM_ENTRIES * SIZE)]


def test_what_a_lookup_found_is_loaded_without_a_second_look() -> None:
    it = Setting()
    it.look_up(1)
    assert it.events == [PrefixFound(name(1), NUM_ENTRIES * SIZE, BATCH_S)]
    it.load(1, num_tokens=2 * SIZE + 3)  # the engine wants less
    it.run()
    assert it.events[1:] == [KVLanded(name(1), None, 2 * SIZE)]
    assert it.store.num_looks == 1


def test_what_the_engines_cache_lost_since_the_lookup_is_loaded_too() -> None:
    """Its tokens before what was found are in the load's blocks as well."""
    it = Setting()
    it.look_up(1, start=2 * SIZE)
    it.load(1)
    it.run()
    assert it.events[1:] == [KVLanded(name(1), None, NUM_ENTRIES * SIZE)]
    assert it.store.read_from == [at * SIZE for at in range(NUM_ENTRIES)]


def test_a_lookup_that_found_nothing_is_not_remembered() -> None:
    it = Setting()
    it.store.num_present = 0
    it.look_up(1)
    assert it.events == [PrefixFound(name(1), 0, BATCH_S)]
    it.store.num_present = NUM_ENTRIES
    it.load(1)
    it.run()
    assert it.events[1:] == [KVLanded(name(1), None, NUM_ENTRIES * SIZE)]


@pytest.mark.parametrize(
    ("start", "stop", "loaded"),
    [
        (0, NUM_ENTRIES * SIZE, (0, NUM_ENTRIES * SIZE)),
        (SIZE + 1, NUM_ENTRIES * SIZE, (SIZE, NUM_ENTRIES * SIZE)),  # the cache has grown
        (0, 2 * SIZE, (0, 2 * SIZE)),  # another rank has found less
    ],
)
def test_what_was_read_is_put_in_blocks_once(
    start: int, stop: int, loaded: tuple[int, int]
) -> None:
    it = Setting()
    assert it.read(1) == PrefixFound(name(1), NUM_ENTRIES * SIZE, 2 * BATCH_S, is_read=True)
    assert it.put_in_blocks(1, start, stop) == stop
    assert it.store.loaded == [loaded]
    assert it.put_in_blocks(1, start, stop) == start
    counts = it.prefixes.counts
    assert (counts.num_whole, counts.loaded_tokens, counts.num_unused) == (1, stop - start, 0)
    assert it.prefixes.costs.predict("shared", NUM_ENTRIES * SIZE) == pytest.approx(BATCH_S)


def test_tokens_before_what_was_read_are_not_taken_for_read() -> None:
    it = Setting()
    it.read(1, start=SIZE)
    assert it.put_in_blocks(1, start=0) == 0
    assert it.store.loaded == []


def test_what_cannot_be_read_is_not_found() -> None:
    it = Setting()
    it.store.num_readable = 2
    assert it.read(1).num_tokens == 2 * SIZE
    it.store.num_readable = 0
    assert it.read(2) == PrefixFound(name(2), 0, 2 * BATCH_S)


def test_what_is_more_than_a_batch_is_loaded_without_a_second_look() -> None:
    it = Setting()
    it.store.num_at_once = NUM_ENTRIES - 1
    assert it.read(1) == PrefixFound(name(1), NUM_ENTRIES * SIZE, BATCH_S)
    it.load(1)
    it.run()
    assert it.events == [KVLanded(name(1), None, NUM_ENTRIES * SIZE)]
    assert it.store.num_looks == 1


def test_memory_for_what_is_read_is_bounded() -> None:
    it = Setting()
    it.store.entry_bytes = MAX_READ_BYTES // (2 * NUM_ENTRIES) + 1
    assert [it.read(number).is_read for number in range(3)] == [True, True, False]
    it.prefixes.release(name(0))
    it.prefixes.release(name(0))
    assert it.prefixes.costs.predict("shared", SIZE) is None, (
        "a read that hung says nothing of the next"
    )
    assert it.prefixes.counts.num_unused == 1
    assert it.put_in_blocks(0) == 0
    assert it.read(4).is_read


class Journal:
    """In place of a `StoreJournal`: what it was told."""

    def __init__(self) -> None:
        self.reported: set[bytes] = set()
        self.calls: list[tuple[int, int, str]] = []
        self.num_steps, self.is_theirs = 0, False

    def step(self, _: object) -> float:
        self.num_steps += 1
        return 1.0

    def reports(self, segment: TokenSegment) -> bool:
        return segment.block_hash in self.reported

    def note_missing(self, segment: TokenSegment) -> None:
        self.reported.discard(segment.block_hash)

    def add_present(self, segments, token_ids, salt, name_parts) -> None:
        assert len(token_ids) >= segments[-1].stop
        if not self.is_theirs:
            self.reported |= {segment.block_hash for segment in segments}
        self.calls.append((segments[0].start, segments[-1].stop, salt))


def test_what_a_lookup_finds_and_nobody_has_reported_is_reported_once():
    """As after a restart of this worker, over a tier that outlives it."""
    it, journal = Setting(), Journal()
    it.prefixes.access.journal = journal
    it.store.name_parts = None
    it.look_up(1, start=SIZE)
    assert not journal.calls, "not while the lookup waits"
    assert it.prefixes.step() == 1.0
    assert journal.calls == [(SIZE, NUM_ENTRIES * SIZE, "")]
    it.look_up(1, start=SIZE)
    it.prefixes.step()
    assert len(journal.calls) == 1


def test_what_is_others_to_report_is_not_looked_for_with_each_lookup():
    """As what lies in the memory of a worker that reports it itself."""
    it, journal = Setting(), Journal()
    it.prefixes.access.journal = journal
    it.store.name_parts = None
    journal.is_theirs = True
    for _ in range(3):
        it.look_up(1)
        it.prefixes.step()
    assert (len(journal.calls), journal.num_steps) == (1, 3)
    it.clock.advance(ELSEWHERE_S)
    it.look_up(1)
    it.prefixes.step()
    assert len(journal.calls) == 2


def test_reports_keep_nothing_from_being_looked_at():
    it, journal = Setting(), Journal()
    it.prefixes.access.journal = journal
    it.store.name_parts = None
    for number in range(1, 4):
        it.look_up(number)
    waits = [it.prefixes.step() for _ in range(4)]
    assert waits == [REPORT_WAIT_S, REPORT_WAIT_S, 1.0, 1.0]
    assert (len(journal.calls), journal.num_steps) == (3, 4)
