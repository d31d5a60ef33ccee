"""Handoffs with op "NONE": nothing is moved."""

from __future__ import annotations

import pytest

from baton.clock import Instant
from baton.errors import ProtocolError
from baton.handoff.interface import BlocksQuiescent, KVFailed, KVLanded, SampledToken, SendFailed
from baton.handoff.messages import BlocksExported, Failed, FallbackToWrite, Finished, Grant
from baton.handoff.session.actions import (
    Emit,
    ExportBlocks,
    ImportBlocks,
    OpenWriteGrant,
    SendMessage,
    TransferPlan,
    WriteLayers,
)
from baton.handoff.session.receive import ReceiveSession
from baton.handoff.session.send import SendSession
from baton.handoff.token_ranges import unpack_ranges
from tests.unit.handoff.orders import PROMPT_HASH, make_ticket, receive_order, send_order

FIRST = SampledToken(3)


def make_receiver() -> ReceiveSession:
    order = receive_order(make_ticket(), start=4, num_tokens=9)
    session = ReceiveSession(order, sealed_ticket="s", num_layers=2, deadline=Instant(10.0))
    (said,) = session.begin(TransferPlan("NONE", order.blocks, staged=False))
    assert isinstance(said, SendMessage)
    assert isinstance(said.message, Grant)
    assert (said.message.op, said.message.blocks) == ("NONE", b"")
    return session


def make_sender(num_ready_tokens: int = 0) -> SendSession:
    ticket = make_ticket()
    order = send_order(ticket, num_tokens=9, num_ready_tokens=num_ready_tokens)
    session = SendSession(order, num_layers=2, deadline=Instant(10.0))
    session.granted(Grant(ticket.id, "sealed", PROMPT_HASH, 4, 9, 0, b"", "NONE"))
    return session


def exported(session: ReceiveSession) -> BlocksExported:
    return BlocksExported(session.ticket, 0, b"")


def finished(session: ReceiveSession) -> Finished:
    return Finished(session.ticket, FIRST, "", "", {})


@pytest.mark.parametrize("finished_first", [True, False])
def test_it_has_landed_once_blocks_and_token_are_here(finished_first: bool) -> None:
    session, heard = make_receiver(), []
    steps = [
        lambda: session.exported(exported(session)) + session.imported((40, 41)),
        lambda: session.finished(finished(session)),
    ]
    for step in reversed(steps) if finished_first else steps:
        assert not any(isinstance(action, Emit) for action in heard)
        heard += step()
    assert heard == [
        ImportBlocks(exported(session)),
        Emit(KVLanded(session.ticket, FIRST, imported=(40, 41))),
    ]
    assert session.over
    assert not session.may_hold_export


def test_a_peer_that_does_not_lend_is_to_write() -> None:
    session = make_receiver()
    opened, said = session.export_refused("enough is out")
    assert isinstance(opened, OpenWriteGrant)
    assert isinstance(said, SendMessage)
    assert isinstance(said.message, FallbackToWrite)
    assert unpack_ranges(said.message.ranges) == [(0, 4, 9), (1, 4, 9)]
    assert session.order.trace.reroutes == ["reference: enough is out"]
    assert session.export_refused("again") == []
    assert not session.may_hold_export


def test_blocks_that_were_not_asked_for_are_refused() -> None:
    order = receive_order(make_ticket(), start=4, num_tokens=9)
    written = ReceiveSession(order, sealed_ticket="s", num_layers=2, deadline=Instant(10.0))
    written.begin(TransferPlan("WRITE", order.blocks, staged=False))
    twice = make_receiver()
    twice.exported(exported(twice))
    for session in (written, twice):
        with pytest.raises(ProtocolError):
            session.exported(exported(session))


@pytest.mark.parametrize("was_lent", [True, False])
def test_one_that_fails_owes_word_of_what_may_have_been_lent(was_lent: bool) -> None:
    session = make_receiver()
    if was_lent:
        session.exported(exported(session))
        session.imported((40, 41))
    said, failed, quiescent = session.fail("the link broke", stage="link")
    assert isinstance(said, SendMessage)
    assert isinstance(failed, Emit)
    assert isinstance(failed.event, KVFailed)
    assert quiescent == Emit(BlocksQuiescent(session.ticket))
    assert session.may_hold_export
    assert session.exported(exported(session)) == []
    assert session.finished(finished(session)) == []


def test_nothing_is_lent_before_all_is_in_place() -> None:
    session = make_sender()
    assert session.begin(1) == []
    assert session.layers_ready([0], 9) == []
    assert session.finish(FIRST) == []
    assert session.layers_ready([1], 8) == []
    assert session.layers_ready([1], 9) == [ExportBlocks(4, FIRST)]
    assert session.over
    assert session.fail("too late", stage="abort") == []


def test_what_the_prefix_cache_has_is_lent_as_soon_as_it_may_be() -> None:
    session = make_sender(num_ready_tokens=9)
    assert session.finish(FIRST) == []
    assert session.begin(1) == [ExportBlocks(4, FIRST)]


def test_one_that_ends_before_it_lends_lends_nothing() -> None:
    session = make_sender()
    session.begin(1)
    said, emitted = session.fail("cancelled", stage="abort")
    assert isinstance(said, SendMessage)
    assert isinstance(said.message, Failed)
    assert isinstance(emitted, Emit)
    assert isinstance(emitted.event, SendFailed)
    assert session.finish(FIRST) == []


def test_what_is_not_lent_is_written_from_the_start() -> None:
    session = make_sender(num_ready_tokens=6)
    session.layers_ready([0], 9)
    assert session.fall_back_to_write(FallbackToWrite(session.ticket, (), 0, b"", b"")) == []
    assert session.begin(1) == [WriteLayers(0, 4, 9), WriteLayers(1, 4, 6)]


def test_what_is_about_to_be_lent_is_not_written_too() -> None:
    session = make_sender()
    session.begin(1)
    with pytest.raises(ProtocolError):
        session.fall_back_to_write(FallbackToWrite(session.ticket, (), 0, b"", b""))
