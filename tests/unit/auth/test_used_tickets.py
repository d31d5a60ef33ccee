from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from baton.auth.ticket import CLOCK_SKEW_S, Ticket, TicketUse, UsedTickets, WorkerRef
from baton.clock import UnixTime
from baton.ids import Epoch, TicketId, WorkerId

ME = WorkerRef(WorkerId("w0"), Epoch("0" * 32), "127.0.0.1:1")
PEER = WorkerRef(WorkerId("w1"), Epoch("a" * 32), "127.0.0.1:2")


class SeenTicketsMachine(RuleBasedStateMachine):
    """Every unexpired ticket that was used is refused; memory is bounded."""

    CAPACITY = 4

    def __init__(self) -> None:
        super().__init__()
        self.seen = UsedTickets(self.CAPACITY)
        self.now = 0.0
        self.model: dict[TicketId, float] = {}

    @rule(name=st.integers(0, 9), lives_s=st.floats(0, 20))
    def use(self, name: int, lives_s: float) -> None:
        one = Ticket(TicketId(bytes([name] * 16)), "r", ME, PEER, "push", self.now + lives_s)
        self.model = {i: end for i, end in self.model.items() if end >= self.now}
        now = UnixTime(self.now)
        if one.id in self.model:
            assert self.seen.use(one, now) is TicketUse.REPEATED
        elif len(self.model) == self.CAPACITY:
            assert self.seen.use(one, now) is TicketUse.FULL
        else:
            assert self.seen.use(one, now) is TicketUse.FIRST
            self.model[one.id] = one.expires_at + CLOCK_SKEW_S

    @rule(seconds=st.floats(0, 30))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @invariant()
    def consistent(self) -> None:
        self.seen.check_invariants()


SeenTicketsMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=30)
TestSeenTickets = SeenTicketsMachine.TestCase
