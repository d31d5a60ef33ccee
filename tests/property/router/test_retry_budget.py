"""Retries are a bounded part of the load, however long a fleet fails."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from baton.router.failover import PER_REQUEST, PER_SECOND, RetryBudget


@given(
    capacity=st.integers(1, 50),
    steps=st.lists(st.tuples(st.floats(0, 5), st.booleans()), max_size=200),
)
def test_retries_never_exceed_what_was_granted(
    capacity: int, steps: list[tuple[float, bool]]
) -> None:
    budget, now, num_requests, num_retries = RetryBudget(0.0, capacity), 0.0, 0, 0
    for elapsed_s, is_retry in steps:
        now += elapsed_s
        if is_retry:
            num_retries += budget.take(now)
        else:
            num_requests += 1
            budget.add_request()
    granted = capacity + num_requests * PER_REQUEST + now * PER_SECOND
    assert num_retries <= granted + 1e-6


def test_a_worker_that_dies_with_all_places_taken_costs_no_request_its_retry() -> None:
    budget = RetryBudget(0.0, 1024)
    assert all(budget.take(0.0) for _ in range(1024))
    assert not budget.take(0.5)
    assert budget.take(1.5)
