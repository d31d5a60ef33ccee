"""When a failed server is asked again: the breaker, under any order of events."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from baton.clock import Instant
from baton.store.remote.circuit_breaker import BreakerState, CircuitBreaker

MIN_S, MAX_S = 1.0, 8.0


class Caller(RuleBasedStateMachine):
    """Sends requests and trials whenever it may; the server answers as it likes."""

    def __init__(self) -> None:
        super().__init__()
        self.breaker = CircuitBreaker(MIN_S, MAX_S)
        self.now = Instant(0.0)
        self.failed_at: Instant | None = None
        self.num_failures = 0
        """Of requests and trials since the last request that succeeded."""
        self.is_trial_sent = False

    @rule(seconds=st.floats(0.0, 2 * MAX_S))
    def wait(self, seconds: float) -> None:
        self.now = Instant(self.now + seconds)

    @precondition(lambda self: self.breaker.is_closed)
    @rule()
    def request_succeeds(self) -> None:
        self.breaker.succeed()
        self.num_failures = 0

    @precondition(lambda self: self.breaker.is_closed)
    @rule()
    def request_fails(self) -> None:
        self.fail()

    @rule()
    def begin_trial(self) -> None:
        was_open = self.breaker.state is BreakerState.OPEN
        begins = self.breaker.try_begin_trial(self.now)
        if begins:
            assert was_open
            assert not self.is_trial_sent, "one trial at once"
            assert self.failed_at is not None
            wait_s = min(MIN_S * 2 ** (self.num_failures - 1), MAX_S)
            assert self.now >= self.failed_at + wait_s, "it was asked again too soon"
            self.is_trial_sent = True
        elif was_open:
            assert self.failed_at is not None
            assert self.now < self.failed_at + MAX_S, "it is never asked again"

    @precondition(lambda self: self.is_trial_sent)
    @rule()
    def trial_succeeds(self) -> None:
        self.breaker.pass_trial()
        self.is_trial_sent = False
        assert self.breaker.is_closed

    @precondition(lambda self: self.is_trial_sent)
    @rule()
    def trial_fails(self) -> None:
        self.is_trial_sent = False
        self.fail()

    @precondition(lambda self: self.breaker.state is BreakerState.OPEN)
    @rule()
    def late_answers(self) -> None:
        """Of requests that were sent before the failure: they change nothing."""
        before = self.breaker.retry_at, self.breaker.backoff_s
        self.breaker.fail(self.now)
        self.breaker.succeed()
        self.breaker.pass_trial()
        assert self.breaker.state is BreakerState.OPEN
        assert (self.breaker.retry_at, self.breaker.backoff_s) == before

    def fail(self) -> None:
        self.breaker.fail(self.now)
        self.failed_at = self.now
        self.num_failures += 1
        assert self.breaker.state is BreakerState.OPEN

    @invariant()
    def holds(self) -> None:
        self.breaker.check_invariants()


TestCircuitBreaker = Caller.TestCase
