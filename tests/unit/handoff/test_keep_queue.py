"""What is kept of what was computed, and what is not. The store is a number of entries."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from baton.errors import StoreFullError
from baton.handoff.interface import KeepOrder, KVSent
from baton.handoff.pool_mode.keep_pace import BUSY_BATCH_S, IDLE_AFTER_S, IDLE_SHARE
from baton.handoff.pool_mode.prefix_store import StoredPrefixes
from baton.ids import TicketId
from baton.kv.copies import BlockTable
from baton.testing.clocks import ManualClock

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager

    from baton.handoff.interface import HandoffEvent
    from baton.handoff.pool_mode.block_copier import TokenSegment

SIZE = 16
ENTRY_S = 2**-12
SHARE = 2**-5
NUM_ENTRIES = 64
FORMAT = SimpleNamespace(
    block_size=SIZE, parts_of_shard=lambda _: (0,), body_bytes=lambda *_: 1 << 14
)


@dataclass
class TimedStore:
    """In place of `StoreWriter`: an entry takes `ENTRY_S`; the first `num_present` are there."""

    clock: ManualClock
    num_present: int = 0
    room: int = 1 << 20
    kept: list[tuple[int, int]] = field(default_factory=list)
    """Tokens of each entry."""

    def count_present(self, segments: Sequence[TokenSegment]) -> int:
        return min(self.num_present, len(segments))

    def keep_segments(
        self,
        segments: Sequence[TokenSegment],
        table: BlockTable,
        tenant_salt: str,
        guard: AbstractContextManager[object],
        *,
        after: None,
    ) -> tuple[int, int]:
        assert after is None
        assert (len(table.blocks), tenant_salt) == (NUM_ENTRIES, "tenant")
        with guard:
            self.clock.advance(ENTRY_S * len(segments))
        if len(self.kept) + len(segments) > self.room:
            raise StoreFullError("full")
        self.kept += [(each.start, each.stop) for each in segments]
        return len(segments), 0


@dataclass
class Setting:
    clock: ManualClock = field(default_factory=ManualClock)
    events: list[HandoffEvent] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.store = TimedStore(self.clock)
        access = SimpleNamespace(
            entry_format=FORMAT,
            journal=None,
            keep_share=SHARE,
            admission="always",
            store=SimpleNamespace(promote_waiting=lambda: False),
            view=SimpleNamespace(layout=SimpleNamespace(shard=None)),
        )
        self.prefixes = StoredPrefixes(access, "f", self.clock, lambda call: call())
        self.prefixes.open(self.events.append, None, self.store)
        self.counts = self.prefixes.counts

    def keep(self, number: int = 0) -> KeepOrder:
        ids = np.full(NUM_ENTRIES * SIZE, number, np.int32)
        table = BlockTable(0, np.arange(NUM_ENTRIES))
        order = KeepOrder(TicketId(number.to_bytes(16, "big")), "tenant", ids, table)
        self.prefixes.start_keep(order)
        return order

    def run(self, seconds: float) -> None:
        """As the pool's thread does, for so long; or until nothing is left."""
        stop = self.clock.now() + seconds
        while self.clock.now() < stop:
            wait_s = self.prefixes.step()
            if wait_s is None:
                return
            self.clock.advance(wait_s)


@pytest.fixture(name="it")
def it_fixture() -> Setting:
    return Setting()


def test_all_of_what_was_computed_is_kept_once_and_in_order(it: Setting) -> None:
    order = it.keep()
    it.run(60)
    assert it.store.kept == [(at, at + SIZE) for at in range(0, NUM_ENTRIES * SIZE, SIZE)]
    assert it.events == [KVSent(order.id)]
    assert (it.counts.num_stored, it.counts.num_dropped) == (NUM_ENTRIES, 0)
    assert it.counts.kept_s == pytest.approx(NUM_ENTRIES * ENTRY_S)
    assert it.counts.num_waiting == 0


def test_what_the_store_has_is_not_copied(it: Setting) -> None:
    it.store.num_present = NUM_ENTRIES - 3
    it.keep()
    it.run(60)
    assert len(it.store.kept) == it.counts.num_stored == 3
    assert it.counts.num_present == NUM_ENTRIES - 3
    assert it.counts.num_waiting == 0


def test_what_comes_for_the_first_time_is_not_kept_where_so_configured(it: Setting) -> None:
    it.prefixes.access.admission = "second"
    it.keep()
    it.run(60)
    assert (it.counts.num_stored, it.counts.num_dropped) == (0, NUM_ENTRIES)
    it.keep()
    it.keep(1)
    it.run(60)
    assert it.store.kept == [(at, at + SIZE) for at in range(0, NUM_ENTRIES * SIZE, SIZE)]
    assert (it.counts.num_stored, it.counts.num_dropped) == (NUM_ENTRIES, 2 * NUM_ENTRIES)
    it.keep()  # it was evicted meanwhile
    it.run(60)
    assert it.counts.num_stored == 2 * NUM_ENTRIES
    assert it.counts.num_waiting == 0


@pytest.mark.parametrize("named", [1, 7, 128])
def test_what_follows_the_first_that_is_new_is_not_kept(
    it: Setting, named: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("baton.handoff.pool_mode.keep_queue.NAMED_ENTRIES", named)
    it.prefixes.access.admission = "second"
    it.keep()
    it.run(60)
    it.prefixes._keeps._seen.popitem(last=False)  # the first block is forgotten
    it.keep()
    it.run(60)
    assert it.store.kept == []
    assert it.counts.num_dropped == 2 * NUM_ENTRIES
    it.keep()
    it.run(60)
    assert len(it.store.kept) == NUM_ENTRIES
    assert it.counts.num_waiting == 0


def test_blocks_that_were_here_are_remembered_within_bounds(
    it: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("baton.handoff.pool_mode.keep_queue.MAX_SEEN", NUM_ENTRIES)
    it.prefixes.access.admission = "second"
    for number in (0, 1, 0):
        it.keep(number)
        it.run(60)
    assert it.counts.num_stored == 0, "it was too long ago"
    assert len(it.prefixes._keeps._seen) == NUM_ENTRIES


def test_keeping_takes_its_share_of_the_time_in_which_the_engine_computes(it: Setting) -> None:
    it.prefixes.steps.num_begun = 1
    for number in range(9):
        it.keep(number)
    it.run(1.0)
    assert SHARE - BUSY_BATCH_S < it.counts.kept_s <= SHARE + BUSY_BATCH_S
    assert it.counts.num_stored + it.counts.num_waiting == 9 * NUM_ENTRIES
    assert it.counts.num_waiting > 0, "there is a backlog"
    it.prefixes.steps.num_ended = 1
    num_left = it.counts.num_waiting
    it.run(2 * IDLE_AFTER_S + 1.1 * num_left * ENTRY_S / IDLE_SHARE)
    assert it.counts.num_waiting == 0, "what was left is kept as soon as the engine is idle"
    assert it.counts.num_dropped == 0


def test_an_order_whose_blocks_are_taken_back_is_dropped_and_counted(it: Setting) -> None:
    it.prefixes.steps.num_begun = 1
    first, second, third = (it.keep(number) for number in range(3))
    it.run(2 * NUM_ENTRIES * ENTRY_S)
    num_stored = it.counts.num_stored
    assert 0 < num_stored < NUM_ENTRIES
    first.guard.revoke()
    third.guard.revoke()
    it.prefixes.steps.num_ended = 1
    it.run(60)
    assert it.events == [KVSent(each.id) for each in (first, second, third)]
    assert it.counts.num_stored == num_stored + NUM_ENTRIES
    assert it.counts.num_dropped == 2 * NUM_ENTRIES - num_stored
    assert it.counts.num_waiting == 0


def test_a_full_store_costs_the_rest_of_an_order_and_no_other(it: Setting) -> None:
    orders = [it.keep(number) for number in range(2)]
    it.store.room = 5
    it.run(60)
    assert it.events == [KVSent(each.id) for each in orders]
    assert it.counts.num_stored + it.counts.num_dropped == 2 * NUM_ENTRIES
    assert it.counts.num_waiting == 0


def test_nothing_is_accessed_after_the_end(it: Setting) -> None:
    orders = [it.keep(number) for number in range(2)]
    it.prefixes.stop()
    it.run(60)
    assert it.store.kept == []
    assert it.events == [KVSent(each.id) for each in orders]
    assert it.counts.num_dropped == 2 * NUM_ENTRIES
