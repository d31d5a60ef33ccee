"""Each rule at its threshold and on both sides of it."""

from __future__ import annotations

import pytest

from baton.config.sections import AlertsSection
from baton.gateway.alerts.observations import (
    EndedByTarget,
    HandoffPath,
    LinkClass,
    LinkTimes,
    Observations,
    StoreCost,
)
from baton.gateway.alerts.rules import COUNTER_WINDOW_S, MIN_ENDED, AlertRules
from baton.protocol.alerts import AlertName
from baton.router.topology import Distance


def rules(**options) -> AlertRules:
    return AlertRules(AlertsSection(**options))


def names(rules: AlertRules, now: float = 0.0, **seen) -> list[AlertName]:
    return [each.alert for each in rules.evaluate(Observations(**seen), now)]


def link(source: str, *, is_drifted: bool, ratio: float | None = 1.0) -> LinkTimes:
    return LinkTimes(source, "d", "tcp", "same_rack", ratio, is_drifted)


def path(num: int, **changed) -> HandoffPath:
    facts = {"source": "p", "target": "d", "distance": "same_host", "used": "tcp"}
    return HandoffPath(**{**facts, "num": num, **changed})


def test_a_drifted_link_is_named_and_a_class_where_most_are():
    one = link("a", is_drifted=True, ratio=4.0)
    found = rules().evaluate(Observations(links=(one, link("b", is_drifted=False))), 0.0)
    assert [each.alert for each in found] == [AlertName.LINK_DRIFT]
    assert dict(found[0].labels) == {
        "distance": "same_rack",
        "from": "a",
        "to": "d",
        "transport": "tcp",
    }
    assert found[0].value == 4.0
    both = (one, link("b", is_drifted=True), link("c", is_drifted=False))
    assert names(rules(), links=both).count(AlertName.DISTANCE_DRIFT) == 1
    learning = link("c", is_drifted=False, ratio=None)
    many = (one, link("b", is_drifted=True), *[link("x", is_drifted=False)] * 2, learning)
    assert AlertName.DISTANCE_DRIFT not in names(rules(), links=many)


def test_a_mismatch_counts_while_it_is_recent():
    facts = {"expected": "shared", "in_common": frozenset({"shared", "tcp"})}
    recent, old = (path(1, **facts, mismatch_s_ago=age_s) for age_s in (5.0, 31.0))
    assert names(rules(), paths=(recent,)) == [AlertName.TRANSPORT_MISMATCH]
    assert not names(rules(), paths=(old,))
    assert not names(rules(), paths=(path(1, distance="same_rack"),))


def test_tcp_on_one_host_is_a_mismatch_where_no_other_transport_is_offered():
    several = rules()
    assert names(several, paths=(path(3, in_common=frozenset({"tcp"})),)) == [
        AlertName.TRANSPORT_MISMATCH
    ]
    assert not names(several, paths=(path(3, in_common=frozenset({"tcp"})),)), "none is new"
    assert names(several, paths=(path(4, in_common=frozenset({"tcp"})),))
    assert not names(rules(), paths=(path(3, in_common=frozenset({"tcp", "shared"})),))


def test_a_nearer_distance_must_not_be_slower():
    def classes(near_s: float) -> tuple[LinkClass, ...]:
        return (
            LinkClass("m", Distance.SAME_ZONE, 1.0),
            LinkClass("m", Distance.SAME_HOST, near_s),
            LinkClass("other", Distance.CROSS_ZONE, 0.001),
        )

    assert names(rules(), classes=classes(1.5)) == [AlertName.INVERTED_DISTANCE]
    assert not names(rules(), classes=classes(1.4))


def test_digest_failures_are_those_since_the_gateway_looks():
    several = rules()
    assert not names(several, 0.0, num_digest_failures={"a": 5})
    assert names(several, 5.0, num_digest_failures={"a": 6}) == [AlertName.DIGEST_FAILURES]
    assert names(several, 10.0, num_digest_failures={"a": 6})
    later = 6.0 + COUNTER_WINDOW_S
    assert not names(several, later, num_digest_failures={"a": 6})
    assert names(several, later + 1, num_digest_failures={"a": 1}), "it was restarted"


def test_single_lapsed_leases_are_no_alert():
    several = rules()
    assert not names(several, 0.0, num_lapsed_leases={"a": 0, "b": 0})
    assert not names(several, 5.0, num_lapsed_leases={"a": 2, "b": 0})
    assert names(several, 9.0, num_lapsed_leases={"a": 2, "b": 1}) == [AlertName.LEASES_LAPSED]


@pytest.mark.parametrize(("found_tokens", "is_off"), [(4000, True), (6000, False)])
def test_predicted_tokens_that_were_not_cached(found_tokens, is_off):
    several = rules()
    assert not names(several, 0.0, predicted_tokens=0, found_tokens=0)
    found = names(several, 5.0, predicted_tokens=10_000, found_tokens=found_tokens)
    assert (found == [AlertName.PREFIX_PREDICTION]) is is_off


def test_few_predicted_tokens_show_nothing():
    several = rules()
    names(several, 0.0)
    assert not names(several, 5.0, predicted_tokens=100, found_tokens=0)


@pytest.mark.parametrize(("load_s", "is_slow"), [(1.2, True), (1.1, False)])
def test_a_store_that_is_slower_than_computing(load_s, is_slow):
    found = names(rules(), stores=(StoreCost("m", "w", 1024, load_s, 1.0),))
    assert (found == [AlertName.STORE_SLOWER]) is is_slow


def test_burn_rates_of_both_windows():
    several, totals = rules(good_share=0.95), [0, 0]

    def minute(now: float, num_missed: int) -> list[AlertName]:
        totals[0] += MIN_ENDED
        totals[1] += num_missed
        return names(several, now, ended=(EndedByTarget("m", "ttft", 1.0, *totals),))

    for number in range(60):
        assert not minute(60.0 * number, 1), "the budget is burnt once"
    found = [minute(3600 + 60.0 * number, MIN_ENDED) for number in range(60)]
    first_slow = next(n for n, each in enumerate(found) if AlertName.BURN_RATE_SLOW in each)
    first_fast = next(n for n, each in enumerate(found) if AlertName.BURN_RATE_FAST in each)
    # The longer window decides: 72 % of an hour's requests, 30 % of all those of two hours.
    assert first_slow == pytest.approx(22, abs=3)
    assert first_fast == pytest.approx(42, abs=3)
    assert AlertName.BURN_RATE_FAST not in minute(7200.0 + 400, 0), "the shorter one ends it"


@pytest.mark.parametrize("good_share", [0.99, 0.94, 0.93, 0.9, 0.83, 0.7, 0.5, 0.2, 0.01])
def test_burn_rates_can_be_reached_at_each_good_share(good_share):
    """All requests miss at a burn rate of 1 / (1 - good_share): at 0.93 that is less than 14.4."""

    def ended(num_missed: int) -> tuple[EndedByTarget]:
        return (EndedByTarget("m", "ttft", 1.0, 1000, num_missed),)

    both = [AlertName.BURN_RATE_FAST, AlertName.BURN_RATE_SLOW]
    assert names(rules(good_share=good_share), ended=ended(1000)) == both
    num_allowed = round(1000 * (1 - good_share))
    assert not names(rules(good_share=good_share), ended=ended(num_allowed)), "in the budget"


def test_burn_rates_at_the_usual_good_share():
    for num_missed, expected in (
        (721, [AlertName.BURN_RATE_FAST, AlertName.BURN_RATE_SLOW]),
        (719, [AlertName.BURN_RATE_SLOW]),
        (301, [AlertName.BURN_RATE_SLOW]),
        (299, []),
    ):
        ended = EndedByTarget("m", "ttft", 1.0, 1000, num_missed)
        assert names(rules(good_share=0.95), ended=(ended,)) == expected


def test_few_requests_have_no_burn_rate():
    ended = EndedByTarget("m", "ttft", 1.0, MIN_ENDED - 1, MIN_ENDED - 1)
    assert not names(rules(), ended=(ended,))


def test_what_the_operator_disables_is_not_raised():
    quiet = rules(disabled=(AlertName.LINK_DRIFT,))
    assert not names(quiet, links=(link("a", is_drifted=True),))
