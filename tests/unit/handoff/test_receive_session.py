from __future__ import annotations

from baton.clock import Instant
from baton.handoff.interface import BlocksQuiescent, KVFailed, KVLanded, SampledToken
from baton.handoff.messages import Finished, Notice
from baton.handoff.session.actions import CloseWindow, Emit
from baton.handoff.session.receive import ReceiveSession
from tests.unit.handoff.orders import make_ticket, receive_order


def make_session() -> ReceiveSession:
    order = receive_order(make_ticket(), start=4, num_tokens=9)
    session = ReceiveSession(order, sealed_ticket="s", num_layers=2, deadline=Instant(10.0))
    session.link_up()
    return session


def finished(session: ReceiveSession) -> Finished:
    return Finished(session.ticket, SampledToken(3), "tcp", "tcp", {})


def land_all(session: ReceiveSession) -> None:
    for layer in range(2):
        assert session.landed(Notice(layer, 4, 9, b"")) == []


def test_a_late_finish_cannot_turn_failure_into_success() -> None:
    session = make_session()
    land_all(session)
    session.abort("the client left")
    assert session.finished(finished(session)) == []
    assert session.window_quiescent() == [Emit(BlocksQuiescent(session.ticket))]
    assert session.over


def test_landing_is_told_once() -> None:
    session = make_session()
    land_all(session)
    landed = [Emit(KVLanded(session.ticket, SampledToken(3))), CloseWindow()]
    assert session.finished(finished(session)) == landed
    assert session.finished(finished(session)) == []
    assert session.abort("too late") == []
    assert session.window_quiescent() == []
    assert session.over


def test_an_expiry_says_what_is_missing() -> None:
    session = make_session()
    session.landed(Notice(0, 4, 9, b""))
    _, emitted, _ = session.expire(Instant(10.0))
    assert isinstance(emitted, Emit)
    assert isinstance(emitted.event, KVFailed)
    assert "5 layer-tokens still missing" in str(emitted.event.error)
