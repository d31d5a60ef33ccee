"""Any order, loss, copy and restart of messages: what is delivered is what one life published."""

from __future__ import annotations

from collections import Counter
from itertools import count

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from baton.clock import UnixTime
from baton.events.blocks import (
    BlockRemoved,
    BlockStored,
    EventBatch,
    EventDomain,
    Lost,
    NumberedBatch,
    Restarted,
    WorkerBlockIndex,
)
from baton.events.sequence import Deliver, ReplayCause, RequestReplay, Sequencer
from tests.examples import examples

DOMAIN = EventDomain("test")
BUFFER = 6
DIGESTS = count()


def make_event(kind, block):
    if kind == "stored":
        return BlockStored(DOMAIN, (block,), None, b"", 0, "GPU", 0)
    return BlockRemoved(DOMAIN, (block,), "GPU", 0)


class SequencerMachine(RuleBasedStateMachine):
    """`published` is this life's truth; `live` and `answer` are what is on its way here."""

    def __init__(self):
        super().__init__()
        self.sequencer = Sequencer(max_held=4, num_remembered=64)
        self.published = []
        self.live, self.answer = [], None
        self.delivered = []  # since the last Lost or Restarted
        self.applied = WorkerBlockIndex(DOMAIN)
        self.may_lose = False
        self.lost_in_this_life = False
        self.take(self.sequencer.connected())

    def take(self, steps):
        for step in steps:
            match step:
                case Deliver(message):
                    self.delivered.append(message)
                    for event in message.batch.events:
                        self.applied.apply(event)
                case Restarted():
                    self.delivered = []
                    self.applied.apply(step)
                case Lost():
                    assert self.may_lose, "nothing was out of reach"
                    self.lost_in_this_life = True
                    self.delivered = []
                    self.applied.apply(step)
                case RequestReplay(start, _):
                    self.asked, self.answer = start, None

    @rule(kind=st.sampled_from(["stored", "removed"]), block=st.integers(0, 3))
    def publish(self, kind, block):
        batch = EventBatch(UnixTime(0), (make_event(kind, block),), 0, 0)
        message = NumberedBatch(len(self.published), next(DIGESTS), batch)
        self.published.append(message)
        self.live.append(message)
        if len(self.published) > BUFFER:
            self.may_lose = True

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def lose_live(self, data):
        self.live.pop(data.draw(st.integers(0, len(self.live) - 1)))

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def copy_live(self, data):
        at = data.draw(st.integers(0, len(self.live) - 1))
        self.live.insert(data.draw(st.integers(0, len(self.live))), self.live[at])

    @precondition(lambda self: len(self.live) > 1)
    @rule(data=st.data())
    def reorder_live(self, data):
        self.live = data.draw(st.permutations(self.live))

    @precondition(lambda self: self.live)
    @rule()
    def deliver_live(self):
        self.take(self.sequencer.live(self.live.pop(0)))

    @precondition(lambda self: self.sequencer.is_replaying and self.answer is None)
    @rule()
    def serve(self):
        self.answer = [m for m in self.published[-BUFFER:] if m.seq >= self.asked]

    @precondition(lambda self: self.answer)
    @rule(data=st.data())
    def lose_answer(self, data):
        self.answer.pop(data.draw(st.integers(0, len(self.answer) - 1)))
        self.may_lose = True

    @precondition(lambda self: self.answer is not None)
    @rule()
    def deliver_answer(self):
        if self.answer:
            self.take(self.sequencer.replayed(self.answer.pop(0)))
        else:
            self.answer = None
            self.take(self.sequencer.replay_ended())

    @precondition(lambda self: self.sequencer.is_replaying)
    @rule()
    def unanswered(self):
        self.answer, self.may_lose = None, True
        self.take(self.sequencer.replay_timed_out())

    @rule()
    def audit(self):
        self.take(self.sequencer.audit())

    @rule()
    def reconnect(self):
        self.live = []
        self.take(self.sequencer.connected())

    @rule()
    def restart(self):
        self.published, self.lost_in_this_life = [], False
        self.reconnect()

    @rule(num=st.integers(1, 5))
    def restart_unnoticed(self, num):
        """The numbers go back on the same connection, and nobody said so."""
        self.settle()
        self.published, self.live, self.lost_in_this_life = [], [], False
        before = self.sequencer.last_seq
        for _ in range(num):
            self.publish("stored", 0)
            self.deliver_live()
        if before is not None and before >= num:
            assert self.sequencer.counts.restarts > 0
        self.reconnect()

    @rule()
    def settle(self):
        """No more trouble: the state must become the publisher's."""
        while self.live:
            self.deliver_live()
        self.finish_answers()
        self.take(self.sequencer.audit())
        self.finish_answers()
        first = self.delivered[0].seq if self.delivered else len(self.published)
        assert self.delivered == self.published[first:]
        if not self.lost_in_this_life:
            assert self.delivered == self.published
            truth = WorkerBlockIndex(DOMAIN)
            for message in self.published:
                truth.apply(message.batch.events[0])
            assert Counter(self.applied.num_blocks) == Counter(truth.num_blocks)

    def teardown(self):
        self.settle()

    def finish_answers(self):
        for _ in range(1_000):
            if not self.sequencer.is_replaying:
                return
            if self.answer is None:
                self.serve()
            self.deliver_answer()
        raise AssertionError("questions without end")

    @invariant()
    def one_life_in_order(self):
        seqs = [m.seq for m in self.delivered]
        if seqs:
            assert seqs == list(range(seqs[0], seqs[0] + len(seqs)))
        self.sequencer.check_invariants()
        self.applied.check_invariants()

    @invariant()
    def nothing_of_two_lives_is_settled(self):
        if not self.sequencer.is_replaying and self.delivered:
            assert self.delivered == self.published[self.delivered[0].seq :][: len(self.delivered)]


SequencerMachine.TestCase.settings = settings(
    max_examples=examples(100), stateful_step_count=50, deadline=None
)
TestSequencer = SequencerMachine.TestCase


def test_causes_are_told():
    sequencer = Sequencer()
    assert sequencer.connected() == [RequestReplay(0, ReplayCause.CONNECTED)]
    assert sequencer.replay_ended() == []
    assert sequencer.audit() == [RequestReplay(0, ReplayCause.AUDIT)]
    assert sequencer.counts.replays == 1
