from __future__ import annotations

from baton.clock import Instant
from baton.handoff.session.borrow import BorrowBook
from baton.handoff.session.lend import MAX_LOANS, RECALL_INTERVAL_S, LoanBook, LoanLimits
from baton.ids import Epoch, TicketId

ONE, OTHER = Epoch("one"), Epoch("other")


def ticket(number: int) -> TicketId:
    return TicketId(number.to_bytes(16, "big"))


def test_each_borrower_and_all_of_them_are_bounded() -> None:
    book = LoanBook(LoanLimits.of_pool(100))
    assert book.promise(ticket(1), ONE, 50) is None
    assert book.promise(ticket(2), ONE, 1) is not None
    assert book.promise(ticket(3), OTHER, 26) is not None
    assert book.promise(ticket(4), OTHER, 25) is None
    assert book.promise(ticket(4), OTHER, 0) == "it was lent before"
    book.forget(ticket(1))
    assert book.promise(ticket(2), ONE, 1) is None
    book.check_invariants()


def test_there_are_only_so_many_loans() -> None:
    book = LoanBook(LoanLimits(10**9, 10**9))
    for number in range(MAX_LOANS):
        assert book.promise(ticket(number), ONE, 1) is None
    assert book.promise(ticket(MAX_LOANS), ONE, 1) is not None


def test_a_loan_ends_by_its_borrowers_word_alone() -> None:
    book = LoanBook(LoanLimits.of_pool(100))
    book.promise(ticket(1), ONE, 5)
    book.lend(ticket(1), Instant(10.0))
    book.forget(ticket(1))
    assert book.returned(OTHER, [ticket(1)]) == []
    assert book.ended(OTHER) == []
    assert book.holds(ONE)
    assert book.returned(ONE, [ticket(2), ticket(1), ticket(1)]) == [ticket(1)]
    assert not book.holds(ONE)


def test_the_end_of_a_process_ends_its_loans_and_no_promise() -> None:
    book = LoanBook(LoanLimits.of_pool(100))
    for number in range(3):
        book.promise(ticket(number), ONE, 5)
    book.lend(ticket(0), Instant(10.0))
    book.lend(ticket(2), Instant(10.0))
    assert book.ended(ONE) == [ticket(0), ticket(2)]
    assert book.num_blocks == 5


def test_loans_are_recalled_when_their_time_is_over_and_then_now_and_again() -> None:
    book = LoanBook(LoanLimits.of_pool(100))
    book.promise(ticket(1), ONE, 5)
    assert book.tick(Instant(50.0)) == {}
    book.lend(ticket(1), Instant(10.0))
    assert book.tick(Instant(9.0)) == {}
    assert book.tick(Instant(10.0)) == {ONE: [ticket(1)]}
    assert book.tick(Instant(10.0)) == {}
    assert book.tick(Instant(10.0 + RECALL_INTERVAL_S)) == {ONE: [ticket(1)]}


def test_who_needs_room_recalls_at_once_and_not_at_every_step() -> None:
    book = LoanBook(LoanLimits.of_pool(100))
    book.promise(ticket(1), ONE, 5)
    book.lend(ticket(1), Instant(1000.0))
    assert book.recall(Instant(1.0)) == {ONE: [ticket(1)]}
    assert book.recall(Instant(1.1)) == {}
    assert book.recall(Instant(1.0 + RECALL_INTERVAL_S)) == {ONE: [ticket(1)]}


def test_a_return_is_said_until_it_was_heard() -> None:
    book = BorrowBook()
    book.borrow(ticket(1), ONE)
    assert book.give_back(ticket(1)) == ONE
    assert book.take_owed(ONE, 10) == [ticket(1)]
    assert book.take_owed(ONE, 10) == []
    book.link_lost(ONE)
    assert book.take_owed(ONE, 10) == [ticket(1)]
    book.settled(ONE, [ticket(1)])
    assert book.lenders == []
    book.check_invariants()


def test_returns_are_said_in_batches() -> None:
    book = BorrowBook()
    for number in range(5):
        book.owe(ticket(number), ONE)
    batches = [len(book.take_owed(ONE, 2)) for _ in range(4)]
    assert batches == [2, 2, 1, 0]


def test_what_is_held_outlives_link_and_lender() -> None:
    book = BorrowBook()
    book.borrow(ticket(1), ONE)
    book.owe(ticket(2), ONE)
    book.link_lost(ONE)
    book.write_off(ONE)
    assert book.holds(ONE)
    assert not book.owes(ONE)
    book.check_invariants()


def test_only_what_is_held_is_recalled_and_once() -> None:
    book = BorrowBook()
    book.borrow(ticket(1), ONE)
    book.borrow(ticket(2), OTHER)
    assert book.recalled(ONE, [ticket(1), ticket(2), ticket(3)]) == [ticket(1)]
    assert book.recalled(ONE, [ticket(1)]) == []


def test_one_that_was_taken_and_failed_is_owed_not_held() -> None:
    book = BorrowBook()
    book.borrow(ticket(1), ONE)
    book.owe(ticket(1), ONE)
    assert not book.holds(ONE)
    assert book.give_back(ticket(1)) is None
    assert book.take_owed(ONE, 10) == [ticket(1)]
