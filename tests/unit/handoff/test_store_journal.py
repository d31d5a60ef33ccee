"""What a worker reports of its store: what is there, until it is not, within bounds."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

import numpy as np
import pytest

from baton.errors import StoreError
from baton.events.blocks import STORE_MEDIUM, BlockRemoved, BlockStored
from baton.events.journal import CacheJournal
from baton.handoff.pool_mode import store_journal
from baton.handoff.pool_mode.block_copier import hash_segments
from baton.handoff.pool_mode.store_journal import (
    BATCH_ENTRIES,
    BILLED_WAIT_S,
    BUSY_SHARE,
    ROUND_S,
    open_store_journal,
)
from baton.kv.identity import HashDomain
from baton.kv.layout import KVLayout
from baton.store.entry_format import EntryFormat
from baton.store.tiered import open_store
from baton.testing.clocks import ManualClock

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from baton.handoff.pool_mode.store_journal import StoreJournal
    from baton.store.tiered import TieredStore

SIZE = 4
SALT = "tenant"
FORMAT = EntryFormat(KVLayout.gqa(1, 1, 4, block_size=SIZE, dtype="float32"), 1)


class Worker:
    """The parts of a worker's pool thread that keep entries and look at them."""

    def __init__(self, folder: Path, clock: ManualClock, **fields) -> None:
        options = {"file": {"directory": str(folder)}}
        self.clock = clock
        self.store: TieredStore = open_store(
            ("file",), options, cluster="c", key=bytes(32), clock=clock
        )
        self.events = CacheJournal()
        known = {"fingerprint": "f", "form": FORMAT} | fields
        opened = open_store_journal(
            self.store.tiers[0].inner,
            known["form"],
            self.events,
            fingerprint=known["fingerprint"],
            clock=clock,
            is_billed=known.get("is_billed", False),
        )
        assert opened is not None
        self.journal: StoreJournal = opened

    def names(self, segments):
        return [FORMAT.name(each.block_hash, 0) for each in segments]

    def count_present(self, segments):
        return self.store.find(self.names(segments))

    def keep(self, token_ids):
        segments = hash_segments(HashDomain("f", SALT, SIZE), token_ids)
        for name in self.names(segments):
            self.store.put(name, bytes(16))
        self.journal.add_present(segments, None, token_ids, SALT)
        return segments

    def reported(self):
        """Hashes, by the journal's events, from the beginning on."""
        held = set()
        for event in self.events.read(0).events:
            assert event.medium == STORE_MEDIUM
            if isinstance(event, BlockStored):
                held.update(event.hashes)
            elif isinstance(event, BlockRemoved):
                held.difference_update(event.hashes)
        return held

    def look(self):
        """Until every entry was looked for once."""
        self.clock.advance(ROUND_S)
        wait_s = self.journal.step(self.count_present)
        while self.journal._to_check:
            self.clock.advance(wait_s)
            wait_s = self.journal.step(self.count_present)


@pytest.fixture(name="pair")
def pair_fixture(tmp_path: Path) -> Iterator[tuple[Worker, Worker]]:
    clock = ManualClock()
    one, other = Worker(tmp_path, clock), Worker(tmp_path, clock)
    with closing(one.store), closing(other.store):
        yield one, other


def hashes_of(segments):
    return {each.block_hash for each in segments}


def test_workers_of_one_folder_and_model_have_one_store(pair, tmp_path):
    one, other = pair
    assert one.journal.store_id == other.journal.store_id
    clock, ids = ManualClock(), {one.journal.store_id}
    another_form = EntryFormat(KVLayout.gqa(1, 1, 4, block_size=2 * SIZE, dtype="float32"), 1)
    for folder, fields in (
        (tmp_path / "elsewhere", {}),
        (tmp_path, {"fingerprint": "g"}),
        (tmp_path, {"form": another_form}),
    ):
        apart = Worker(folder, clock, **fields)
        ids.add(apart.journal.store_id)
        apart.store.close()
    assert len(ids) == 4


def test_the_identity_outlives_an_eviction(pair, tmp_path):
    one, _ = pair
    one.keep(np.arange(8, dtype=np.int32))
    for entry in one.store.entries():
        one.store.discard(entry.name)
    one.look()
    late = Worker(tmp_path, ManualClock())
    assert late.journal.store_id == one.journal.store_id
    late.store.close()


def test_what_is_kept_is_reported_and_what_another_process_evicts_is_taken_back(pair):
    one, other = pair
    first = one.keep(np.arange(100 * SIZE, dtype=np.int32))
    second = one.keep(np.arange(1000, 1000 + 3 * SIZE, dtype=np.int32))
    assert one.reported() == hashes_of((*first, *second))
    one.look()
    assert one.reported() == hashes_of((*first, *second)), "all of it is there"
    gone = [*first[10:20], first[99], second[0]]
    for name in other.names(gone):
        other.store.discard(name)
    one.look()
    assert one.reported() == hashes_of((*first, *second)) - hashes_of(gone)
    one.keep(np.arange(100 * SIZE, dtype=np.int32))
    assert one.reported() >= hashes_of(first)


def test_what_a_request_does_not_find_is_taken_back_at_once(pair):
    one, _ = pair
    segments = one.keep(np.arange(2 * SIZE, dtype=np.int32))
    one.journal.note_missing(segments[1])
    one.journal.note_missing(segments[1])
    assert one.reported() == hashes_of(segments[:1])


def test_the_events_name_the_tokens(pair):
    one, _ = pair
    ids = np.arange(3 * SIZE, dtype=np.int32)
    segments = one.keep(ids[: 2 * SIZE])
    longer = hash_segments(HashDomain("f", SALT, SIZE), ids)
    one.journal.add_present(longer[2:], longer[1], ids, SALT)
    (event,) = one.events.read(0).events
    assert event.hashes == tuple(each.block_hash for each in longer)
    assert longer[:2] == segments
    assert (event.block_size, event.salt, event.parent) == (SIZE, SALT, None)
    assert event.packed_ids == ids.astype("<i4").tobytes()


def test_no_more_is_reported_than_the_bound_and_ends_are_forgotten_first(pair, monkeypatch):
    monkeypatch.setattr(store_journal, "MAX_REPORTED", 5)
    one, _ = pair
    first = one.keep(np.arange(4 * SIZE, dtype=np.int32))
    second = one.keep(np.arange(1000, 1000 + 3 * SIZE, dtype=np.int32))
    assert one.reported() == hashes_of((*first[:2], *second))


def test_looking_takes_a_bounded_share_of_the_threads_time(pair):
    one, _ = pair
    one.keep(np.arange(200 * SIZE, dtype=np.int32))
    one.clock.advance(ROUND_S)
    took_s = 0.5

    def slow(segments):
        one.clock.advance(took_s)
        return one.count_present(segments)

    assert one.journal.step(slow) >= took_s / BUSY_SHARE - took_s
    assert one.journal.step(slow) > 0, "it is not time yet"


def test_a_store_that_cannot_be_looked_at_is_left_alone_for_a_while(pair):
    one, _ = pair
    segments = one.keep(np.arange(4 * SIZE, dtype=np.int32))

    def fail(_):
        raise StoreError("no")

    one.clock.advance(ROUND_S)
    with pytest.raises(StoreError):
        one.journal.step(fail)
    assert one.journal.step(fail) == ROUND_S
    one.look()
    assert one.reported() == hashes_of(segments)


def test_the_identity_is_kept_also_where_nothing_is_reported(pair, tmp_path):
    one, _ = pair
    for entry in one.store.entries():
        one.store.discard(entry.name)
    assert not one.store.entries(), "the identity was evicted"
    one.clock.advance(ROUND_S)
    assert one.journal.step(one.count_present) == ROUND_S
    late = Worker(tmp_path, ManualClock())
    assert late.journal.store_id == one.journal.store_id
    late.store.close()


def test_where_looking_costs_money_a_batch_is_looked_for_now_and_then(tmp_path):
    clock = ManualClock()
    one = Worker(tmp_path, clock, is_billed=True)
    with closing(one.store):
        one.keep(np.arange(3 * BATCH_ENTRIES * SIZE, dtype=np.int32))
        clock.advance(ROUND_S)
        looked_for = []

        def count(segments):
            looked_for.append(len(segments))
            return one.count_present(segments)

        assert one.journal.step(count) == BILLED_WAIT_S
        clock.advance(BILLED_WAIT_S / 2)
        assert one.journal.step(count) == BILLED_WAIT_S / 2
        assert looked_for == [BATCH_ENTRIES]
