"""What a worker reports of its store: what is where, until it is not, within bounds."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import pytest

from baton.errors import StoreError
from baton.events.blocks import EntriesRemoved, EntriesStored, TiersListed, unpack_names
from baton.events.journal import CacheJournal
from baton.handoff.pool_mode import store_journal
from baton.handoff.pool_mode.block_copier import hash_segments
from baton.handoff.pool_mode.store_journal import (
    BATCH_ENTRIES,
    BILLED_IDENTITY_S,
    BILLED_WAIT_S,
    BUSY_SHARE,
    ROUND_S,
    open_store_journal,
)
from baton.kv.identity import HashDomain
from baton.kv.layout import KVLayout
from baton.kv.prefix_names import PrefixNames
from baton.store.counted_tier import CountedTier
from baton.store.entry_format import EntryFormat
from baton.store.interface import TIERS, ServerPlace, TierContext
from baton.store.tiered import TieredStore, open_store
from baton.testing.clocks import ManualClock

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from baton.handoff.pool_mode.store_journal import StoreJournal

SIZE = 4
SALT = "tenant"
FORMAT = EntryFormat(KVLayout.gqa(1, 1, 4, block_size=SIZE, dtype="float32"), 1)
NAMING = bytes(range(16))
NAMES = PrefixNames(NAMING)


@dataclass
class Server:
    """A tier on a server, over a real one in memory: bills each look, or has a read-only owner."""

    context: TierContext
    is_billed: bool = False
    is_read_only: bool = False
    is_away: bool = False
    num_checked: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.inner = TIERS.build("host", {})(self.context)

    def is_available(self):
        return not self.is_away

    def check_each(self, names):
        """As an object store does: beyond the first that is missing none is looked for."""
        self.num_checked.append(len(names))
        if self.is_away:
            return None
        if not self.is_billed:
            return [bool(self.inner.find((name,))) for name in names]
        found = self.inner.find(names)
        return [True] * found + [False] * (len(names) - found)

    def find_each(self, names):
        return self.check_each(names)

    def __getattr__(self, name):
        return getattr(self.inner, name)


def open_files(folder: Path, clock: ManualClock) -> TieredStore:
    options = {"file": {"directory": str(folder)}}
    return open_store(("file",), options, cluster="c", key=bytes(32), clock=clock)


class Worker:
    """The parts of a worker's pool thread that keep entries and look at them."""

    def __init__(
        self, store: TieredStore, clock: ManualClock, form=FORMAT, fingerprint="f"
    ) -> None:
        self.store, self.clock, self.events = store, clock, CacheJournal()
        self.journal: StoreJournal = open_store_journal(
            store, form, self.events, naming=NAMING, fingerprint=fingerprint, clock=clock
        )

    @property
    def tiers(self):
        return self.journal.list_reported()[0].tiers

    def name_parts(self, block_hash):
        return [FORMAT.name(block_hash, 0)]

    def keep(self, token_ids, tier=None):
        segments = hash_segments(HashDomain("f", SALT, SIZE), token_ids)
        for segment in segments:
            (tier or self.store).put(FORMAT.name(segment.block_hash, 0), bytes(16))
        self.report(segments, token_ids)
        return segments

    def report(self, segments, token_ids):
        self.journal.add_present(segments, token_ids, SALT, self.name_parts)

    def reported(self):
        """Names by tier, from the journal's events; the same as what it gives anew."""
        held, tiers = {}, ()
        for event in self.events.read(0).events:
            match event:
                case TiersListed():
                    tiers = event.tiers
                case EntriesStored():
                    names = set(unpack_names(event.names))
                    assert not held.setdefault(event.tier, set()) & names, "reported twice"
                    assert (event.naming, event.block_size) == (NAMING, SIZE)
                    held[event.tier] |= names
                case EntriesRemoved():
                    names = set(unpack_names(event.names))
                    assert names <= held[event.tier], "it was not reported"
                    held[event.tier] -= names
        self.journal.check_invariants()
        held = {tier: names for tier, names in held.items() if names}
        listed, *stored = self.journal.list_reported()
        assert listed.tiers == tiers
        assert held == {event.tier: set(unpack_names(event.names)) for event in stored}
        assert set(held) <= set(tiers)
        return held

    def look(self):
        """Until every entry was looked for once."""
        self.clock.advance(ROUND_S)
        wait_s = self.journal.step(self.name_parts)
        while self.journal._to_check:
            self.clock.advance(wait_s)
            wait_s = self.journal.step(self.name_parts)


@pytest.fixture(name="pair")
def pair_fixture(tmp_path: Path) -> Iterator[tuple[Worker, Worker]]:
    clock = ManualClock()
    one, other = (Worker(open_files(tmp_path, clock), clock) for _ in range(2))
    with closing(one.store), closing(other.store):
        yield one, other


def names_of(token_ids, start=0, stop=None):
    names = NAMES.of(token_ids, SIZE, NAMES.root(SALT))
    return set(names[start:stop])


def test_workers_of_one_folder_and_model_have_one_tier(pair, tmp_path):
    one, other = pair
    assert one.tiers == other.tiers
    clock, tiers = ManualClock(), {one.tiers}
    another_form = EntryFormat(KVLayout.gqa(1, 1, 4, block_size=2 * SIZE, dtype="float32"), 1)
    for folder, fields in (
        (tmp_path / "elsewhere", {}),
        (tmp_path, {"fingerprint": "g"}),
        (tmp_path, {"form": another_form}),
    ):
        apart = Worker(open_files(folder, clock), clock, **fields)
        tiers.add(apart.tiers)
        apart.store.close()
    assert len(tiers) == 4


def test_the_identity_outlives_an_eviction(pair, tmp_path):
    one, _ = pair
    one.keep(np.arange(8, dtype=np.int32))
    for entry in one.store.entries():
        one.store.discard(entry.name)
    one.look()
    late = Worker(open_files(tmp_path, ManualClock()), ManualClock())
    assert late.tiers == one.tiers
    late.store.close()


def test_what_is_kept_is_reported_and_what_another_process_evicts_is_taken_back(pair):
    one, other = pair
    (tier,) = one.tiers
    long, short = np.arange(100 * SIZE, dtype=np.int32), np.arange(1000, 1012, dtype=np.int32)
    first, second = one.keep(long), one.keep(short)
    everything = names_of(long) | names_of(short)
    assert one.reported() == {tier: everything}
    one.look()
    assert one.reported() == {tier: everything}, "all of it is there"
    for segment in (*first[10:20], first[99], second[0]):
        other.store.discard(FORMAT.name(segment.block_hash, 0))
    one.look()
    gone = names_of(long, 10, 20) | names_of(long, 99) | names_of(short, 0, 1)
    assert one.reported() == {tier: everything - gone}
    one.keep(long)
    assert one.reported()[tier] >= names_of(long)


def test_what_a_request_does_not_find_is_taken_back_at_once(pair):
    one, _ = pair
    ids = np.arange(2 * SIZE, dtype=np.int32)
    segments = one.keep(ids)
    one.journal.note_missing(segments[1])
    one.journal.note_missing(segments[1])
    assert one.reported() == {one.tiers[0]: names_of(ids, 0, 1)}


def test_blocks_that_follow_reported_ones_are_named_by_all_tokens_before_them(pair):
    one, _ = pair
    ids = np.arange(3 * SIZE, dtype=np.int32)
    one.keep(ids[: 2 * SIZE])
    longer = hash_segments(HashDomain("f", SALT, SIZE), ids)
    one.store.put(FORMAT.name(longer[2].block_hash, 0), bytes(16))
    one.report(longer[2:], ids)
    assert one.reported() == {one.tiers[0]: names_of(ids)}


def test_no_more_is_reported_than_the_bound_and_ends_are_forgotten_first(pair, monkeypatch):
    monkeypatch.setattr(store_journal, "MAX_REPORTED", 5)
    one, _ = pair
    long, short = np.arange(4 * SIZE, dtype=np.int32), np.arange(1000, 1012, dtype=np.int32)
    one.keep(long)
    one.keep(short)
    assert one.reported() == {one.tiers[0]: names_of(long, 0, 2) | names_of(short)}


def test_looking_takes_a_bounded_share_of_the_threads_time(pair):
    one, _ = pair
    one.keep(np.arange(200 * SIZE, dtype=np.int32))
    one.clock.advance(ROUND_S)
    took_s = 0.5 / BATCH_ENTRIES

    def slow(block_hash):
        one.clock.advance(took_s)
        return one.name_parts(block_hash)

    assert one.journal.step(slow) >= 0.5 / BUSY_SHARE - 0.5
    assert one.journal.step(slow) > 0, "it is not time yet"


def test_a_store_that_cannot_be_looked_at_is_left_alone_for_a_while(pair):
    one, _ = pair
    ids = np.arange(4 * SIZE, dtype=np.int32)
    one.keep(ids)

    def fail(_):
        raise StoreError("no")

    one.clock.advance(ROUND_S)
    with pytest.raises(StoreError):
        one.journal.step(fail)
    assert one.journal.step(fail) == ROUND_S
    one.look()
    assert one.reported() == {one.tiers[0]: names_of(ids)}
    more = hash_segments(HashDomain("f", "other", SIZE), ids)
    with pytest.raises(StoreError):
        one.journal.add_present(more, ids, SALT, fail)
    assert one.reported() == {one.tiers[0]: names_of(ids)}


def test_the_identity_is_kept_also_where_nothing_is_reported(pair, tmp_path):
    one, _ = pair
    for entry in one.store.entries():
        one.store.discard(entry.name)
    assert not one.store.entries(), "the identity was evicted"
    one.clock.advance(ROUND_S)
    assert one.journal.step(one.name_parts) == ROUND_S
    late = Worker(open_files(tmp_path, ManualClock()), ManualClock())
    assert late.tiers == one.tiers
    late.store.close()


def make_context(clock, below=None):
    return TierContext("c", bytes(32), clock, below)


def combine(*tiers):
    return TieredStore([CountedTier("t", tier) for tier in tiers])


def test_each_tier_is_reported_as_itself():
    """A worker's own memory above a server that two workers use."""
    clock = ManualClock()
    shared = Server(make_context(clock))
    assert isinstance(shared, ServerPlace)
    own = [TIERS.build("host", {})(make_context(clock, shared)) for _ in range(2)]
    one, other = (Worker(combine(tier, shared), clock) for tier in own)
    (first, below), (second, also_below) = one.tiers, other.tiers
    assert below == also_below
    assert len({first, second, below}) == 3, "an identity was written through"
    long, short = np.arange(6 * SIZE, dtype=np.int32), np.arange(1000, 1012, dtype=np.int32)
    segments = one.keep(long)
    one.keep(short, tier=shared.inner)
    assert one.reported() == {first: names_of(long), below: names_of(long) | names_of(short)}
    for segment in segments[:2]:
        shared.inner.discard(FORMAT.name(segment.block_hash, 0))
    for segment in segments[1:3]:
        own[0].discard(FORMAT.name(segment.block_hash, 0))
    one.look()
    everywhere = names_of(long) | names_of(short)
    assert one.reported() == {
        first: names_of(long) - names_of(long, 1, 3),
        below: everywhere - names_of(long, 0, 2),
    }


@pytest.mark.parametrize("is_billed", [False, True])
def test_a_server_that_does_not_answer_keeps_what_was_reported_of_it(is_billed):
    clock = ManualClock()
    own = TIERS.build("host", {})(make_context(clock))
    server = Server(make_context(clock), is_billed=is_billed)
    one = Worker(combine(own, server), clock)
    first, below = one.tiers
    ids, in_both = np.arange(3 * SIZE, dtype=np.int32), np.arange(1000, 1008, dtype=np.int32)
    segments = one.keep(ids, tier=server.inner)
    one.keep(in_both)
    one.keep(in_both, tier=server.inner)
    clock.advance(BILLED_WAIT_S)
    one.look()
    reported = {first: names_of(in_both), below: names_of(ids) | names_of(in_both)}
    assert one.reported() == reported
    server.is_away = True
    for _ in range(3):
        clock.advance(BILLED_WAIT_S)
        one.look()
    assert server.num_checked.count(len(segments) + 2) >= 2, "it was not looked for"
    one.journal.note_missing(segments[0])  # nothing was found while it is away
    assert one.reported() == reported
    server.is_away = False
    server.inner.discard(FORMAT.name(segments[1].block_hash, 0))
    clock.advance(BILLED_WAIT_S)
    one.look()
    if not is_billed:  # there, those beyond the first that is missing count as missing
        assert one.reported()[below] == reported[below] - names_of(ids, 1, 2)
    one.journal.note_missing(segments[2])
    assert not names_of(ids, 2) & one.reported()[below]


def test_another_process_that_comes_in_a_places_stead_has_none_of_its_entries():
    clock = ManualClock()
    own, daemon = TIERS.build("host", {})(make_context(clock)), Server(make_context(clock))
    one = Worker(combine(own, daemon), clock)
    first, below = one.tiers
    both, there = np.arange(2 * SIZE, dtype=np.int32), np.arange(1000, 1008, dtype=np.int32)
    one.keep(both)
    one.keep(both, tier=daemon.inner)
    one.keep(there, tier=daemon.inner)
    assert one.reported() == {first: names_of(both), below: names_of(both) | names_of(there)}
    daemon.inner = TIERS.build("host", {})(make_context(clock))  # it was started again
    daemon.inner.put(store_journal_identity(), b"\x81\xa6random\xc4\x10" + bytes(16))
    one.look()
    again = one.tiers[1]
    assert again not in {first, below}
    assert one.reported() == {first: names_of(both)}
    one.keep(both, tier=daemon.inner)
    assert one.reported() == {first: names_of(both), again: names_of(both)}


def store_journal_identity():
    from baton.handoff.pool_mode.side_entries import _IDENTITY_NAME  # noqa: PLC0415

    return _IDENTITY_NAME


def test_what_others_put_into_their_own_memory_is_theirs_to_report():
    clock = ManualClock()
    own, peer = TIERS.build("host", {})(make_context(clock)), Server(make_context(clock))
    peer.is_read_only = True
    owner = Worker(combine(peer.inner), clock)
    one = Worker(combine(own, peer), clock)
    assert one.tiers == (one.tiers[0], *owner.tiers)
    ids = np.arange(3 * SIZE, dtype=np.int32)
    one.keep(ids)
    one.keep(ids, tier=peer.inner)
    one.look()
    assert one.reported() == {one.tiers[0]: names_of(ids)}
    assert peer.num_checked == [], "it was asked for entries"


def test_a_place_that_is_listed_twice_counts_once():
    clock = ManualClock()
    tier = TIERS.build("host", {})(make_context(clock))
    one = Worker(combine(tier, tier), clock)
    assert len(one.tiers) == 1
    ids = np.arange(3 * SIZE, dtype=np.int32)
    one.keep(ids)
    assert one.reported() == {one.tiers[0]: names_of(ids)}


def test_where_looking_costs_money_a_batch_is_looked_for_now_and_then():
    clock = ManualClock()
    bucket = Server(make_context(clock), is_billed=True)
    one = Worker(combine(bucket), clock)
    ids = np.arange(3 * BATCH_ENTRIES * SIZE, dtype=np.int32)
    segments = one.keep(ids)
    assert one.reported() == {one.tiers[0]: names_of(ids)}, "what was found present is there"
    assert bucket.num_checked == []
    one.look()
    assert bucket.num_checked == [BATCH_ENTRIES]
    one.look()
    assert bucket.num_checked == [BATCH_ENTRIES], "it is not time yet"
    for segment in segments:
        bucket.inner.discard(FORMAT.name(segment.block_hash, 0))
    clock.advance(BILLED_WAIT_S)
    one.look()
    assert len(one.reported()[one.tiers[0]]) == 2 * BATCH_ENTRIES


def test_what_made_room_is_taken_to_be_where_looking_costs_money():
    clock = ManualClock()
    own = TIERS.build("host", {})(make_context(clock))
    bucket = Server(make_context(clock), is_billed=True)
    one = Worker(combine(own, bucket), clock)
    first, below = one.tiers
    ids = np.arange(3 * SIZE, dtype=np.int32)
    segments = one.keep(ids)
    assert one.reported() == {first: names_of(ids)}
    one.look()  # the bucket, too: the next time is a minute later
    assert one.reported() == {first: names_of(ids)}
    name = FORMAT.name(segments[1].block_hash, 0)
    own.discard(name)
    bucket.inner.put(name, bytes(16))
    one.look()
    expected = {first: names_of(ids) - names_of(ids, 1, 2), below: names_of(ids, 1, 2)}
    assert one.reported() == expected
    clock.advance(BILLED_WAIT_S)
    one.look()
    assert one.reported() == expected, "it is there indeed"
    bucket.inner.discard(name)
    clock.advance(BILLED_WAIT_S)
    one.look()
    assert one.reported() == {first: names_of(ids) - names_of(ids, 1, 2)}


def test_an_identity_that_expires_where_looking_costs_money_is_put_there_again():
    """As by a lifecycle rule: workers that start later have the same tier."""
    clock = ManualClock()
    bucket = Server(make_context(clock), is_billed=True)
    one = Worker(combine(bucket), clock)
    tiers = one.tiers
    bucket.inner.discard(store_journal_identity())
    one.look()
    assert bucket.inner.find([store_journal_identity()]) == 0, "each look costs money"
    clock.advance(BILLED_IDENTITY_S)
    one.look()
    assert one.tiers == Worker(combine(bucket), clock).tiers == tiers
