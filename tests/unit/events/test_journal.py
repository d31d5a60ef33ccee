from __future__ import annotations

import asyncio

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.errors import ProtocolError
from baton.events import journal_page
from baton.events.blocks import (
    DEFAULT_MEDIUM,
    BlockRemoved,
    BlocksExpected,
    BlockStored,
    EntriesRemoved,
    EntriesStored,
    TiersListed,
    pack_names,
    unpack_names,
)
from baton.events.journal import BATON_HASHES, MOST_EXPECTED_BLOCKS, CacheJournal
from baton.events.wire import decode_page, encode_page
from tests.examples import examples

BLOCK_SIZE = 2
names = st.integers(0, 7).map(lambda i: bytes([i]) * 32)
stored = st.lists(names, min_size=1, max_size=4, unique=True)
changes = st.lists(
    st.tuples(stored, st.just("store"))
    | st.tuples(stored, st.just("expect"))
    | st.tuples(names, st.just("remove"))
    | st.tuples(st.sets(st.integers(0, 9), min_size=1), st.sampled_from(["keep", "evict"]))
)
TIER, NAMING = "0" * 32, bytes(16)


def ids_of(hashes: list[bytes]) -> np.ndarray:
    return np.repeat([h[0] for h in hashes], BLOCK_SIZE).astype(np.int32)


def apply(held: dict, page) -> None:
    if page.is_whole:
        held.clear()
    for event in page.events:
        match event:
            case BlockStored(hashes=hashes, packed_ids=packed):
                ids = tuple(np.frombuffer(packed, "<i4").tolist())
                assert len(ids) == BLOCK_SIZE * len(hashes)
                for at, block_hash in enumerate(hashes):
                    assert block_hash not in held
                    own = ids[at * BLOCK_SIZE : (at + 1) * BLOCK_SIZE]
                    held[block_hash] = own
            case BlockRemoved(hashes=hashes):
                for block_hash in hashes:
                    del held[block_hash]
            case EntriesStored(names=packed):
                for name in unpack_names(packed):
                    assert name not in held
                    held[name] = True
            case EntriesRemoved(names=packed):
                for name in unpack_names(packed):
                    del held[name]


class Store:
    """Reports names of entries, as `StoreJournal` does."""

    def __init__(self, journal: CacheJournal) -> None:
        self.journal, self.names = journal, set()
        journal.store = self

    def keep(self, names: set[int]) -> None:
        self.change(EntriesStored, names - self.names)

    def evict(self, names: set[int]) -> None:
        self.change(EntriesRemoved, names & self.names)

    def change(self, kind: type, names: set[int]) -> None:
        if names:
            with self.journal.lock:
                self.names ^= names
                self.journal.add_of_store(kind(TIER, NAMING, 64, pack_names([*names])))

    def list_reported(self) -> list:
        names = pack_names(sorted(self.names))
        held = [EntriesStored(TIER, NAMING, 64, names)] if names else []
        return [TiersListed((TIER,)), *held]


@settings(max_examples=examples(100), deadline=None)
@given(st.lists(changes, max_size=6), st.sampled_from([3, 1000]))
def test_who_reads_now_and_then_knows_what_is_held(rounds, num_remembered):
    journal, held, last, was_whole = CacheJournal(num_remembered), {}, 0, False
    truth, store = {}, Store(journal)
    for each_round in rounds:
        for what, kind in each_round:
            if kind == "store":
                journal.add_stored(what, None, ids_of(what), "salt")
                truth.update({h: (h[0],) * BLOCK_SIZE for h in what})
            elif kind == "expect":
                journal.add_expected(what[0], ids_of(what), BLOCK_SIZE, "salt")
            elif kind == "remove":
                journal.add_removed(what)
                truth.pop(what, None)
            elif kind == "keep":
                store.keep(what)
            else:
                store.evict(what)
        page = decode_page(encode_page(journal.read(last)), BATON_HASHES)
        assert page == journal.read(last)
        assert page.last == journal.last
        apply(held, page)
        was_whole |= page.is_whole
        last = page.last
        assert held == truth | dict.fromkeys(store.names, True)
    assert num_remembered == 3 or not was_whole


def reported(hashes, parent=None, salt="") -> BlockStored:
    ids = b"".join(bytes([each % 128, 0, 0, 0]) * BLOCK_SIZE for each in hashes)
    return BlockStored(
        BATON_HASHES, tuple(hashes), parent, ids, BLOCK_SIZE, DEFAULT_MEDIUM, 0, salt
    )


engine_changes = st.lists(
    st.tuples(st.lists(st.integers(0, 9), min_size=1, max_size=4, unique=True), st.just("report"))
    | st.tuples(st.integers(0, 9), st.just("remove"))
    | st.tuples(st.booleans(), st.just("clear"))
)


@settings(max_examples=examples(100), deadline=None)
@given(st.lists(engine_changes, max_size=6), st.sampled_from([3, 1000]))
def test_who_reads_knows_what_an_engine_reported_and_whether_some_of_it_was_lost(rounds, num):
    journal, held, last, truth, is_incomplete = CacheJournal(num), set(), 0, set(), False
    seen_incomplete = False
    for each_round in rounds:
        for what, kind in each_round:
            if kind == "report":
                journal.add_reported(reported(what), len(what))
                truth |= set(what)
            elif kind == "remove":
                journal.add_removed(what)
                truth.discard(what)
            else:
                journal.clear(is_incomplete=what)
                truth, is_incomplete = set(), what
        page = decode_page(encode_page(journal.read(last)), BATON_HASHES)
        assert page == journal.read(last)
        if page.is_whole:
            held, seen_incomplete = set(), page.is_incomplete
        for event in page.events:
            if isinstance(event, BlockStored):
                assert event.packed_ids == reported(event.hashes).packed_ids
                held |= set(event.hashes)
            else:
                held -= set(event.hashes)
        last = page.last
        assert held == truth
        assert seen_incomplete == is_incomplete


def test_blocks_that_an_engine_reports_again_are_passed_on_again():
    """It does so because a gateway lacks them."""
    journal = CacheJournal()
    journal.add_reported(reported([1, 2, 3], salt="salt"), 2)
    (first,) = journal.read(0).events
    assert (first.hashes, first.parent, first.salt) == ((1, 2), None, "salt")
    assert first.packed_ids == reported([1, 2]).packed_ids
    journal.add_reported(reported([1, 2], salt="salt"), 2)
    assert journal.read(2).events == (first,)
    whole = journal.read(9)
    assert (whole.is_whole, whole.events) == (True, (first,))


def test_a_page_without_the_last_field_is_complete():
    page = decode_page(msgspec.msgpack.encode((1, True, [])), BATON_HASHES)
    assert not page.is_incomplete
    assert encode_page(page) == msgspec.msgpack.encode((1, True, []))


def test_what_a_queued_prompt_will_store_is_reported_and_is_not_held():
    journal = CacheJournal()
    journal.add_expected(None, np.arange(5, dtype=np.int32)[:4], BLOCK_SIZE, "salt")
    journal.add_expected(b"1" * 32, np.arange(2, dtype=np.int32), BLOCK_SIZE, "salt")
    first, second = journal.read(0).events
    assert first == BlocksExpected(None, np.arange(4, dtype="<i4").tobytes(), BLOCK_SIZE, "salt")
    assert (second.parent, second.salt) == (b"1" * 32, "")
    assert journal.read(17).is_whole
    assert journal.read(17).events == ()


def test_one_long_prompt_does_not_push_all_other_events_out():
    journal = CacheJournal(2 * MOST_EXPECTED_BLOCKS)
    ids = np.zeros(BLOCK_SIZE * 10 * MOST_EXPECTED_BLOCKS, dtype=np.int32)
    journal.add_expected(None, ids, BLOCK_SIZE, "")
    page = journal.read(0)
    assert not page.is_whole
    assert len(page.events[0].packed_ids) == 4 * BLOCK_SIZE * MOST_EXPECTED_BLOCKS


def test_blocks_follow_one_another_and_the_first_has_the_salt():
    journal = CacheJournal()
    first, second = b"1" * 32, b"2" * 32
    journal.add_stored([first, second], None, ids_of([first, second]), "salt")
    journal.add_stored([first], None, ids_of([first]), "salt")  # held already: nothing is new
    (run,) = journal.read(0).events
    assert (run.hashes, run.parent, run.salt) == ((first, second), None, "salt")
    (rest,) = journal.read(1).events
    assert (rest.hashes, rest.parent, rest.salt) == ((second,), first, "")


def test_a_number_of_another_life_gives_everything():
    journal = CacheJournal()
    journal.add_stored([b"1" * 32], None, ids_of([b"1"]), "")
    page = journal.read(17)
    assert page.is_whole
    assert len(page.events) == 1
    assert journal.read(1).events == ()


def page_of(**fields) -> bytes:
    event = {"type": "EntriesStored", "tier": TIER, "naming": NAMING, "block_size": 64} | fields
    return msgspec.msgpack.encode((1, True, [event]))


def test_a_page_of_entries_is_read():
    page = decode_page(page_of(names=pack_names([1, 1 << 63])), BATON_HASHES)
    assert page.events == (EntriesStored(TIER, NAMING, 64, pack_names([1, 1 << 63])),)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc0",
        msgspec.msgpack.encode((-1, True, [])),
        msgspec.msgpack.encode((1, True)),
        page_of(tier="x", names=b""),
        page_of(naming=b"short", names=b""),
        page_of(names=bytes(7)),
        page_of(block_size=0, names=b""),
        page_of(type="BlocksExpected", parent_block_hash=None, token_ids=bytes(7), block_size=2),
        page_of(type="BlocksExpected", parent_block_hash=None, token_ids=b"", block_size=0),
        msgspec.msgpack.encode((1, True, [{"type": "TiersListed", "tiers": ["0" * 32] * 65}])),
    ],
)
def test_what_is_no_page_is_refused(body):
    with pytest.raises(ProtocolError):
        decode_page(body, BATON_HASHES)


def test_a_block_that_was_stored_again_comes_before_what_follows_it():
    """A gateway that begins anew takes up no block whose parent it does not know."""
    journal, chain = CacheJournal(), [bytes([i]) * 32 for i in range(3)]
    journal.add_stored(chain, None, ids_of(chain), "salt")
    journal.add_removed(chain[0])
    journal.add_stored(chain, None, ids_of(chain), "salt")
    other = b"9" * 32
    journal.add_stored([other], chain[0], ids_of([other]), "salt")
    whole = journal.read(17)
    assert whole.is_whole
    known = {None}
    for event in whole.events:
        assert event.parent in known
        known.update(event.hashes)
    assert known == {None, *chain, other}


def test_entries_count_one_by_one_in_what_is_remembered():
    """However many are in one event: the memory of the latest events is bounded."""
    journal = CacheJournal(num_remembered=10)
    store = Store(journal)
    store.keep(set(range(6)))
    store.keep(set(range(6, 10)))
    assert not journal.read(journal.last - 2).is_whole
    store.keep({10})
    assert not journal.read(journal.last - 2).is_whole
    assert journal.read(journal.last - 3).is_whole
    store.keep(set(range(20, 40)))
    assert journal.read(journal.last - 1).is_whole, "one event alone is more than is remembered"
    assert journal.read(journal.last).events == ()


def test_few_stored_blocks_wait_for_more_and_queued_prompts_do_not(monkeypatch):
    monkeypatch.setattr(journal_page, "POLL_S", 0.0)
    journal = CacheJournal()

    def read(after):
        """The page after that event, and how often it was looked whether it is time."""
        looks = []
        page = journal_page.make_page(journal, after, lambda: bool(looks.append(0)))
        return decode_page(asyncio.run(page), BATON_HASHES), len(looks)

    def store(first, num):
        hashes = [first + at.to_bytes(31, "big") for at in range(num)]
        journal.add_stored(hashes, None, np.zeros(num * BLOCK_SIZE, np.int32), "")

    assert read(0)[1] == journal_page.NUM_POLLS, "nothing is there"
    store(b"a", 2)
    assert read(0)[1] == 0, "a gateway that begins"
    page, num_looks = read(1)
    assert num_looks == journal_page.NUM_POLLS_FOR_FEW
    assert page.last == 2
    journal.add_expected(None, np.zeros(200, np.int32), BLOCK_SIZE, "")
    assert read(2)[1] == 0, "a queued prompt"
    store(b"b", journal_page.FEW_EVENTS + 1)
    assert read(3)[1] == 0, "many"
