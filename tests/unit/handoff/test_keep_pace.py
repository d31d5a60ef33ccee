"""What copies into the store take of the time in which an engine computes, in virtual time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.clock import Instant
from baton.handoff.interface import EngineSteps
from baton.handoff.pool_mode.keep_pace import (
    BUSY_BATCH_S,
    IDLE_AFTER_S,
    IDLE_BATCH_S,
    IDLE_SHARE,
    KeepPace,
)

ENTRY_S = BUSY_BATCH_S / 8


def computing() -> EngineSteps:
    return EngineSteps(num_begun=1)


def copy_for(pace: KeepPace, seconds: float, entry_s: float = ENTRY_S) -> float:
    """Copy whenever that is allowed; what it took."""
    now, took_s = 0.0, 0.0
    while now < seconds:
        wait_s = pace.compute_wait_s(Instant(now))
        if wait_s > 0:
            now += wait_s
            continue
        num_entries = pace.count_at_once(Instant(now), 1000)
        batch_s = num_entries * entry_s
        pace.observe(Instant(now + batch_s), batch_s, batch_s, num_entries)
        now, took_s = now + batch_s, took_s + batch_s
    return took_s


@given(share=st.floats(0.001, 1.0), entry_s=st.floats(1e-6, 0.01))
def test_while_the_engine_computes_copies_have_their_share_of_the_time(
    share: float, entry_s: float
) -> None:
    took_s = copy_for(KeepPace(computing(), share), 3.0, entry_s)
    batch_s = max(BUSY_BATCH_S, entry_s)
    assert 0 < took_s <= share * 3.0 + batch_s
    assert took_s >= share * (3.0 - batch_s / share) - batch_s, "no more is left unused"


def test_while_it_is_idle_they_have_the_most_of_it() -> None:
    took_s = copy_for(KeepPace(EngineSteps(), 0.01), 3.0)
    assert took_s == pytest.approx(IDLE_SHARE * 3.0, rel=0.05)


def test_an_engine_is_busy_between_two_steps_and_idle_some_time_after_the_last() -> None:
    steps = EngineSteps()
    pace = KeepPace(steps, 0.1)
    assert not pace.is_busy(Instant(1.0))
    steps.num_begun = 1
    assert pace.is_busy(Instant(1.0))
    assert pace.is_busy(Instant(9.0)), "it is still in that step"
    steps.num_ended = 1
    assert pace.is_busy(Instant(9.0)), "it has just ended"
    assert pace.is_busy(Instant(9.0 + 0.9 * IDLE_AFTER_S))
    assert not pace.is_busy(Instant(9.0 + IDLE_AFTER_S))
    steps.num_begun = steps.num_ended = 2  # a whole step since the last look
    assert pace.is_busy(Instant(10.0))
    assert not pace.is_busy(Instant(10.0 + IDLE_AFTER_S))


def test_a_pause_ends_when_the_engine_becomes_idle() -> None:
    steps = computing()
    pace = KeepPace(steps, 0.01)
    pace.observe(Instant(0.01), 0.01, 0.01, 1)
    wait_s = pace.compute_wait_s(Instant(0.01))
    assert wait_s == IDLE_AFTER_S, "it looks again before the pause of 1 s is over"
    steps.num_ended = 1
    assert pace.compute_wait_s(Instant(0.01 + wait_s)) == IDLE_AFTER_S
    assert pace.compute_wait_s(Instant(0.01 + 2 * wait_s)) == 0.0


def test_a_batch_is_shorter_while_the_engine_computes() -> None:
    steps = computing()
    pace = KeepPace(steps, 0.1)
    assert pace.count_at_once(Instant(0.0), 1000) == 1, "what an entry takes is not known"
    pace.observe(Instant(ENTRY_S), ENTRY_S, ENTRY_S, 1)
    assert pace.count_at_once(Instant(1.0), 1000) == pytest.approx(BUSY_BATCH_S / ENTRY_S, abs=1)
    steps.num_ended = 1
    pace.is_busy(Instant(1.0))
    in_idle_time = pace.count_at_once(Instant(2.0), 1000)
    assert in_idle_time == pytest.approx(IDLE_BATCH_S / ENTRY_S, abs=1)
    assert pace.count_at_once(Instant(2.0), 3) == 3
    pace.observe(Instant(3.0), 1.0, 1.0, 1)
    assert pace.count_at_once(Instant(3.0), 1000) == 1


def test_what_is_kept_first_waits_until_the_answer_has_left() -> None:
    pace = KeepPace(EngineSteps(), 0.1)
    pace.start(Instant(5.0))
    assert pace.compute_wait_s(Instant(5.0)) == pytest.approx(IDLE_AFTER_S)
    assert pace.compute_wait_s(Instant(5.0 + IDLE_AFTER_S)) == pytest.approx(0.0, abs=1e-12)


def test_an_engine_that_waits_for_copies_does_not_wait_for_their_turn() -> None:
    pace = KeepPace(computing(), 0.001)
    pace.observe(Instant(5.0), 0.003, 0.003, 1)
    assert pace.compute_wait_s(Instant(5.0)) > 0
    pace.is_hurried = True
    assert pace.compute_wait_s(Instant(5.0)) == 0


def test_waiting_for_a_server_is_not_charged() -> None:
    pace = KeepPace(computing(), 0.1)
    pace.observe(Instant(1.0), 1.0, 0.001, 1)
    assert pace.compute_wait_s(Instant(1.0)) == pytest.approx(0.009)
