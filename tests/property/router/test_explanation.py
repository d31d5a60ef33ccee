"""An explanation lists every candidate, names the one that is placed next, and changes nothing."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from enum import Enum
from functools import partial
from operator import itemgetter
from threading import Lock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.protocol.worker_http import Role
from baton.router.cost import CostOptions, CostPolicy
from baton.router.explanation import NotExplainableError, explain
from baton.router.fleet import Fleet
from baton.router.load import FleetLoad
from baton.router.placement import Placement, PlacementRequest, Unplaceable
from baton.router.prefix import PrefixOptions, PrefixPolicy
from baton.router.simple import LeastLoaded, RandomChoice, RoundRobin
from tests.examples import examples
from tests.property.router.test_cost import (
    NOW,
    fleets,
    gap_limits,
    is_divided,
    loaded,
    loadings,
    naive_cost,
    options,
    places,
    requests,
    view,
    work,
)

POLICIES = {
    "round_robin": RoundRobin,
    "random": RandomChoice,
    "least_loaded": LeastLoaded,
    "prefix": lambda: PrefixPolicy(PrefixOptions()),
    "cost": lambda: CostPolicy(CostOptions()),
}


def state(value):
    """All that an object holds, as text: arrays and objects without equality included."""
    if isinstance(value, np.ndarray):
        return value.tobytes()
    if isinstance(value, dict):
        return {key: state(each) for key, each in value.items()}
    if isinstance(value, list | tuple | set | frozenset) or hasattr(value, "popleft"):
        return [state(each) for each in value]
    if isinstance(value, Enum) or not type(value).__module__.startswith("baton."):
        return repr(value)
    slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
    names = [*getattr(value, "__dict__", ()), *(name for name in slots if hasattr(value, name))]
    return {name: state(getattr(value, name)) for name in names}


def alternatives(worker_views):
    """(prefill, decode) of every way to serve a request, by definition."""
    usable = [each for each in worker_views if each.available]
    decodes = [each for each in usable if each.decodes]
    helpers = [each for each in usable if each.role is not Role.DECODE]
    yield from ((None, decode) for decode in decodes)
    for decode in decodes:
        for prefill in helpers:
            if prefill is not decode and prefill.fingerprint == decode.fingerprint:
                yield prefill, decode


@pytest.mark.parametrize("make", POLICIES.values(), ids=POLICIES)
@settings(max_examples=examples(25))
@given(worker_views=fleets, given=work, asked=st.lists(requests, min_size=1, max_size=5))
def test_nothing_is_changed_and_who_is_chosen_is_placed_next(make, worker_views, given, asked):
    fleet, load, other_load = Fleet.of(worker_views), loaded(given), loaded(given)
    policy, other = make(), make()
    make().place(fleet, PlacementRequest("demo", num_prompt_tokens=1, at=NOW), load)
    for each in worker_views:  # all have rows
        load.of(each.id, each.model)
    for number, each in enumerate(asked):
        request = replace(each, at=NOW + 2 * number)
        before = state(policy), state(load)
        explained = explain(policy, fleet, request, load)
        assert (state(policy), state(load)) == before
        placement = policy.place(fleet, request, load)
        assert placement == other.place(fleet, request, other_load)
        assert explained.placement == placement
        chosen = [each for each in explained.candidates if each.is_chosen(placement)]
        if isinstance(placement, Unplaceable):
            assert not chosen
            continue
        assert placement.decode.id in {each.decode for each in chosen}
        if placement.prefill is not None:
            assert placement.prefill.id in {each.prefill for each in chosen}
        load.begin(placement, request.num_prompt_tokens, request.at)
        other_load.begin(placement, request.num_prompt_tokens, request.at)


@given(worker_views=fleets, given=work, wanted=options, request_=requests, most_running=places)
def test_cost_lists_every_way_with_its_cost(worker_views, given, wanted, request_, most_running):
    request = replace(request_, avoid=frozenset())
    fleet, load = Fleet.of(worker_views), loaded(given, most_running=most_running)
    explained = explain(CostPolicy(wanted), fleet, request, load)
    possible = [each for each in explained.candidates if each.why_not is None]
    found = {
        (each.prefill, each.decode, each.num_prefix_tokens): each.figures["cost"]
        for each in possible
    }
    assert len(found) == len(possible)
    usable = [each for each in worker_views if each.available]
    naive = partial(naive_cost, limits=gap_limits(given), is_divided=is_divided(usable))
    expected = {
        (prefill and prefill.id, decode.id, 0): naive(prefill, decode, request, load, wanted)
        for prefill, decode in alternatives(worker_views)
    }
    best_loadings = {}
    answering = [each for each in usable if each.decodes]
    for source, decode, num in loadings(usable, answering, request, load, wanted):
        way = (source.id, decode.id, num), naive(source, decode, request, load, wanted, num)
        best_loadings[source.id] = min(way, best_loadings.get(source.id, way), key=itemgetter(1))
    for way, cost in found.items():
        if way[2]:  # of each source the best one, where it is better than that of the one before
            assert cost == pytest.approx(best_loadings[way[0]][1])
    if best_loadings:
        least = min(best_loadings.values(), key=itemgetter(1))
        expected |= {way: cost for way, cost in found.items() if way[2]}
        assert min(cost for way, cost in found.items() if way[2]) == pytest.approx(least[1])
    assert found == pytest.approx(expected)
    costs = [each.figures["cost"] for each in possible]
    assert costs == sorted(costs)
    named = {each for way in explained.candidates for each in (way.prefill, way.decode)}
    unavailable = {each.id for each in worker_views if not each.available}
    assert unavailable <= named, "it is not listed why they are not used"


@pytest.mark.parametrize("make", POLICIES.values(), ids=POLICIES)
@given(worker_views=fleets, request_=requests)
def test_every_worker_that_answers_is_listed_with_the_reason_why_it_may_not(
    make, worker_views, request_
):
    explained = explain(make(), Fleet.of(worker_views), request_, FleetLoad())
    alone = {each.decode: each for each in explained.candidates if each.prefill is None}
    for worker in worker_views:
        if worker.decodes:
            may = worker.available and worker.id not in request_.avoid
            assert (alone[worker.id].why_not is None) == may


def test_the_first_figure_decides():
    busy, idle = view("w0"), view("w1")
    load = FleetLoad()
    load.begin(Placement(None, busy), 1000, NOW)
    for make in (POLICIES["least_loaded"], POLICIES["prefix"], POLICIES["cost"]):
        request = PlacementRequest("demo", num_prompt_tokens=100, at=NOW)
        explained = explain(make(), Fleet.of([busy, idle]), request, load)
        first = explained.candidates[0]
        assert first.decode == "w1"
        assert first.is_chosen(explained.placement)
        figures = [next(iter(each.figures.values())) for each in explained.candidates]
        assert figures == sorted(figures)


def test_workers_that_only_prefill_at_present_are_listed_so():
    policy = CostPolicy(CostOptions())
    workers = [view("w0"), view("w1"), view("w2")]
    fleet, load = Fleet.of(workers), FleetLoad()
    request = PlacementRequest("demo", num_prompt_tokens=100, at=NOW)
    policy.place(fleet, request, load)
    policy._divisions["demo"].prefills = frozenset({"w1"})
    explained = explain(policy, fleet, request, load)
    assert [
        each.decode for each in explained.candidates if each.why_not == "only prefills at present"
    ] == ["w1"]


class Plain:
    """A policy of a plug-in that lists nothing."""

    uses_prefixes = False

    def __init__(self, lock=None):
        self.lock, self.num = lock, 0

    def place(self, fleet, request, load):
        self.num += 1
        return Placement(None, fleet.models[request.model].decodes[0])


def test_of_a_policy_that_lists_nothing_the_usable_workers_are_shown():
    policy, fleet = Plain(), Fleet.of([view("w0"), view("w1", available=False)])
    explained = explain(policy, fleet, PlacementRequest("demo"), FleetLoad())
    listed = [(each.decode, each.why_not) for each in explained.candidates]
    assert listed == [("w0", None), ("w1", "is not available")]
    assert explained.candidates[0].is_chosen(explained.placement)
    assert policy.num == 0


def test_a_policy_that_cannot_be_copied_is_not_explained():
    policy, fleet = Plain(Lock()), Fleet.of([view("w0")])
    with pytest.raises(TypeError):
        deepcopy(policy)
    with pytest.raises(NotExplainableError, match="Plain cannot be explained"):
        explain(policy, fleet, PlacementRequest("demo"), FleetLoad())
