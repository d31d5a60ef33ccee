"""A long prompt is shared by two workers where that is sooner, and counted as what it is."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.protocol.worker_http import MAX_SPLIT_TOKENS, SPLIT_UNIT, Role
from baton.router.cost import CostOptions, CostPolicy
from baton.router.explanation import explain
from baton.router.fleet import Fleet
from baton.router.load import FleetLoad
from baton.router.placement import Placement, PlacementRequest, Unplaceable
from baton.router.split_prompts import LEAST_SAVED, LEAST_SPLIT
from tests.property.router.test_cost import (
    NOW,
    bend,
    fleets,
    loaded,
    loads,
    naive_place_s,
    options,
    pace,
    placed,
    places,
    requests,
    view,
    work,
)

LAYERS = 8


def landing(worker, num_layers=LAYERS):
    return replace(worker, num_landing_layers=num_layers)


def pair(**fields):
    """Two workers of one host: by default what a handoff exposes there is little."""
    fields = {"topology": "z/r/h", "num_landing_layers": LAYERS} | fields
    return [view(name, **fields) for name in ("a", "b")]


def naive_split(prefill, decode, request_, load, wanted, num_prefix):
    """The formula of docs/routing.md for one split, step by step; no answers at `decode`."""
    costs, num = load.costs("demo"), request_.num_prompt_tokens
    first, second = load.of(prefill.id, "demo"), load.of(decode.id, "demo")
    cached = num - request_.count_uncached(prefill.id)
    first_s = first.prefill_cost.predict(num_prefix - cached, cached)
    second_s = second.prefill_cost.predict(num - num_prefix, num_prefix)
    both_s = max(first_s + second_s / LAYERS, first_s / LAYERS + second_s)
    before_s = max(max(each.queue_s(NOW), naive_place_s(each, load)) for each in (first, second))
    handed = num_prefix - (num - request_.count_uncached(decode.id))
    handoff_s = costs.handoffs.cost_of(prefill, decode).predict(handed)
    alone_s = second.prefill_cost.predict(
        request_.count_uncached(decode.id), num - request_.count_uncached(decode.id)
    )
    busy = min(0.95, max(each.prefill_share(NOW) for each in (first, second)))
    taken_s = first_s + both_s - first_s / LAYERS
    others_s = max(0.0, taken_s - alone_s) * busy / (1 - busy)
    ttft_s = before_s + both_s + handoff_s + others_s
    if wanted.objective == "throughput":
        return ttft_s + 128 * pace(second, 1) + first.num_decodes * first_s
    return bend(ttft_s / (request_.ttft_s or wanted.ttft_s))


idle_fleets = st.lists(
    st.builds(
        view,
        st.sampled_from([f"w{i}" for i in range(4)]),
        st.sampled_from([Role.BOTH, Role.BOTH, Role.BOTH, Role.PREFILL]),
        max_step_tokens=st.sampled_from([None, 512, 8192]),
        topology=st.just("z/r/h"),
    ),
    min_size=2,
    max_size=4,
    unique_by=lambda each: each.id,
)
little_work = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(1, 500), st.just(0), st.booleans(),
              st.none()),
    max_size=1,
)  # fmt: skip
long_requests = st.builds(
    PlacementRequest,
    st.just("demo"),
    num_prompt_tokens=st.integers(LEAST_SPLIT, 20_000),
    at=st.just(NOW),
    cached=st.dictionaries(st.sampled_from(["w0", "w1"]), st.integers(0, 400)),
    ttft_s=st.none() | st.floats(0.5, 5.0),
)


@given(fleets, requests, work, options, loads, places)
def test_whatever_the_fleet_does_splits_change_nothing_but_splits(
    workers, request_, given, wanted, from_stores, most_running
):
    fleet = Fleet.of([landing(each) for each in workers])
    load = loaded(given, from_stores, most_running)
    check_split(fleet, request_, load, wanted)


@given(idle_fleets, long_requests, little_work, options, st.sampled_from([True, True, False]))
def test_a_split_is_taken_only_where_it_saves_enough_and_can_be(
    workers, request_, given, wanted, by_layer
):
    workers = [landing(each, LAYERS if by_layer else 0) for each in workers]
    if check_split(Fleet.of(workers), request_, loaded(given), wanted):
        assert by_layer


def check_split(fleet, request_, load, wanted):
    """Whether the prompt is split; if so, as it may be, and with the gain that is asked for."""
    placement = CostPolicy(wanted).place(fleet, request_, load)
    whole = CostPolicy(replace_options(wanted)).place(fleet, request_, load)
    if isinstance(placement, Unplaceable):
        assert placement == whole
        return False
    if not placement.num_split_tokens:
        ways = [(p.prefill, p.decode, p.num_prefix_tokens) for p in (placement, whole)]
        assert ways[0] == ways[1]
        return False
    prefill, decode, num_prefix = placement.prefill, placement.decode, placement.num_prefix_tokens
    assert prefill.role is not Role.DECODE
    assert decode.role is not Role.PREFILL
    assert prefill is not decode
    num, cached = (
        request_.num_prompt_tokens,
        request_.num_prompt_tokens - request_.count_uncached(prefill.id),
    )
    assert request_.count_uncached(decode.id) >= LEAST_SPLIT
    assert num_prefix % SPLIT_UNIT == 0
    assert placement.num_split_tokens == num_prefix - cached > 0
    assert 0 < num - num_prefix <= MAX_SPLIT_TOKENS
    activity = load.of(decode.id, "demo")
    assert activity.num_decodes == 0, "answers there would wait for layers"
    explained = explain(CostPolicy(wanted), fleet, request_, load)
    (chosen,) = [each for each in explained.candidates if each.is_chosen(explained.placement)]
    alone = next(e for e in explained.candidates if e.prefill is None and e.decode == decode.id)
    ttft_s = alone.figures["ttft_s"]
    if wanted.objective == "goodput":
        ttft_s = bend(ttft_s / (request_.ttft_s or wanted.ttft_s))
    assert chosen.figures["cost"] < alone.figures["cost"] - LEAST_SAVED * ttft_s + 1e-9
    assert chosen.figures["split_at"] == num_prefix
    return True


def replace_options(wanted):
    return CostOptions(
        wanted.objective, wanted.ttft_s, wanted.tpot_s, wanted.load_prefixes, wanted.count_stored,
        split_prompts=False,
    )  # fmt: skip


@given(
    num_tokens=st.integers(LEAST_SPLIT, 12_000),
    behind=st.tuples(st.integers(0, 3000), st.integers(0, 3000)),
    seen=st.lists(st.tuples(st.integers(64, 8000), st.floats(0.01, 3.0)), max_size=20),
)
def test_the_best_point_is_about_the_best_of_all(num_tokens, behind, seen):
    load, workers = FleetLoad(), pair()
    for number, (tokens, seconds) in enumerate(seen):
        at = NOW - 1000 + 10 * number
        running = load.begin(Placement(None, workers[number % 2]), tokens, at)
        running.first_token(at + seconds)
        running.end(at + seconds)
    for worker, tokens in zip(workers, behind, strict=True):
        if tokens:
            load.begin(Placement(None, worker), tokens, NOW)
    wanted = CostOptions(objective="throughput", load_prefixes=False)
    request = PlacementRequest("demo", num_prompt_tokens=num_tokens, at=NOW)
    answer = CostPolicy(wanted).place(Fleet.of(workers), request, load)
    if not answer.num_split_tokens:
        return
    costs = {
        num_prefix: naive_split(answer.prefill, answer.decode, request, load, wanted, num_prefix)
        for num_prefix in range(SPLIT_UNIT, MAX_SPLIT_TOKENS + 1, SPLIT_UNIT)
        if 1 < num_tokens - num_prefix <= MAX_SPLIT_TOKENS
    }
    before = [load.of(each.id, "demo").queue_s(NOW) for each in workers]
    computing = costs[answer.num_prefix_tokens] - 128 * pace(load.of(answer.decode.id, "demo"), 1)
    best = min(costs.values()) - 128 * pace(load.of(answer.decode.id, "demo"), 1)
    # It is where both compute as long; what the handoff and other prompts take may move it a bit.
    assert computing - max(before) <= 1.05 * (best - max(before)) + 0.002
    (why,) = [line for line in answer.why if line.startswith("chosen: ")]
    assert f"(split: the first computes up to token {answer.num_prefix_tokens})" in why


def test_two_idle_workers_share_a_long_prompt_and_not_a_short_one():
    load, workers = FleetLoad(), pair()
    policy = CostPolicy(CostOptions())
    placement = placed(policy, workers, load, num_tokens=4000)
    assert {placement.prefill, placement.decode} == set(workers)
    assert placement.num_split_tokens == placement.num_prefix_tokens > 1000
    assert placement.mode == "push"
    assert placement.computing is placement.decode
    assert placed(policy, workers, load, num_tokens=LEAST_SPLIT - 1).prefill is None


@pytest.mark.parametrize(
    "policy",
    [
        CostPolicy(CostOptions(split_prompts=False)),
        CostPolicy(CostOptions(), "pull"),
        CostPolicy(CostOptions(), "colocated"),
    ],
)
def test_no_prompt_is_split_where_the_operator_does_not_want_it(policy):
    assert placed(policy, pair(), FleetLoad(), num_tokens=4000).num_split_tokens == 0


def test_who_cannot_share_a_prompt_does_not():
    """Another engine, an accelerator, two workers of one device, a worker that has failed."""
    alone = [
        [replace(each, num_landing_layers=0) for each in pair()],
        [pair()[0], replace(pair()[1], num_landing_layers=0)],
        [replace(pair()[0], num_landing_layers=0), pair()[1]],
        pair(topology="z/r/h/gpu0"),
        [pair()[0], replace(pair()[1], available=False)],
    ]
    for workers in alone:
        placement = placed(CostPolicy(CostOptions()), workers, FleetLoad(), num_tokens=4000)
        assert placement.num_split_tokens == 0
    apart = [replace(w, topology=f"z/r/h/gpu{i}") for i, w in enumerate(pair())]
    assert placed(CostPolicy(CostOptions()), apart, FleetLoad(), num_tokens=4000).num_split_tokens


@pytest.mark.parametrize("fields", [{"is_tokenized": False}, {"failed_modes": frozenset({"push"})}])
def test_which_prompts_are_not_shared(fields):
    modes = frozenset({"push", "pull"})
    workers = [replace(each, modes=modes) for each in pair()]
    placement = placed(CostPolicy(CostOptions()), workers, FleetLoad(), num_tokens=4000, **fields)
    assert placement.num_split_tokens == 0


def test_what_takes_longer_than_predicted_is_not_done_again_for_a_while():
    load, workers, policy = FleetLoad(), pair(), CostPolicy(CostOptions())
    is_split = []
    for number in range(20):
        at = NOW + 20.0 * number
        request = PlacementRequest("demo", num_prompt_tokens=4000, at=at)
        placement = policy.place(Fleet.of(workers), request, load)
        alone_s = load.of("a", "demo").prefill_cost.predict(4000)
        num_first = placement.num_prefix_tokens
        running = load.begin(placement, 4000 - num_first, at, num_first, num_cached=num_first)
        first_at = at + alone_s * (3.0 if placement.num_split_tokens else 1.0)
        is_split.append(placement.num_split_tokens > 0)
        if is_split[-1]:
            running.prefilled(at + alone_s / 2)
        running.first_token(first_at)
        running.end(first_at + 0.1)
    assert all(is_split[:3]), "before it is known what prompts take here"
    assert 1 <= sum(is_split[5:]) <= 7, "it was given up, and tried again"


def test_a_busy_fleet_splits_none():
    """Together two workers compute longer: beside many other prompts nothing is won."""
    load, workers = FleetLoad(), pair()
    for at in np.arange(NOW - 30, NOW, 0.41).tolist():
        for worker in workers:
            running = load.begin(Placement(None, worker), 4000, at)
            running.first_token(at + 0.4)
            running.end(at + 0.45)
    placement = placed(CostPolicy(CostOptions()), workers, load, num_tokens=4000)
    assert placement.prefill is None


def test_beside_answers_the_second_worker_shares_no_prompt():
    load, workers = FleetLoad(), pair()
    for worker in workers:
        load.begin(Placement(None, worker), 1, NOW - 1.0).first_token(NOW - 0.9)
    assert placed(CostPolicy(CostOptions()), workers, load, num_tokens=4000).prefill is None


@pytest.mark.parametrize("is_reported", [True, False])
def test_both_workers_have_their_part_of_a_split_prompt_to_compute(is_reported):
    load, (first, second) = FleetLoad(), pair()
    placement = Placement(first, second, num_prefix_tokens=1024, num_split_tokens=960)
    running = load.begin(placement, 976, NOW, 1024, num_cached=1024)
    at_first, at_second = load.of(first.id, "demo"), load.of(second.id, "demo")
    assert (at_first.prefill_tokens, at_second.prefill_tokens) == (960, 976)
    assert (at_first.num_prefills, at_second.num_prefills) == (1, 1)
    assert at_first.num_decodes == 0
    assert load.costs("demo").found_share == pytest.approx(64 / 2000), "the rest is computed"
    if is_reported:
        running.prefilled(NOW + 0.25)
        running.prefilled(NOW + 0.25)
        assert load.costs("demo").prefill.num_seen == 1, "what the first one took is known"
        assert at_first.num_prefills == 0
        assert at_first.queue_s(NOW + 0.25) == pytest.approx(0.0)
    running.first_token(NOW + 0.5)
    running.end(NOW + 1.0, num_output_tokens=5)
    # What the second one took shows once it is known that the first one was done before.
    assert load.costs("demo").prefill.num_seen == 2 * is_reported
    assert (at_first.num_requests, at_second.num_requests) == (0, 0)
    assert (at_first.prefill_tokens, at_second.prefill_tokens) == (0, 0)
    (answered,) = load.costs("demo").answered
    assert (answered.num_tokens, answered.num_cached) == (1936, 64)
