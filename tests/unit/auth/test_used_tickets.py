"""No ticket is used twice, and none is refused because others were used."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from baton.auth.replay import MAX_ISSUERS, WINDOW, TicketUse, UsedTickets
from baton.auth.ticket import TicketIssue
from baton.ids import Epoch, new_epoch
from tests.examples import examples

SMALL_WINDOW = 64
LIFETIME_S = 10.0


def numbered(number: int, issuer: int = 0, at: float = 0.0) -> TicketIssue:
    return TicketIssue(Epoch(f"{issuer:032x}"), number, at, LIFETIME_S)


class UsedTicketsMachine(RuleBasedStateMachine):
    """What was used is refused; what is new is good, within the window and the lifetime."""

    def __init__(self) -> None:
        super().__init__()
        self.used = UsedTickets(SMALL_WINDOW)
        self.known: dict[int, set[int]] = {}
        self.highest: dict[int, int] = {}
        self.newest: dict[int, float] = {}

    @rule(issuer=st.integers(0, 2), back=st.integers(-200, 90), late_s=st.floats(-20, 20))
    def use(self, issuer: int, back: int, late_s: float) -> None:
        is_first = issuer not in self.known
        known = self.known.setdefault(issuer, set())
        highest, newest = self.highest.get(issuer, 500), self.newest.get(issuer, 0.0)
        number, at = highest - back, newest - late_s
        found = self.used.use(numbered(number, issuer, at))
        if is_first:
            assert found is TicketUse.FIRST
            self.highest[issuer], self.newest[issuer] = number, at
            known.add(number)
            return
        self.highest[issuer] = max(highest, number)
        if number <= highest - SMALL_WINDOW or at + LIFETIME_S < newest:
            assert found is TicketUse.EXPIRED
            return
        self.newest[issuer] = max(newest, at)
        assert found is (TicketUse.REPEATED if number in known else TicketUse.FIRST)
        known.add(number)


UsedTicketsMachine.TestCase.settings = settings(max_examples=examples(75), stateful_step_count=60)
TestUsedTickets = UsedTicketsMachine.TestCase


@given(st.lists(st.integers(0, 10 * SMALL_WINDOW), max_size=80))
def test_no_number_is_good_twice(numbers: list[int]) -> None:
    used = UsedTickets(SMALL_WINDOW)
    good = [n for n in numbers if used.use(numbered(n)) is TicketUse.FIRST]
    assert len(good) == len(set(good))


def test_twice_as_many_as_the_window_holds_are_all_good_once() -> None:
    """Of one gateway; a worker is shown every third. They come in a little disorder."""
    used = UsedTickets(1 << 14)
    numbers = [3 * (n ^ 5) for n in range(2 * (1 << 14))]
    assert {used.use(numbered(n)) for n in numbers} == {TicketUse.FIRST}
    assert {used.use(numbered(n)) for n in numbers} == {TicketUse.EXPIRED, TicketUse.REPEATED}


def test_an_hour_of_2000_a_second_fits_in_half_a_mebibyte() -> None:
    used = UsedTickets()
    step = 1000
    for number in range(0, 2000 * 3600, step):
        assert used.use(numbered(number, at=number / 2000)) is TicketUse.FIRST
    assert used.use(numbered(2000 * 3600 - step, at=3599.5)) is TicketUse.REPEATED
    (window,) = used._issuers.values()
    assert len(window._bits) == WINDOW // 8 == 512 << 10


def test_gateways_that_come_and_go_are_forgotten_in_turn() -> None:
    used = UsedTickets(SMALL_WINDOW)
    steady = new_epoch()
    for number in range(3 * MAX_ISSUERS):
        one = TicketIssue(steady, number, 0.0, LIFETIME_S)
        assert used.use(one) is TicketUse.FIRST
        assert used.use(numbered(0, issuer=number)) is TicketUse.FIRST
        assert used.use(one) is TicketUse.REPEATED
    assert len(used._issuers) == MAX_ISSUERS
