"""How long both sides wait for an engine that lives, stands still, or is stuck for good.

The real pulse, the real voucher and both sessions, over a link that delays, between two clocks that
disagree. What must hold: an engine that computes is waited for, however long its queue is; one that
gives no sign of life is waited for no longer than `timeout_s` after its last one (and the link's
delay); and nobody waits beyond the request's deadline.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from baton.clock import Instant
from baton.handoff.heartbeat import EngineHeartbeat, HeartbeatPublisher
from baton.handoff.messages import Finished, Keepalive
from baton.handoff.session.actions import TransferPlan
from baton.handoff.session.receive import ReceivePhase, ReceiveSession
from baton.handoff.session.send import SendSession
from tests.examples import examples
from tests.unit.handoff.orders import make_ticket, receive_order, send_order

TIMEOUT_S = 8.0
REQUEST_S = 100.0
TICK_S = 0.1
LONGEST_DELAY_S = 1.0
INTERVAL_S = 1.0
"""What `compute_interval_s` makes of the timeout."""


@dataclass
class OffsetClock:
    """Another host's: shows `offset` more."""

    world: PatienceWorld
    offset: float

    def now(self) -> Instant:
        return Instant(self.world.now + self.offset)


class PatienceWorld(RuleBasedStateMachine):
    """One handoff whose prompt waits in prefill's queue. `now` is the world's time."""

    @initialize(offset=st.floats(-1e3, 1e3))
    def begin(self, offset: float) -> None:
        self.now = 0.0
        self.here, self.there = OffsetClock(self, offset), OffsetClock(self, 0.0)
        self.ticket = make_ticket()
        decode = SimpleNamespace(dialed=None, hello=SimpleNamespace(worker="d", epoch="ed"))
        context = SimpleNamespace(clock=self.there, timeout_s=TIMEOUT_S, peers=self)
        self.links = [decode]
        self.heartbeat = EngineHeartbeat(self.there)
        self.vouching = HeartbeatPublisher(context, self.heartbeat)  # type: ignore[arg-type]
        receive = receive_order(self.ticket, start=0, num_tokens=9)
        send = send_order(self.ticket, num_tokens=9)
        self.receiver = ReceiveSession(
            replace(receive, deadline=Instant(offset + REQUEST_S)),
            sealed_ticket="s",
            num_layers=2,
            deadline=Instant(offset + TIMEOUT_S),
        )
        self.sender = SendSession(
            replace(send, deadline=Instant(REQUEST_S)), num_layers=2, deadline=Instant(TIMEOUT_S)
        )
        self.receiver.begin(TransferPlan("WRITE", receive.blocks, staged=False))
        self.on_the_wire: list[tuple[float, Keepalive]] = []
        self.delay_s = 0.0
        self.is_stuck = self.is_computed = self.was_late = False
        self.last_progress_at = 0.0
        self.longest_still_s = 0.0
        self.heartbeat.report_progress([self.ticket])

    def __iter__(self) -> object:
        return iter(self.links)

    def send(self, peer: object, message: Keepalive) -> None:
        """In order: a link never overtakes itself."""
        latest = max((at for at, _ in self.on_the_wire), default=0.0)
        self.on_the_wire.append((max(latest, self.now + self.delay_s), message))

    @property
    def has_given_up(self) -> bool:
        return self.receiver.phase is not ReceivePhase.GRANTED

    def pass_tick(self) -> None:
        self.now += TICK_S
        pending = self.vouching.tick()
        if pending is not None:
            for _ in pending.prompts:
                self.sender.wait_until(Instant(pending.last_progress_at + TIMEOUT_S))
        while self.on_the_wire and self.on_the_wire[0][0] <= self.now:
            _, message = self.on_the_wire.pop(0)
            before = self.receiver.deadline
            assert message.tickets == (self.ticket.id,)
            self.receiver.wait_until(Instant(self.here.now() - message.idle_s + TIMEOUT_S))
            assert self.receiver.deadline >= before
        self.longest_still_s = max(self.longest_still_s, self.now - self.last_progress_at)
        self.receiver.expire(self.here.now())
        self.sender.expire(self.there.now())
        self.look()

    @rule(seconds=st.floats(0.1, 6.0), step_s=st.floats(0.05, 2.0))
    def the_engine_works_off_its_queue(self, seconds: float, step_s: float) -> None:
        """Steps, and in the middle of each a layer."""
        until = self.now + seconds
        while self.now < until:
            if not self.is_stuck and self.now - self.last_progress_at >= step_s / 2:
                self.last_progress_at = self.now
                if self.now % 2 < 1:
                    self.heartbeat.report_progress([] if self.is_computed else [self.ticket])
                else:
                    self.heartbeat.tick()
            self.pass_tick()

    @rule(seconds=st.floats(0.1, 3.0))
    def it_stands_still_for_a_while(self, seconds: float) -> None:
        until = self.now + seconds
        while self.now < until:
            self.pass_tick()

    @rule(delay_s=st.floats(0.0, LONGEST_DELAY_S))
    def the_link_becomes_slow_or_quick(self, delay_s: float) -> None:
        self.delay_s = delay_s

    @precondition(lambda self: self.now > 2 * TIMEOUT_S)
    @rule(seconds=st.floats(0.0, 2 * TIMEOUT_S))
    def it_is_stuck_for_good(self, seconds: float) -> None:
        self.is_stuck = True
        self.it_stands_still_for_a_while(seconds)

    @precondition(lambda self: self.now > TIMEOUT_S)
    @rule()
    def the_prompt_is_computed(self) -> None:
        if not self.is_stuck:
            self.is_computed = True
            self.last_progress_at = self.now
            self.heartbeat.report_progress([])
            self.receiver.finished(Finished(self.ticket.id, None, "", "", {}))

    def look(self) -> None:
        assert self.receiver.deadline <= self.receiver.order.deadline
        assert self.sender.deadline <= self.sender.order.deadline
        still_s = self.now - self.last_progress_at
        # Not a moment longer than the engine deserves.
        if still_s > TIMEOUT_S + LONGEST_DELAY_S + TICK_S or self.now > REQUEST_S + TICK_S:
            assert self.has_given_up
        if still_s > TIMEOUT_S + TICK_S or self.now > REQUEST_S + TICK_S:
            assert self.sender.over
        # And not a moment less.
        patience_s = TIMEOUT_S - INTERVAL_S - 2 * LONGEST_DELAY_S - TICK_S
        lives = self.longest_still_s < patience_s and not self.is_computed
        if lives and self.now < REQUEST_S - TICK_S:
            assert not self.has_given_up
            assert not self.sender.over

    @invariant()
    def what_is_computed_is_not_waited_for_any_longer(self) -> None:
        if hasattr(self, "now") and self.is_computed:
            before = self.receiver.deadline
            self.receiver.wait_until(Instant(self.here.now() + 2 * TIMEOUT_S))
            assert self.receiver.deadline == before


PatienceWorld.TestCase.settings = settings(
    max_examples=examples(25), stateful_step_count=15, deadline=None
)
TestPatienceWorld = PatienceWorld.TestCase
