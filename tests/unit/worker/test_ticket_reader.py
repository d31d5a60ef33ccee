from __future__ import annotations

import msgspec
import pytest

from baton.auth.credentials import Credentials
from baton.auth.key import ClusterKey
from baton.auth.ticket import Ticket, WorkerRef, seal
from baton.engines.interface import Colocated, DecodeRequest, PrefillRequest
from baton.errors import TicketError
from baton.ids import Epoch, WorkerId, new_ticket_id
from baton.worker.errors import StaleTicketError
from baton.worker.ticket_reader import TicketReader
from tests.tickets import issue
from tests.unit.worker.scripted_engine import EPOCH, KEY

ME = WorkerRef(WorkerId("w0"), EPOCH, "127.0.0.1:1")
PEER = WorkerRef(WorkerId("w1"), Epoch("a" * 32), "127.0.0.1:2")
OLD_ME = WorkerRef(WorkerId("w0"), Epoch("0" * 32), "127.0.0.1:1")


def ticket(prefill: WorkerRef, decode: WorkerRef) -> Ticket:
    return Ticket(new_ticket_id(), "req-1", prefill, decode, "push", issue(60))


@pytest.fixture
def tickets() -> TicketReader:
    return TicketReader(WorkerId("w0"), EPOCH, KEY)


def test_the_ticket_says_which_leg(tickets: TicketReader) -> None:
    sending, receiving = ticket(ME, PEER), ticket(PEER, ME)
    assert tickets.read(None) == Colocated()
    assert tickets.read(seal(sending, KEY)) == PrefillRequest(sending)
    assert tickets.read(seal(receiving, KEY)) == DecodeRequest(receiving)


@pytest.mark.parametrize(("prefill", "decode"), [(PEER, PEER), (OLD_ME, PEER), (PEER, OLD_ME)])
def test_a_ticket_for_others_or_for_an_earlier_life_is_stale(
    tickets: TicketReader, prefill: WorkerRef, decode: WorkerRef
) -> None:
    with pytest.raises(StaleTicketError, match="read /baton/v1/info again"):
        tickets.read(seal(ticket(prefill, decode), KEY))


def test_a_ticket_serves_once(tickets: TicketReader) -> None:
    text = seal(ticket(ME, PEER), KEY)
    tickets.read(text)
    with pytest.raises(StaleTicketError, match="used before"):
        tickets.read(text)


def test_a_ticket_expires_by_its_gateways_clock_alone(tickets: TicketReader) -> None:
    at = issue(60)
    old, new = (
        msgspec.structs.replace(
            ticket(ME, PEER), issue=msgspec.structs.replace(at, number=n, at=at.at + s)
        )
        for n, s in ((100, 0.0), (101, 61.0))
    )
    tickets.read(seal(new, KEY))
    with pytest.raises(StaleTicketError, match="expired"):
        tickets.read(seal(old, KEY))


def test_forged_and_broken_tickets_are_refused(tickets: TicketReader) -> None:
    good = ticket(ME, PEER)
    forged = seal(good, Credentials.of(ClusterKey(b"x" * 32)))
    for text in (forged, "", "not a ticket", "é", seal(good, KEY)[:-3]):
        with pytest.raises(TicketError):
            tickets.read(text)


def test_without_handoffs_every_ticket_is_refused() -> None:
    tickets = TicketReader(WorkerId("w0"), EPOCH, None)
    with pytest.raises(TicketError, match="without handoffs"):
        tickets.read(seal(ticket(ME, PEER), KEY))


def test_what_a_gateway_says_itself_needs_no_signature(tickets: TicketReader) -> None:
    good = ticket(ME, PEER)
    unsigned = seal(good, Credentials.of(ClusterKey(b"x" * 32)))
    assert tickets.read(unsigned, is_from_gateway=True) == PrefillRequest(good)
    with pytest.raises(TicketError):
        tickets.read("not a ticket", is_from_gateway=True)
