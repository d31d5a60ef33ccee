from __future__ import annotations

import pytest

from baton.authority.key import ClusterKey
from baton.authority.ticket import Ticket, WorkerRef, seal
from baton.engines.interface import Colocated, DecodeLeg, PrefillLeg
from baton.errors import TicketError
from baton.ids import Epoch, WorkerId, new_ticket_id
from baton.testing.clocks import ManualClock
from baton.worker.legs import LegReader
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
