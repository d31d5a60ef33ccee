"""Costs by distance: a default, then what links have measured, then what handoffs took."""

from __future__ import annotations

import itertools
from dataclasses import replace
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.auth.ticket import WorkerRef
from baton.ids import Epoch, WorkerId
from baton.protocol.worker_http import Role
from baton.router.fleet import WorkerView
from baton.router.handoff_costs import (
    DEFAULTS,
    HandoffCosts,
    KVShape,
    LinkCost,
    group_links,
    guess_exposed,
)
from baton.router.learning import PromptLine
from baton.router.load import FleetLoad
from baton.router.placement import Placement
from baton.router.topology import Distance

SLOW = LinkCost(1e-3, 1 / 12.5e6)


def view(name: str, topology: str) -> WorkerView:
    ref = WorkerRef(WorkerId(name), Epoch("0" * 32), "127.0.0.1:1")
    transports = frozenset({"tcp"})
    return WorkerView(ref, Role.BOTH, "demo", "f", transports, available=True, topology=topology)


P, NEAR, FAR = view("p", "z/r0/h0"), view("near", "z/r0/h1"), view("far", "z/r1/h2")


def costs_of(prefill_token_s: float = 5e-5) -> HandoffCosts:
    return HandoffCosts(PromptLine((0.005, prefill_token_s)))


def note_links(
    costs: HandoffCosts, links: list[tuple[WorkerView, WorkerView, LinkCost]], shape: KVShape
) -> None:
    costs.note_links([group_links(links, costs.places)], shape)


links = st.builds(LinkCost, st.floats(0, 1.0), st.floats(1e-12, 1e-5))
shapes = st.builds(KVShape, st.integers(1, 1 << 24), st.integers(1, 200))


@given(links, shapes, st.floats(0, 0.1))
def test_what_is_exposed_is_at_most_all_and_at_least_the_last_layer(link, shape, prefill_token_s):
    fixed, each = guess_exposed(link, shape, prefill_token_s)
    moved = shape.bytes_per_token * link.byte_s
    assert fixed >= link.latency_s
    assert moved / shape.num_layers <= each * (1 + 1e-9)
    assert each <= moved * (1 + 1e-9)


def test_a_link_that_is_slower_than_prefill_is_waited_for():
    shape = KVShape(8192, 4)
    _, fast = guess_exposed(LinkCost(1e-4, 1 / 250e6), shape, 3e-4)
    _, slow = guess_exposed(SLOW, shape, 3e-4)
    assert fast == pytest.approx((4 << 20) / 250e6 / 1000)  # one batch
    assert slow == pytest.approx(8192 / 12.5e6 - 3e-4 * 3 / 4)


def test_defaults_grow_with_the_distance_and_are_marked_so():
    costs = costs_of()
    assert [costs.source(each) for each in Distance] == ["default"] * 5
    seconds = [line.predict(1000) for line in costs.lines]
    assert seconds == sorted(seconds)
    assert len(DEFAULTS) == len(Distance)
    assert costs.explain(P, FAR) == "same_zone, default"


def test_measured_links_give_the_first_guess_of_their_distance():
    costs = costs_of()
    costs.note_links([], KVShape(8192, 4))
    before = costs.cost_of(P, NEAR).predict(1000)
    note_links(costs, [(P, FAR, SLOW)], KVShape(8192, 4))
    assert costs.explain(P, FAR) == "same_zone, measured"
    assert costs.explain(P, NEAR) == "same_rack, default"
    assert costs.cost_of(P, FAR).predict(1000) == pytest.approx(0.004 + 8.192 / 12.5 - 0.0375)
    assert costs.cost_of(P, NEAR).predict(1000) == pytest.approx(before)
    costs.note_links([], None)
    assert costs.explain(P, FAR) == "same_zone, default"


def test_handoffs_teach_their_own_distance_and_others_what_links_do_not_show():
    """Engines that take 50 ms to begin do so at any distance."""
    costs = costs_of()
    for _ in range(50):
        costs.observe(costs.cost_of(P, NEAR), 1000, 0.05 + 0.002)
    assert costs.explain(P, NEAR) == "same_rack, learned"
    assert costs.explain(P, FAR) == "same_zone, default"
    near, far = costs.cost_of(P, NEAR).predict(1000), costs.cost_of(P, FAR).predict(1000)
    assert near == pytest.approx(0.052, rel=0.1)
    assert near <= far <= near + 0.2
    same_host = costs.lines[Distance.SAME_HOST].predict(1000)
    assert same_host <= near * 1.01


@given(st.lists(st.tuples(st.sampled_from([NEAR, FAR]), st.floats(0, 5)), max_size=60))
def test_what_was_not_seen_is_never_negative_or_better_than_what_is_nearer(seen):
    costs = costs_of()
    for decode, seconds in seen:
        costs.observe(costs.cost_of(P, decode), 1000, seconds)
    for near, far in zip(Distance, list(Distance)[1:], strict=False):
        assert costs.lines[near].fixed >= 0
        assert costs.lines[near].each >= 0
        if "learned" in {costs.source(near), costs.source(far)} and costs.source(
            near
        ) != costs.source(far):
            assert costs.lines[near].predict(1000) <= costs.lines[far].predict(1000) * (1 + 1e-9)


def test_a_worker_that_moved_has_its_new_distance():
    load = FleetLoad()
    costs = load.costs("demo").handoffs
    load.rows([P, FAR])
    assert costs.cost_of(P, FAR).line is costs.lines[Distance.SAME_ZONE]
    moved = view("far", "z/r0/h9")
    load.rows([P, moved])
    assert costs.cost_of(P, moved).line is costs.lines[Distance.SAME_RACK]


@pytest.mark.parametrize("is_report_late", [False, True])
def test_the_handoff_is_what_lies_between_the_prompts_end_and_the_first_token(is_report_late):
    """A push's prefill worker answers when the handoff has ended, and tells when it computed."""
    load = FleetLoad()
    for at in range(100):
        running = load.begin(Placement(P, FAR), 1000, float(at))
        if is_report_late:
            running.first_token(at + 0.6)
            running.prefilled(at + 0.1)
        else:
            running.prefilled(at + 0.1)
            running.first_token(at + 0.6)
        running.end(at + 0.7, 5)
    costs = load.costs("demo")
    assert costs.handoffs.cost_of(P, FAR).predict(1000) == pytest.approx(0.5, rel=0.05)
    assert load.of(P.id, "demo").prefill_cost.predict(1000) == pytest.approx(0.1, rel=0.05)
    assert load.of(P.id, "demo").num_requests == 0


def test_kv_that_is_encoded_on_a_link_is_predicted_as_it_goes_there():
    """And a load of a prefix by the link of its own pair, not by all at that distance."""
    shape, other = KVShape(8192, 4), view("other", "z/r9/h9")
    encoded = replace(SLOW, encoding="int8/1", encoded_byte_s=SLOW.byte_s / 2)
    raw, lossy = costs_of(), costs_of()
    note_links(raw, [(P, FAR, SLOW)], shape)
    note_links(lossy, [(P, FAR, encoded)], shape)
    fixed = raw.cost_of(P, FAR).predict(0)
    exposed = [costs.cost_of(P, FAR).predict(1000) - fixed for costs in (raw, lossy)]
    assert exposed[0] == pytest.approx(8.192 / 12.5 - 0.0375)
    assert exposed[1] == pytest.approx(8.192 / 25 - 0.0375)
    loads = [costs.predict_load(P, FAR, 1000) - fixed for costs in (raw, lossy)]
    assert loads == pytest.approx([8.192 / 12.5, 8.192 / 25])
    both = costs_of()
    note_links(both, [(P, FAR, encoded), (P, other, SLOW)], shape)
    fixed = both.cost_of(P, FAR).predict(0)
    assert both.distance(P, FAR) == both.distance(P, other)
    loads = [both.predict_load(P, decode, 1000) - fixed for decode in (FAR, other)]
    assert loads == pytest.approx([8.192 / 25, 8.192 / 12.5])


@given(
    st.lists(
        st.lists(
            st.tuples(st.sampled_from([P, NEAR, FAR]), st.sampled_from([P, NEAR, FAR]), links)
        ),
        max_size=4,
    )
)
def test_a_distance_has_the_median_of_all_that_workers_have_measured(of_workers):
    costs = costs_of()
    costs.note_links([group_links(each, costs.places) for each in of_workers], None)
    last = {(one.id, other.id): link for each in of_workers for one, other, link in each}
    assert costs.links == last
    found = {}
    for one, other, link in itertools.chain(*of_workers):
        found.setdefault(costs.distance(one, other), []).append(link.byte_s)
    for distance in Distance:
        rate = costs.measured_rate(distance)
        expected = median(found[distance]) if distance in found else None
        assert rate == (None if expected is None else pytest.approx(1 / expected))
