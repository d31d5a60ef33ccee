"""The gateway's queue: bounded, nothing lost or admitted twice, fair, early with refusals."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from baton.router.admission import (
    AGED_ONE_IN,
    AGING_S,
    MOST_RETRY_AFTER_S,
    TOLERANCE,
    AdmissionQueue,
    QueueLimits,
    Refusal,
)
from baton.router.drain_rate import DrainRate
from baton.router.fair_queue import PRIORITIES, FairQueue, QueuedRequest, RefusalCause, lower

MODELS = ("a", "b")
TENANTS = ("", "acme", "other", "third")
LIMITS = QueueLimits(max_requests=8, max_tokens=4000, max_requests_per_tenant=5)
LATE = {RefusalCause.TARGET, RefusalCause.DEADLINE}


class QueueMachine(RuleBasedStateMachine):
    """Requests come, are taken, leave and expire in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.queue, self.now = AdmissionQueue(LIMITS), 0.0
        self.waiting: list[QueuedRequest] = []
        self.num_since_aged: dict[str, int] = dict.fromkeys(MODELS, 0)

    @rule(
        model=st.sampled_from(MODELS),
        tenant=st.sampled_from(TENANTS),
        priority=st.sampled_from(PRIORITIES),
        num_tokens=st.integers(0, 3000),
        weight=st.sampled_from([0.5, 1.0, 3.0]),
        target_s=st.one_of(st.just(inf), st.floats(0, 20)),
        deadline_s=st.one_of(st.just(inf), st.floats(0, 60)),
    )
    def comes(self, model, tenant, priority, num_tokens, weight, target_s, deadline_s):
        request = QueuedRequest(
            model, tenant, priority, num_tokens, self.now, weight,
            self.now + target_s, self.now + deadline_s,
        )  # fmt: skip
        wait_s = self.queue.predict_wait_s(request, self.now)
        outcome = self.queue.offer(request, self.now)
        if isinstance(outcome, Refusal):
            assert 1 <= outcome.retry_after_s <= MOST_RETRY_AFTER_S
            self._check_refusal(outcome, request, wait_s)
            return
        assert (wait_s or 0.0) <= request.latest_at - self.now
        for victim, refusal in outcome:
            assert refusal.cause is RefusalCause.DISPLACED
            assert PRIORITIES.index(victim.priority) >= PRIORITIES.index(priority)
            self.waiting.remove(victim)
        self.waiting.append(request)

    def _check_refusal(self, refusal, request, wait_s):
        match refusal.cause:
            case RefusalCause.TARGET | RefusalCause.DEADLINE:
                assert self.now + (wait_s or 0.0) > request.latest_at
                assert refusal.cause is request.late_cause
            case RefusalCause.TENANT_FULL:
                own = [each for each in self.waiting if each.tenant == request.tenant]
                assert len(own) == LIMITS.max_requests_per_tenant
                assert refusal.is_tenants
            case RefusalCause.QUEUE_FULL:
                tokens = sum(each.num_tokens for each in self.waiting)
                assert (
                    len(self.waiting) == LIMITS.max_requests
                    or tokens + request.num_tokens > LIMITS.max_tokens
                )
            case _:
                pytest.fail(f"{refusal.cause} on arrival")

    @rule(model=st.sampled_from(MODELS))
    def is_taken(self, model):
        mine = [each for each in self.waiting if each.model == model]
        assert self.queue.is_waiting(model) == bool(mine)
        request = self.queue.take(model, self.now)
        assert (request is None) == (not mine)
        if request is None:
            return
        assert request in mine
        first = next(p for p in PRIORITIES if any(each.priority == p for each in mine))
        if request.priority != first:
            own = [each.at for each in mine if each.priority == request.priority]
            assert self.now - min(own) >= AGING_S
            assert self.num_since_aged[model] >= AGED_ONE_IN - 1
            self.num_since_aged[model] = 0
        else:
            self.num_since_aged[model] += 1
        same = [e for e in mine if (e.tenant, e.priority) == (request.tenant, request.priority)]
        assert same[0] is request, "first come, first served, within a tenant"
        self.waiting.remove(request)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data(), again=st.booleans())
    def leaves(self, data, again):
        request = data.draw(st.sampled_from(self.waiting))
        self.waiting.remove(request)
        self.queue.leave(request, self.now)
        if again:
            self.queue.leave(request, self.now)

    @rule()
    def expires(self):
        late = {each for each in self.waiting if each.latest_at <= self.now}
        rates = {model: self.queue.rate(model, self.now) for model in MODELS}
        before = list(self.waiting)
        for request, refusal in self.queue.expire(self.now):
            assert refusal.cause is request.late_cause
            if request not in late:
                ahead = sum(each.num_tokens for each in before if each.model == request.model)
                rate = rates[request.model]
                assert rate is not None
                assert ahead / rate > TOLERANCE * (request.latest_at - self.now)
            late.discard(request)
            self.waiting.remove(request)
        assert not late

    @rule(elapsed_s=st.one_of(st.floats(0, 1), st.floats(0, 30)))
    def time_passes(self, elapsed_s):
        self.now += elapsed_s

    @invariant()
    def nothing_is_lost_or_there_twice(self):
        self.queue.check_invariants()
        shown = sum(each.num_requests for each in self.queue.show(self.now))
        assert shown == self.queue.num_requests == len(self.waiting)
        counts = [self.queue.count(priority) for priority in PRIORITIES]
        assert sum(num for num, _ in counts) == len(self.waiting)
        assert sum(tokens for _, tokens in counts) == sum(e.num_tokens for e in self.waiting)
        assert {each.model for each in self.waiting} == set(self.queue.models())

    def teardown(self):
        for model in MODELS:
            while (request := self.queue.take(model, self.now)) is not None:
                self.waiting.remove(request)
        assert not self.waiting


TestQueue = QueueMachine.TestCase


def queued(tenant: str, num_tokens: int, weight: float = 1.0, **more) -> QueuedRequest:
    return QueuedRequest("a", tenant, "normal", num_tokens, more.pop("at", 0.0), weight, **more)


COSTS = st.lists(st.integers(1, 2000), min_size=1, max_size=60)


@given(
    costs=st.lists(COSTS, min_size=2, max_size=4),
    weights=st.lists(st.floats(0.1, 10), min_size=4, max_size=4),
    leavers=st.sets(st.integers(0, 59)),
)
def test_tenants_that_all_wait_get_shares_of_their_weights(costs, weights, leavers):
    """To within one request of each; who has requests leave gets no more for that."""
    queue = FairQueue()
    most = {str(n): max(each) / weights[n] for n, each in enumerate(costs)}
    for n, each in enumerate(costs):
        for cost in each:
            queue.add(queued(str(n), cost, weights[n]))
    got, leaving = dict.fromkeys(most, 0.0), "0"
    num_taken = 0
    while len(queue.turns) == len(costs):
        request = queue.take()
        got[request.tenant] += request.num_tokens / request.weight
        num_taken += 1
        if len(queue.turns) < len(costs):
            break
        if num_taken in leavers:
            queue.remove(queue.turns[leaving].first)
        others = [tenant for tenant in got if tenant != leaving or not leavers]
        for one in others:
            for other in got:
                # Of the one that had requests leave only: it got no more than its share.
                assert got[other] - got[one] <= most[one] + most[other] + 1e-6
        queue.check_invariants()


@given(
    costs=st.lists(st.tuples(st.sampled_from(TENANTS), st.integers(1, 2000)), max_size=40),
    last=st.tuples(st.sampled_from(TENANTS), st.integers(1, 2000)),
    num_before=st.integers(0, 20),
)
def test_what_is_ahead_is_predicted_to_within_a_request_of_each_tenant(costs, last, num_before):
    queue = FairQueue()
    for n, (tenant, cost) in enumerate(costs):
        queue.add(queued(tenant, cost))
        if n < num_before and n % 2:
            queue.take()
    request = queued(*last, target_at=9.0)
    ahead = queue.count_ahead(request)
    queue.add(request)
    again = dict(queue.count_each_ahead())
    assert again.keys() == {request}
    num_tenants, most = len(queue.turns), max([*(cost for _, cost in costs), last[1]])
    taken = 0
    while (served := queue.take()) is not request:
        taken += served.num_tokens
    for predicted in (ahead, again[request]):
        assert abs(predicted - taken) <= (num_tenants - 1) * most + 1e-6


def test_the_lowest_class_is_served_now_and_then_once_it_has_waited():
    queue, now, low = AdmissionQueue(QueueLimits()), 0.0, 0
    queue.offer(QueuedRequest("a", "slow", "low", 10, now), now)
    queue.offer(QueuedRequest("a", "slow", "low", 10, now), now)
    taken: list[str] = []
    for _ in range(300):  # 30 s, in which the workers are never without urgent requests
        now += 0.1
        queue.offer(QueuedRequest("a", "urgent", "high", 10, now), now)
        queue.offer(QueuedRequest("a", "urgent", "high", 10, now), now)
        request = queue.take("a", now)
        assert request is not None
        taken.append(request.priority)
    low = taken.index("low")
    assert AGING_S * 10 - 1 <= low < AGING_S * 10 + AGED_ONE_IN
    assert taken.count("low") == 2
    assert taken.index("low", low + 1) - low == AGED_ONE_IN


@given(rate=st.floats(10, 1e6), cost=st.integers(1, 1000))
def test_a_steady_rate_is_found(rate, cost):
    drain, now = DrainRate(), 5.0
    drain.begin(now)
    interval_s = cost / rate
    for _ in range(int(min(500, 20 + 1 / interval_s))):
        now += interval_s
        drain.take(cost, now)
    found = drain.find(now)
    if found is not None:
        assert found == pytest.approx(rate, rel=0.3)


def test_a_request_is_refused_at_once_if_others_before_it_take_too_long():
    queue, now = AdmissionQueue(QueueLimits()), 0.0
    for _ in range(40):
        assert queue.offer(queued("one", 100, at=now), now) == ()
    for _ in range(20):  # 1000 tokens a second
        now += 0.1
        queue.take("a", now)
    fits = queued("one", 100, at=now, target_at=now + 2.5)
    assert queue.predict_wait_s(fits, now) == pytest.approx(2.0, rel=0.1)
    assert queue.offer(fits, now) == ()
    late = queue.offer(queued("one", 100, at=now, target_at=now + 1.0), now)
    assert isinstance(late, Refusal)
    assert (late.cause, late.is_tenants) == (RefusalCause.TARGET, False)
    assert late.retry_after_s == pytest.approx(1.1, rel=0.1)
    other = queued("two", 100, at=now, target_at=now + 1.0)
    assert queue.offer(other, now) == (), "another tenant does not wait behind it"
    late = queue.offer(queued("one", 100, at=now, target_at=now + 1.0), now)
    assert isinstance(late, Refusal)
    assert late.is_tenants, "its tenant has nearly all that waits"
    now += 1.5  # the workers are stuck: what is left of the other's target is too little, too
    assert {each for each, _ in queue.expire(now)} == {other, fits}


@pytest.mark.parametrize("idle_s", [None, 1.0, 150.0])
def test_what_the_workers_have_begun_before_a_queue_is_no_sign_of_a_slow_one(idle_s):
    """Long prompts, one a second: none is taken until those are done that came first.

    Or, without an idle time, until something that held the workers up is over.
    """
    queue, now = AdmissionQueue(QueueLimits()), 0.0
    num = 30 if idle_s is None else 10

    def offer(num):
        for _ in range(num):
            assert queue.offer(queued("one", 2000, at=now, deadline_at=now + 300), now) == ()

    offer(num)
    for _ in range(10):
        now += 1.0
        assert queue.take("a", now) is not None
    if idle_s is not None:
        now += idle_s
        offer(20)
    for _ in range(25):
        now += 1.0
        assert queue.expire(now) == []
    offer(5)
    for _ in range(15):
        now += 1.0
        assert queue.expire(now) == []
        assert queue.take("a", now) is not None
    wait_s = queue.predict_wait_s(queued("one", 2000, at=now), now)
    assert wait_s is not None
    assert 9.0 < wait_s < 30.0, "ten others are before it"


def test_what_is_taken_at_once_does_not_make_a_queue_look_fast():
    """Queues that empty in one pass, again and again; then one that is served one by one."""
    drain, now = DrainRate(), 0.0
    for _ in range(300):
        now += 6.0
        drain.begin(now)
        now += 5.0
        for _ in range(4):
            drain.take(1000, now)
            now += 1e-5
        drain.end(now)
        assert drain.find(now) is None
    drain.begin(now)
    for num in range(1, 12):
        now += 1.0
        drain.take(1000, now)
        found = drain.find(now)
        assert found is None if num < 5 else found == pytest.approx(1000, rel=0.01)
    now += 1.0
    for _ in range(4):  # four workers have room at once
        drain.take(1000, now)
        now += 1e-5
    assert 1000 < drain.find(now) < 1700


def test_a_full_queue_makes_room_for_tenants_with_less_and_for_higher_classes():
    queue = AdmissionQueue(QueueLimits(max_requests=4))
    busy = [queued("busy", 10) for _ in range(4)]
    assert [queue.offer(each, 0.0) for each in busy] == [()] * 4
    refused = queue.offer(queued("busy", 10), 0.0)
    assert isinstance(refused, Refusal)
    assert (refused.cause, refused.is_tenants) == (RefusalCause.QUEUE_FULL, False)
    outcome = queue.offer(queued("quiet", 10), 0.0)
    assert [victim for victim, _ in outcome] == [busy[3]]
    outcome = queue.offer(QueuedRequest("b", "busy", "high", 10, 0.0), 0.0)
    assert [victim for victim, _ in outcome] == [busy[2]]
    refused = queue.offer(QueuedRequest("a", "third", "low", 10, 0.0), 0.0)
    assert isinstance(refused, Refusal), "no lower class is there"


def test_one_that_is_larger_than_the_queue_waits_alone():
    queue = AdmissionQueue(QueueLimits(max_tokens=100))
    assert queue.offer(queued("one", 1000), 0.0) == ()
    refused = queue.offer(queued("one", 1), 0.0)
    assert isinstance(refused, Refusal)


def test_classes_are_lowered_and_never_raised():
    for one in PRIORITIES:
        for other in PRIORITIES:
            assert PRIORITIES.index(lower(one, other)) == max(
                PRIORITIES.index(one), PRIORITIES.index(other)
            )
