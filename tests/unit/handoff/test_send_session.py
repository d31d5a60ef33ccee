from __future__ import annotations

import msgspec
import pytest

from baton.clock import Instant
from baton.handoff.interface import KVSent, SendFailed
from baton.handoff.messages import Failed, Grant
from baton.handoff.session.actions import Announce, Emit, Say, SayFinished, Submit
from baton.handoff.session.send import SendSession
from tests.unit.handoff.orders import PROMPT_HASH, make_ticket, send_order


def make_session() -> tuple[SendSession, Grant]:
    ticket = make_ticket()
    session = SendSession(send_order(ticket, num_tokens=9), num_layers=2, deadline=Instant(10.0))
    return session, Grant(ticket.id, "sealed", PROMPT_HASH, 0, 9, 0, b"", "prefill")


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


def make_read_session() -> SendSession:
    session, grant = make_session()
    session.granted(msgspec.structs.replace(grant, mover="decode"))
    return session


def test_the_source_is_held_until_it_is_taken() -> None:
    session = make_read_session()
    assert session.begin(1) == []
    for layer in range(2):
        assert session.layer_ready(layer, 9) == [Announce(layer, 0, 9)]
        assert session.announced(layer, 9) == []
    assert session.finish(None) == [SayFinished(None)]
    assert not session.over
    assert session.taken() == [Emit(KVSent(session.ticket))]
    assert session.over
    assert session.taken() == []


def test_the_deadline_ends_the_wait_for_a_reader() -> None:
    session = make_read_session()
    session.begin(1)
    for layer in range(2):
        session.layer_ready(layer, 9)
        session.announced(layer, 9)
    session.finish(None)
    _, emitted = session.expire(Instant(10.0))
    assert isinstance(emitted, Emit)
    assert isinstance(emitted.event, SendFailed)
    assert session.over


def test_taking_what_was_not_announced_ends_the_handoff() -> None:
    session = make_read_session()
    session.begin(1)
    said, emitted = session.taken()
    assert isinstance(said, Say)
    assert isinstance(emitted, Emit)
    assert isinstance(emitted.event, SendFailed)


@pytest.mark.parametrize(("ready", "sent"), [(3, None), (4, 4), (7, 4), (8, 8), (9, 9)])
def test_whole_pages_and_at_last_the_rest(ready: int, sent: int | None) -> None:
    session, grant = make_session()
    session.granted(grant)
    session.begin(4)
    expected = [] if sent is None else [Submit(0, 0, sent)]
    assert session.layer_ready(0, ready) == expected
