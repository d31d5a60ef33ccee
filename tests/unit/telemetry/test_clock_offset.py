"""Another process's clock: the true offset is within the bound, whatever the round trips are."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from baton.telemetry.clock_offset import MAX_DRIFT, ClockOffset

SECONDS = st.floats(0.0, 0.5)
TRIPS = st.lists(st.tuples(SECONDS, SECONDS, st.floats(0.01, 100.0)), min_size=1, max_size=40)


@given(TRIPS, st.floats(-1e6, 1e6), st.floats(-MAX_DRIFT / 2, MAX_DRIFT / 2))
@example([(0.0, 0.5, 0.01)], 0.0, MAX_DRIFT / 2)  # read as it was asked, and long on its way back
def test_the_true_offset_is_within_the_bound(trips, offset_s, drift) -> None:
    clock, now = ClockOffset(), 1000.0

    def theirs(at: float) -> float:
        return at + offset_s + drift * (at - 1000.0)

    for there_s, back_s, pause_s in trips:
        sent_at, read_at = now, now + there_s
        now = read_at + back_s
        clock.observe("host", theirs(read_at), sent_at, now)
        now += pause_s
        found = clock.estimate(now)
        assert found is not None
        assert abs(found.offset_s - (theirs(now) - now)) <= found.error_s + 1e-6


def test_a_short_round_trip_narrows_the_bound_and_a_long_one_does_not_widen_it() -> None:
    clock = ClockOffset()
    clock.observe("host", 50.0, 0.0, 0.4)
    assert clock.estimate(0.4).error_s == pytest.approx(0.2 + MAX_DRIFT * 0.4)
    clock.observe("host", 51.0, 1.0, 1.002)
    assert clock.estimate(1.002).error_s == pytest.approx(0.001 + MAX_DRIFT * 0.002)
    clock.observe("host", 52.2, 2.0, 2.4)
    assert clock.estimate(2.4).error_s == pytest.approx(0.001 + MAX_DRIFT * 1.4)


def test_a_clock_that_jumps_is_followed_at_once() -> None:
    clock = ClockOffset()
    clock.observe("host", 0.001, 0.0, 0.002)
    clock.observe("host", 3600.5, 0.4, 0.6)  # a worse round trip, and an hour away
    found = clock.estimate(0.6)
    assert found.offset_s == pytest.approx(3600.0)
    assert found.error_s == pytest.approx(0.1 + MAX_DRIFT * 0.2)


def test_a_host_that_was_started_again_has_another_clock() -> None:
    clock = ClockOffset()
    clock.observe("boot-1", 5.0, 0.0, 0.002)
    clock.observe("boot-2", 5.3, 0.3, 0.5)
    assert clock.estimate(0.5).offset_s == pytest.approx(4.9)


def test_one_hosts_processes_have_one_clock() -> None:
    clock = ClockOffset()
    assert clock.estimate(0.0) is None
    clock.observe_same("host")
    assert (clock.estimate(9.0).offset_s, clock.estimate(9.0).error_s) == (0.0, 0.0)


def test_a_clock_of_ours_that_went_back_shows_nothing() -> None:
    clock = ClockOffset()
    clock.observe("host", 5.0, 2.0, 1.0)
    assert clock.estimate(2.0) is None
