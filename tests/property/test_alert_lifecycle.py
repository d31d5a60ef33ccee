"""Alerts fire after `for_s`, end after `keep_s`, once each, and their number is bounded."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from baton.gateway.alerts.lifecycle import MAX_FOLLOWED, AlertLifecycle, Condition, Timing
from baton.protocol.alerts import AlertName, AlertState
from tests.examples import examples

TIMINGS = {
    AlertName.LINK_DRIFT: Timing(for_s=10, keep_s=30),
    AlertName.TRANSPORT_MISMATCH: Timing(keep_s=60),
}
NAMES = (*TIMINGS, AlertName.DIGEST_FAILURES)


class Lifecycle(RuleBasedStateMachine):
    """A model that keeps, for each alert, since when it is true and when it was last."""

    def __init__(self) -> None:
        super().__init__()
        self.lifecycle, self.now = AlertLifecycle(TIMINGS), 0.0
        self.true_since: dict = {}
        self.true_at: dict = {}
        self.firing: set = set()

    @rule(
        held=st.lists(st.tuples(st.sampled_from(NAMES), st.integers(0, 3)), max_size=8),
        seconds=st.sampled_from([0.0, 1.0, 5.0, 10.0, 31.0, 61.0]),
    )
    def evaluate(self, held, seconds):
        self.now += seconds
        conditions = [Condition(name, (("link", str(n)),), f"{n}", n) for name, n in held]
        changed = self.lifecycle.apply(conditions, self.now)
        keys = {each.key for each in conditions}
        began, ended = set(), set()
        for key in keys:
            self.true_since.setdefault(key, self.now)
            self.true_at[key] = self.now
            timing = TIMINGS.get(key[0], Timing())
            if key not in self.firing and self.now - self.true_since[key] >= timing.for_s:
                began.add(key)
        for key in set(self.true_since) - keys:
            timing = TIMINGS.get(key[0], Timing())
            if key not in self.firing:
                del self.true_since[key]
            elif self.now - self.true_at[key] >= timing.keep_s:
                ended.add(key)
                del self.true_since[key]
        self.firing = self.firing - ended | began
        reported = [(each.state, each.condition.key) for each in changed]
        assert len(reported) == len(set(reported))
        assert {key for state, key in reported if state is AlertState.FIRING} == began
        assert {key for state, key in reported if state is AlertState.RESOLVED} == ended

    @invariant()
    def consistent(self):
        self.lifecycle.check_invariants()
        followed = self.lifecycle.followed
        assert {e.condition.key for e in followed if e.state is AlertState.FIRING} == self.firing
        for name in NAMES:
            num = sum(key[0] is name for key in self.firing)
            assert self.lifecycle.num_firing(name) == num


TestLifecycle = Lifecycle.TestCase
TestLifecycle.settings = settings(max_examples=examples(30), stateful_step_count=30, deadline=None)


def test_more_label_sets_than_are_followed_are_counted():
    lifecycle = AlertLifecycle({})
    conditions = [
        Condition(AlertName.LINK_DRIFT, (("to", str(n)),), "", 1.0)
        for n in range(MAX_FOLLOWED + 50)
    ]
    assert len(lifecycle.apply(conditions, 0.0)) == MAX_FOLLOWED
    assert lifecycle.num_dropped == 50
    assert not lifecycle.apply(conditions, 0.5)
    assert lifecycle.num_dropped == 50, "the same ones again"
    assert len(lifecycle.apply([], 1.0)) == MAX_FOLLOWED
    assert lifecycle.num_dropped == 0
    lifecycle.check_invariants()
