from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from baton.authority.key import ClusterKey
from baton.authority.ticket import CLOCK_SKEW_S, Ticket, WorkerRef, seal
from baton.clock import UnixTime
from baton.engines.interface import Colocated, DecodeLeg, PrefillLeg
from baton.errors import OverloadedError, TicketError
from baton.ids import Epoch, TicketId, WorkerId, new_ticket_id
from baton.testing.clocks import ManualClock
from baton.worker.legs import LegReader, SeenTickets
from baton.worker.problems import StaleTicketError
from tests.unit.worker.scripted_engine import EPOCH, KEY

ME = WorkerRef(WorkerId("w0"), EPOCH, "127.0.0.1:1")
PEER = WorkerRef(WorkerId("w1"), Epoch("a" * 32), "127.0.0.1:2")
OLD_ME = WorkerRef(WorkerId("w0"), Epoch("0" * 32), "127.0.0.1:1")


def ticket(prefill: WorkerRef, decode: WorkerRef, expires_at: float) -> Ticket:
    return Ticket(new_ticket_id(), "req-1", prefill, decode, "push", expires_at)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def legs(clock: ManualClock) -> LegReader:
    return LegReader(WorkerId("w0"), EPOCH, KEY, clock)


def test_the_ticket_says_which_leg(legs: LegReader, clock: ManualClock) -> None:
    soon = clock.unix_now() + 60
    sending, receiving = ticket(ME, PEER, soon), ticket(PEER, ME, soon)
    assert legs.read(None) == Colocated()
    assert legs.read(seal(sending, KEY)) == PrefillLeg(sending)
    assert legs.read(seal(receiving, KEY)) == DecodeLeg(receiving)


@pytest.mark.parametrize(("prefill", "decode"), [(PEER, PEER), (OLD_ME, PEER), (PEER, OLD_ME)])
def test_a_ticket_for_others_or_for_an_earlier_life_is_stale(
    legs: LegReader, clock: ManualClock, prefill: WorkerRef, decode: WorkerRef
) -> None:
    with pytest.raises(StaleTicketError, match="read /baton/v1/info again"):
        legs.read(seal(ticket(prefill, decode, clock.unix_now() + 60), KEY))


def test_a_ticket_serves_once(legs: LegReader, clock: ManualClock) -> None:
    text = seal(ticket(ME, PEER, clock.unix_now() + 60), KEY)
    legs.read(text)
    with pytest.raises(StaleTicketError, match="used before"):
        legs.read(text)


def test_forged_expired_and_broken_tickets_are_refused(legs: LegReader, clock: ManualClock) -> None:
    good = ticket(ME, PEER, clock.unix_now() + 60)
    forged = seal(good, ClusterKey(b"x" * 32))
    expired = seal(ticket(ME, PEER, clock.unix_now() - 6), KEY)
    for text in (forged, expired, "", "not a ticket", "é", seal(good, KEY)[:-3]):
        with pytest.raises(TicketError):
            legs.read(text)


def test_without_handoffs_every_ticket_is_refused(clock: ManualClock) -> None:
    legs = LegReader(WorkerId("w0"), EPOCH, None, clock)
    with pytest.raises(TicketError, match="without handoffs"):
        legs.read(seal(ticket(ME, PEER, clock.unix_now() + 60), KEY))


class SeenTicketsMachine(RuleBasedStateMachine):
    """Every unexpired ticket that was used is refused; memory is bounded."""

    CAPACITY = 4

    def __init__(self) -> None:
        super().__init__()
        self.seen = SeenTickets(self.CAPACITY)
        self.now = 0.0
        self.model: dict[TicketId, float] = {}

    @rule(name=st.integers(0, 9), lives_s=st.floats(0, 20))
    def use(self, name: int, lives_s: float) -> None:
        one = ticket(ME, PEER, self.now + lives_s)
        one = Ticket(TicketId(bytes([name] * 16)), "r", ME, PEER, "push", one.expires_at)
        self.model = {i: end for i, end in self.model.items() if end >= self.now}
        now = UnixTime(self.now)
        if one.id in self.model:
            with pytest.raises(StaleTicketError):
                self.seen.use(one, now)
        elif len(self.model) == self.CAPACITY:
            with pytest.raises(OverloadedError):
                self.seen.use(one, now)
        else:
            self.seen.use(one, now)
            self.model[one.id] = one.expires_at + CLOCK_SKEW_S

    @rule(seconds=st.floats(0, 30))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @invariant()
    def consistent(self) -> None:
        self.seen.check_invariants()


SeenTicketsMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=30)
TestSeenTickets = SeenTicketsMachine.TestCase
