from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from baton.clock import Instant
from baton.encodings.interface import RAW
from baton.errors import ProtocolError
from baton.handoff.interface import BlocksQuiescent, KVFailed, KVLanded, SampledToken
from baton.handoff.messages import (
    Available,
    Declined,
    ExcludeTransport,
    Failed,
    FallbackToWrite,
    Finished,
    Grant,
    Notification,
    ReceivingCosts,
    RetransmitRequest,
    TransportFailed,
    decode,
    encode,
)
from baton.handoff.session.actions import (
    CloseWriteGrant,
    Emit,
    Fence,
    OpenWriteGrant,
    ReadPages,
    SendMessage,
    SendTransferAck,
    TransferHandle,
    TransferPlan,
)
from baton.handoff.session.receive import ReceiveSession
from baton.handoff.token_ranges import unpack_ranges
from baton.transfer.interface import TransferId
from tests.unit.handoff.orders import make_ticket, receive_order

if TYPE_CHECKING:
    from baton.handoff.messages import TransferOp


def make_session(
    op: TransferOp = "WRITE",
    *,
    staged: bool = False,
    encoding: str = RAW,
    costs: ReceivingCosts | None = None,
) -> ReceiveSession:
    order = receive_order(make_ticket(), start=4, num_tokens=9)
    session = ReceiveSession(order, sealed_ticket="s", num_layers=2, deadline=Instant(10.0))
    session.begin(TransferPlan(op, order.blocks, staged, encoding=encoding, costs=costs))
    return session


def available(session: ReceiveSession, layer: int = 0) -> Available:
    return Available(session.ticket, layer, 4, 9, 0, b"", b"")


def finished(session: ReceiveSession) -> Finished:
    return Finished(session.ticket, SampledToken(3), "tcp", "tcp", {})


def land_all(session: ReceiveSession) -> None:
    for layer in range(2):
        assert session.landed(Notification(layer, 4, 9, b"")) == []


def test_a_late_finish_cannot_turn_failure_into_success() -> None:
    session = make_session()
    land_all(session)
    session.abort("the client left")
    assert session.finished(finished(session)) == []
    assert session.grant_quiescent() == [Emit(BlocksQuiescent(session.ticket))]
    assert session.over


def test_landing_is_told_once() -> None:
    session = make_session()
    land_all(session)
    landed = [
        Emit(KVLanded(session.ticket, SampledToken(3))),
        SendTransferAck(closes_grant=True),
        CloseWriteGrant(writer_is_done=True),
    ]
    assert session.finished(finished(session)) == landed
    assert session.finished(finished(session)) == []
    assert session.abort("too late") == []
    assert session.grant_quiescent() == []
    assert session.over


def test_an_expiry_says_what_is_missing() -> None:
    session = make_session()
    session.landed(Notification(0, 4, 9, b""))
    _, emitted, _ = session.expire(Instant(10.0))
    assert isinstance(emitted, Emit)
    assert isinstance(emitted.event, KVFailed)
    assert "5 layer-tokens still missing" in str(emitted.event.error)


def test_an_expiry_before_a_grant_names_what_it_waited_for() -> None:
    order = receive_order(make_ticket(), start=4, num_tokens=9)
    session = ReceiveSession(order, sealed_ticket="s", num_layers=2, deadline=Instant(10.0))
    failed = next(each for each in session.expire(Instant(10.0)) if isinstance(each, Emit))
    assert isinstance(failed.event, KVFailed)
    assert "waited for the prefill worker's link, or for staging pages" in str(failed.event.error)


def test_kv_lands_when_the_last_copy_has_ended() -> None:
    session = make_session(staged=True)
    session.scattering()
    land_all(session)
    assert session.finished(finished(session)) == []
    landed, acked, closed = session.scattered()
    assert landed == Emit(KVLanded(session.ticket, SampledToken(3)))
    assert acked == SendTransferAck(closes_grant=True)
    assert closed == CloseWriteGrant(writer_is_done=True)


def test_blocks_are_given_back_when_no_copy_writes_to_them() -> None:
    session = make_session(staged=True)
    for _ in range(2):
        session.scattering()
    land_all(session)
    assert len(session.abort("the client left")) == 2  # Failed, and the window is closed
    assert session.scattered() == []
    assert session.grant_quiescent() == []
    assert not session.over
    assert session.scattered() == [Emit(BlocksQuiescent(session.ticket))]
    assert session.over


def test_what_was_read_is_taken() -> None:
    session = make_session("READ")
    for layer in range(2):
        message = available(session, layer)
        assert session.available(message) == [ReadPages(message)]
        session.reading(TransferHandle("shared", TransferId(layer)))
    assert session.finished(Finished(session.ticket, None, "", "", {})) == []
    for layer in range(2):
        assert session.read_ended(TransferHandle("shared", TransferId(layer))) == []
        actions = session.landed(Notification(layer, 4, 9, b""))
    assert actions == [Emit(KVLanded(session.ticket, None)), SendTransferAck()]
    assert session.over


def test_a_failure_waits_for_the_reads_and_for_nothing_else() -> None:
    session = make_session("READ")
    session.available(available(session))
    session.reading(TransferHandle("shared", TransferId(1)))
    said, emitted = session.fail("the deadline passed", stage="granted")
    assert said == SendMessage(Failed(session.ticket, "the deadline passed"))
    assert isinstance(emitted, Emit)
    assert isinstance(emitted.event, KVFailed)
    assert session.read_ended(TransferHandle("shared", TransferId(1))) == [
        Emit(BlocksQuiescent(session.ticket))
    ]
    assert session.over


def test_without_a_read_blocks_are_quiet_at_once() -> None:
    session = make_session("READ")
    assert session.abort("the client left")[1:] == [Emit(BlocksQuiescent(session.ticket))]
    assert session.over


@pytest.mark.parametrize("op", ["WRITE", "READ"])
def test_blocks_behind_staging_are_quiet_at_once(op: TransferOp) -> None:
    session = make_session(op, staged=True)
    if op == "READ":
        session.available(available(session))
        session.reading(TransferHandle("shared", TransferId(1)))
    assert Emit(BlocksQuiescent(session.ticket)) in session.abort("the client left")
    assert not session.over, "a hand may still be in the staging pages"
    ended = (
        session.grant_quiescent()
        if op == "WRITE"
        else session.read_ended(TransferHandle("shared", TransferId(1)))
    )
    assert ended == []
    assert session.over


def test_a_worker_that_is_written_to_does_not_read() -> None:
    session = make_session("WRITE")
    with pytest.raises(ProtocolError, match="does not read"):
        session.available(available(session))


def test_nothing_is_read_twice() -> None:
    session = make_session("READ")
    session.available(available(session))
    with pytest.raises(ProtocolError, match="twice"):
        session.available(available(session))


def test_quiescence_of_an_open_window_is_not_believed() -> None:
    session = make_session()
    assert session.grant_quiescent() == []
    assert CloseWriteGrant() in session.fail("the deadline passed", stage="granted")


def test_a_transport_that_failed_is_fenced_before_it_is_said_what_is_missing() -> None:
    session = make_session()
    session.landed(Notification(0, 4, 6, b""))
    assert session.transport_failed(TransportFailed(session.ticket, "shared")) == [Fence("shared")]
    (said,) = session.fenced("shared")
    assert isinstance(said, SendMessage)
    assert isinstance(said.message, RetransmitRequest)
    assert said.message.transport == "shared"
    assert unpack_ranges(said.message.ranges) == [(0, 6, 9), (1, 4, 9)]
    with pytest.raises(ProtocolError, match="left before"):
        session.transport_failed(TransportFailed(session.ticket, "shared"))


def test_nothing_has_landed_while_a_fence_is_awaited() -> None:
    session = make_session()
    land_all(session)
    session.transport_failed(TransportFailed(session.ticket, "shared"))
    assert session.finished(finished(session)) == []
    said, landed, *_ = session.fenced("shared")
    assert isinstance(said, SendMessage)
    assert landed == Emit(KVLanded(session.ticket, SampledToken(3)))


def test_a_range_that_lands_twice_ends_the_handoff_rerouted_or_not() -> None:
    session = make_session()
    session.landed(Notification(0, 4, 9, b""))
    session.transport_failed(TransportFailed(session.ticket, "shared"))
    session.fenced("shared")
    with pytest.raises(ProtocolError, match="landed twice"):
        session.expects(Notification(0, 4, 9, b""))


def test_a_suspected_transport_is_named_once() -> None:
    session = make_session()
    (said,) = session.exclude("shared", "digest mismatch")
    assert said == SendMessage(ExcludeTransport(session.ticket, "shared", "digest mismatch"))
    assert session.exclude("shared", "digest mismatch") == []


def test_a_reader_that_can_read_no_more_is_written_to() -> None:
    session = make_session("READ")
    message = available(session)
    session.available(message)
    posted = TransferHandle("shared", TransferId(1))
    session.reading(posted)
    assert session.fall_back_to_write(["shared"]) == [], "a read is under way"
    session.read_ended(posted)
    opened, said = session.fall_back_to_write(["shared"])
    assert opened == OpenWriteGrant()
    assert isinstance(said, SendMessage)
    assert isinstance(said.message, FallbackToWrite)
    assert said.message.transports == ("shared",)
    assert unpack_ranges(said.message.ranges) == [(0, 4, 9), (1, 4, 9)]
    assert session.available(available(session, 1)) == [], "it crossed the message"


def test_who_wants_no_more_before_the_grant_says_so_for_the_peer_may_hold_its_kv() -> None:
    order = receive_order(make_ticket(), start=4, num_tokens=9)
    session = ReceiveSession(order, sealed_ticket="s", num_layers=2, deadline=Instant(10.0))
    declined, failed, quiescent = session.fail("there is no room for it", stage="staging")
    assert declined == SendMessage(Declined("s", "there is no room for it"))
    assert isinstance(failed, Emit)
    assert isinstance(failed.event, KVFailed)
    assert quiescent == Emit(BlocksQuiescent(session.ticket))


@pytest.mark.parametrize(("layer", "num_layers"), [(0, 3), (1, 2), (1, 4096)])
def test_layers_that_are_not_there_cannot_be_announced_with_others(layer, num_layers) -> None:
    session = make_session("READ")
    with pytest.raises(ProtocolError):
        session.available(Available(session.ticket, layer, 4, 9, 0, b"", b"", num_layers))
    assert session.available(Available(session.ticket, 0, 4, 9, 0, b"", b"", 2)) != []
    with pytest.raises(ProtocolError):
        session.available(available(session, 1))  # it was announced, together with layer 0


@pytest.mark.parametrize("op", ["WRITE", "READ"])
def test_after_a_refused_encoding_raw_pages_are_granted(op: TransferOp) -> None:
    session = make_session(op, staged=True, encoding="int8/1")
    blocks = session.order.blocks
    closing = session.encoding_refused(RAW)
    assert closing == ([CloseWriteGrant()] if op == "WRITE" else [])
    if op == "WRITE":
        assert session.begin(TransferPlan(op, blocks, staged=False)) == [], "not quiescent"
        assert session.grant_quiescent() == []
    *opened, said = session.begin(TransferPlan(op, blocks, staged=False))
    assert opened == ([OpenWriteGrant()] if op == "WRITE" else [])
    assert isinstance(said, SendMessage)
    assert isinstance(said.message, Grant)
    assert said.message.encoding == RAW


def test_an_encoding_is_refused_before_anything_has_come() -> None:
    for session in (make_session(), make_session(staged=True, encoding="int8/1")):
        session.landed(Notification(0, 4, 9, b""))
        with pytest.raises(ProtocolError, match="has come in it already"):
            session.encoding_refused(RAW)
    session = make_session(staged=True, encoding="int8/1")
    session.encoding_refused(RAW)
    with pytest.raises(ProtocolError, match="has come in it already"):
        session.encoding_refused(RAW)


@pytest.mark.parametrize("wanted", ["int8/1", "int4/1"])
def test_only_another_encoding_that_was_offered_can_be_asked_for(wanted: str) -> None:
    costs = ReceivingCosts(8e-9, {"int8/1": 1e-10, "fp8/1": 1e-10})
    session = make_session("READ", staged=True, encoding="int8/1", costs=costs)
    with pytest.raises(ProtocolError, match="not offered"):
        session.encoding_refused(wanted)
    session.encoding_refused("fp8/1")
    plan = TransferPlan("READ", session.order.blocks, staged=True, encoding="fp8/1")
    (sent,) = session.begin(plan)
    assert isinstance(sent, SendMessage)
    assert isinstance(sent.message, Grant)
    assert sent.message.encoding == "fp8/1"
    with pytest.raises(ProtocolError, match="not offered"):
        session.encoding_refused("int8/1")


def test_an_encoding_is_not_refused_before_it_is_granted() -> None:
    """Nor once more, while the raw pages that were asked for have yet to be granted."""
    session = make_session("READ", staged=True, encoding="int8/1")
    session.encoding_refused(RAW)
    with pytest.raises(ProtocolError, match="nothing is granted"):
        session.encoding_refused(RAW)


def test_a_failure_while_a_refused_grant_is_closed_waits_for_it() -> None:
    session = make_session(staged=True, encoding="int8/1")
    session.encoding_refused(RAW)
    actions = session.fail("the prefill worker is gone", stage="link")
    assert CloseWriteGrant() not in actions, "it is being closed"
    assert Emit(BlocksQuiescent(session.ticket)) in actions, "the engine's blocks are apart"
    assert not session.over
    session.grant_quiescent()
    assert session.over


def test_a_long_reason_is_one_that_the_peer_can_read() -> None:
    """Else it would end the link, and all other handoffs over it."""
    said, *_ = make_session().fail("x" * 3000, stage="staging")
    assert isinstance(said, SendMessage)
    assert isinstance(said.message, Failed)
    assert decode(encode(said.message)) == said.message
