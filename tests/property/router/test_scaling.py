"""The size of a fleet: the cheapest that suffices; growth at once, shrinking after a while."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise, product
from math import inf
from random import Random
from typing import TYPE_CHECKING

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.protocol.demand import DemandReport, EndedAnswer, ModelDemand, RequestShape
from baton.router.demand import Demand, Limits, predict_share
from baton.router.scaling import RoleBounds, Scaler, ScalingOptions, Size, find_size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

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


def to_demand(shape: RequestShape) -> Demand:
    """Without a limit of its KV."""
    return Demand(
        num_at_once=1.0,
        prefill_s=shape.prefill_s,
        cold_prefill_s=shape.prefill_s,
        handoff_s=shape.handoff_s,
        cold_handoff_s=shape.handoff_s,
        num_answer_tokens=shape.num_answer_tokens,
        step_s=(shape.step_s, shape.step_answer_s),
    )


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


def check_it_serves_nearly_as_much_as_any(
    size: Size, sizes: Iterable[Size], rate: float, serves: Callable[[Size, float], bool]
) -> None:
    """Up to `rate` requests a second."""
    for lower in (0.95**n * rate for n in range(100)):
        if any(serves(each, lower) for each in sizes):
            assert serves(size, 0.98 * lower)
            return


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
    possible = predict_share(demand, LIMITS, 2, 1, rate=0.0)
    target = 0.95 if possible >= 0.95 else 0.95 * possible
    suffices = [each for each, found in shares.items() if found >= target]
    assert share == pytest.approx(shares[size])
    if suffices:
        assert share >= target
        assert options.price(size) <= min(map(options.price, suffices)) + 1e-9

    def flows(each: Size, lower: float) -> bool:
        late = Limits(inf, inf)
        return predict_share(demand, late, sum(each), each.prefill, rate=lower) > 0.0

    if most := max(shares.values()):
        assert share >= min(target, 0.98 * most)
    else:
        check_it_serves_nearly_as_much_as_any(size, shares, rate, flows)


@given(demands(), st.floats(0.01, 60.0), st.floats(1.0, 1000.0), st.booleans())
def test_more_than_can_be_served_needs_no_fewer_workers_than_less(
    demand: Demand, rate: float, times: float, is_alike: bool
) -> None:
    """At the same price at least: roles may need fewer where others need more.

    At the highest price it may cost less: then what answers the most is wanted, late or not.
    """
    options = replicas() if is_alike else replace(pools(), prefill=RoleBounds(1, MOST, 5.0))
    size, share = find_size(demand, rate, options)
    more, _ = find_size(demand, 1.02 * rate * times, options)
    _, share_beyond = find_size(demand, 1.02 * rate, options)
    if share_beyond >= options.good_share:
        assert share >= options.good_share
        assert options.price(more) >= options.price(size)


def test_overload_needs_no_more_of_a_role_that_is_not_short() -> None:
    """The highest rate of 4 prefill workers with as many decode workers as there may be."""
    shape = msgspec.structs.replace(SHAPE, prefill_s=0.2)
    options = replace(pools(), prefill=RoleBounds(1, 4))
    sizes = {find_size(to_demand(shape), rate, options)[0] for rate in (18.5, 20.0, 40.0, 4e4)}
    assert len(sizes) == 1
    (size,) = sizes
    assert size.prefill == 4
    assert size.decode < MOST


@pytest.mark.parametrize("rate", [0.001, 5.0, 5000.0])
def test_limits_that_no_size_keeps_are_no_reason_to_take_workers_away(rate: float) -> None:
    """Prompts take longer than the limit, and more so where they wait."""
    shape = msgspec.structs.replace(SHAPE, prefill_s=3.0)
    size, share = find_size(to_demand(shape), rate, pools())
    assert share < 0.95
    assert size.prefill == (MOST if rate >= 5.0 else 1)


@given(demands(), st.floats(0.01, 60.0))
def test_replicas_are_the_fewest_that_suffice(demand: Demand, rate: float) -> None:
    size, share = find_size(demand, rate, replicas())

    def best(num: int, rate: float) -> float:
        return max(predict_share(demand, LIMITS, num, p, rate=rate) for p in range(num))

    possible = best(MOST, 0.0)
    target = 0.95 if possible >= 0.95 else 0.95 * possible
    sizes = [Size(both=num) for num in range(1, MOST + 1)]
    suffices = [each for each in sizes if best(each.both, rate) >= target]
    assert share == pytest.approx(best(size.both, rate))
    assert not suffices or size == suffices[0]

    def serves(each: Size, lower: float) -> bool:
        return best(each.both, lower) >= target

    if most := max(best(each.both, rate) for each in sizes):
        assert share >= min(target, 0.98 * most)
    else:
        check_it_serves_nearly_as_much_as_any(size, sizes, rate, serves)


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
    traffic.shape = msgspec.structs.replace(SHAPE, num_answer_tokens=300.0)
    found = [
        scaler.decide(traffic.after(5.0, 15.0), present, starting, traffic.now) for _ in range(12)
    ]
    grown = [each.size for each in found if each is not None]
    assert grown
    assert all(each.prefill > present.prefill and each.decode == present.decode for each in grown)
    later = scaler.decide(traffic.after(5.0, 15.0), present, Size(), traffic.now)
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


@pytest.mark.parametrize("ended", [(), (GOOD,) * 5])
def test_what_was_learned_wears_off_where_few_answers_end(ended: tuple[EndedAnswer, ...]) -> None:
    scaler, traffic = Scaler("demo", pools()), Traffic()
    size = follow(scaler, traffic, Size(1, 1), 120.0, 2.0)
    traffic.ended = (LATE,) * 30
    larger = follow(scaler, traffic, size, 300.0, 2.0)
    assert sum(larger) > sum(size)
    traffic.ended = (*ended, LATE)
    assert follow(scaler, traffic, larger, 900.0, 2.0) == larger, "one of few is late"
    traffic.ended = ended
    assert follow(scaler, traffic, larger, 900.0, 2.0) == size


def test_gateways_that_answer_at_one_url_in_turn_are_counted_and_warned_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As behind a load balancer: each has its own count."""
    scaler, one, other = Scaler("demo", pools(shrink_after_s=300.0)), Traffic(), Traffic()
    other.epoch = "b"
    size = start = follow(scaler, one, Size(1, 1), 60.0, 12.0)
    assert size.prefill > 3
    other.now = one.now
    for look in range(80):
        reports = [one.after(5.0, 6.0), other.after(5.0, 6.0)]
        resize = scaler.decide(reports[look % 2], size, Size(), one.now)
        size = size if resize is None else resize.size
    assert size == start
    assert caplog.text.count("several gateways answer here in turn") == 1


def test_a_gateway_that_begins_again_is_no_burst_and_no_lull() -> None:
    scaler, traffic = Scaler("demo", pools()), Traffic()
    size = follow(scaler, traffic, Size(1, 1), 600.0, 5.0)
    for epoch in "bc":
        traffic.epoch, traffic.num_begun = epoch, 0.0
        assert follow(scaler, traffic, size, 60.0, 5.0) == size


@pytest.mark.parametrize("is_idle_first", [True, False])
def test_requests_are_as_those_of_the_gateway_that_is_asked_most(is_idle_first: bool) -> None:
    """Whatever it reports of streams: answers of one token are none."""
    scaler, idle, busy = Scaler("demo", pools()), Traffic(), Traffic()
    idle.ended = busy.ended = ()
    idle.shape = msgspec.structs.replace(SHAPE, prefill_s=0.01 * SHAPE.prefill_s)
    size, busy.epoch = Size(1, 1), "b"
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


@pytest.mark.parametrize("rate", [16.0, 20.0, 30.0, 300.0])
@pytest.mark.parametrize("most_price", [inf, 8.0])
def test_a_fleet_that_is_overloaded_grows_and_stays(rate: float, most_price: float) -> None:
    """The backlog counts, too, so that the rate is soon far above what any size serves."""
    shape = msgspec.structs.replace(SHAPE, prefill_s=0.2)
    options = replace(pools(most_price=most_price), prefill=RoleBounds(1, 4))
    scaler, traffic, sizes = Scaler("demo", options), Traffic(), [Size(1, 1)]
    traffic.shape, waiting = shape, 0.0
    for _ in range(200):
        num = waiting + 5 * rate
        served = min(num, 5 * 0.97 * sizes[-1].prefill / shape.prefill_s)
        waiting = num - served
        traffic.waiting = int(waiting)
        traffic.ended = (LATE if waiting >= rate else GOOD,) * 100
        sizes.append(follow(scaler, traffic, sizes[-1], 5.0, served / 5))
    assert sizes[-1].prefill == 4
    assert all(later.prefill >= earlier.prefill for earlier, later in pairwise(sizes))
    assert sum(earlier != later for earlier, later in pairwise(sizes)) <= 6


@pytest.mark.parametrize("rate", [7.0, 8.0, 9.0])
def test_at_the_highest_price_roles_do_not_give_up_workers_for_each_other_in_turn(
    rate: float,
) -> None:
    """What requests cost is measured, and varies: the best division of the price varies with it."""
    draw, scaler, traffic = Random(1), Scaler("demo", pools(most_price=8.0)), Traffic()
    sizes = [Size(4, 4)]
    for _ in range(360):
        traffic.shape = RequestShape(
            prefill_s=0.3 * draw.uniform(0.9, 1.1),
            handoff_s=0.01,
            num_answer_tokens=120 * draw.uniform(0.95, 1.05),
            step_s=0.01,
            step_answer_s=0.003 * draw.uniform(0.95, 1.05),
            most_at_once=None,
        )
        sizes.append(follow(scaler, traffic, sizes[-1], 5.0, draw.gauss(rate, (rate / 5) ** 0.5)))
    assert sum(earlier != later for earlier, later in pairwise(sizes)) <= 1


def test_at_the_highest_price_a_role_gives_up_workers_that_it_did_not_need_for_a_minute() -> None:
    scaler, traffic = Scaler("demo", pools(most_price=8.0)), Traffic()
    assert follow(scaler, traffic, Size(1, 7), 60.0, 40.0) == Size(1, 7)
    size = follow(scaler, traffic, Size(1, 7), 20.0, 40.0)
    assert size.prefill > 3
    assert follow(scaler, traffic, size, 600.0, 40.0) == size


def test_a_role_grows_and_shrinks_while_the_other_one_is_below_its_bounds() -> None:
    """As a StatefulSet does of which one pod has failed for good."""
    options = replace(pools(shrink_after_s=300.0), prefill=RoleBounds(5, MOST))
    scaler, traffic, decode, seen = Scaler("demo", options), Traffic(), 1, []
    for rate in [1.0] * 12 + [16.0] * 24 + [1.0] * 90:
        resize = scaler.decide(traffic.after(5.0, rate), Size(4, decode), Size(), traffic.now)
        assert resize is not None
        assert resize.size.prefill >= 5
        decode = resize.size.decode
        seen.append(decode)
    assert seen[11] == 1
    assert seen[35] > 1
    assert seen[-1] == 1


def test_a_fleet_without_workers_gets_some() -> None:
    scaler, traffic = Scaler("demo", pools()), Traffic()
    for present in (Size(), Size(0, 1), Size(1, 0), Size(both=2)):
        found = scaler.decide(traffic.after(5.0, 1.0), present, Size(), traffic.now)
        assert found is not None
        assert found.size.prefill >= 1
        assert found.size.decode >= 1
        assert not found.size.both


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


MANY_PREFILL = Demand(
    num_at_once=1.0,
    prefill_s=0.6,
    cold_prefill_s=0.6,
    handoff_s=0.05,
    cold_handoff_s=0.05,
    num_answer_tokens=300,
    step_s=(0.01, 0.0005),
    most_at_once=64,
)


def up_to(most: int) -> ScalingOptions:
    return ScalingOptions(
        Limits(1.2, 0.05), RoleBounds(1, most), RoleBounds(1, most), RoleBounds(0, 0)
    )


@pytest.mark.parametrize("rate", [15.0, 30.0])
def test_where_no_answer_can_be_in_time_decode_is_sized_for_what_prefill_computes(
    rate: float,
) -> None:
    """Eight workers compute 13 prompts a second; one worker makes tokens for five answers."""
    size, share = find_size(MANY_PREFILL, rate, up_to(8))
    assert (size, share) == (Size(8, 3), 0.0)


def test_where_some_answers_can_be_in_time_as_many_as_possible_are() -> None:
    slow = replace(MANY_PREFILL, prefill_s=0.75, cold_prefill_s=0.75)
    size, share = find_size(slow, 10.0, up_to(32))
    assert size.prefill == 32
    assert 3 <= size.decode < 6
    assert 0.75 < share < 0.95


@pytest.mark.parametrize("rate", [11.0, 12.0, 40.0, 4e4])
def test_at_the_highest_price_late_answers_flow_too(rate: float) -> None:
    size, _ = find_size(MANY_PREFILL, rate, replace(up_to(8), most_price=10.0))
    assert size == Size(7, 3)
