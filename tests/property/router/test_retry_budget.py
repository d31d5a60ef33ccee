"""Retries are a bounded part of the load, however long a fleet fails."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from baton.router.failover import LEAST_RETRIES, PER_SECOND, RetryBudget, RetryVerdict

STEPS = st.lists(
    st.tuples(st.sampled_from(["request", "end", "retry", "first token", "fail"]), st.floats(0, 2)),
    max_size=300,
)


@given(share=st.floats(0.01, 1.0), steps=STEPS)
def test_retries_are_a_share_of_what_is_under_way(
    share: float, steps: list[tuple[str, float]]
) -> None:
    budget, now = RetryBudget(share, 0.0), 0.0
    num_requests = most_under_way = num_failed = 0
    for step, elapsed_s in steps:
        now += elapsed_s
        match step:
            case "request":
                budget.add_request()
                num_requests += 1
                most_under_way = max(most_under_way, budget.num_requests)
            case "end" if budget.num_requests:
                budget.num_requests -= 1
            case "retry":
                before = budget.num_retrying
                verdict = budget.begin(now)
                room = max(LEAST_RETRIES, share * budget.num_requests)
                assert budget.num_retrying == before + (verdict is RetryVerdict.GRANTED)
                if verdict is RetryVerdict.GRANTED:
                    assert budget.num_retrying <= room + 1e-9
                else:
                    assert (verdict is RetryVerdict.WAIT) == (before > 0)
                    assert before + 1 > room - num_failed - 1e-9
            case "first token" | "fail" if budget.num_retrying:
                has_failed = step == "fail"
                num_failed += has_failed
                budget.end(has_failed=has_failed)
    granted = max(LEAST_RETRIES, share * most_under_way) + num_requests * share + now * PER_SECOND
    assert num_failed <= granted + 1e-6


@given(num_requests=st.integers(1, 400), share=st.floats(0.01, 1.0))
def test_all_requests_of_a_worker_that_died_get_their_retry(
    num_requests: int, share: float
) -> None:
    budget = RetryBudget(share, 0.0)
    for _ in range(num_requests):
        budget.add_request()
    num_left = num_requests
    while num_left:
        while num_left and budget.begin(0.0) is RetryVerdict.GRANTED:
            num_left -= 1
        assert budget.num_retrying
        budget.end(has_failed=False)


def test_a_fleet_that_fails_is_asked_for_three_retries_more() -> None:
    budget = RetryBudget(0.2, 0.0)
    for _ in range(LEAST_RETRIES):
        assert budget.begin(0.0) is RetryVerdict.GRANTED
        budget.end(has_failed=True)
    assert budget.begin(0.5) is RetryVerdict.REFUSED
    assert budget.begin(1.0) is RetryVerdict.GRANTED
