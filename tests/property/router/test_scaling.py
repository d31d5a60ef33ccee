"""The size of a fleet: the cheapest that suffices; growth at once, shrinking after a while."""

from __future__ import annotations

from itertools import product

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.protocol.demand import DemandReport, EndedAnswer, ModelDemand, RequestShape
from baton.router.demand import Demand, Limits, predict_share
from baton.router.scaling import RoleBounds, Scaler, ScalingOptions, Size, find_size

NONE = RoleBounds(0, 0)
MOST = 9
LIMITS = Limits(ttft_s=2.0, tpot_s=0.05)
SHAPE = RequestShape(
    prefill_s=0.3,
    handoff_s=0.01,
    num_answer_tokens=100.0,
    step_s=0.01,
    step_answer_s=0.0004,
    most_at_once=None,
)
GOOD, LATE = EndedAnswer(0.5, 0.02), EndedAnswer(9.0, 0.02)


def pools(**changes: float) -> ScalingOptions:
    return ScalingOptions(LIMITS, RoleBounds(1, MOST), RoleBounds(1, MOST), NONE, **changes)


def replicas() -> ScalingOptions:
    return ScalingOptions(LIMITS, NONE, NONE, RoleBounds(1, MOST))


@st.composite
def demands(draw: st.DrawFn) -> Demand:
    prefill_s = draw(st.floats(0.01, 1.0))
    return Demand(
        num_at_once=1.0,
        prefill_s=prefill_s,
        cold_prefill_s=prefill_s,
        handoff_s=0.01,
        cold_handoff_s=0.01,
        num_answer_tokens=draw(st.floats(1.0, 500.0)),
        step_s=(draw(st.floats(0.001, 0.04)), draw(st.floats(0.0, 0.002))),
        most_at_once=draw(st.floats(1.0, 200.0)),
    )


@given(demands(), st.floats(0.01, 60.0), st.floats(0.1, 10.0), st.floats(3.0, 60.0))
def test_no_cheaper_size_suffices(
    demand: Demand, rate: float, prefill_price: float, most_price: float
) -> None:
    options = ScalingOptions(
        LIMITS,
        RoleBounds(1, MOST, prefill_price),
        RoleBounds(1, MOST),
        NONE,
        most_price=max(most_price, prefill_price + 1.0),
    )
    size, share = find_size(demand, rate, options)
    assert options.price(size) <= options.most_price + 1e-9
    all_sizes = [Size(p, d) for p, d in product(range(1, MOST + 1), repeat=2)]
    shares = {
        each: predict_share(demand, LIMITS, sum(each), each.prefill, rate=rate)
        for each in all_sizes
        if options.price(each) <= options.most_price
    }
    suffices = [each for each, found in shares.items() if found >= options.good_share]
    if suffices:
        assert share >= options.good_share
        assert options.price(size) <= min(map(options.price, suffices)) + 1e-9
    else:
        assert share == pytest.approx(max(shares.values()))


@given(demands(), st.floats(0.01, 60.0))
def test_replicas_are_the_fewest_that_suffice(demand: Demand, rate: float) -> None:
    size, share = find_size(demand, rate, replicas())

    def best(num: int) -> float:
        return max(predict_share(demand, LIMITS, num, p, rate=rate) for p in range(num))

    suffices = [num for num in range(1, MOST + 1) if best(num) >= 0.95]
    assert size == Size(both=min(suffices, default=MOST))
    assert share == pytest.approx(best(size.both))


class Traffic:
    """One gateway's report, from a rate that changes."""

    def __init__(self) -> None:
        self.num_begun, self.now, self.waiting = 0.0, 0.0, 0
        self.epoch, self.ended = "a", (GOOD,) * 30
        self.shape: RequestShape | None = SHAPE

    def after(self, seconds: float, rate: float) -> dict[str, DemandReport]:
        self.now += seconds
        self.num_begun += rate * seconds
        demand = ModelDemand(
            model="demo",
            num_begun=int(self.num_begun),
            num_waiting=self.waiting,
            window_s=30.0,
            ended=self.ended,
            shape=self.shape,
        )
        return {"gateway": DemandReport(self.epoch, (demand,))}


def follow(scaler: Scaler, traffic: Traffic, size: Size, seconds: float, rate: float) -> Size:
    """Sizes are there at once."""
    for _ in range(int(seconds / 5)):
        found = scaler.decide(traffic.after(5.0, rate), size, Size(), traffic.now)
        size = size if found is None else found.size
    return size


def test_it_grows_at_once_and_shrinks_to_the_most_that_was_needed_for_a_while() -> None:
    scaler, traffic = Scaler("demo", pools(shrink_after_s=300.0)), Traffic()
    small = follow(scaler, traffic, Size(1, 1), 60.0, 1.0)
    large = follow(scaler, traffic, small, 60.0, 12.0)
    assert large.prefill >= 12 * SHAPE.prefill_s > small.prefill
    assert follow(scaler, traffic, large, 290.0, 1.0) == large, "others may come"
    assert follow(scaler, traffic, large, 120.0, 1.0) == small


def test_it_does_not_grow_again_while_workers_start() -> None:
    scaler, traffic = Scaler("demo", pools()), Traffic()
    follow(scaler, traffic, Size(1, 1), 60.0, 1.0)
    larger = follow(scaler, traffic, Size(1, 1), 30.0, 6.0)
    assert larger != Size(1, 1)
    for _ in range(60):
        assert scaler.decide(traffic.after(5.0, 20.0), larger, Size(1, 1), traffic.now) is None
    assert scaler.decide(traffic.after(5.0, 20.0), larger, Size(), traffic.now) is not None


def test_a_role_grows_while_workers_of_the_other_one_start() -> None:
    """As when a decode worker waits for a machine, and prompts become many."""
    scaler, traffic = Scaler("demo", pools()), Traffic()
    size = follow(scaler, traffic, Size(1, 1), 120.0, 1.0)
    starting = Size(decode=1)
    present = size._replace(decode=size.decode + 1)
    found = [
        scaler.decide(traffic.after(5.0, 25.0), present, starting, traffic.now) for _ in range(12)
    ]
    grown = [each.size for each in found if each is not None]
    assert grown
    assert all(each.prefill > present.prefill and each.decode == present.decode for each in grown)
    later = scaler.decide(traffic.after(5.0, 25.0), present, Size(), traffic.now)
    assert later is not None
    assert later.size.decode > present.decode


def test_what_is_preempted_is_replaced_at_once_and_not_more_than_that() -> None:
    scaler, traffic = Scaler("demo", pools()), Traffic()
    size = Size(1, 1)
    while size == Size(1, 1):
        assert traffic.now < 60.0
        size = follow(scaler, traffic, size, 5.0, 6.0)
    assert size.prefill > 1
    assert follow(scaler, traffic, size, 5.0, 6.0) == size
    fewer = size._replace(prefill=size.prefill - 1)  # while growth is held
    found = scaler.decide(traffic.after(5.0, 6.0), fewer, Size(), traffic.now)
    assert found is not None
    assert found.size == size
    more = scaler.decide(traffic.after(5.0, 60.0), size, Size(), traffic.now)
    assert more is None or more.size.prefill == size.prefill, "more is held"


def test_a_preempted_worker_that_is_not_needed_is_not_replaced() -> None:
    scaler, traffic = Scaler("demo", pools()), Traffic()
    assert follow(scaler, traffic, Size(3, 3), 60.0, 0.2) == Size(3, 3)
    assert scaler.decide(traffic.after(5.0, 0.2), Size(3, 2), Size(), traffic.now) is None


def test_requests_that_wait_count() -> None:
    scaler, traffic = Scaler("demo", pools()), Traffic()
    size = follow(scaler, traffic, Size(1, 1), 60.0, 1.0)
    traffic.waiting = 300
    assert follow(scaler, traffic, size, 30.0, 1.0).prefill > size.prefill


def test_answers_that_are_late_though_none_was_predicted_to_be_make_it_grow() -> None:
    scaler, traffic = Scaler("demo", pools()), Traffic()
    size = follow(scaler, traffic, Size(1, 1), 120.0, 2.0)
    traffic.ended = (LATE,) * 30
    larger = follow(scaler, traffic, size, 300.0, 2.0)
    assert sum(larger) > sum(size)
    traffic.ended = (GOOD,) * 30
    assert follow(scaler, traffic, larger, 3000.0, 2.0) == size, "what was learned wears off"


def test_a_gateway_that_begins_again_is_no_burst_and_no_lull() -> None:
    scaler, traffic = Scaler("demo", pools()), Traffic()
    size = follow(scaler, traffic, Size(1, 1), 600.0, 5.0)
    traffic.epoch, traffic.num_begun = "b", 0.0
    assert follow(scaler, traffic, size, 60.0, 5.0) == size


@pytest.mark.parametrize("is_idle_first", [True, False])
def test_requests_are_as_those_of_the_gateway_that_is_asked_most(is_idle_first: bool) -> None:
    """Whatever it reports of streams: answers of one token are none."""
    scaler, idle, busy = Scaler("demo", pools()), Traffic(), Traffic()
    idle.ended = busy.ended = ()
    idle.shape = msgspec.structs.replace(SHAPE, prefill_s=0.01 * SHAPE.prefill_s)
    size = Size(1, 1)
    for _ in range(12):
        pairs = [("idle", idle.after(5.0, 0.0)), ("busy", busy.after(5.0, 12.0))]
        found = {name: each["gateway"] for name, each in sorted(pairs, reverse=is_idle_first)}
        resize = scaler.decide(found, size, Size(), busy.now)
        size = size if resize is None else resize.size
    assert size.prefill >= 12 * SHAPE.prefill_s


@pytest.mark.parametrize("silent_s", [70.0, 301.0, 5000.0])
def test_one_look_after_a_silence_does_not_stand_for_all_of_it(silent_s: float) -> None:
    """No gateway answers, so nothing is decided; then a gateway that has restarted does."""
    scaler, traffic = Scaler("demo", pools(shrink_after_s=300.0)), Traffic()
    size = follow(scaler, traffic, Size(1, 1), 600.0, 10.0)
    assert size.prefill > 2
    traffic.now += silent_s
    traffic.epoch, traffic.num_begun = "b", 0.0
    assert follow(scaler, traffic, size, 295.0, 1.0) == size
    assert sum(follow(scaler, traffic, size, 30.0, 1.0)) < sum(size)


def test_the_first_requests_after_a_long_time_shrink_nothing() -> None:
    scaler, traffic = Scaler("demo", pools(shrink_after_s=300.0)), Traffic()
    traffic.shape = None
    assert follow(scaler, traffic, Size(4, 4), 600.0, 0.0) == Size(4, 4)
    traffic.shape = SHAPE
    assert follow(scaler, traffic, Size(4, 4), 295.0, 0.2) == Size(4, 4)


def test_looks_that_are_rare_are_no_silence() -> None:
    scaler, traffic = Scaler("demo", pools(interval_s=90.0)), Traffic()
    looks = [
        scaler.decide(traffic.after(90.0, 0.2), Size(4, 4), Size(), traffic.now) for _ in range(6)
    ]
    assert looks[-1] is not None
    assert sum(looks[-1].size) < 8


def test_nothing_is_decided_without_reports() -> None:
    scaler = Scaler("demo", pools())
    assert scaler.decide({}, Size(2, 2), Size(), 1000.0) is None
    assert scaler.decide({}, Size(2, 2), Size(), 9000.0) is None


def test_bounds_are_kept_even_without_traffic() -> None:
    scaler = Scaler("demo", pools())
    found = scaler.decide({}, Size(0, MOST + 2), Size(), 0.0)
    assert found is not None
    assert found.size == Size(1, MOST)


@given(st.lists(st.floats(0.0, 60.0), min_size=1, max_size=40), st.floats(4.0, 12.0))
def test_price_and_bounds_hold_whatever_comes(rates: list[float], most_price: float) -> None:
    options = pools(most_price=most_price, shrink_after_s=60.0)
    scaler, traffic, size = Scaler("demo", options), Traffic(), Size(1, 1)
    for rate in rates:
        size = follow(scaler, traffic, size, 20.0, rate)
        assert options.price(size) <= most_price
        assert options.clamp(size) == size
