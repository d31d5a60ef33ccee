"""Awake for a moment where answers come quickly; asleep at once where they do not."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.testing.clocks import ManualClock
from baton.transfer.waiting import (
    ASLEEP,
    MAX_STREAK,
    MIN_STREAK,
    NUM_TRIALS,
    Patience,
    Waiting,
)

LONGEST_S = 0.001
SHORT_S, LONG_S = 0.0005, 0.02


class Middle(Random):
    """Draws what lies in the middle."""

    def randint(self, a, b):
        return (a + b) // 2


def note(patience, waits):
    for waited_s in waits:
        patience.note(waited_s)
    return patience.awake_s


def test_a_thread_that_hears_quick_answers_awaits_the_next_one_awake():
    patience = Patience(LONGEST_S)
    assert note(patience, [SHORT_S] * (MIN_STREAK - 1)) == 0
    assert note(patience, [SHORT_S]) == LONGEST_S
    assert note(patience, [SHORT_S] * 100) == LONGEST_S


def test_an_answer_that_two_sleepers_were_late_for_is_a_quick_one():
    patience = Patience(LONGEST_S)
    assert note(patience, [ASLEEP * LONGEST_S] * MIN_STREAK) == LONGEST_S


def test_what_comes_just_too_late_is_awaited_awake_a_few_times():
    patience, late_s = Patience(LONGEST_S, Middle()), 1.01 * LONGEST_S
    note(patience, [SHORT_S] * MIN_STREAK)
    for _ in range(NUM_TRIALS):
        assert note(patience, [late_s]) == ASLEEP * LONGEST_S
    assert note(patience, [late_s]) == 0
    assert note(patience, [late_s] * (2 * MIN_STREAK - 1)) == 0
    assert note(patience, [late_s]) == LONGEST_S
    assert note(patience, [late_s]) == 0  # the next time it is not tried
    while note(patience, [late_s]) != LONGEST_S:
        pass
    assert note(patience, [late_s]) == ASLEEP * LONGEST_S
    assert note(patience, [SHORT_S]) == LONGEST_S  # it helped


def test_one_wait_in_vain_ends_it_and_makes_the_next_beginning_harder():
    patience = Patience(LONGEST_S, Middle())
    note(patience, [SHORT_S] * MIN_STREAK)
    assert note(patience, [LONG_S]) == 0
    assert note(patience, [SHORT_S] * (2 * MIN_STREAK - 1)) == 0
    assert note(patience, [SHORT_S]) == LONGEST_S


def test_a_long_wait_asleep_costs_nothing_and_so_changes_nothing_but_the_streak():
    patience = Patience(LONGEST_S)
    note(patience, [LONG_S] * 50)
    assert note(patience, [SHORT_S] * MIN_STREAK) == LONGEST_S


def test_a_thread_that_may_not_wait_awake_never_does():
    patience = Patience(0.0)
    assert note(patience, [0.0] * 1000) == 0


@given(st.lists(st.sampled_from([SHORT_S, LONG_S]), max_size=600))
def test_waits_in_vain_are_few_whatever_comes(waits):
    patience, num_in_vain = Patience(LONGEST_S), 0
    for waited_s in waits:
        num_in_vain += patience.awake_s > 0 and waited_s > LONGEST_S
        patience.note(waited_s)
    num_short = waits.count(SHORT_S)
    # Each takes a streak before it, and each one not in vain halves only one doubling.
    assert num_in_vain <= num_short / MIN_STREAK


@pytest.mark.parametrize(("rng", "most"), [(Middle(), 1), *((Random(n), 2) for n in range(20))])
def test_a_rhythm_that_deceives_is_found_out(rng, most):
    patience, num_in_vain = Patience(LONGEST_S, rng), 0
    for _ in range(1000):
        for waited_s in [SHORT_S] * MIN_STREAK + [LONG_S]:
            num_in_vain += patience.awake_s > 0 and waited_s > LONGEST_S
            patience.note(waited_s)
    assert 1 <= num_in_vain <= most


def answer_each_other(one, other, num_rounds, *, waking_s, working_s=60e-6):
    """Two that ask and answer by turns: how long each answer took.

    To be woken takes `waking_s`; what is met awake is seen at once.
    """
    now, other_since, took = 0.0, 0.0, []
    for _ in range(num_rounds):
        asked = now
        heard = max(asked, other_since)
        heard += 0 if heard <= other_since + other.awake_s else waking_s
        other.note(heard - other_since)
        answered = other_since = heard + working_s
        now = answered + (0 if answered <= asked + one.awake_s else waking_s)
        one.note(now - asked)
        took.append(now - asked)
        now += working_s
    return took


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("waking_s", [0.00005, 0.0004, 0.0008, 0.0016])
def test_two_that_wait_for_each_other_do_not_hold_each_other_asleep(seed, waking_s):
    one, other = Patience(LONGEST_S, Random(seed)), Patience(LONGEST_S, Random(-1 - seed))
    took = answer_each_other(one, other, 40, waking_s=waking_s)
    assert max(took[20:]) < 2 * 60e-6
    for _ in range(5):  # one of them becomes wary
        while one.awake_s == 0:
            one.note(SHORT_S)
        one.note(LONG_S)
    took = answer_each_other(one, other, 20_000, waking_s=waking_s)
    assert took[-1] < 2 * 60e-6


@given(st.floats(1.05, 3.95), st.integers())
def test_answers_that_take_longer_by_themselves_are_seldom_awaited_awake(times, seed):
    patience, answer_s = Patience(LONGEST_S, Random(seed)), times * LONGEST_S
    awake_s = 0.0
    for _ in range(2000):
        awake_s += min(patience.awake_s, answer_s)
        patience.note(answer_s)
    assert awake_s < 0.07 * 2000 * answer_s


class Peer:
    """Answers `look` when the clock has reached a time; a look costs time too."""

    def __init__(self, clock, answers_at):
        self.clock, self.answers_at, self.timeouts = clock, answers_at, []

    def look(self, timeout_s):
        self.timeouts.append(timeout_s)
        self.clock.advance(1e-5)
        if timeout_s > 0:
            self.clock.advance(max(0.0, min(timeout_s, self.answers_at - self.clock.now())))
        return ["answer"] if self.clock.now() >= self.answers_at else []


def answer_after(waiting, clock, delay_s):
    peer = Peer(clock, clock.now() + delay_s)
    return waiting.wait(peer.look, 1.0), peer.timeouts


def test_what_comes_soon_is_met_without_sleeping_and_what_does_not_is_slept_for():
    clock = ManualClock()
    waiting = Waiting(clock, LONGEST_S)
    for _ in range(MIN_STREAK):
        assert answer_after(waiting, clock, SHORT_S) == (["answer"], [1.0])
    found, timeouts = answer_after(waiting, clock, SHORT_S)
    assert found == ["answer"]
    assert set(timeouts) == {0}
    found, timeouts = answer_after(waiting, clock, LONG_S)
    assert found == ["answer"]
    assert timeouts[-1] == 1.0
    assert len(timeouts) <= LONGEST_S / 1e-5 + 2
    assert answer_after(waiting, clock, SHORT_S)[1] == [1.0]


def test_a_wait_that_finds_nothing_ends_in_time():
    clock = ManualClock()
    assert answer_after(Waiting(clock, LONGEST_S), clock, 5.0) == ([], [1.0])
    assert MAX_STREAK > MIN_STREAK
