from __future__ import annotations

import pytest

from baton.auth.key import ClusterKey
from baton.auth.ticket import Ticket, WorkerRef, seal
from baton.engines.interface import Colocated, DecodeRequest, PrefillRequest
from baton.errors import TicketError
from baton.ids import Epoch, WorkerId, new_ticket_id
from baton.testing.clocks import ManualClock
from baton.worker.error_responses import StaleTicketError
from baton.worker.ticket_reader import TicketReader
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
def tickets(clock: ManualClock) -> TicketReader:
    return TicketReader(WorkerId("w0"), EPOCH, KEY, clock)


def test_the_ticket_says_which_leg(tickets: TicketReader, clock: ManualClock) -> None:
    soon = clock.unix_now() + 60
    sending, receiving = ticket(ME, PEER, soon), ticket(PEER, ME, soon)
    assert tickets.read(None) == Colocated()
    assert tickets.read(seal(sending, KEY)) == PrefillRequest(sending)
    assert tickets.read(seal(receiving, KEY)) == DecodeRequest(receiving)


@pytest.mark.parametrize(("prefill", "decode"), [(PEER, PEER), (OLD_ME, PEER), (PEER, OLD_ME)])
def test_a_ticket_for_others_or_for_an_earlier_life_is_stale(
    tickets: TicketReader, clock: ManualClock, prefill: WorkerRef, decode: WorkerRef
) -> None:
    with pytest.raises(StaleTicketError, match="read /baton/v1/info again"):
        tickets.read(seal(ticket(prefill, decode, clock.unix_now() + 60), KEY))


def test_a_ticket_serves_once(tickets: TicketReader, clock: ManualClock) -> None:
    text = seal(ticket(ME, PEER, clock.unix_now() + 60), KEY)
    tickets.read(text)
    with pytest.raises(StaleTicketError, match="used before"):
        tickets.read(text)


def test_forged_expired_and_broken_tickets_are_refused(
    tickets: TicketReader, clock: ManualClock
) -> None:
    good = ticket(ME, PEER, clock.unix_now() + 60)
    forged = seal(good, ClusterKey(b"x" * 32))
    expired = seal(ticket(ME, PEER, clock.unix_now() - 6), KEY)
    for text in (forged, expired, "", "not a ticket", "é", seal(good, KEY)[:-3]):
        with pytest.raises(TicketError):
            tickets.read(text)


def test_without_handoffs_every_ticket_is_refused(clock: ManualClock) -> None:
    tickets = TicketReader(WorkerId("w0"), EPOCH, None, clock)
    with pytest.raises(TicketError, match="without handoffs"):
        tickets.read(seal(ticket(ME, PEER, clock.unix_now() + 60), KEY))
