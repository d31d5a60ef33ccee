from __future__ import annotations

from baton.clock import Instant
from baton.handoff.interface import SendFailed
from baton.handoff.messages import Failed, Grant
from baton.handoff.session.actions import Emit, Say
from baton.handoff.session.send import SendSession
from tests.unit.handoff.orders import PROMPT_HASH, make_ticket, send_order


def make_session() -> tuple[SendSession, Grant]:
    ticket = make_ticket()
    session = SendSession(send_order(ticket, num_tokens=9), num_layers=2, deadline=Instant(10.0))
    return session, Grant(ticket.id, "sealed", PROMPT_HASH, 0, 9, 0, b"")


def test_another_prompt_under_the_same_ticket_ends_the_handoff() -> None:
    for change in ({"prompt_hash": b"x" * 32}, {"num_tokens": 8}):
        session, grant = make_session()
        grant = Grant(**{f: getattr(grant, f) for f in grant.__struct_fields__} | change)
        said, emitted = session.granted(grant)
        assert isinstance(said, Say)
        assert isinstance(said.message, Failed)
        assert isinstance(emitted, Emit)
        assert isinstance(emitted.event, SendFailed)
        assert session.over


def test_a_second_grant_changes_nothing() -> None:
    session, grant = make_session()
    assert session.granted(grant) == []
    assert session.granted(grant) == []
    assert session.grant is grant


def test_an_error_names_stage_and_peer() -> None:
    session, _ = make_session()
    (_, emitted) = session.expire(Instant(11.0))
    assert isinstance(emitted, Emit)
    assert isinstance(emitted.event, SendFailed)
    error = emitted.event.error
    assert (error.stage, error.peer) == ("offered", "d")
    assert "no grant" in str(error)
