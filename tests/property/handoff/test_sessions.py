"""Both sessions of one handoff against an adversarial network, step by step.

The world below owns what the sessions must not lose track of: who may still write into the
decode worker's pages, and who holds the prefill worker's. Faults are counted, so that a run that
claims to have survived one can be seen to have met it. Either side may move the bytes, into the
engine's own blocks or into staging pages.
"""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from baton.clock import Instant
from baton.errors import ProtocolError
from baton.handoff.interface import (
    BlocksQuiescent,
    HandoffEvent,
    KVFailed,
    KVLanded,
    KVSent,
    SampledToken,
    SendFailed,
)
from baton.handoff.messages import Available, Failed, Finished, Grant, Mover, Notice, Taken
from baton.handoff.session.actions import (
    Announce,
    CloseWindow,
    Emit,
    OpenWindow,
    Read,
    ReceiveAction,
    Say,
    SayFinished,
    SendAction,
    Submit,
)
from baton.handoff.session.receive import ReceivePhase, ReceiveSession
from baton.handoff.session.send import SendPhase, SendSession
from baton.handoff.session.terms import Terms
from baton.transfer.interface import TransferId
from tests.unit.handoff.orders import make_ticket, receive_order, send_order

NUM_LAYERS = 3
DEADLINE = Instant(100.0)


class HandoffWorld(RuleBasedStateMachine):
    """One handoff, a lossless but arbitrarily slow link, and a transport that may fail."""

    @initialize(
        num_tokens=st.integers(1, 40),
        start_share=st.floats(0, 0.99),
        ready_share=st.floats(0, 1),
        fault_budget=st.sampled_from([0, 0, 1, 1, 2]),
        mover=st.sampled_from(["prefill", "decode"]),
        staged=st.booleans(),
        page_tokens=st.sampled_from([1, 4]),
        first_token=st.sampled_from([None, SampledToken(7)]),
        head_start=st.integers(0, 3),
    )
    def begin(
        self,
        num_tokens: int,
        start_share: float,
        ready_share: float,
        fault_budget: int,
        mover: Mover,
        staged: bool,
        page_tokens: int,
        first_token: SampledToken | None,
        head_start: int,
    ) -> None:
        self.fault_budget = self.first_budget = fault_budget
        self.mover, self.staged, self.page_tokens = mover, staged, page_tokens
        self.first_token = first_token
        ticket = make_ticket()
        self.num_tokens = num_tokens
        self.start = int(num_tokens * start_share)
        num_ready = int(num_tokens * ready_share)
        self.receiver = ReceiveSession(
            receive_order(ticket, start=self.start, num_tokens=num_tokens),
            sealed_ticket="sealed",
            num_layers=NUM_LAYERS,
            deadline=DEADLINE,
        )
        self.sender = SendSession(
            send_order(ticket, num_tokens=num_tokens, num_ready_tokens=num_ready),
            num_layers=NUM_LAYERS,
            deadline=DEADLINE,
        )
        self.computed = [num_ready] * NUM_LAYERS
        self.told: list[HandoffEvent] = []  # by the receiver
        self.sent: list[HandoffEvent] = []  # by the sender
        self.to_sender: list[Grant | Failed | Taken] = []
        self.to_receiver: list[Available | Finished | Failed] = []
        self.heard: list[Available] = []
        self.reads: dict[TransferId, Available] = {}  # posted, not ended
        self.writes: dict[TransferId, Notice] = {}  # posted, not landed
        self.landed: set[tuple[int, int]] = set()  # (layer, token)
        self.window = "never opened"
        self.finished_said = False
        self.num_transfers = 0
        self.faults: Counter[str] = Counter()
        self.advance(head_start)

    def advance(self, num_stages: int) -> None:
        """The ordinary first steps, so that faults meet handoffs that are well under way too."""
        if num_stages >= 1:
            self.link_comes_up()
            self.sender_hears()
        if num_stages >= 2:
            self.the_way_is_clear()
            for layer in range(NUM_LAYERS):
                self.compute(layer, self.num_tokens)
        while num_stages >= 3 and self.to_receiver:
            self.hear(0)

    def perform_receiver(self, actions: list[ReceiveAction]) -> None:
        for action in actions:
            match action:
                case OpenWindow():
                    assert self.window == "never opened"
                    self.window = "open"
                case CloseWindow():
                    assert self.window == "open"
                    self.window = "closed"
                case Say(message):
                    self.to_sender.append(message)
                case Read(available):
                    assert self.mover == "decode"
                    transfer = TransferId(self.num_transfers)
                    self.num_transfers += 1
                    self.reads[transfer] = available
                    self.receiver.reading(transfer)
                case Emit(event):
                    self.told.append(event)
                    if isinstance(event, BlocksQuiescent) and not self.staged:
                        assert self.window in {"never opened", "quiescent"}
                        assert not self.reads, "quiescent, and a read may still land"
                    if isinstance(event, KVFailed):
                        assert self.window != "closed", "told only after its blocks may be quiet"
                    if isinstance(event, KVLanded):
                        expected = {
                            (layer, token)
                            for layer in range(NUM_LAYERS)
                            for token in range(self.start, self.num_tokens)
                        }
                        assert self.landed == expected
                        assert not self.writes, "a write may still land in ready pages"
                        assert not self.reads, "a read may still land in ready pages"
                        assert event.first_token == self.first_token
                case _:
                    pytest.fail(f"{action} from a receiver")

    def perform_sender(self, actions: list[SendAction]) -> None:
        for action in actions:
            match action:
                case Submit(layer, start, stop):
                    if self.sender.phase is not SendPhase.SENDING:
                        continue
                    assert self.mover == "prefill"
                    self.check_range(layer, start, stop)
                    transfer = TransferId(self.num_transfers)
                    self.num_transfers += 1
                    self.writes[transfer] = Notice(layer, start, stop, b"")
                    self.perform_sender(self.sender.submitted(transfer, layer, stop))
                case Announce(layer, start, stop):
                    if self.sender.phase is not SendPhase.SENDING:
                        continue
                    assert self.mover == "decode"
                    self.check_range(layer, start, stop)
                    self.to_receiver.append(
                        Available(self.sender.ticket, layer, start, stop, 0, b"", b"")
                    )
                    self.perform_sender(self.sender.announced(layer, stop))
                case SayFinished(token):
                    assert not self.finished_said
                    self.finished_said = True
                    self.to_receiver.append(
                        Finished(self.sender.ticket, token, "shared", "shared", {})
                    )
                case Say(message):
                    assert isinstance(message, Failed)
                    self.to_receiver.append(message)
                case Emit(event):
                    self.sent.append(event)
                    assert not self.writes, "source pages given back under a write"
                    if isinstance(event, KVSent) and self.mover == "decode":
                        assert not self.reads, "source pages given back under a read"
                        assert any(isinstance(event, KVLanded) for event in self.told)
                case _:
                    pytest.fail(f"{action} from a sender")

    def check_range(self, layer: int, start: int, stop: int) -> None:
        assert self.start <= start < stop <= self.computed[layer]
        assert stop == self.num_tokens or stop % self.page_tokens == 0
        assert not self.finished_said, "more after Finished"

    @property
    def disturbed(self) -> bool:
        return self.fault_budget != self.first_budget

    @rule()
    def link_comes_up(self) -> None:
        pages = self.receiver.order.blocks
        self.perform_receiver(self.receiver.begin(Terms(self.mover, pages, self.staged)))

    @rule()
    def the_way_is_clear(self) -> None:
        self.perform_sender(self.sender.begin(self.page_tokens))

    @rule(layer=st.integers(0, NUM_LAYERS - 1), num_tokens=st.integers(1, 40))
    def compute(self, layer: int, num_tokens: int) -> None:
        if layer and self.computed[layer - 1] <= self.computed[layer]:
            return
        limit = self.computed[layer - 1] if layer else self.num_tokens
        self.computed[layer] = min(self.computed[layer] + num_tokens, limit)
        self.perform_sender(self.sender.layer_ready(layer, self.computed[layer]))

    @precondition(lambda self: min(self.computed) == self.num_tokens)
    @rule()
    def finish(self) -> None:
        self.perform_sender(self.sender.finish(self.first_token))

    @precondition(lambda self: self.to_sender)
    @rule()
    def sender_hears(self) -> None:
        message = self.to_sender.pop(0)
        if isinstance(message, Grant):
            assert (message.mover, bool(message.blocks)) == (self.mover, self.mover == "prefill")
            self.perform_sender(self.sender.granted(message))
        elif isinstance(message, Taken):
            self.perform_sender(self.sender.taken())
        else:
            self.perform_sender(self.sender.peer_failed(message.reason, stage="decode"))

    @precondition(lambda self: self.to_receiver)
    @rule(data=st.data())
    def receiver_hears(self, data: st.DataObject) -> None:
        """In any order: nothing is assumed of it, though a link keeps it."""
        self.hear(data.draw(st.integers(0, len(self.to_receiver) - 1)))

    def hear(self, place: int) -> None:
        message = self.to_receiver.pop(place)
        if isinstance(message, Finished):
            if self.writes or self.to_receiver:  # Finished may overtake writes on the wire
                self.faults["finished overtook writes"] += 1
            self.perform_receiver(self.receiver.finished(message))
        elif isinstance(message, Available):
            self.heard.append(message)
            self.perform_receiver(self.receiver.available(message))
        else:
            self.perform_receiver(self.receiver.fail(message.reason, stage="prefill"))

    @precondition(lambda self: self.reads)
    @rule(data=st.data())
    def a_read_completes(self, data: st.DataObject) -> None:
        self.end_read(data.draw(st.sampled_from(sorted(self.reads))))

    def end_read(self, transfer: TransferId) -> None:
        read = self.reads.pop(transfer)
        notice = Notice(read.layer, read.start, read.stop, read.digests)
        self.perform_receiver(self.receiver.read_ended(transfer))
        if self.receiver.phase is not ReceivePhase.GRANTED:
            return
        if self.sender.over:  # the source changed under the read: digests tell
            self.perform_receiver(self.receiver.fail("digest mismatch", stage="verify"))
            return
        self.landed |= {(notice.layer, t) for t in range(notice.start, notice.stop)}
        self.perform_receiver(self.receiver.landed(notice))

    @precondition(lambda self: self.reads and self.fault_budget)
    @rule(data=st.data())
    def a_read_fails(self, data: st.DataObject) -> None:
        self.fault_budget -= 1
        transfer = data.draw(st.sampled_from(sorted(self.reads)))
        self.perform_receiver(self.receiver.fail("the mapping is gone", stage="read"))
        del self.reads[transfer]
        self.perform_receiver(self.receiver.read_ended(transfer))

    @precondition(lambda self: self.heard)
    @rule(data=st.data())
    def available_comes_twice(self, data: st.DataObject) -> None:
        again = data.draw(st.sampled_from(self.heard))
        if self.receiver.phase is ReceivePhase.GRANTED:
            with pytest.raises(ProtocolError):
                self.receiver.available(again)
        else:
            assert self.receiver.available(again) == []

    @precondition(lambda self: self.finished_said)
    @rule()
    def finished_comes_twice(self) -> None:
        again = Finished(self.sender.ticket, SampledToken(99), "", "", {})
        if not any(isinstance(message, Finished) for message in self.to_receiver):
            assert self.receiver.finished(again) == []

    @precondition(lambda self: self.writes)
    @rule(data=st.data())
    def a_write_lands(self, data: st.DataObject) -> None:
        self.land(data.draw(st.sampled_from(sorted(self.writes))))

    def land(self, transfer: TransferId) -> None:
        notice = self.writes.pop(transfer)
        if self.window == "open" and self.receiver.expects(notice):
            self.landed |= {(notice.layer, t) for t in range(notice.start, notice.stop)}
            self.perform_receiver(self.receiver.landed(notice))
        self.perform_sender(self.sender.completed(transfer))

    @precondition(lambda self: self.writes and self.fault_budget)
    @rule(data=st.data())
    def a_write_fails(self, data: st.DataObject) -> None:
        self.fault_budget -= 1
        transfer = data.draw(st.sampled_from(sorted(self.writes)))
        del self.writes[transfer]
        self.faults["write failed"] += 1
        self.perform_sender(self.sender.write_failed(transfer, "the transport broke"))

    @precondition(lambda self: self.landed)
    @rule(data=st.data())
    def a_notice_comes_twice(self, data: st.DataObject) -> None:
        layer, token = data.draw(st.sampled_from(sorted(self.landed)))
        notice = Notice(layer, token, token + 1, b"")
        if self.receiver.phase is ReceivePhase.GRANTED:
            with pytest.raises(ProtocolError):
                self.receiver.expects(notice)
            self.faults["duplicate refused"] += 1
        else:
            assert not self.receiver.expects(notice)

    @precondition(lambda self: self.window == "closed" and not self.writes)
    @rule()
    def window_falls_quiet(self) -> None:
        self.window = "quiescent"
        self.perform_receiver(self.receiver.window_quiescent())

    @precondition(lambda self: self.fault_budget)
    @rule()
    def receiver_aborts(self) -> None:
        self.fault_budget -= 1
        self.perform_receiver(self.receiver.abort("the client left"))

    @precondition(lambda self: self.fault_budget)
    @rule()
    def sender_aborts(self) -> None:
        self.fault_budget -= 1
        self.perform_sender(self.sender.fail("the client left", stage="abort"))

    @precondition(lambda self: self.fault_budget)
    @rule()
    def digest_is_wrong(self) -> None:
        self.fault_budget -= 1
        self.perform_receiver(self.receiver.fail("digest mismatch", stage="verify"))

    @precondition(lambda self: self.fault_budget)
    @rule(now=st.floats(0, 200))
    def time_passes(self, now: float) -> None:
        self.fault_budget -= now >= DEADLINE
        self.perform_receiver(self.receiver.expire(Instant(now)))
        self.perform_sender(self.sender.expire(Instant(now)))

    @invariant()
    def each_end_is_told_once(self) -> None:
        if not hasattr(self, "receiver"):
            return
        self.receiver.check_invariants()
        if self.receiver.over:
            assert not self.reads, "staging pages given back under a read"
            assert self.window in {"never opened", "quiescent"}
        told = Counter(type(event) for event in self.told)
        assert told[KVLanded] + told[KVFailed] <= 1
        assert told[BlocksQuiescent] <= 1
        assert not (told[KVLanded] and told[BlocksQuiescent])
        if self.staged:
            assert told[KVFailed] <= told[BlocksQuiescent], "the engine's blocks are quiet at once"
        assert len(self.sent) <= 1
        assert bool(self.sent) == self.sender.over
        if self.receiver.phase is ReceivePhase.WAITING:
            assert self.window == "never opened"
            assert not self.told

    def carry_through(self) -> None:
        """What was never disturbed reaches its end by the ordinary steps alone."""
        self.link_comes_up()
        while self.to_sender:
            self.sender_hears()
        self.the_way_is_clear()
        for layer in range(NUM_LAYERS):
            self.computed[layer] = self.num_tokens
            self.perform_sender(self.sender.layer_ready(layer, self.num_tokens))
        self.finish()
        while self.to_receiver:
            self.hear(-1)
        for transfer in sorted(self.writes, reverse=True):
            self.land(transfer)
        for transfer in sorted(self.reads, reverse=True):
            self.end_read(transfer)
        while self.to_sender:
            self.sender_hears()
        assert [type(event) for event in self.told] == [KVLanded]
        assert [type(event) for event in self.sent] == [KVSent]

    def teardown(self) -> None:
        """Whatever happened, time ends it: nothing stays reserved, nobody waits."""
        if not hasattr(self, "receiver"):
            return
        if not self.disturbed:
            self.carry_through()
        self.perform_receiver(self.receiver.expire(DEADLINE))
        self.perform_sender(self.sender.expire(DEADLINE))
        while self.writes:
            transfer = next(iter(self.writes))
            del self.writes[transfer]
            self.perform_sender(self.sender.write_failed(transfer, "the end"))
        if self.window == "closed":
            self.window = "quiescent"
            self.perform_receiver(self.receiver.window_quiescent())
        while self.reads:
            self.end_read(next(iter(self.reads)))
        assert self.receiver.over
        assert self.sender.over
        self.each_end_is_told_once()
        assert isinstance(self.sent[0], KVSent | SendFailed)
        ends = [event for event in self.told if isinstance(event, KVLanded | BlocksQuiescent)]
        assert len(ends) == 1


HandoffWorld.TestCase.settings = settings(
    max_examples=600,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestHandoffWorld = HandoffWorld.TestCase
