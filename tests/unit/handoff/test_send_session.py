from __future__ import annotations

import msgspec
import pytest

from baton.clock import Instant
from baton.errors import ProtocolError
from baton.handoff.interface import KVSent, SendFailed
from baton.handoff.messages import (
    Failed,
    FallbackToWrite,
    Grant,
    RetransmitRequest,
    TransportFailed,
    decode,
    encode,
)
from baton.handoff.session.actions import (
    AnnounceReadable,
    Emit,
    GatherPages,
    SendAction,
    SendFinished,
    SendMessage,
    TransferHandle,
    WriteLayers,
)
from baton.handoff.session.send import LayersWritten, SendSession
from baton.handoff.token_ranges import LayerTokenRange, pack_ranges
from baton.transfer.interface import TransferId
from tests.unit.handoff.orders import PROMPT_HASH, make_ticket, send_order


def make_session() -> tuple[SendSession, Grant]:
    ticket = make_ticket()
    session = SendSession(send_order(ticket, num_tokens=9), num_layers=2, deadline=Instant(10.0))
    return session, Grant(ticket.id, "sealed", PROMPT_HASH, 0, 9, 0, b"", "WRITE")


def test_another_prompt_under_the_same_ticket_ends_the_handoff() -> None:
    for change in ({"prompt_hash": b"x" * 32}, {"num_tokens": 8}):
        session, grant = make_session()
        grant = Grant(**{f: getattr(grant, f) for f in grant.__struct_fields__} | change)
        said, emitted = session.granted(grant)
        assert isinstance(said, SendMessage)
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


def test_an_expiry_after_a_grant_names_what_it_waited_for() -> None:
    session, grant = make_session()
    session.granted(grant)
    (_, emitted) = session.expire(Instant(11.0))
    assert isinstance(emitted, Emit)
    assert isinstance(emitted.event, SendFailed)
    assert "waited for staging pages, or for a transport" in str(emitted.event.error)


def make_read_session() -> SendSession:
    session, grant = make_session()
    session.granted(msgspec.structs.replace(grant, op="READ"))
    return session


def test_the_source_is_held_until_it_is_taken() -> None:
    session = make_read_session()
    assert session.begin(1) == []
    for layer in range(2):
        assert session.layers_ready([layer], 9) == [AnnounceReadable(layer, 0, 9)]
        assert session.announced(range(layer, layer + 1), 9) == []
    assert session.finish(None) == [SendFinished(None)]
    assert not session.over
    assert session.acked() == [Emit(KVSent(session.ticket))]
    assert session.over
    assert session.acked() == []


def test_the_deadline_ends_the_wait_for_a_reader() -> None:
    session = make_read_session()
    session.begin(1)
    for layer in range(2):
        session.layers_ready([layer], 9)
        session.announced(range(layer, layer + 1), 9)
    session.finish(None)
    _, emitted = session.expire(Instant(10.0))
    assert isinstance(emitted, Emit)
    assert isinstance(emitted.event, SendFailed)
    assert session.over


def test_taking_what_was_not_announced_ends_the_handoff() -> None:
    session = make_read_session()
    session.begin(1)
    said, emitted = session.acked()
    assert isinstance(said, SendMessage)
    assert isinstance(emitted, Emit)
    assert isinstance(emitted.event, SendFailed)


@pytest.mark.parametrize(("ready", "sent"), [(3, None), (4, 4), (7, 4), (8, 8), (9, 9)])
def test_whole_pages_and_at_last_the_rest(ready: int, sent: int | None) -> None:
    session, grant = make_session()
    session.granted(grant)
    session.begin(4)
    expected = [] if sent is None else [WriteLayers(0, 0, sent)]
    assert session.layers_ready([0], ready) == expected


def make_staged_session() -> SendSession:
    session, grant = make_session()
    session.granted(grant)
    assert session.begin(4, is_gathered=True) == []
    return session


def test_a_page_is_gathered_once_and_sent_after_that() -> None:
    session = make_staged_session()
    assert session.layers_ready([0, 1], 6) == [GatherPages(0, 0, 4, num_layers=2)]
    session.gathering()
    assert session.layers_ready([0], 9) == [GatherPages(0, 4, 9)]
    session.gathering()
    assert session.gathered([0, 1], 4) == [WriteLayers(0, 0, 4, num_layers=2)]
    session.submitted(TransferHandle("tcp", TransferId(1)), LayersWritten(range(2), 0, 4))
    assert session.gathered([0], 9) == [WriteLayers(0, 4, 9)]


def test_the_source_is_held_until_no_copy_reads_it() -> None:
    session = make_staged_session()
    session.layers_ready([0, 1], 9)
    session.gathering()
    (said,) = session.fail("the client left", stage="abort")
    assert isinstance(said, SendMessage)
    assert not session.over
    (emitted,) = session.gathered([0, 1], 9)
    assert isinstance(emitted, Emit)
    assert isinstance(emitted.event, SendFailed)
    assert session.over


def make_written_session() -> SendSession:
    """All 9 tokens of both layers submitted: layer 0 over `shared`, layer 1 over `tcp`."""
    session, grant = make_session()
    session.granted(grant)
    session.begin(1)
    for layer, kind in enumerate(("shared", "tcp")):
        session.layers_ready([layer], 9)
        session.submitted(
            TransferHandle(kind, TransferId(1)), LayersWritten(range(layer, layer + 1), 0, 9)
        )
    session.finish(None)
    return session


def missing(session: SendSession, kind: str, *token_ranges: LayerTokenRange) -> RetransmitRequest:
    return RetransmitRequest(session.ticket, kind, pack_ranges(token_ranges))


def test_only_what_the_failed_transport_carried_and_did_not_bring_is_sent_again() -> None:
    session = make_written_session()
    assert session.fail_over("shared") == [], "a write is under way over it"
    assert session.ended(TransferHandle("shared", TransferId(1))) == [
        SendMessage(TransportFailed(session.ticket, "shared"))
    ]
    gaps = missing(session, "shared", LayerTokenRange(0, 4, 9), LayerTokenRange(1, 0, 9))
    assert session.retransmit(gaps) == [WriteLayers(0, 4, 9)], "layer 1 is on its way over tcp"
    assert session.retransmit(gaps) == []
    assert session.excluded == {"shared"}


def test_what_was_sent_well_is_asked_for_too_when_its_transport_fails() -> None:
    session = make_written_session()
    session.ended(TransferHandle("shared", TransferId(1)))
    assert session.fail_over("shared") == [SendMessage(TransportFailed(session.ticket, "shared"))]
    assert session.fail_over("shared") == []


def test_a_transport_that_carried_nothing_is_left_without_a_word() -> None:
    session = make_written_session()
    assert session.fail_over("nixl") == []
    assert "nixl" in session.excluded


def test_the_source_is_held_until_all_writes_have_ended_and_it_is_taken() -> None:
    session = make_written_session()
    session.ended(TransferHandle("shared", TransferId(1)))
    assert session.acked() == []
    assert session.ended(TransferHandle("tcp", TransferId(1))) == [Emit(KVSent(session.ticket))]


def test_a_session_without_a_route_submits_what_it_owes_once_there_is_one() -> None:
    session = make_written_session()
    session.ended(TransferHandle("shared", TransferId(1)))
    session.fail_over("shared")
    assert session.retransmit(missing(session, "shared", LayerTokenRange(0, 2, 9))) == [
        WriteLayers(0, 2, 9)
    ]
    session.submitted(TransferHandle("tcp", TransferId(2)), LayersWritten(range(1), 2, 5))
    assert session.resume() == [WriteLayers(0, 5, 9)]


def test_a_reader_that_gives_up_is_written_to() -> None:
    session = make_read_session()
    session.begin(1)
    for layer in range(2):
        session.layers_ready([layer], 6)
        session.announced(range(layer, layer + 1), 6)
    ranges = pack_ranges([LayerTokenRange(0, 0, 9), LayerTokenRange(1, 3, 9)])
    message = FallbackToWrite(session.ticket, ("shared",), 0, b"", ranges)
    assert session.fall_back_to_write(message) == [WriteLayers(0, 0, 6), WriteLayers(1, 3, 6)]
    assert session.fall_back_to_write(message) == []
    assert session.excluded == {"shared"}
    assert session.layers_ready([0], 9) == [WriteLayers(0, 6, 9)]


def test_more_ranges_than_can_be_missing_are_refused() -> None:
    session = make_read_session()
    session.begin(1)
    session.layers_ready([0, 1], 9)
    session.announced(range(2), 9)

    def ask(*stops: int) -> list[SendAction]:
        ranges = pack_ranges([LayerTokenRange(0, stop - 1, stop) for stop in stops])
        return session.fall_back_to_write(FallbackToWrite(session.ticket, (), 0, b"", ranges))

    with pytest.raises(ProtocolError):
        ask(1, 3, 5, 7, 9)
    assert not session.is_written
    assert len(ask(1, 3, 5, 7)) == 4, "one of each layer, and one more for each that was sent"


def test_what_is_asked_for_many_times_is_written_once() -> None:
    session = make_written_session()
    session.ended(TransferHandle("shared", TransferId(1)))
    session.fail_over("shared")
    again = LayerTokenRange(0, 0, 9)
    with pytest.raises(ProtocolError):
        session.retransmit(missing(session, "shared", again, again))
    assert session.retransmit(missing(session, "shared", again)) == [WriteLayers(0, 0, 9)]


def test_a_long_reason_is_one_that_the_peer_can_read() -> None:
    session, grant = make_session()
    session.granted(grant)
    said, _ = session.fail("x" * 3000, stage="submit")
    assert isinstance(said, SendMessage)
    assert isinstance(said.message, Failed)
    assert decode(encode(said.message)) == said.message
