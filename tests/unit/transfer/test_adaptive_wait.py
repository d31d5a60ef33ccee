"""Awake for a moment where answers come quickly; asleep at once where they do not."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.testing.clocks import ManualClock
from baton.transfer.adaptive_wait import (
    MAX_STREAK,
    MIN_STREAK,
    NUM_LONG_SPINS,
    SLEEP_FACTOR,
    AdaptiveWaiter,
    SpinPolicy,
)

MAX_BACKOFF_S = 0.001
SHORT_S, LONG_S = 0.0005, 0.02


class Middle(Random):
    """Draws what lies in the middle."""

    def randint(self, a, b):
        return (a + b) // 2


def record(policy, waits):
    for waited_s in waits:
        policy.record(waited_s)
    return policy.spin_s


def test_a_thread_that_hears_quick_answers_awaits_the_next_one_awake():
    policy = SpinPolicy(MAX_BACKOFF_S)
    assert record(policy, [SHORT_S] * (MIN_STREAK - 1)) == 0
    assert record(policy, [SHORT_S]) == MAX_BACKOFF_S
    assert record(policy, [SHORT_S] * 100) == MAX_BACKOFF_S


def test_an_answer_that_two_sleepers_were_late_for_is_a_quick_one():
    policy = SpinPolicy(MAX_BACKOFF_S)
    assert record(policy, [SLEEP_FACTOR * MAX_BACKOFF_S] * MIN_STREAK) == MAX_BACKOFF_S


def test_what_comes_just_too_late_is_awaited_awake_a_few_times():
    policy, late_s = SpinPolicy(MAX_BACKOFF_S, Middle()), 1.01 * MAX_BACKOFF_S
    record(policy, [SHORT_S] * MIN_STREAK)
    for _ in range(NUM_LONG_SPINS):
        assert record(policy, [late_s]) == SLEEP_FACTOR * MAX_BACKOFF_S
    assert record(policy, [late_s]) == 0
    assert record(policy, [late_s] * (2 * MIN_STREAK - 1)) == 0
    assert record(policy, [late_s]) == MAX_BACKOFF_S
    assert record(policy, [late_s]) == 0  # the next time it is not tried
    while record(policy, [late_s]) != MAX_BACKOFF_S:
        pass
    assert record(policy, [late_s]) == SLEEP_FACTOR * MAX_BACKOFF_S
    assert record(policy, [SHORT_S]) == MAX_BACKOFF_S  # it helped


def test_one_wait_in_vain_ends_it_and_makes_the_next_beginning_harder():
    policy = SpinPolicy(MAX_BACKOFF_S, Middle())
    record(policy, [SHORT_S] * MIN_STREAK)
    assert record(policy, [LONG_S]) == 0
    assert record(policy, [SHORT_S] * (2 * MIN_STREAK - 1)) == 0
    assert record(policy, [SHORT_S]) == MAX_BACKOFF_S


def test_a_long_wait_asleep_costs_nothing_and_so_changes_nothing_but_the_streak():
    policy = SpinPolicy(MAX_BACKOFF_S)
    record(policy, [LONG_S] * 50)
    assert record(policy, [SHORT_S] * MIN_STREAK) == MAX_BACKOFF_S


def test_a_thread_that_may_not_wait_awake_never_does():
    policy = SpinPolicy(0.0)
    assert record(policy, [0.0] * 1000) == 0


@given(st.lists(st.sampled_from([SHORT_S, LONG_S]), max_size=600))
def test_waits_in_vain_are_few_whatever_comes(waits):
    policy, num_in_vain = SpinPolicy(MAX_BACKOFF_S), 0
    for waited_s in waits:
        num_in_vain += policy.spin_s > 0 and waited_s > MAX_BACKOFF_S
        policy.record(waited_s)
    num_short = waits.count(SHORT_S)
    # Each takes a streak before it, and each one not in vain halves only one doubling.
    assert num_in_vain <= num_short / MIN_STREAK


@pytest.mark.parametrize(("rng", "most"), [(Middle(), 1), *((Random(n), 2) for n in range(20))])
def test_a_rhythm_that_deceives_is_found_out(rng, most):
    policy, num_in_vain = SpinPolicy(MAX_BACKOFF_S, rng), 0
    for _ in range(1000):
        for waited_s in [SHORT_S] * MIN_STREAK + [LONG_S]:
            num_in_vain += policy.spin_s > 0 and waited_s > MAX_BACKOFF_S
            policy.record(waited_s)
    assert 1 <= num_in_vain <= most


def answer_each_other(one, other, num_rounds, *, waking_s, working_s=60e-6):
    """Two that ask and answer by turns: how long each answer took.

    To be woken takes `waking_s`; what is met awake is seen at once.
    """
    now, other_since, took = 0.0, 0.0, []
    for _ in range(num_rounds):
        asked = now
        received_at = max(asked, other_since)
        received_at += 0 if received_at <= other_since + other.spin_s else waking_s
        other.record(received_at - other_since)
        answered = other_since = received_at + working_s
        now = answered + (0 if answered <= asked + one.spin_s else waking_s)
        one.record(now - asked)
        took.append(now - asked)
        now += working_s
    return took


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("waking_s", [0.00005, 0.0004, 0.0008, 0.0016])
def test_two_that_wait_for_each_other_do_not_hold_each_other_asleep(seed, waking_s):
    one, other = (
        SpinPolicy(MAX_BACKOFF_S, Random(seed)),
        SpinPolicy(MAX_BACKOFF_S, Random(-1 - seed)),
    )
    took = answer_each_other(one, other, 40, waking_s=waking_s)
    assert max(took[20:]) < 2 * 60e-6
    for _ in range(5):  # one of them becomes wary
        while one.spin_s == 0:
            one.record(SHORT_S)
        one.record(LONG_S)
    took = answer_each_other(one, other, 20_000, waking_s=waking_s)
    assert took[-1] < 2 * 60e-6


@given(st.floats(1.05, 3.95), st.integers())
def test_answers_that_take_longer_by_themselves_are_seldom_awaited_awake(times, seed):
    policy, answer_s = SpinPolicy(MAX_BACKOFF_S, Random(seed)), times * MAX_BACKOFF_S
    spin_s = 0.0
    for _ in range(2000):
        spin_s += min(policy.spin_s, answer_s)
        policy.record(answer_s)
    assert spin_s < 0.07 * 2000 * answer_s


class Peer:
    """Answers `look` when the clock has reached a time; a look costs time too."""

    def __init__(self, clock, answers_at):
        self.clock, self.answers_at, self.timeouts = clock, answers_at, []

    def poll(self, timeout_s):
        self.timeouts.append(timeout_s)
        self.clock.advance(1e-5)
        if timeout_s > 0:
            self.clock.advance(max(0.0, min(timeout_s, self.answers_at - self.clock.now())))
        return ["answer"] if self.clock.now() >= self.answers_at else []


def answer_after(waiting, clock, delay_s):
    peer = Peer(clock, clock.now() + delay_s)
    return waiting.wait(peer.poll, 1.0), peer.timeouts


def test_what_comes_soon_is_met_without_sleeping_and_what_does_not_is_slept_for():
    clock = ManualClock()
    waiting = AdaptiveWaiter(clock, MAX_BACKOFF_S)
    for _ in range(MIN_STREAK):
        assert answer_after(waiting, clock, SHORT_S) == (["answer"], [1.0])
    found, timeouts = answer_after(waiting, clock, SHORT_S)
    assert found == ["answer"]
    assert set(timeouts) == {0}
    found, timeouts = answer_after(waiting, clock, LONG_S)
    assert found == ["answer"]
    assert timeouts[-1] == 1.0
    assert len(timeouts) <= MAX_BACKOFF_S / 1e-5 + 2
    assert answer_after(waiting, clock, SHORT_S)[1] == [1.0]


def test_a_wait_that_finds_nothing_ends_in_time():
    clock = ManualClock()
    assert answer_after(AdaptiveWaiter(clock, MAX_BACKOFF_S), clock, 5.0) == ([], [1.0])
    assert MAX_STREAK > MIN_STREAK
