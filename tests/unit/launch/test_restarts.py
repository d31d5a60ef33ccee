"""When a process that died may start again."""

from hypothesis import given
from hypothesis import strategies as st

from baton.clock import Instant
from baton.launch.child import RestartBudget, RestartPolicy


def test_each_restart_waits_twice_as_long_and_the_sixth_is_refused():
    budget = RestartBudget(RestartPolicy())
    delays = [budget.next_delay_s(Instant(float(t))) for t in range(6)]
    assert delays == [0.5, 1.0, 2.0, 4.0, 8.0, None]


def test_a_quiet_minute_forgives():
    budget = RestartBudget(RestartPolicy())
    for t in range(5):
        budget.next_delay_s(Instant(float(t)))
    assert budget.next_delay_s(Instant(59.9)) is None
    assert budget.next_delay_s(Instant(64.5)) == 0.5
    assert budget.num_recent == 1


@given(st.lists(st.floats(0, 30), max_size=60), st.integers(1, 6))
def test_no_window_has_more_restarts_than_allowed(gaps_s, max_restarts):
    policy = RestartPolicy(max_restarts=max_restarts)
    budget = RestartBudget(policy)
    now, granted = 0.0, []
    for gap_s in gaps_s:
        now += gap_s
        delay_s = budget.next_delay_s(Instant(now))
        if delay_s is not None:
            assert 0 < delay_s <= policy.max_delay_s
            granted.append(now)
    for first in granted:
        assert sum(first <= at < first + policy.window_s for at in granted) <= max_restarts
