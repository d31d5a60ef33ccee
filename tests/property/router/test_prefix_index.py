"""The index against a plain set of names for each worker, whatever order events come in."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from baton.events.blocks import pack_ids
from baton.kv.prefix_names import FEW_TOKENS, NUM_PLACES, PrefixNames
from baton.router.prefix_index import PrefixIndex
from tests.examples import examples

NAMES = PrefixNames(b"a secret of sixteen bytes")
WORKERS = [f"w{i}" for i in range(4)]
# Sequences of one-token blocks over two tokens: they share prefixes and fork.
sequences = st.lists(st.integers(0, 1), min_size=1, max_size=6)
workers = st.sampled_from(WORKERS)


def name(tokens, salt=""):
    return NAMES.of(np.array(tokens, dtype=np.int32), 1, NAMES.root(salt))


class IndexMachine(RuleBasedStateMachine):
    @initialize(max_blocks=st.sampled_from([5, 1000]))
    def begin(self, max_blocks):
        self.max_blocks = max_blocks
        self.index = PrefixIndex(max_blocks)
        self.held = {worker: set() for worker in WORKERS}

    @rule(worker=workers, tokens=sequences, start=st.integers(0, 5))
    def store(self, worker, tokens, start):
        names = name(tokens)
        start = min(start, len(names) - 1)
        after = names[start - 1] if start else None
        is_known = after is None or after in self.index._nodes
        num_kept = len(names) - start - self.index.store(worker, names[start:], after)
        assert num_kept == (len(names) - start if is_known else 0) or self.max_blocks == 5
        assert num_kept == 0 or is_known
        self.held[worker].update(names[start : start + num_kept])

    @rule(worker=workers, tokens=sequences, data=st.data())
    def remove(self, worker, tokens, data):
        gone = data.draw(st.lists(st.sampled_from(name(tokens))))
        self.index.remove(worker, gone)
        self.held[worker].difference_update(gone)

    @rule(worker=workers)
    def forget(self, worker):
        self.index.remove(worker, list(self.held[worker]))
        self.index.forget(worker)
        self.held[worker] = set()

    @rule(tokens=sequences)
    def find(self, tokens):
        names, expected = name(tokens), {}
        for worker, held in self.held.items():
            num = next((i for i, each in enumerate(names) if each not in held), len(names))
            if num:
                expected[worker] = num
        assert self.index.find_matches(names) == expected

    @invariant()
    def is_consistent(self):
        if hasattr(self, "index"):
            self.index.check_invariants()
            assert self.index.num_blocks <= self.max_blocks

    def teardown(self):
        if hasattr(self, "index"):
            for worker in WORKERS:
                self.forget(worker)
            assert self.index.num_blocks == 0, "blocks that no worker holds were kept"


IndexMachine.TestCase.settings = settings(max_examples=examples(50), stateful_step_count=40)
TestIndex = IndexMachine.TestCase


@given(st.lists(st.integers(0, 300), min_size=1, max_size=40), st.integers(1, 300))
def test_long_prompts_are_searched_by_halves(held, num_asked):
    """Workers hold so many blocks of one sequence: sets change at few of its blocks, or at many."""
    names, index = name([0] * 300), PrefixIndex()
    for at, num in enumerate(held):
        index.store(f"w{at}", names[:num], None)
    expected = {f"w{at}": min(num, num_asked) for at, num in enumerate(held) if num}
    assert index.find_matches(names[:num_asked]) == expected


def test_a_full_index_takes_nothing_that_no_prompt_could_find():
    """What follows a block that found no room would keep the place of what can be found."""
    index, names = PrefixIndex(max_blocks=4), name([0, 1, 0, 1, 0, 1, 0, 1])
    assert index.store("w0", names[:6], None) == 2
    assert index.num_blocks == 4
    index.remove("w0", [names[3]])
    assert index.store("w0", names[6:], names[5]) == 2
    assert index.num_blocks == 3
    assert index.store("w1", names[:4], None) == 0
    assert index.find_matches(names) == {"w0": 3, "w1": 4}
    index.check_invariants()


def test_what_follows_an_evicted_block_is_not_expected():
    index, names = PrefixIndex(), name([0, 1, 0])
    index.store("w0", names[:2], None)
    index.remove("w0", names[:2])
    index.expect("w0", names[2:], names[1])
    assert index.num_blocks == 0


def test_the_machine_finds_an_index_that_forgets_what_follows(monkeypatch):
    monkeypatch.setattr("baton.router.prefix_index._break", lambda node, bit: None)
    index = PrefixIndex()
    names = name([0, 1, 0])
    index.store("w0", names, None)
    index.remove("w0", names[:1])
    try:
        index.check_invariants()
    except AssertionError:
        return
    raise AssertionError("a hole in a prefix was not noticed")


@given(
    st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=64),
    st.integers(1, 8),
    st.integers(0, 8),
)
def test_names_go_on_from_any_block(tokens, block_size, cut):
    ids = np.array(tokens, dtype=np.int32)
    root = NAMES.root("salt")
    whole = NAMES.of(ids, block_size, root)
    assert len(whole) == len(tokens) // block_size
    cut = min(cut, len(whole))
    head = NAMES.of(ids[: cut * block_size], block_size, root)
    tail = NAMES.of(ids[cut * block_size :], block_size, head[-1] if head else root)
    assert head + tail == whole


@given(
    st.lists(st.integers(-(2**31), 2**31 - 1), max_size=2 * FEW_TOKENS),
    st.sampled_from([1, 16, FEW_TOKENS]),
    st.integers(0, 2**64 - 1) | st.integers(2**64 - NUM_PLACES, 2**64 - 1),
)
def test_few_blocks_are_named_as_many_are(tokens, block_size, after):
    packed = pack_ids(tokens)
    of_numpy = NAMES.of(np.array(tokens, dtype=np.int32), block_size, after)
    assert NAMES.of_packed(packed, block_size, after) == of_numpy


def test_a_block_is_named_without_numpy(monkeypatch):
    monkeypatch.setattr(NAMES, "of", None)
    assert NAMES.of_packed(pack_ids(range(16)), 16, NAMES.root(""))


@given(sequences, sequences)
def test_only_equal_prefixes_have_equal_names(left, right):
    for depth, pair in enumerate(zip(name(left), name(right), strict=False), start=1):
        assert (pair[0] == pair[1]) == (left[:depth] == right[:depth])


def test_names_depend_on_salt_and_secret():
    ids = np.arange(8, dtype=np.int32)
    of = NAMES.of(ids, 4, NAMES.root(""))
    assert set(of).isdisjoint(NAMES.of(ids, 4, NAMES.root("tenant")))
    other = PrefixNames(b"another secret of the same sort")
    assert set(of).isdisjoint(other.of(ids, 4, other.root("")))


def test_names_go_on_beyond_the_last_place():
    ids = np.zeros(NUM_PLACES + 3, dtype=np.int32)
    names = NAMES.of(ids, 1, NAMES.root(""))
    assert len(set(names)) == len(names)
    assert NAMES.of(ids[:3], 1, names[NUM_PLACES - 1]) == names[NUM_PLACES : NUM_PLACES + 3]
