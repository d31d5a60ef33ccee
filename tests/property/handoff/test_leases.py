"""Both halves of a lease over a link that delays, loses and breaks, between clocks that disagree.

What must hold: as long as decode believes that what it reads is held, prefill has not let go of it;
and prefill lets go within one lease of the last renewal that it heard.
"""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from baton.clock import Instant
from baton.handoff.interface import SendFailed
from baton.handoff.messages import Failed, Grant
from baton.handoff.session.actions import Emit, SendMessage, TransferPlan
from baton.handoff.session.lease import LEASE_STAGE
from baton.handoff.session.receive import ReceivePhase, ReceiveSession
from baton.handoff.session.send import SendSession
from tests.examples import examples
from tests.unit.handoff.orders import PROMPT_HASH, make_ticket, receive_order, send_order

LEASE_S = 10.0
FAR = Instant(1e9)


class LeaseWorld(RuleBasedStateMachine):
    """Time is prefill's; decode's clock shows `offset` more. Messages are in order, or lost."""

    @initialize(offset=st.floats(-1e4, 1e4), queued=st.booleans())
    def begin(self, offset: float, queued: bool) -> None:
        self.now, self.offset = 0.0, offset
        ticket = make_ticket(mode="pull")
        order = receive_order(ticket, start=0, num_tokens=9)
        self.receiver = ReceiveSession(order, sealed_ticket="s", num_layers=2, deadline=FAR)
        self.sender = SendSession(
            send_order(ticket, num_tokens=9, num_ready_tokens=9),
            num_layers=2,
            deadline=FAR,
            lease_s=LEASE_S,
        )
        self.sender.lease.hold(self.there)
        self.sender.finish(None)
        self.heard_at = self.now  # when prefill last heard something that renews
        self.let_go_at: float | None = None
        self.to_sender: list[Grant | float] = []
        self.to_receiver: list[Failed | float] = []
        self.consumed_late = False
        if not queued:
            self.decode_has_room()

    @property
    def here(self) -> Instant:
        """Decode's clock."""
        return Instant(self.now + self.offset)

    @property
    def there(self) -> Instant:
        """Prefill's."""
        return Instant(self.now)

    def perform_sender(self, actions: list) -> None:
        for action in actions:
            match action:
                case SendMessage(Failed() as failed):
                    self.to_receiver.append(failed)
                case Emit(SendFailed(_, error)):
                    assert error.stage == LEASE_STAGE
                    self.let_go_at = self.now

    @rule(seconds=st.sampled_from([0.1, 1.0, 3.0, 9.0, 10.0, 30.0]))
    def time_passes(self, seconds: float) -> None:
        """Prefill looks at its clock in time, as its agent does: every tick, or when it wakes."""
        self.now += seconds
        self.perform_sender(self.sender.expire(self.there))

    @precondition(lambda self: self.receiver.phase is ReceivePhase.WAITING)
    @rule()
    def decode_has_room(self) -> None:
        pages = self.receiver.order.blocks
        self.receiver.begin(TransferPlan("READ", pages, staged=False))
        self.receiver.lease_holder.begin(self.here, LEASE_S)
        ticket = self.receiver.ticket
        self.to_sender.append(Grant(ticket, "s", PROMPT_HASH, 0, 9, 0, b"", "READ"))

    @rule()
    def decode_renews(self) -> None:
        self.to_sender.append(float(self.here))

    @precondition(lambda self: self.to_sender)
    @rule()
    def prefill_hears(self) -> None:
        message = self.to_sender.pop(0)
        is_held = self.sender.renew(self.there)
        if is_held:
            self.heard_at = self.now
        if isinstance(message, Grant):
            self.perform_sender(self.sender.granted(message))
        elif is_held:
            self.to_receiver.append(message)
        elif self.sender.over:
            self.to_receiver.append(Failed(self.receiver.ticket, "gone"))

    @precondition(lambda self: self.to_receiver)
    @rule()
    def decode_hears(self) -> None:
        message = self.to_receiver.pop(0)
        if isinstance(message, Failed):
            self.receiver.fail(message.reason, stage="prefill")
        else:
            self.receiver.lease_holder.confirmed(Instant(message))

    @rule()
    def the_link_breaks(self) -> None:
        """What is on its way is lost; a held prompt survives it."""
        self.to_sender = [m for m in self.to_sender if isinstance(m, Grant)]
        self.to_receiver.clear()

    @precondition(lambda self: self.sender.grant and self.receiver.phase is ReceivePhase.GRANTED)
    @rule()
    def a_read_ends(self) -> None:
        """One that prefill announced, so it had the grant. It counts if its source was held."""
        was_let_go = self.let_go_at is not None
        failed = self.receiver.check_lease(self.here)
        assert failed or not was_let_go, "decode counts what prefill no longer held"

    @invariant()
    def decode_never_believes_longer_than_prefill_holds(self) -> None:
        if not hasattr(self, "receiver") or self.receiver.phase is not ReceivePhase.GRANTED:
            return
        if self.let_go_at is not None and self.sender.grant is not None:
            assert not self.receiver.lease_holder.holds(self.here)

    @invariant()
    def prefill_lets_go_within_one_lease(self) -> None:
        if not hasattr(self, "sender"):
            return
        self.sender.check_invariants()
        if self.let_go_at is None:
            assert self.now < self.heard_at + LEASE_S, "held for longer than its lease"
        else:
            assert self.let_go_at >= self.heard_at + LEASE_S, "let go while it was renewed"
            assert not self.sender.renew(self.there)


LeaseWorld.TestCase.settings = settings(
    max_examples=examples(150), stateful_step_count=30, deadline=None
)
TestLeaseWorld = LeaseWorld.TestCase
