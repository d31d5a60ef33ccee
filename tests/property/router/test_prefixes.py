"""What workers have of prompts, against plain sets of prefixes: by events, and by expectation."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from baton.auth.ticket import WorkerRef
from baton.events.blocks import (
    DEFAULT_MEDIUM,
    STORE_MEDIUM,
    AllBlocksCleared,
    BlockRemoved,
    BlocksExpected,
    BlockStored,
    EntriesRemoved,
    EntriesStored,
    EventDomain,
    Lost,
    Restarted,
    TiersListed,
    pack_ids,
    pack_names,
)
from baton.ids import Epoch, WorkerId
from baton.kv.prefix_names import PrefixNames
from baton.protocol.worker_http import Role
from baton.router.fleet import WorkerView
from baton.router.placement import Placement
from baton.router.prefixes import (
    EXPECTED_WITH_EVENTS_S,
    EXPECTED_WITHOUT_S,
    MAX_FORMS,
    ModelPrefixes,
)
from baton.router.worker_prefixes import MEDIA
from tests.examples import examples

DOMAIN = EventDomain("test/sha256")
NAMES = PrefixNames(b"a secret of sixteen bytes")
SIZES = {"a": 2, "b": 2, "c": 3}
"""Block sizes; the events of `mute` are not followed."""
STORE_SIZE = 4
NAMING = b"sixteen bytes of"
"""The secret by which workers name entries."""
ENTRY_NAMES = PrefixNames(NAMING)
TIERS = ["memory of a", "memory of b", "server"]
EVERY_WORKER = [*SIZES, "mute"]
tokens = st.lists(st.integers(0, 1), min_size=1, max_size=13).map(tuple)
salts = st.sampled_from(["", "tenant"])
followed = st.sampled_from([*SIZES])


def view(worker: str) -> WorkerView:
    ref = WorkerRef(WorkerId(worker), Epoch("e" * 32), "127.0.0.1:1")
    return WorkerView(ref, Role.BOTH, "demo", "f", frozenset({"tcp"}), available=True)


@dataclass(frozen=True)
class Expectation:
    until: float
    worker: str
    blocks: frozenset


class PrefixesMachine(RuleBasedStateMachine):
    @initialize(max_expected=st.sampled_from([4, 1000]))
    def begin(self, max_expected):
        self.prefixes = ModelPrefixes(NAMES, max_expected)
        self.feeds = {w: self.prefixes.follow(WorkerId(w)) for w in SIZES}
        self.tiers: dict[str, tuple] = dict.fromkeys(EVERY_WORKER, ())
        self.reported: dict[str, set] = {w: set() for w in EVERY_WORKER}
        self.stored: dict[tuple[str, str], set] = {(w, t): set() for w in SIZES for t in TIERS}
        self.expected: list[Expectation] = []
        self.now = 0.0

    @rule(
        worker=followed,
        ids=tokens,
        salt=salts,
        start=st.integers(0, 3),
        num_plain=st.none() | st.integers(0, 3),
    )
    def store(self, worker, ids, salt, start, num_plain):
        """`num_plain`: after so many blocks comes one with an image."""
        size = SIZES[worker]
        blocks = [(salt, ids[:end]) for end in range(size, len(ids) + 1, size)]
        start = min(start, len(blocks) - 1)
        if start < 0:
            return
        parent = blocks[start - 1] if start else None
        event = BlockStored(
            DOMAIN,
            tuple(map(engine_hash, blocks[start:])),
            engine_hash(parent) if parent else None,
            pack_ids(ids[start * size : len(blocks) * size]),
            size,
            DEFAULT_MEDIUM,
            0,
            "" if parent else salt,
            num_plain=num_plain,
        )
        ignored = self.feeds[worker].num_ignored
        self.feeds[worker].apply(event)
        is_known = parent is None or parent in self.reported[worker]
        known = blocks[start:][:num_plain] if is_known else []
        num_ignored = self.feeds[worker].num_ignored - ignored
        assert num_ignored == len(blocks) - start - len(known)
        self.reported[worker].update(known)

    @rule(worker=followed, ids=tokens, salt=salts, start=st.integers(0, 3))
    def queue(self, worker, ids, salt, start):
        """A worker reports a prompt that another gateway has placed there."""
        size = SIZES[worker]
        blocks = [(salt, ids[:end]) for end in range(size, len(ids) + 1, size)]
        start = min(start, len(blocks) - 1)
        if start < 0:
            return
        parent = blocks[start - 1] if start else None
        event = BlocksExpected(
            engine_hash(parent) if parent else None,
            pack_ids(ids[start * size : len(blocks) * size]),
            size,
            "" if parent else salt,
        )
        ignored = self.feeds[worker].num_ignored
        self.feeds[worker].apply(event, now=self.now)
        is_known = parent is None or parent in self.reported[worker]
        assert (self.feeds[worker].num_ignored == ignored) is is_known
        if is_known:
            until = self.now + EXPECTED_WITH_EVENTS_S
            self.expected.append(Expectation(until, worker, frozenset(blocks[start:])))

    @rule(worker=followed, data=st.data())
    def remove(self, worker, data):
        if self.reported[worker]:
            held = sorted(self.reported[worker])
            gone = data.draw(st.lists(st.sampled_from(held), unique=True, max_size=4))
            hashes = tuple(map(engine_hash, gone))
            self.feeds[worker].apply(BlockRemoved(DOMAIN, hashes, DEFAULT_MEDIUM, 0))
            self.reported[worker].difference_update(gone)

    @rule(worker=followed, tiers=st.lists(st.sampled_from(TIERS), unique=True))
    def list_tiers(self, worker, tiers):
        """A worker finds from which tiers it loads. What it has reported stays as it is."""
        self.feeds[worker].apply(TiersListed(tuple(tiers)))
        self.tiers[worker] = tuple(tiers)

    @rule(
        worker=followed,
        tier=st.sampled_from(TIERS),
        ids=tokens,
        salt=salts,
        start=st.integers(0, 2),
    )
    def keep(self, worker, tier, ids, salt, start):
        """A worker reports a sequence's entries in one of its tiers, or some of them."""
        blocks = [(salt, ids[:end]) for end in range(STORE_SIZE, len(ids) + 1, STORE_SIZE)][start:]
        if blocks:
            ignored = self.feeds[worker].num_ignored
            self.feeds[worker].apply(entries(EntriesStored, tier, blocks))
            is_known = tier in self.tiers[worker]
            assert (self.feeds[worker].num_ignored == ignored) is is_known
            if is_known:
                self.stored[worker, tier].update(blocks)

    @rule(worker=followed, tier=st.sampled_from(TIERS), data=st.data())
    def evict(self, worker, tier, data):
        """A worker finds that some of what it reported is not in a tier any more."""
        held = sorted(set().union(*self.stored.values()))
        if held:
            gone = data.draw(st.lists(st.sampled_from(held), max_size=4))
            self.feeds[worker].apply(entries(EntriesRemoved, tier, gone))
            self.stored[worker, tier].difference_update(gone)

    @rule(
        worker=followed,
        event=st.sampled_from([AllBlocksCleared(), Restarted(), Lost(3)]),
        media=st.sampled_from([MEDIA, frozenset({DEFAULT_MEDIUM}), frozenset({STORE_MEDIUM})]),
    )
    def lose_all(self, worker, event, media):
        """A feed begins anew: it reports of its own media alone."""
        self.feeds[worker].apply(event, media)
        self.forget_model_of(worker, media)

    @rule(worker=st.sampled_from(EVERY_WORKER))
    def forget(self, worker):
        self.prefixes.forget(WorkerId(worker))
        if worker in SIZES:
            self.feeds[worker] = self.prefixes.follow(WorkerId(worker))
        self.forget_model_of(worker)

    @rule(ids=tokens, salt=salts, worker=st.sampled_from(EVERY_WORKER))
    def expect(self, ids, salt, worker):
        match = self.prefixes.find(np.array(ids, dtype=np.int32), salt, self.now)
        self.prefixes.expect(match, Placement(None, view(worker)), self.now)
        blocks = {(salt, ids[:end]) for end in range(1, len(ids) + 1)}
        lasts_s = EXPECTED_WITH_EVENTS_S if worker in SIZES else EXPECTED_WITHOUT_S
        self.expected.append(Expectation(self.now + lasts_s, worker, frozenset(blocks)))

    @rule(ids=tokens, salt=salts)
    def find(self, ids, salt):
        match = self.prefixes.find(np.array(ids, dtype=np.int32), salt, self.now)
        assert match.num_tokens == len(ids)
        for worker in EVERY_WORKER:
            cached = match.cached.get(WorkerId(worker), 0)
            size = SIZES.get(worker, 16)
            assert cached % size == 0
            assert cached < len(ids)
            hoped = self.reported[worker] | self.hopes_for(worker)
            least = self.longest(self.reported[worker], ids, salt, size)
            assert least <= cached <= self.longest(hoped, ids, salt, size)
        for worker in EVERY_WORKER:
            reachable = set().union(
                *(held for (_, tier), held in self.stored.items() if tier in self.tiers[worker])
            )
            longest = self.longest(reachable, ids, salt, STORE_SIZE)
            assert match.stored.get(WorkerId(worker), 0) == longest

    @rule(seconds=st.sampled_from([1.0, EXPECTED_WITH_EVENTS_S, EXPECTED_WITHOUT_S]))
    def wait(self, seconds):
        self.now += seconds

    @precondition(lambda self: hasattr(self, "now"))
    @rule()
    def nothing_expected_is_left_in_the_end(self):
        self.now += EXPECTED_WITHOUT_S
        self.prefixes.find(np.array([0], dtype=np.int32), "", self.now)
        assert self.prefixes.num_blocks == sum(
            len(set().union(*(self.reported[w] for w in SIZES if SIZES[w] == size)))
            for size in set(SIZES.values())
        )
        assert self.prefixes.num_stored_blocks == len(set().union(*self.stored.values()))

    @invariant()
    def is_consistent(self):
        if hasattr(self, "prefixes"):
            self.prefixes.check_invariants()

    def forget_model_of(self, worker, media=MEDIA):
        if worker in SIZES and STORE_MEDIUM in media:
            self.tiers[worker] = ()
            self.stored |= {(worker, tier): set() for tier in TIERS}
        if DEFAULT_MEDIUM in media:
            self.reported[worker] = set()
            self.expected = [each for each in self.expected if each.worker != worker]

    def hopes_for(self, worker):
        live = [e.blocks for e in self.expected if e.worker == worker and e.until > self.now]
        return set().union(*live)

    @staticmethod
    def longest(held, ids, salt, size):
        """Tokens of the longest prefix in whole blocks; the last token is never cached."""
        end = 0
        while end + size < len(ids) and (salt, ids[: end + size]) in held:
            end += size
        return end


def entries(kind, tier, blocks):
    names = []
    for salt, ids in blocks:
        whole = np.array(ids, dtype=np.int32)
        names += ENTRY_NAMES.of(whole, STORE_SIZE, ENTRY_NAMES.root(salt))[-1:]
    return kind(tier, NAMING, STORE_SIZE, pack_names(names))


def engine_hash(block) -> bytes:
    salt, ids = block
    return f"{salt}:{ids}".encode()[-64:]


TestPrefixes = PrefixesMachine.TestCase
TestPrefixes.settings = settings(max_examples=examples(30), stateful_step_count=30, deadline=None)


def test_a_gap_in_what_is_held_ends_the_prefix():
    prefixes = ModelPrefixes(NAMES)
    feed = prefixes.follow(WorkerId("a"))
    ids = tuple(range(8))
    hashes = tuple(b"%d" % i for i in range(4))
    feed.apply(BlockStored(DOMAIN, hashes, None, pack_ids(ids), 2, DEFAULT_MEDIUM, 0))
    prompt = np.array([*ids, 9], dtype=np.int32)
    assert prefixes.find(prompt, "", 0.0).cached == {"a": 8}
    feed.apply(BlockRemoved(DOMAIN, (hashes[1],), DEFAULT_MEDIUM, 0))
    assert prefixes.find(prompt, "", 0.0).cached == {"a": 2}
    assert prefixes.find(prompt, "tenant", 0.0).cached == {}


def test_a_feed_of_the_store_says_nothing_of_the_cache_and_the_other_way_round():
    prefixes = ModelPrefixes(NAMES)
    feed = prefixes.follow(WorkerId("a"))
    prompt = np.arange(5, dtype=np.int32)
    of_cache, of_store = frozenset({DEFAULT_MEDIUM}), frozenset({STORE_MEDIUM})
    cached = BlockStored(DOMAIN, (b"x", b"y"), None, pack_ids(range(4)), 2, DEFAULT_MEDIUM, 0)
    tiers, stored = TiersListed(("host",)), entries(EntriesStored, "host", [("", (0, 1, 2, 3))])
    for event, foreign in ((cached, of_store), (tiers, of_cache), (stored, of_cache)):
        feed.apply(event, foreign)
        assert prefixes.find(prompt, "", 0.0).cached == prefixes.find(prompt, "", 0.0).stored == {}
    assert feed.num_ignored == 2
    for event, media in ((cached, of_cache), (tiers, of_store), (stored, of_store)):
        feed.apply(event, media)
    feed.apply(entries(EntriesRemoved, "host", [("", (0, 1, 2, 3))]), of_cache)
    match = prefixes.find(prompt, "", 0.0)
    assert (match.cached, match.stored) == ({"a": 4}, {"a": 4})


def test_forms_of_entries_are_bounded():
    """A worker that makes up secrets or sizes takes no memory."""
    prefixes = ModelPrefixes(NAMES)
    feed = prefixes.follow(WorkerId("a"))
    feed.apply(TiersListed(("host",)))
    for number in range(MAX_FORMS + 3):
        feed.apply(EntriesStored("host", bytes([number]) * 16, STORE_SIZE, pack_names([1])))
    assert (prefixes.num_stored_blocks, feed.num_ignored) == (MAX_FORMS, 3)
    prefixes.check_invariants()


def test_what_a_worker_that_reports_of_a_store_alone_is_expected_to_hold_is_believed_longer():
    prefixes = ModelPrefixes(NAMES)
    prefixes.follow(WorkerId("a")).reports_cache = False
    prompt = np.arange(33, dtype=np.int32)
    match = prefixes.find(prompt, "", 0.0)
    prefixes.expect(match, Placement(None, view("a")), 0.0)
    assert prefixes.find(prompt, "", EXPECTED_WITHOUT_S - 1).cached == {"a": 32}
    assert prefixes.find(prompt, "", EXPECTED_WITHOUT_S).cached == {}


def test_what_is_used_again_at_a_worker_without_events_is_expected_from_then_on():
    """Two sessions begin alike. Each turn is one block longer, and the first goes on for longer."""
    prefixes, step_s = ModelPrefixes(NAMES), 0.75 * EXPECTED_WITHOUT_S
    prompts = np.arange(200, dtype=np.int32), np.r_[np.arange(32), np.arange(500, 700)]

    def turn(session, num_blocks, now):
        prompt = prompts[session][: 16 * num_blocks + 1].astype(np.int32)
        match = prefixes.find(prompt, "", now)
        prefixes.expect(match, Placement(None, view("mute")), now)
        prefixes.check_invariants()
        return match.cached.get("mute", 0)

    assert [turn(at % 2, 3 + at // 2, 0.1 * at) for at in range(4)] == [0, 32, 48, 48]
    assert [turn(0, 5 + at, at * step_s) for at in range(1, 5)] == [64, 96, 112, 128]
    assert turn(1, 5, 4 * step_s) == 32, "what both have; its own was last used long ago"
    end = 4 * step_s + EXPECTED_WITHOUT_S
    assert prefixes.find(prompts[0], "", end).cached == {}
    assert prefixes.num_blocks == 0
    assert prefixes._until == {"mute": {}}


def test_blocks_without_tokens_are_ignored_and_what_follows_is_not():
    """vLLM reports blocks of an unknown size so."""
    prefixes = ModelPrefixes(NAMES)
    feed = prefixes.follow(WorkerId("a"))
    feed.apply(BlockStored(DOMAIN, (b"x",), None, b"", 0, DEFAULT_MEDIUM, 0))
    assert (feed.num_ignored, feed.reported) == (1, set())
    feed.apply(BlockStored(DOMAIN, (b"x",), None, pack_ids(range(2)), 2, DEFAULT_MEDIUM, 0))
    assert len(feed.reported) == 1


def test_a_prompt_that_another_gateway_placed_is_expected_for_a_while():
    prefixes = ModelPrefixes(NAMES)
    feed = prefixes.follow(WorkerId("a"))
    prompt, ids = np.arange(9, dtype=np.int32), pack_ids(range(8))
    feed.apply(BlocksExpected(None, ids, 2), frozenset({STORE_MEDIUM}), 5.0)
    assert prefixes.find(prompt, "", 5.0).cached == {}
    feed.apply(BlocksExpected(None, ids, 2), now=5.0)
    assert prefixes.find(prompt, "", 5.0).cached == {"a": 8}
    assert prefixes.find(prompt, "tenant", 5.0).cached == {}
    feed.apply(BlocksExpected(None, ids, 2), now=9.0)  # the same prompt again: it does not last
    assert prefixes.find(prompt, "", 5.0 + EXPECTED_WITH_EVENTS_S).cached == {}
    feed.apply(BlocksExpected(None, ids, 2), now=20.0)
    feed.apply(BlockStored(DOMAIN, (b"x", b"y"), None, ids[:16], 2, DEFAULT_MEDIUM, 0))
    feed.apply(BlocksExpected(b"z", ids, 2), now=20.0)
    assert feed.num_ignored == 4, "what follows an unknown block"
    assert prefixes.find(prompt, "", 21.0).cached == {"a": 8}
    assert prefixes.find(prompt, "", 20.0 + EXPECTED_WITH_EVENTS_S).cached == {"a": 4}


def test_what_is_placed_here_and_reported_as_queued_is_expected_once():
    prefixes = ModelPrefixes(NAMES, max_expected=8)
    feed = prefixes.follow(WorkerId("a"))
    prompt = np.arange(17, dtype=np.int32)
    feed.apply(BlocksExpected(None, pack_ids(range(8)), 2), now=0.0)
    match = prefixes.find(prompt, "", 0.0)
    prefixes.expect(match, Placement(None, view("a")), 0.0)
    feed.apply(BlocksExpected(None, pack_ids(range(16)), 2), now=0.0)
    assert prefixes.find(prompt, "", 1.0).cached == {"a": 16}, "8 blocks, as many as may be"


def test_what_is_expected_of_a_silent_worker_does_not_delay_the_end_of_other_expectations():
    prefixes = ModelPrefixes(NAMES)
    prefixes.follow(WorkerId("a"))
    prompt = np.arange(33, dtype=np.int32)
    for worker in ("mute", "a"):
        match = prefixes.find(prompt, "", 0.0)
        prefixes.expect(match, Placement(None, view(worker)), 0.0)
    assert prefixes.find(prompt, "", EXPECTED_WITH_EVENTS_S).cached == {"mute": 32}


def test_of_a_worker_some_of_whose_events_are_lost_more_may_be_cached_than_is_known():
    prefixes = ModelPrefixes(NAMES)
    feed, prompt = prefixes.follow(WorkerId("a")), np.arange(9, dtype=np.int32)
    prefixes.follow(WorkerId("b"))

    def may_have_more():
        match = prefixes.find(prompt, "", 0.0)
        return [worker for worker in "ab" if match.may_have_more(WorkerId(worker))]

    def store(num_blocks):
        hashes, ids = tuple(range(num_blocks)), pack_ids(range(2 * num_blocks))
        feed.apply(BlockStored(DOMAIN, hashes, None, ids, 2, DEFAULT_MEDIUM, 0))

    assert may_have_more() == []
    feed.apply(Lost(3), frozenset({STORE_MEDIUM}))
    assert may_have_more() == [], "of the store is asked again"
    feed.apply(Lost(3))
    assert may_have_more() == ["a"]
    store(2)
    assert may_have_more() == ["a"]
    store(3)
    assert may_have_more() == [], "most of it is known"
    for event in (AllBlocksCleared(), Restarted()):
        feed.apply(Lost(3))
        feed.apply(event)
        assert may_have_more() == []
    feed.apply(Lost(3))
    prefixes.forget(WorkerId("a"))
    assert may_have_more() == []
