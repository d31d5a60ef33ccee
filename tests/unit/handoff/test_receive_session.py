from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from baton.clock import Instant
from baton.errors import ProtocolError
from baton.handoff.interface import BlocksQuiescent, KVFailed, KVLanded, SampledToken
from baton.handoff.messages import (
    Available,
    Avoid,
    Declined,
    Failed,
    Finished,
    Missing,
    Notice,
    Rerouted,
    Reversed,
)
from baton.handoff.session.actions import (
    CloseWindow,
    Emit,
    Fence,
    OpenWindow,
    Read,
    Say,
    SayTaken,
)
from baton.handoff.session.posted import Posted
from baton.handoff.session.receive import ReceiveSession
from baton.handoff.session.terms import Terms
from baton.handoff.stretches import unpack_stretches
from baton.transfer.interface import TransferId
from tests.unit.handoff.orders import make_ticket, receive_order

if TYPE_CHECKING:
    from baton.handoff.messages import Mover


def make_session(mover: Mover = "prefill", *, staged: bool = False) -> ReceiveSession:
    order = receive_order(make_ticket(), start=4, num_tokens=9)
    session = ReceiveSession(order, sealed_ticket="s", num_layers=2, deadline=Instant(10.0))
    session.begin(Terms(mover, order.blocks, staged))
    return session


def available(session: ReceiveSession, layer: int = 0) -> Available:
    return Available(session.ticket, layer, 4, 9, 0, b"", b"")


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
    landed = [Emit(KVLanded(session.ticket, SampledToken(3))), SayTaken(), CloseWindow()]
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


def test_what_was_read_is_taken() -> None:
    session = make_session("decode")
    for layer in range(2):
        message = available(session, layer)
        assert session.available(message) == [Read(message)]
        session.reading(Posted("shared", TransferId(layer)))
    assert session.finished(Finished(session.ticket, None, "", "", {})) == []
    for layer in range(2):
        assert session.read_ended(Posted("shared", TransferId(layer))) == []
        actions = session.landed(Notice(layer, 4, 9, b""))
    assert actions == [Emit(KVLanded(session.ticket, None)), SayTaken()]
    assert session.over


def test_a_failure_waits_for_the_reads_and_for_nothing_else() -> None:
    session = make_session("decode")
    session.available(available(session))
    session.reading(Posted("shared", TransferId(1)))
    said, emitted = session.fail("the deadline passed", stage="granted")
    assert said == Say(Failed(session.ticket, "the deadline passed"))
    assert isinstance(emitted, Emit)
    assert isinstance(emitted.event, KVFailed)
    assert session.read_ended(Posted("shared", TransferId(1))) == [
        Emit(BlocksQuiescent(session.ticket))
    ]
    assert session.over


def test_without_a_read_blocks_are_quiet_at_once() -> None:
    session = make_session("decode")
    assert session.abort("the client left")[1:] == [Emit(BlocksQuiescent(session.ticket))]
    assert session.over


@pytest.mark.parametrize("mover", ["prefill", "decode"])
def test_blocks_behind_staging_are_quiet_at_once(mover: Mover) -> None:
    session = make_session(mover, staged=True)
    if mover == "decode":
        session.available(available(session))
        session.reading(Posted("shared", TransferId(1)))
    assert Emit(BlocksQuiescent(session.ticket)) in session.abort("the client left")
    assert not session.over, "a hand may still be in the staging pages"
    ended = (
        session.window_quiescent()
        if mover == "prefill"
        else session.read_ended(Posted("shared", TransferId(1)))
    )
    assert ended == []
    assert session.over


def test_a_worker_that_is_written_to_does_not_read() -> None:
    session = make_session("prefill")
    with pytest.raises(ProtocolError, match="does not read"):
        session.available(available(session))


def test_nothing_is_read_twice() -> None:
    session = make_session("decode")
    session.available(available(session))
    with pytest.raises(ProtocolError, match="twice"):
        session.available(available(session))


def test_quiescence_of_an_open_window_is_not_believed() -> None:
    session = make_session()
    assert session.window_quiescent() == []
    assert CloseWindow() in session.fail("the deadline passed", stage="granted")


def test_a_transport_that_failed_is_fenced_before_it_is_said_what_is_missing() -> None:
    session = make_session()
    session.landed(Notice(0, 4, 6, b""))
    assert session.rerouted(Rerouted(session.ticket, "shared")) == [Fence("shared")]
    (said,) = session.fenced("shared")
    assert isinstance(said, Say)
    assert isinstance(said.message, Missing)
    assert said.message.transport == "shared"
    assert unpack_stretches(said.message.ranges) == [(0, 6, 9), (1, 4, 9)]
    with pytest.raises(ProtocolError, match="left before"):
        session.rerouted(Rerouted(session.ticket, "shared"))


def test_nothing_has_landed_while_a_fence_is_awaited() -> None:
    session = make_session()
    land_all(session)
    session.rerouted(Rerouted(session.ticket, "shared"))
    assert session.finished(finished(session)) == []
    said, landed, *_ = session.fenced("shared")
    assert isinstance(said, Say)
    assert landed == Emit(KVLanded(session.ticket, SampledToken(3)))


def test_a_range_that_lands_twice_ends_the_handoff_rerouted_or_not() -> None:
    session = make_session()
    session.landed(Notice(0, 4, 9, b""))
    session.rerouted(Rerouted(session.ticket, "shared"))
    session.fenced("shared")
    with pytest.raises(ProtocolError, match="landed twice"):
        session.expects(Notice(0, 4, 9, b""))


def test_a_suspected_transport_is_named_once() -> None:
    session = make_session()
    (said,) = session.suspect("shared", "digest mismatch")
    assert said == Say(Avoid(session.ticket, "shared", "digest mismatch"))
    assert session.suspect("shared", "digest mismatch") == []


def test_a_reader_that_can_read_no_more_is_written_to() -> None:
    session = make_session("decode")
    message = available(session)
    session.available(message)
    posted = Posted("shared", TransferId(1))
    session.reading(posted)
    assert session.reverse(["shared"]) == [], "a read is under way"
    session.read_ended(posted)
    opened, said = session.reverse(["shared"])
    assert opened == OpenWindow()
    assert isinstance(said, Say)
    assert isinstance(said.message, Reversed)
    assert said.message.transports == ("shared",)
    assert unpack_stretches(said.message.ranges) == [(0, 4, 9), (1, 4, 9)]
    assert session.available(available(session, 1)) == [], "it crossed the message"


def test_who_wants_no_more_before_the_grant_says_so_for_the_peer_may_hold_its_kv() -> None:
    order = receive_order(make_ticket(), start=4, num_tokens=9)
    session = ReceiveSession(order, sealed_ticket="s", num_layers=2, deadline=Instant(10.0))
    declined, failed, quiescent = session.fail("there is no room for it", stage="staging")
    assert declined == Say(Declined("s", "there is no room for it"))
    assert isinstance(failed, Emit)
    assert isinstance(failed.event, KVFailed)
    assert quiescent == Emit(BlocksQuiescent(session.ticket))
