"""The cost policy takes the best of all ways to serve a request, and says why."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.auth.ticket import WorkerRef
from baton.ids import Epoch, WorkerId
from baton.protocol.worker_http import Role, StoreLoads, WorkerLoad
from baton.router.cost import (
    LEAST_LOADED,
    MOST_SOURCES,
    PREFERRED_ALONE,
    PREFERRED_REPLICA,
    CostOptions,
    CostPolicy,
)
from baton.router.fleet import Fleet, WorkerView
from baton.router.load import FleetLoad
from baton.router.placement import NonDisaggregableField, Placement, PlacementRequest, Unplaceable

NOW = 1000.0


def view(name, role=Role.BOTH, *, fingerprint="f", **fields):
    ref = WorkerRef(WorkerId(name), Epoch("0" * 32), "127.0.0.1:1")
    transports = frozenset({"tcp"})
    fields = {"available": True} | fields
    return WorkerView(ref, role, "demo", fingerprint, transports, **fields)


views = st.builds(
    view,
    st.sampled_from([f"w{i}" for i in range(5)]),
    st.sampled_from(Role),
    available=st.sampled_from([True, True, True, False]),
    fingerprint=st.sampled_from(["f", "f", "g"]),
    topology=st.sampled_from(["", "z/r0/h0", "z/r0/h1", "z/r1/h2", "y/r0/h0"]),
    max_step_tokens=st.sampled_from([None, 512, 8192]),
    protocol=st.sampled_from(["baton", "baton", "vllm"]),
    takes_prefixes=st.sampled_from([True, True, False]),
)
fleets = st.lists(views, max_size=5, unique_by=lambda each: each.id)
work = st.lists(
    st.tuples(
        st.integers(0, 4),
        st.integers(0, 4),
        st.integers(1, 20_000),
        st.sampled_from([0, 10_000]),
        st.booleans(),
        st.sampled_from([None, None, 0.02, 0.1, 1.0]),
    ),
    max_size=30,
)
options = st.builds(
    CostOptions,
    objective=st.sampled_from(["goodput", "throughput"]),
    ttft_s=st.floats(0.05, 5.0),
    tpot_s=st.floats(0.01, 0.5),
    count_stored=st.booleans(),
)
loads = st.lists(
    st.tuples(st.integers(0, 4), st.integers(1, 20_000), st.floats(0.001, 2.0)), max_size=20
)
"""What workers have loaded from their stores: tokens, and seconds."""
places = st.lists(st.sampled_from([1, 2, 3, np.inf]), max_size=5)
"""Answers that workers generate at once."""
requests = st.builds(
    PlacementRequest,
    st.just("demo"),
    st.frozensets(st.sampled_from([WorkerId(f"w{i}") for i in range(5)]), max_size=2),
    num_prompt_tokens=st.integers(1, 30_000),
    at=st.just(NOW),
    cached=st.dictionaries(
        st.sampled_from([f"w{i}" for i in range(5)]), st.integers(0, 30_000), max_size=MOST_SOURCES
    ),
    stored=st.dictionaries(st.sampled_from([f"w{i}" for i in range(5)]), st.integers(0, 30_000)),
    ttft_s=st.none() | st.floats(0.05, 5.0),
    tpot_s=st.none() | st.floats(0.01, 0.5),
    itl_s=st.sampled_from([None, 0.01, 0.05, 1.0]),
)


def loaded(given, from_stores=(), most_running=()):
    """Workers with prompts and answers under way, and places for so many answers."""
    load, names = FleetLoad(), [view(f"w{i}") for i in range(5)]
    for prefill, decode, num_tokens, num_cached, is_streaming, itl_s in given:
        placement = Placement(None if prefill == decode else names[prefill], names[decode])
        running = load.begin(placement, num_tokens, NOW - 1.0, num_cached=num_cached)
        if itl_s is not None:
            running.limit_gaps(itl_s)
        if is_streaming:
            running.first_token(NOW - 0.5)
    for worker, num_tokens, seconds in from_stores:
        load.of(f"w{worker}", "demo").observe_loads(num_tokens, seconds)
    for worker, most in enumerate(most_running):
        limit_running(load, f"w{worker}", most)
    load.costs("demo").handoffs.forget_pairs()  # workers of these names are elsewhere in the fleet
    return load


def bend(share):
    return share + 10 * max(0.0, share - 1)


def naive_load(worker, request_, load, wanted):
    """Tokens that a worker loads from its store, and the seconds that takes."""
    activity, uncached = load.of(worker.id, "demo"), request_.count_uncached(worker.id)
    stored = request_.stored.get(worker.id, 0) if wanted.count_stored else 0
    num = max(0, min(stored - (request_.num_prompt_tokens - uncached), uncached - 1))
    load_s = activity.load_cost.predict(num)
    computed_s = activity.prefill_cost.predict(num) - activity.prefill_cost.predict(0)
    return (num, load_s) if load_s < computed_s else (0, 0.0)


def limit_running(load, worker, most):
    load.of(worker, "demo")
    load.limit_running(worker, "demo", most)


def pace(activity, more, more_share=0.0):
    share = min(0.95, activity.prefill_share(NOW) + more_share)
    return activity.step_cost.predict(activity.num_decodes + more) / (1 - share)


def step(activity):
    return activity.step_cost.predict(activity.num_decodes)


def beyond(gap_s, limit_s):
    """Of an answer that is under way."""
    return 10 * max(0.0, min(3.0, gap_s / limit_s) - 1)


def gap(activity, worker, more, prefill_s=0.0, *, counts_lately=True):
    """A step, and the part of the prompts of 3 s that is computed in it."""
    prompts_s = (3.0 * activity.prefill_share(NOW) if counts_lately else 0.0) + prefill_s
    piece_s = activity.prefill_cost.predict(worker.max_step_tokens or 1e9)
    return activity.step_cost.predict(activity.num_decodes + more) + min(prompts_s, piece_s)


@given(given=work, fleet=fleets.filter(len), more=st.integers(0, 3))
def test_streams_move_by_the_gaps_that_placement_predicts(given, fleet, more):
    load = loaded(given)
    load.rows(fleet)
    for worker in fleet:
        activity = load.of(worker.id, "demo")
        found = load.costs("demo").gap_s(activity, more, NOW)
        assert found == pytest.approx(gap(activity, worker, more))


def naive_gaps(computing, decode, request_, prefill_s, limits, *, is_divided):
    """What gaps between tokens cost beyond their limits; each of the two is `(activity, worker)`.

    `limits` are those of the answers at each worker. `is_divided`: who answers is to compute no
    prompts.
    """
    usual, after = gap(*decode, 0), gap(*decode, 1)
    at_first, at_second = limits.get(computing[1].id), limits.get(decode[1].id)
    own = request_.itl_s
    cost = 0.0 if own is None else 10 * max(0.0, after / own - 1)
    if at_second:
        least = max(min(at_second), step(decode[0]))
        cost += len(at_second) * (beyond(after, least) - beyond(usual, least))
    if at_first:
        usual, stalled = (
            gap(*computing, 0, more_s, counts_lately=not is_divided) for more_s in (0.0, prefill_s)
        )
        least = max(min(at_first), step(computing[0]))
        return cost, len(at_first) * (beyond(stalled, least) - beyond(usual, least))
    return cost, 0.0


def is_divided(usable):
    """Whether no worker that answers prefills for others, and some worker does."""
    roles = {worker.role for worker in usable}
    return Role.PREFILL in roles and Role.BOTH not in roles


def gap_limits(given):
    """The targets of the answers at each worker."""
    limits = {}
    for _, decode, *_, itl_s in given:
        if itl_s is not None:
            limits.setdefault(f"w{decode}", []).append(itl_s)
    return limits


def naive_place_s(activity, load):
    """Until as many of the answers have ended as are too many; they end one after the other."""
    costs = load.costs("demo")
    most = costs.columns.most_running[activity.row]
    num_ahead = max(0, activity.num_decodes + 1 - most)
    return num_ahead * costs.answer_tokens * pace(activity, 0) / most if num_ahead else 0.0


def naive_cost(prefill, decode, request_, load, wanted, num_loaded=0, *, limits, is_divided):
    """The formula of docs/routing.md for one way, step by step."""
    answering = load.of(decode.id, "demo")

    computing, handoff_s, whole_s, load_share = answering, 0.0, 0.0, 1.0
    if num_loaded:
        missing = request_.count_uncached(decode.id) - (request_.num_prompt_tokens - num_loaded)
        handoff_s = load.costs("demo").handoffs.predict_load(prefill, decode, missing)
        if prefill.protocol == "vllm":  # it computes a token, in its own queue
            source = load.of(prefill.id, "demo")
            handoff_s += max(source.queue_s(NOW), naive_place_s(source, load)) + pace(source, 1)
        before_s = max(answering.queue_s(NOW), naive_place_s(answering, load))
        handoff_s = max(0.0, handoff_s - before_s)
    elif prefill is not None:
        computing = load.of(prefill.id, "demo")
        handed = request_.count_uncached(decode.id)
        handoff_s = load.costs("demo").handoffs.cost_of(prefill, decode).predict(handed)
    uncached = request_.count_uncached((prefill or decode).id)
    num_stored, load_s = naive_load(prefill or decode, request_, load, wanted)
    prefill_s = computing.prefill_cost.predict(uncached - num_stored)
    if num_loaded:
        num_stored, load_s = naive_load(decode, request_, load, wanted)[0], 0.0
        whole_s = computing.prefill_cost.predict(request_.count_uncached(decode.id) - num_stored)
        prefill_s = computing.prefill_cost.predict(request_.num_prompt_tokens - num_loaded)
        load_share = prefill_s / whole_s
    ttft_s = (
        max(computing.queue_s(NOW), naive_place_s(computing, load)) + load_s + prefill_s + handoff_s
    )
    ttft_s = max(ttft_s, naive_place_s(answering, load))

    # What is stored pushes out what others would have found: at the second worker, too.
    kept = request_.count_uncached(decode.id)
    if prefill is not None and not num_loaded:
        kept += uncached
    costs = load.costs("demo")
    keep_s = costs.found_share * costs.prefill.each * kept

    before, after, limit = pace(answering, 0), pace(answering, 1), wanted.tpot_s
    if wanted.objective == "throughput":
        others = (after - before) * 128 * answering.num_decodes + computing.num_decodes * prefill_s
        return ttft_s + 128 * after + others + keep_s
    slower = (bend(after / limit) - bend(before / limit)) * answering.num_decodes
    usual, shared = pace(computing, 0), pace(computing, 0, (whole_s or prefill_s) / 3.0)
    shared = min(shared, usual + (whole_s or prefill_s) / costs.answer_tokens)
    stalled = (bend(shared / limit) - bend(usual / limit)) * computing.num_decodes
    own_ttft, own_tpot = request_.ttft_s or wanted.ttft_s, request_.tpot_s or limit
    first = decode if prefill is None or num_loaded else prefill
    gaps, stalled_gaps = naive_gaps(
        (computing, first),
        (answering, decode),
        request_,
        whole_s or prefill_s,
        limits,
        is_divided=is_divided,
    )
    others = slower + load_share * (stalled + stalled_gaps) + keep_s / wanted.ttft_s
    return bend(ttft_s / own_ttft) + bend(after / own_tpot) + gaps + others


def loadings(usable, decodes, request_, load, wanted):
    """Who could load a prefix from whom, and how much; not what its store has nearly as much of."""
    for source, decode in product(usable, decodes):
        num_loaded = min(request_.num_prompt_tokens - 1, request_.cached.get(source.id, 0))
        num_computed = request_.count_uncached(decode.id)
        num_computed -= naive_load(decode, request_, load, wanted)[0]
        missing = num_computed - (request_.num_prompt_tokens - num_loaded)
        both_can = source.takes_prefixes and decode.takes_prefixes
        if missing >= LEAST_LOADED and both_can and decode.why_not_from(source) is None:
            yield source, decode, num_loaded


def preferred(prefill, decode, request_, workers):
    """Of one worker's cost, what a handoff must cost less than to be worth it."""
    is_replica = any(w.id == prefill and w.role is Role.BOTH for w in workers)
    ahead = request_.count_uncached(decode) - request_.count_uncached(prefill)
    return PREFERRED_REPLICA if is_replica and ahead < LEAST_LOADED else PREFERRED_ALONE


@given(
    st.lists(views, min_size=2, max_size=5, unique_by=lambda each: each.id),
    requests,
    work,
    options,
    loads,
    places,
)
def test_no_way_to_serve_a_request_is_better(
    workers, request_, given, wanted, from_stores, most_running
):
    policy, load = CostPolicy(wanted), loaded(given, from_stores, most_running)
    answer = policy.place(Fleet.of(workers), request_, load)
    usable = [w for w in workers if w.available and w.id not in request_.avoid]
    decodes = [w for w in usable if w.role is not Role.PREFILL]
    if isinstance(answer, Unplaceable):
        assert not decodes
        return
    assert answer.decode in decodes
    pairs = [
        (prefill, decode)
        for prefill, decode in product(usable, decodes)
        if prefill.role is not Role.DECODE
        and prefill is not decode
        and decode.why_not_from(prefill) is None
    ]
    naive = partial(naive_cost, limits=gap_limits(given), is_divided=is_divided(usable))
    costs = {
        (prefill and prefill.id, decode.id, 0): naive(prefill, decode, request_, load, wanted)
        for prefill, decode in [*((None, decode) for decode in decodes), *pairs]
    }
    for source, decode, num_loaded in loadings(usable, decodes, request_, load, wanted):
        cost = naive(source, decode, request_, load, wanted, num_loaded)
        costs[source.id, decode.id, num_loaded] = cost
    alone = min(cost for (prefill, *_), cost in costs.items() if prefill is None)
    best = min(
        cost
        for (prefill, decode, num_loaded), cost in costs.items()
        if prefill is None
        or (num_loaded and cost < PREFERRED_ALONE * alone)
        or cost < preferred(prefill, decode, request_, workers) * alone
    )
    way = answer.prefill and answer.prefill.id, answer.decode.id, answer.num_prefix_tokens
    chosen = costs[way]
    assert chosen == pytest.approx(best)
    assert sum(line.startswith("chosen: ") for line in answer.why) == 1
    expected = 0
    if not answer.num_prefix_tokens:
        expected = naive_load(answer.computing, request_, load, wanted)[0]
    assert answer.num_stored_tokens == expected


@given(fleets, requests, work)
def test_the_same_question_gets_the_same_answer(workers, request_, given):
    fleet, policy = Fleet.of(workers), CostPolicy(CostOptions())
    answers = [policy.place(fleet, request_, loaded(given)) for _ in range(2)]
    assert answers[0] == answers[1]


def placed(policy, workers, load, num_tokens=1000, **fields):
    request = PlacementRequest("demo", num_prompt_tokens=num_tokens, at=NOW, **fields)
    placement = policy.place(Fleet.of(workers), request, load)
    assert isinstance(placement, Placement)
    return placement


def stream(load, worker, count):
    for at in np.linspace(NOW - 100, NOW - 99, count).tolist():
        load.begin(Placement(None, worker), 1, at).first_token(at + 0.005)


def test_the_idle_worker_is_taken():
    load, (one, other) = FleetLoad(), (view("a"), view("b"))
    load.begin(Placement(None, one), 4000, NOW)
    for objective in ("goodput", "throughput"):
        placement = placed(CostPolicy(CostOptions(objective=objective)), [one, other], load)
        assert (placement.prefill, placement.decode) == (None, other)
        assert placement.reasons == ()


def test_of_equals_the_one_that_has_had_no_prompt_longest_is_taken():
    """So that prompts of a fleet with little to do fill all workers' caches."""
    load, workers = FleetLoad(), [view(name) for name in "abc"]
    for at, worker in enumerate((workers[1], workers[0], workers[2])):
        load.begin(Placement(None, worker), 10, at).end(at + 0.5)
    assert placed(CostPolicy(CostOptions()), workers, load).decode is workers[1]


def test_where_prompts_find_much_a_prefix_is_worth_a_short_wait():
    """Another copy would push out what others find."""
    chosen = []
    for num_cached in (0, 1_000_000):
        load, (has, idle) = FleetLoad(), (view("has"), view("idle"))
        load.begin(Placement(None, idle), 1, NOW - 50, num_cached=num_cached).end(NOW - 49)
        load.begin(Placement(None, has), 1100, NOW)
        placement = placed(CostPolicy(CostOptions()), [has, idle], load, cached={"has": 999})
        chosen.append(placement.decode.id)
    assert chosen == ["idle", "has"]


@pytest.mark.parametrize("is_allowed", [True, False])
def test_a_prefix_is_loaded_from_a_worker_that_is_busy(is_allowed):
    load, (has, idle) = FleetLoad(), [view(name, topology="z/r/h") for name in ("has", "idle")]
    load.begin(Placement(None, has), 20_000, NOW)
    policy = CostPolicy(CostOptions(load_prefixes=is_allowed))
    placement = placed(policy, [has, idle], load, num_tokens=4000, cached={"has": 3968})
    assert placement.decode is idle
    assert placement.prefill is (has if is_allowed else None)
    assert placement.num_prefix_tokens == (3968 if is_allowed else 0)
    assert (placement.mode == "push") is is_allowed
    assert placement.computing is idle


def test_a_vllm_server_hands_over_a_prefix_behind_what_waits_there():
    def place(num_waiting, **fields):
        load = FleetLoad()
        has, idle = (
            replace(view(name, topology="z/r/h"), protocol="vllm", **fields)
            for name in ("has", "idle")
        )
        for _ in range(64):  # nobody waits for their prompts, but for their tokens
            load.begin(Placement(None, has), 1, NOW - 60).first_token(NOW - 59)
        load.begin(Placement(None, has), num_waiting, NOW)
        cached = {"has": 2048}
        return placed(CostPolicy(CostOptions()), [has, idle], load, num_tokens=4000, cached=cached)

    found = place(1)
    assert (found.prefill.id, found.decode.id, found.num_prefix_tokens) == ("has", "idle", 2048)
    assert place(1, takes_prefixes=False).num_prefix_tokens == 0  # Baton did not start it
    assert place(20_000).prefill is None  # what waits there takes longer than the whole prompt


STORED = {"cached": {"busy": 3968}, "stored": {"busy": 3968, "idle": 3968}}


def test_a_prefix_is_loaded_from_a_worker_that_has_no_place_for_the_request():
    load, (has, idle) = FleetLoad(), [view(name, topology="z/r/h") for name in ("has", "idle")]
    cached, full = {"has": 3968}, frozenset({has.id})
    policy = CostPolicy(CostOptions())
    placement = placed(policy, [has, idle], load, num_tokens=4000, cached=cached, full=full)
    assert (placement.prefill, placement.decode) == (has, idle)
    assert placement.num_prefix_tokens == 3968
    gone = replace(has, available=False)
    placement = placed(policy, [gone, idle], load, num_tokens=4000, cached=cached, full=full)
    assert placement.prefill is None


def test_what_the_store_has_is_loaded_by_a_worker_that_is_idle():
    """Its store is that of the busy worker, which has the prompt cached; the third has another."""
    busy, idle, apart = view("busy"), view("idle"), view("apart")
    load = FleetLoad()
    load.begin(Placement(None, busy), 20_000, NOW)
    for count_stored in (True, False):
        policy = CostPolicy(CostOptions(load_prefixes=False, count_stored=count_stored))
        placement = placed(policy, [apart, busy, idle], load, num_tokens=4000, **STORED)
        assert placement.decode is (idle if count_stored else apart)
        assert placement.num_stored_tokens == (3968 if count_stored else 0)
        assert any("(3968 tokens stored)" in line for line in placement.why) is count_stored


def test_a_load_that_takes_longer_than_computing_is_not_counted_on():
    load, worker = FleetLoad(), view("w")
    for _ in range(10):
        load.of(worker.id, "demo").observe_loads(1000, 1.0)
    request = {"num_tokens": 4000, "stored": {"w": 3968}}
    placement = placed(CostPolicy(CostOptions()), [worker], load, **request)
    assert placement.num_stored_tokens == 0
    assert not any("stored" in line for line in placement.why)


def test_a_prompt_that_was_loaded_teaches_nothing_about_computing():
    load, worker = FleetLoad(), view("w")
    activity = load.of(worker.id, "demo")
    running = load.begin(Placement(None, worker, num_stored_tokens=3000), 1000, NOW)
    assert activity.prefill_tokens == 1000
    computed_s = activity.prefill_cost.predict(1000)
    assert activity.queue_s(NOW) == pytest.approx(computed_s), "others go on while it loads"
    running.first_token(NOW + 0.5)
    assert activity.prefill_cost.num_seen == 0
    assert activity.num_prefills == 0
    load.begin(Placement(None, worker), 1000, NOW + 0.1).first_token(NOW + 0.6)
    assert activity.prefill_cost.num_seen == 1
    assert load.costs("demo").prefill.predict(1000) == pytest.approx(0.1)


def test_loads_are_learned_from_what_workers_report():
    load = FleetLoad()
    reports = [(1, 1000, 0.1), (1, 1000, 0.1), (4, 7000, 0.7), (1, 100, 0.01)]  # it was restarted
    for num_loads, num_tokens, seconds in reports:
        loads_ = StoreLoads(num_loads, num_tokens, seconds)
        load.note_report("w", "demo", WorkerLoad(0, 10, 10, 16, store_loads=loads_))
    load.note_report("w", "demo", WorkerLoad(0, 10, 10, 16))
    cost = load.of("w", "demo").load_cost
    assert cost.num_seen == 3
    assert cost.predict(1500) == pytest.approx(0.15, rel=0.1)


def test_a_restarted_worker_may_report_more_loads_than_its_last_life():
    """More and smaller ones: the difference to the last life's sums is of no load."""
    load = FleetLoad()
    activity = load.of("w", "demo")
    activity.note_loads(StoreLoads(3, 30_000, 3.0))
    activity.note_loads(StoreLoads(5, 500, 0.05))
    assert load.costs("demo").load.predict(100) < 0.05
    assert load.costs("demo").load.predict(10_000) == pytest.approx(1.0, rel=0.2)


def test_what_one_worker_loads_where_it_must_serve_alone_is_not_taken_for_computed():
    load, workers = FleetLoad(), [view("a"), view("b")]
    policy = CostPolicy(CostOptions(), "colocated")
    placement = placed(policy, workers, load, num_tokens=4000, stored={"a": 3968, "b": 3968})
    assert placement.num_stored_tokens == 3968


def test_a_prefix_that_is_loaded_is_no_prompt_of_its_source():
    load, (has, idle) = FleetLoad(), (view("has"), view("idle"))
    running = load.begin(Placement(has, idle, num_prefix_tokens=960), 40, NOW, 960)
    assert load.of(has.id, "demo").num_requests == 0
    assert load.of(idle.id, "demo").prefill_tokens == 40
    running.prefilled(NOW)  # the source has sent it
    assert load.of(idle.id, "demo").num_prefills == 1
    running.first_token(NOW + 0.1)
    running.end(NOW + 1.0)
    assert load.of(idle.id, "demo").num_requests == 0
    assert not load.costs("demo").prefill.num_seen


def test_a_decode_worker_that_computed_prompts_lately_is_not_given_more_for_that():
    """Its answers have missed their target for gaps for 3 s, and would for 3 s more each time."""
    load, prefill, decode = FleetLoad(), view("p", Role.PREFILL), view("d", Role.DECODE)
    decode = replace(decode, max_step_tokens=1000)
    for at in np.arange(NOW - 10, NOW, 1.0).tolist():
        running = load.begin(Placement(None, decode), 2000, at)
        running.limit_gaps(0.04)
        running.first_token(at + 0.1)
    load.begin(Placement(prefill, decode), 20_000, NOW)
    policy = CostPolicy(CostOptions())
    placement = placed(policy, [prefill, decode], load, num_tokens=2000, itl_s=0.04)
    assert placement.prefill is prefill


def test_a_long_prompt_is_computed_where_no_answer_waits_for_it():
    """Ten answers under way at one worker; the other is busy with prompts: a division of labour."""
    load, (answering, computing) = FleetLoad(), (view("a"), view("b"))
    stream(load, answering, 10)
    for at in np.arange(NOW - 10, NOW, 0.25).tolist():  # prompts take 0.2 of each 0.25 s
        running = load.begin(Placement(computing, answering), 4000, at)
        running.prefilled(at + 0.2)
        running.end(at + 0.25)
    assert load.of(computing.id, "demo").prefill_share(NOW) == pytest.approx(0.7, abs=0.1)
    policy = CostPolicy(CostOptions(tpot_s=0.0125))  # the answers are hardly fast enough
    placement = placed(policy, [answering, computing], load, num_tokens=4000)
    assert placement.prefill is computing
    assert placement.decode is answering
    assert any("rather than" in line for line in placement.why)


def test_a_decode_worker_with_room_prefills_what_would_wait():
    load, (prefill, decode) = FleetLoad(), (view("p", Role.PREFILL), view("d", Role.DECODE))
    for _ in range(20):
        load.begin(Placement(prefill, decode), 4000, NOW)
    load.of(decode.id, "demo").count_decodes(-20)
    placement = placed(CostPolicy(CostOptions()), [prefill, decode], load)
    assert (placement.prefill, placement.decode, placement.reasons) == (None, decode, ())


def test_a_missing_prefill_worker_is_named():
    prefill, decode = view("p", Role.PREFILL, available=False), view("d", Role.DECODE)
    placement = placed(CostPolicy(CostOptions()), [prefill, decode], FleetLoad())
    assert placement.reasons == ("p is not available",)


def test_a_field_that_one_worker_must_serve_is_served_by_one():
    workers = [view("a"), view("b")]
    vllm = [WorkerView(w.ref, w.role, w.model, "f", w.transports, True, "vllm") for w in workers]
    placement = placed(
        CostPolicy(CostOptions()), vllm, FleetLoad(), non_disaggregable=NonDisaggregableField.ECHO
    )
    assert placement.prefill is None
    assert placement.non_disaggregable is NonDisaggregableField.ECHO


@pytest.mark.parametrize("num_workers", [64])
def test_of_many_workers_the_idle_pair_is_found(num_workers):
    load, workers = FleetLoad(), [view(f"w{i:03}") for i in range(num_workers)]
    for worker in workers[:-1]:
        load.begin(Placement(None, worker), 8000, NOW)
    assert placed(CostPolicy(CostOptions()), workers, load).decode is workers[-1]


@pytest.mark.parametrize(
    ("targets", "chosen"), [({}, "slow"), ({"ttft_s": 60.0, "tpot_s": 0.0155}, "busy")]
)
def test_a_requests_own_targets_go_before_the_policys(targets, chosen):
    """One worker has prompts before this one; the other has so many answers that all are slow."""
    load, (busy, slow) = FleetLoad(), (view("busy"), view("slow"))
    load.begin(Placement(None, busy), 10_000, NOW)
    stream(load, slow, 30)
    policy = CostPolicy(CostOptions(ttft_s=0.2, tpot_s=10.0), "colocated")
    assert placed(policy, [busy, slow], load, **targets).decode.id == chosen


@pytest.mark.parametrize(
    ("step_tokens", "itl_s", "objective", "chosen"),
    [
        (None, None, "goodput", "answers"),
        (None, 0.05, "goodput", "busy"),
        (512, 0.05, "goodput", "answers"),  # pieces of 0.03 s
        (512, 0.03, "goodput", "busy"),
        (None, 0.05, "throughput", "answers"),
    ],
)
def test_a_prompt_keeps_away_from_answers_whose_gaps_it_would_make_too_long(
    step_tokens, itl_s, objective, chosen
):
    """The other worker has a prompt before this one, so that it is slower."""
    load, busy = FleetLoad(), view("busy")
    answers = view("answers", max_step_tokens=step_tokens)
    running = load.begin(Placement(None, answers), 1, NOW - 100)
    if itl_s is not None:
        running.limit_gaps(itl_s)
    running.first_token(NOW - 99.995)
    load.begin(Placement(None, busy), 2000, NOW)
    policy = CostPolicy(CostOptions(objective=objective))
    assert placed(policy, [answers, busy], load, num_tokens=4000).decode.id == chosen
    running.end(NOW)
    assert placed(policy, [answers, busy], load, num_tokens=4000).decode is answers


def test_a_target_that_nobody_can_keep_takes_no_worker_from_the_others():
    load, workers = FleetLoad(), [view("limited"), view("other")]
    running = load.begin(Placement(None, workers[0]), 1, NOW - 100)
    running.limit_gaps(1e-6)
    running.first_token(NOW - 99.9)
    policy = CostPolicy(CostOptions())
    for _ in range(120):
        load.begin(placed(policy, workers, load, num_tokens=2000), 2000, NOW)
    queues = [load.of(worker.id, "demo").queue_s(NOW) for worker in workers]
    assert max(queues) < 8 * CostOptions().ttft_s + min(queues)


@pytest.mark.parametrize(("itl_s", "chosen"), [(None, "prompts"), (0.05, "answers")])
def test_a_request_with_a_target_for_gaps_keeps_away_from_prompts(itl_s, chosen):
    load, (prompts, answers) = FleetLoad(), (view("prompts"), view("answers"))
    running = load.begin(Placement(None, prompts), 4000, NOW - 1.0)
    running.first_token(NOW - 0.7)
    running.end(NOW - 0.5)
    stream(load, answers, 4)
    policy = CostPolicy(CostOptions())
    placement = placed(policy, [prompts, answers], load, num_tokens=100, itl_s=itl_s)
    assert placement.decode.id == chosen
    assert any(", ITL 0.0" in line for line in placement.why) is (itl_s is not None)


@given(
    fleets, requests, work, st.frozensets(st.sampled_from([WorkerId(f"w{i}") for i in range(5)]))
)
def test_a_full_worker_is_taken_only_if_all_are(workers, request_, given, full):
    policy, load = CostPolicy(CostOptions()), loaded(given)
    answer = policy.place(Fleet.of(workers), replace(request_, full=full), load)
    if isinstance(answer, Placement):
        usable = [w.id for w in workers if w.available and w.id not in request_.avoid]
        decodes = {w.id for w in workers if w.id in usable and w.decodes}
        assert answer.decode.id not in full or decodes <= full


RACKS = 8
HOSTS = 4
busy = st.lists(st.tuples(st.integers(0, 63), st.integers(1, 4)), max_size=20)


def racks(roles=(Role.PREFILL, Role.DECODE)):
    """64 workers: in each of eight racks four hosts, with a worker of each role."""
    return [
        view(f"{role.value}-{rack}-{host}", role, topology=f"z/rack-{rack}/host-{role}-{host}")
        for role in roles
        for rack in range(RACKS)
        for host in range(HOSTS)
    ]


def rack_of(worker):
    return worker.topology.split("/")[1]


def make_slow_alone(load, workers):
    """Decode workers have prompts of their own, so that pairs are the better way."""
    for worker in workers:
        if worker.role is Role.DECODE:
            load.begin(Placement(None, worker), 30_000, NOW)
            load.of(worker.id, "demo").count_decodes(-1)


@given(busy, st.integers(0, 2**32))
def test_of_many_racks_the_pair_is_within_one(given_work, seed):
    """All else equal: workers that are idle are in every rack, whoever is busy."""
    workers, load = racks(), FleetLoad()
    order = np.random.default_rng(seed).permutation(len(workers))
    workers = [workers[at] for at in order]
    make_slow_alone(load, workers)
    prefills = [w for w in workers if w.role is Role.PREFILL]
    for at, num in given_work:
        if len(prefills) > 1 and at % 2:
            load.begin(Placement(None, prefills.pop(at % len(prefills))), 1000 * num, NOW)
    placement = placed(CostPolicy(CostOptions()), workers, load, num_tokens=4000)
    assert placement.prefill is not None
    assert rack_of(placement.prefill) == rack_of(placement.decode)
    assert any("(same_rack, default)" in line for line in placement.why)


@pytest.mark.parametrize("rack", range(RACKS))
def test_the_only_rack_with_idle_decode_workers_gets_the_prompt_too(rack):
    """Also where the idle prefill workers that are listed first are in other racks."""
    workers, load = racks(), FleetLoad()
    make_slow_alone(load, workers)
    for worker in workers:
        if worker.role is Role.DECODE and rack_of(worker) != f"rack-{rack}":
            load.of(worker.id, "demo").count_decodes(40)
    placement = placed(CostPolicy(CostOptions()), workers, load, num_tokens=4000)
    assert (rack_of(placement.prefill), rack_of(placement.decode)) == (f"rack-{rack}",) * 2


def one_near_one_far():
    return (
        view("p", Role.PREFILL, topology="z/r0/h0"),
        view("near", Role.DECODE, topology="z/r0/h1"),
        view("far", Role.DECODE, topology="y/r/h"),
    )


def test_a_far_worker_is_taken_where_the_near_ones_are_busy():
    (prefill, near, far), load = one_near_one_far(), FleetLoad()
    make_slow_alone(load, [near, far])
    assert placed(CostPolicy(CostOptions()), [prefill, near, far], load).decode is near
    load.of(near.id, "demo").count_decodes(200)
    assert placed(CostPolicy(CostOptions()), [prefill, near, far], load).decode is far


def test_where_far_links_prove_as_good_as_near_ones_they_are_used_alike():
    """Labels say little: what was learned counts."""
    (prefill, near, far), load = one_near_one_far(), FleetLoad()
    costs = load.costs("demo").handoffs
    for _ in range(40):
        for decode, seconds in ((near, 0.02), (far, 0.01)):
            costs.observe(costs.cost_of(prefill, decode), 1000, seconds)
    make_slow_alone(load, [near, far])
    assert placed(CostPolicy(CostOptions()), [prefill, near, far], load).decode is far


def test_a_decode_worker_without_a_place_is_avoided():
    prefill, full, free = view("p", Role.PREFILL), view("a", Role.DECODE), view("b", Role.DECODE)
    for most, chosen in ((10, full), (1, free)):
        load = FleetLoad()
        make_slow_alone(load, [full, free])
        stream(load, full, 2)
        stream(load, free, 6)
        limit_running(load, full.id, most)
        policy = CostPolicy(CostOptions(objective="throughput"))
        assert placed(policy, [prefill, full, free], load).decode is chosen


@pytest.mark.parametrize("most_running", [10, 1])
def test_the_wait_for_a_place_is_a_part_of_what_is_predicted(most_running):
    """And none of what a handoff costs."""
    load, (prefill, decode) = FleetLoad(), (view("p", Role.PREFILL), view("d", Role.DECODE))
    stream(load, decode, 2)
    limit_running(load, decode.id, most_running)
    asked = PlacementRequest("demo", num_prompt_tokens=100, at=NOW)
    ways = CostPolicy(CostOptions()).explain(Fleet.of([prefill, decode]), asked, load)
    figures = {way.prefill: way.figures for way in ways}
    waits_s = figures["p"].get("decode_queue_s", 0.0)
    assert (waits_s > 1) == (figures[None]["queue_s"] > 1) == (most_running == 1)
    running = load.begin(Placement(prefill, decode), 100, NOW)
    assert running.predicted.decode_queue_s == pytest.approx(waits_s)
    assert running.predicted.ttft_s == pytest.approx(figures["p"]["ttft_s"])
    running.prefilled(NOW + 0.01)
    running.first_token(NOW + 0.01 + waits_s + 0.05)
    cost = load.costs("demo").handoffs.cost_of(prefill, decode)
    assert (cost.num_seen, cost.predict(100)) == (1, pytest.approx(0.05, rel=0.01))


@pytest.mark.parametrize("most_running", [1, np.inf])
@pytest.mark.parametrize("num_waiting", [0, 3])
def test_what_is_recorded_as_predicted_is_what_the_policy_compared(num_waiting, most_running):
    load, (prefill, decode) = FleetLoad(), (view("p", Role.PREFILL), view("d", Role.DECODE))
    for _ in range(num_waiting):
        load.begin(Placement(prefill, decode), 4000, NOW)
    stream(load, decode, 8)
    limit_running(load, decode.id, most_running)
    placement = placed(CostPolicy(CostOptions()), [prefill, decode], load, 3000)
    chosen = next(line for line in placement.why if line.startswith("chosen"))
    predicted = load.begin(placement, 3000, NOW).predicted
    assert f"TTFT {predicted.ttft_s:.3f} s" in chosen
    assert f"queue {predicted.queue_s:.3f}, prefill {predicted.prefill_s:.3f}" in chosen
    assert (predicted.handoff_s > 0) == (placement.prefill is not None)
