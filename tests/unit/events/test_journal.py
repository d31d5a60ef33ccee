from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.errors import ProtocolError
from baton.events.blocks import DEFAULT_MEDIUM, STORE_MEDIUM, BlockRemoved, BlockStored
from baton.events.journal import BATON_HASHES, CacheJournal
from baton.events.wire import decode_page, encode_page

BLOCK_SIZE = 2
names = st.integers(0, 7).map(lambda i: bytes([i]) * 32)
stored = st.lists(names, min_size=1, max_size=4, unique=True)
media = st.sampled_from([DEFAULT_MEDIUM, STORE_MEDIUM])
changes = st.lists(
    st.tuples(stored, st.just("store"), media) | st.tuples(names, st.just("remove"), media)
)


def ids_of(hashes: list[bytes]) -> np.ndarray:
    return np.repeat([h[0] for h in hashes], BLOCK_SIZE).astype(np.int32)


def apply(held: dict, page) -> None:
    if page.is_whole:
        held.clear()
    for event in page.events:
        match event:
            case BlockStored(hashes=hashes, packed_ids=packed, medium=medium):
                ids = tuple(np.frombuffer(packed, "<i4").tolist())
                assert len(ids) == BLOCK_SIZE * len(hashes)
                for at, block_hash in enumerate(hashes):
                    assert (medium, block_hash) not in held
                    own = ids[at * BLOCK_SIZE : (at + 1) * BLOCK_SIZE]
                    held[medium, block_hash] = own
            case BlockRemoved(hashes=hashes, medium=medium):
                for block_hash in hashes:
                    del held[medium, block_hash]


@settings(max_examples=200, deadline=None)
@given(st.lists(changes, max_size=6), st.sampled_from([3, 1000]))
def test_who_reads_now_and_then_knows_what_is_held(rounds, num_remembered):
    journal, held, last, was_whole = CacheJournal(num_remembered), {}, 0, False
    truth = {}
    for each_round in rounds:
        for what, kind, medium in each_round:
            if kind == "store":
                journal.add_stored(what, None, ids_of(what), "salt", medium=medium)
                truth.update({(medium, h): (h[0],) * BLOCK_SIZE for h in what})
            else:
                journal.add_removed(what, medium)
                truth.pop((medium, what), None)
        page = decode_page(encode_page(journal.read(last)), BATON_HASHES)
        assert page == journal.read(last)
        assert page.last == journal.last
        apply(held, page)
        was_whole |= page.is_whole
        last = page.last
        assert held == truth
    assert num_remembered == 3 or not was_whole


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


@pytest.mark.parametrize(
    "body",
    [b"", b"\xc0", msgspec.msgpack.encode((-1, True, [])), msgspec.msgpack.encode((1, True))],
)
def test_what_is_no_page_is_refused(body):
    with pytest.raises(ProtocolError):
        decode_page(body, BATON_HASHES)


def test_a_block_that_was_stored_again_comes_before_what_follows_it():
    """A gateway that begins anew takes up no block whose parent it does not know."""
    journal, chain = CacheJournal(), [bytes([i]) * 32 for i in range(3)]
    journal.add_stored(chain, None, ids_of(chain), "salt", medium=STORE_MEDIUM)
    journal.add_removed(chain[0], STORE_MEDIUM)
    journal.add_stored(chain, None, ids_of(chain), "salt", medium=STORE_MEDIUM)
    other = b"9" * 32
    journal.add_stored([other], chain[0], ids_of([other]), "salt", medium=STORE_MEDIUM)
    whole = journal.read(17)
    assert whole.is_whole
    known = {None}
    for event in whole.events:
        assert event.medium == STORE_MEDIUM
        assert event.parent in known
        known.update(event.hashes)
    assert known == {None, *chain, other}
