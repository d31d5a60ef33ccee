from __future__ import annotations

from baton.clock import Instant
from baton.handoff.reference.exports import (
    MAX_EXPORTS,
    REVOKE_INTERVAL_S,
    ExportLimits,
    ExportTable,
)
from baton.handoff.reference.imports import ImportTable
from baton.ids import Epoch, TicketId

ONE, OTHER = Epoch("one"), Epoch("other")


def ticket(number: int) -> TicketId:
    return TicketId(number.to_bytes(16, "big"))


def test_each_borrower_and_all_of_them_are_bounded() -> None:
    table = ExportTable(ExportLimits.of_block_pool(100))
    assert table.reserve(ticket(1), ONE, 50) is None
    assert table.reserve(ticket(2), ONE, 1) is not None
    assert table.reserve(ticket(3), OTHER, 26) is not None
    assert table.reserve(ticket(4), OTHER, 25) is None
    assert table.reserve(ticket(4), OTHER, 0) == "it was exported before"
    table.forget(ticket(1))
    assert table.reserve(ticket(2), ONE, 1) is None
    table.check_invariants()


def test_there_are_only_so_many_loans() -> None:
    table = ExportTable(ExportLimits(10**9, 10**9))
    for number in range(MAX_EXPORTS):
        assert table.reserve(ticket(number), ONE, 1) is None
    assert table.reserve(ticket(MAX_EXPORTS), ONE, 1) is not None


def test_a_loan_ends_by_its_borrowers_word_alone() -> None:
    table = ExportTable(ExportLimits.of_block_pool(100))
    table.reserve(ticket(1), ONE, 5)
    table.export(ticket(1), Instant(10.0))
    table.forget(ticket(1))
    assert table.released(OTHER, [ticket(1)]) == []
    assert table.importer_died(OTHER) == []
    assert table.holds(ONE)
    assert table.released(ONE, [ticket(2), ticket(1), ticket(1)]) == [ticket(1)]
    assert not table.holds(ONE)


def test_the_end_of_a_process_ends_its_loans_and_no_promise() -> None:
    table = ExportTable(ExportLimits.of_block_pool(100))
    for number in range(3):
        table.reserve(ticket(number), ONE, 5)
    table.export(ticket(0), Instant(10.0))
    table.export(ticket(2), Instant(10.0))
    assert table.importer_died(ONE) == [ticket(0), ticket(2)]
    assert table.num_blocks == 5


def test_loans_are_recalled_when_their_time_is_over_and_then_now_and_again() -> None:
    table = ExportTable(ExportLimits.of_block_pool(100))
    table.reserve(ticket(1), ONE, 5)
    assert table.tick(Instant(50.0)) == {}
    table.export(ticket(1), Instant(10.0))
    assert table.tick(Instant(9.0)) == {}
    assert table.tick(Instant(10.0)) == {ONE: [ticket(1)]}
    assert table.tick(Instant(10.0)) == {}
    assert table.tick(Instant(10.0 + REVOKE_INTERVAL_S)) == {ONE: [ticket(1)]}


def test_who_needs_room_recalls_at_once_and_not_at_every_step() -> None:
    table = ExportTable(ExportLimits.of_block_pool(100))
    table.reserve(ticket(1), ONE, 5)
    table.export(ticket(1), Instant(1000.0))
    assert table.revoke(Instant(1.0)) == {ONE: [ticket(1)]}
    assert table.revoke(Instant(1.1)) == {}
    assert table.revoke(Instant(1.0 + REVOKE_INTERVAL_S)) == {ONE: [ticket(1)]}


def test_a_return_is_said_until_it_was_heard() -> None:
    table = ImportTable()
    table.add(ticket(1), ONE)
    assert table.release(ticket(1)) == ONE
    assert table.take_pending(ONE, 10) == [ticket(1)]
    assert table.take_pending(ONE, 10) == []
    table.link_lost(ONE)
    assert table.take_pending(ONE, 10) == [ticket(1)]
    table.acked(ONE, [ticket(1)])
    assert table.exporters == []
    table.check_invariants()


def test_returns_are_said_in_batches() -> None:
    table = ImportTable()
    for number in range(5):
        table.queue_release(ticket(number), ONE)
    batches = [len(table.take_pending(ONE, 2)) for _ in range(4)]
    assert batches == [2, 2, 1, 0]


def test_what_is_held_outlives_link_and_lender() -> None:
    table = ImportTable()
    table.add(ticket(1), ONE)
    table.queue_release(ticket(2), ONE)
    table.link_lost(ONE)
    table.drop_pending(ONE)
    assert table.holds(ONE)
    assert not table.has_pending(ONE)
    table.check_invariants()


def test_only_what_is_held_is_recalled_and_once() -> None:
    table = ImportTable()
    table.add(ticket(1), ONE)
    table.add(ticket(2), OTHER)
    assert table.revoked(ONE, [ticket(1), ticket(2), ticket(3)]) == [ticket(1)]
    assert table.revoked(ONE, [ticket(1)]) == []


def test_one_that_was_taken_and_failed_is_owed_not_held() -> None:
    table = ImportTable()
    table.add(ticket(1), ONE)
    table.queue_release(ticket(1), ONE)
    assert not table.holds(ONE)
    assert table.release(ticket(1)) is None
    assert table.take_pending(ONE, 10) == [ticket(1)]
