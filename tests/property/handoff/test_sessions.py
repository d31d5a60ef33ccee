"""Both sessions of one handoff against an adversarial network, step by step.

The world below owns what the sessions must not lose track of: who may still write into the
decode worker's pages, and who holds the prefill worker's. Faults are counted, so that a run that
claims to have survived one can be seen to have met it.
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
from baton.handoff.messages import Failed, Finished, Grant, Notice
from baton.handoff.session.actions import (
    CloseWindow,
    Emit,
    OpenWindow,
    ReceiveAction,
    Say,
    SayFinished,
    SendAction,
    Submit,
)
from baton.handoff.session.receive import ReceivePhase, ReceiveSession
from baton.handoff.session.send import SendPhase, SendSession
from baton.transfer.interface import RemoteId, TransferId
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
    )
    def begin(
        self, num_tokens: int, start_share: float, ready_share: float, fault_budget: int
    ) -> None:
        self.fault_budget = self.first_budget = fault_budget
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
        self.to_sender: list[Grant | Failed] = []
        self.to_receiver: list[Finished | Failed] = []
        self.writes: dict[TransferId, Notice] = {}  # posted, not landed
        self.landed: set[tuple[int, int]] = set()  # (layer, token)
        self.window = "never opened"
        self.finished_said = False
        self.num_transfers = 0
        self.faults: Counter[str] = Counter()

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
                case Emit(event):
                    self.told.append(event)
                    if isinstance(event, BlocksQuiescent):
                        assert self.window in {"never opened", "quiescent"}
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
                case _:
                    pytest.fail(f"{action} from a receiver")

    def perform_sender(self, actions: list[SendAction]) -> None:
        for action in actions:
            match action:
                case Submit(layer, start, stop):
                    if self.sender.phase is not SendPhase.SENDING:
                        continue
                    assert self.start <= start < stop <= self.computed[layer]
                    assert not self.finished_said, "a write after Finished"
                    transfer = TransferId(self.num_transfers)
                    self.num_transfers += 1
                    self.writes[transfer] = Notice(layer, start, stop, b"")
                    self.perform_sender(self.sender.submitted(transfer, layer, stop))
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
                case _:
                    pytest.fail(f"{action} from a sender")

    @property
    def disturbed(self) -> bool:
        return self.fault_budget != self.first_budget

    @rule()
    def link_comes_up(self) -> None:
        self.perform_receiver(self.receiver.link_up())

    @rule()
    def transport_attaches(self) -> None:
        self.perform_sender(self.sender.attached(RemoteId(1)))

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
        self.perform_sender(self.sender.finish(SampledToken(7)))

    @precondition(lambda self: self.to_sender)
    @rule()
    def sender_hears(self) -> None:
        message = self.to_sender.pop(0)
        if isinstance(message, Grant):
            self.perform_sender(self.sender.granted(message))
        else:
            self.perform_sender(self.sender.peer_failed(message.reason, stage="decode"))

    @precondition(lambda self: self.to_receiver)
    @rule()
    def receiver_hears(self) -> None:
        message = self.to_receiver.pop(0)
        if isinstance(message, Finished):
            if self.writes:  # Finished may overtake writes on the wire
                self.faults["finished overtook writes"] += 1
            self.perform_receiver(self.receiver.finished(message))
        else:
            self.perform_receiver(self.receiver.fail(message.reason, stage="prefill"))

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
        self.receiver.coverage.check_invariants()
        told = Counter(type(event) for event in self.told)
        assert told[KVLanded] + told[KVFailed] <= 1
        assert told[BlocksQuiescent] <= 1
        assert not (told[KVLanded] and told[BlocksQuiescent])
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
        self.transport_attaches()
        for layer in range(NUM_LAYERS):
            self.computed[layer] = self.num_tokens
            self.perform_sender(self.sender.layer_ready(layer, self.num_tokens))
        self.finish()
        while self.to_receiver:
            self.receiver_hears()
        for transfer in sorted(self.writes, reverse=True):
            self.land(transfer)
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
        assert self.receiver.over
        assert self.sender.over
        self.each_end_is_told_once()
        assert isinstance(self.sent[0], KVSent | SendFailed)
        ends = [event for event in self.told if isinstance(event, KVLanded | BlocksQuiescent)]
        assert len(ends) == 1


HandoffWorld.TestCase.settings = settings(
    max_examples=300,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestHandoffWorld = HandoffWorld.TestCase
