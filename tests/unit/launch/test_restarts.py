"""When a process that ended may start again."""

from hypothesis import given
from hypothesis import strategies as st

from baton.clock import Instant
from baton.launch.restarts import RestartHistory, RestartPolicy


def test_each_restart_waits_twice_as_long_up_to_five_minutes():
    history = RestartHistory(RestartPolicy())
    delays = [history.next_delay_s(Instant(float(t))) for t in range(12)]
    assert delays[:6] == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0]
    assert delays[-2:] == [300.0, 300.0]


def test_the_sixth_end_is_too_often():
    history = RestartHistory(RestartPolicy())
    found = []
    for t in range(6):
        history.next_delay_s(Instant(float(t)))
        found.append(history.has_ended_too_often)
    assert found == [False] * 5 + [True]


def test_a_minute_of_serving_starts_again_at_the_shortest_pause():
    history, now = RestartHistory(RestartPolicy()), 0.0
    for _ in range(8):
        history.next_delay_s(Instant(now))
    history.note_ready(Instant(now))
    assert history.next_delay_s(Instant(now + 59.9)) > 16.0
    assert history.has_ended_too_often
    history.note_ready(Instant(now))
    assert history.next_delay_s(Instant(now + 60.0)) == 0.5
    assert not history.has_ended_too_often


def test_time_to_start_is_no_time_of_serving():
    history = RestartHistory(RestartPolicy())
    for t in range(6):
        history.next_delay_s(Instant(600.0 * t))
    assert history.has_ended_too_often


@given(st.lists(st.tuples(st.booleans(), st.floats(0, 90)), max_size=200), st.integers(0, 6))
def test_pauses_grow_until_it_has_served_for_long_enough(lives, max_restarts):
    policy = RestartPolicy(max_restarts=max_restarts)
    history, now, before_s, num_ends = RestartHistory(policy), 0.0, 0.0, 0
    for is_ready, lasts_s in lives:
        started = now
        if is_ready:
            history.note_ready(Instant(started))
        now += lasts_s
        delay_s = history.next_delay_s(Instant(now))
        if is_ready and now - started >= policy.stable_s:
            num_ends, before_s = 0, 0.0
        num_ends += 1
        assert before_s <= delay_s <= policy.max_delay_s
        assert (
            delay_s == policy.max_delay_s or delay_s == policy.first_delay_s or delay_s > before_s
        )
        assert history.has_ended_too_often == (num_ends > max_restarts)
        before_s = delay_s
        now += delay_s
