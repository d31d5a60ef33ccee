from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.auth.ticket import WorkerRef
from baton.ids import Epoch, WorkerId
from baton.protocol.worker_http import Role, WorkerProtocol
from baton.router.fleet import Fleet, WorkerView
from baton.router.load import FleetLoad
from baton.router.placement import NonDisaggregableField, Placement, PlacementRequest, Unplaceable
from baton.router.simple import LeastLoaded, RandomChoice, RoundRobin


def worker(
    name: str,
    role: Role,
    *,
    available: bool = True,
    model: str = "demo",
    fingerprint: str = "f",
    transports: frozenset[str] = frozenset({"tcp"}),
    protocol: WorkerProtocol = "baton",
) -> WorkerView:
    ref = WorkerRef(WorkerId(name), Epoch("0" * 32), "127.0.0.1:1")
    return WorkerView(ref, role, model, fingerprint, transports, available, protocol)


def fleet_of(*workers: WorkerView) -> Fleet:
    return Fleet.of(workers)


DEMO = PlacementRequest("demo")
P0, P1 = worker("p0", Role.PREFILL), worker("p1", Role.PREFILL)
D0, D1, D2 = (worker(f"d{i}", Role.DECODE) for i in range(3))
W0 = worker("w0", Role.BOTH)


def placed(policy: RoundRobin, fleet: Fleet, request: PlacementRequest = DEMO) -> Placement:
    placement = policy.place(fleet, request, FleetLoad())
    assert isinstance(placement, Placement)
    return placement


def test_workers_take_turns_in_the_listed_order():
    policy, fleet = RoundRobin(), fleet_of(P0, P1, D0, D1, D2)
    placements = [placed(policy, fleet) for _ in range(6)]
    assert [p.decode.id for p in placements] == ["d0", "d1", "d2"] * 2
    assert [p.prefill.id for p in placements if p.prefill] == ["p0", "p1"] * 3
    assert {p.mode for p in placements} == {"push"}
    assert all(not p.reasons for p in placements)


def test_an_undivided_request_is_vllms_alone_and_takes_no_prefill_workers_turn():
    v0 = worker("v0", Role.DECODE, protocol="vllm")
    policy, fleet = RoundRobin(), fleet_of(P0, P1, v0)
    whole = PlacementRequest("demo", non_disaggregable=NonDisaggregableField.ECHO)
    placements = [placed(policy, fleet, request) for request in (DEMO, whole, DEMO, whole)]
    assert [p.prefill and p.prefill.id for p in placements] == ["p0", None, "p1", None]
    assert [p.non_disaggregable for p in placements] == [None, NonDisaggregableField.ECHO] * 2
    assert placements[1].reasons == ("v0 serves the request alone, because of its field 'echo'",)
    assert placements[1].mode == "colocated"


def test_an_undivided_request_goes_to_any_other_worker_as_ever():
    placement = placed(
        RoundRobin(),
        fleet_of(P0, D0),
        PlacementRequest("demo", non_disaggregable=NonDisaggregableField.ECHO),
    )
    assert (placement.prefill, placement.non_disaggregable, placement.reasons) == (P0, None, ())


def test_the_dialects_of_those_who_answer_are_at_hand():
    p0 = worker("p0", Role.PREFILL, protocol="vllm")
    assert fleet_of(p0, D0).models["demo"].decode_protocols == {"baton"}
    w0 = worker("w0", Role.BOTH, protocol="vllm")
    assert fleet_of(p0, D0, w0).models["demo"].decode_protocols == {"baton", "vllm"}


def test_where_there_are_no_prefill_workers_an_undivided_request_is_nothing_special():
    v0 = worker("v0", Role.BOTH, protocol="vllm")
    placement = placed(
        RoundRobin(),
        fleet_of(v0),
        PlacementRequest("demo", non_disaggregable=NonDisaggregableField.ECHO),
    )
    assert (placement.non_disaggregable, placement.reasons) == (None, ())


def test_a_worker_of_both_roles_serves_alone_without_a_reason():
    placement = placed(RoundRobin(), fleet_of(W0))
    assert (placement.prefill, placement.decode, placement.reasons) == (None, W0, ())
    assert placement.mode == "colocated"


def test_a_worker_of_both_roles_takes_kv_from_a_prefill_worker():
    assert placed(RoundRobin(), fleet_of(P0, W0)).prefill is P0


def test_a_worker_of_both_roles_does_not_prefill_for_others():
    policy, fleet = RoundRobin(), fleet_of(D0, W0)
    assert [placed(policy, fleet).prefill for _ in range(4)] == [None] * 4


@pytest.mark.parametrize(
    ("prefill", "reason"),
    [
        (worker("p0", Role.PREFILL, available=False), "p0 is not available"),
        (
            worker("p0", Role.PREFILL, fingerprint="other"),
            "p0 and d0 loaded models of different fingerprints",
        ),
        (
            worker("p0", Role.PREFILL, transports=frozenset({"nixl"})),
            "p0 and d0 have no transport in common",
        ),
    ],
)
def test_it_says_why_no_prefill_worker_was_chosen(prefill, reason):
    placement = placed(RoundRobin(), fleet_of(prefill, D0))
    assert placement.prefill is None
    assert placement.reasons == (reason,)


def test_prefill_workers_that_fit_are_found_beside_others():
    other = worker("p0", Role.PREFILL, fingerprint="other")
    assert placed(RoundRobin(), fleet_of(other, P1, D0)).prefill is P1


def test_an_avoided_worker_is_not_chosen():
    request = PlacementRequest("demo", frozenset({WorkerId("d0"), WorkerId("p0")}))
    placement = placed(RoundRobin(), fleet_of(P0, D0, D1), request)
    assert placement.decode is D1
    assert placement.reasons == ("p0 has just failed this request",)


@pytest.mark.parametrize(
    ("workers", "request_", "reason"),
    [
        ((), DEMO, "no worker serves the model 'demo'"),
        ((P0,), DEMO, "no decode worker serves the model 'demo'"),
        ((P0, D0), PlacementRequest("other"), "no worker serves the model 'other'"),
        (
            (worker("d0", Role.DECODE, available=False),),
            DEMO,
            "no decode worker of the model 'demo' is available (known: d0)",
        ),
    ],
)
def test_it_says_why_nobody_can_serve(workers, request_, reason):
    assert RoundRobin().place(fleet_of(*workers), request_, FleetLoad()) == Unplaceable(reason)


def test_a_worker_that_comes_back_is_not_flooded():
    policy = RoundRobin()
    away = fleet_of(D0, worker("d1", Role.DECODE, available=False))
    for _ in range(10):
        placed(policy, away)
    back = fleet_of(D0, D1)
    assert [placed(policy, back).decode.id for _ in range(4)] == ["d1", "d0", "d1", "d0"]


def test_a_worker_that_is_gone_leaves_its_turns():
    policy = RoundRobin()
    for _ in range(4):
        placed(policy, fleet_of(D0, D1))
    policy.forget([D0.id, D2.id])
    assert policy.weigh(D0, DEMO, FleetLoad()) == {"last_turn": 0}
    assert policy.weigh(D1, DEMO, FleetLoad()) == {"last_turn": 4}
    policy.check_invariants()


def test_models_are_served_by_their_own_workers():
    policy = RoundRobin()
    fleet = fleet_of(D0, worker("x0", Role.DECODE, model="other"))
    assert placed(policy, fleet, PlacementRequest("other")).decode.id == "x0"
    assert placed(policy, fleet).decode is D0


def test_a_fleet_can_decode_only_with_an_available_decode_worker():
    assert fleet_of(P0, D0).can_decode
    assert not fleet_of(P0, worker("d0", Role.DECODE, available=False)).can_decode
    assert not Fleet().can_decode


views = st.builds(
    worker,
    st.sampled_from([f"w{i}" for i in range(6)]),
    st.sampled_from(Role),
    available=st.booleans(),
    model=st.sampled_from(["demo", "other"]),
    fingerprint=st.sampled_from(["f", "g"]),
    transports=st.frozensets(st.sampled_from(["tcp", "shared"])),
)
fleets = st.lists(views, max_size=6, unique_by=lambda view: view.id).map(Fleet.of)
requests = st.builds(
    PlacementRequest,
    st.sampled_from(["demo", "other", "unknown"]),
    st.frozensets(st.sampled_from([WorkerId(f"w{i}") for i in range(6)]), max_size=3),
)


@given(st.lists(st.tuples(fleets, requests), max_size=30))
def test_a_placement_keeps_its_promises(questions):
    policy = RoundRobin()
    for fleet, request in questions:
        answer = policy.place(fleet, request, FleetLoad())
        policy.check_invariants()
        served = fleet.models.get(request.model)
        usable = [
            w
            for w in (served.decodes if served else ())
            if w.available and w.id not in request.avoid
        ]
        if isinstance(answer, Unplaceable):
            assert not usable
            continue
        assert answer.decode in usable
        if answer.prefill is None:
            assert len(answer.reasons) == len(served.prefills)
            assert all(answer.reasons)
        else:
            assert answer.prefill.role is Role.PREFILL
            assert answer.prefill.available
            assert answer.prefill.id not in request.avoid
            assert answer.prefill.model == request.model
            assert answer.decode.why_not_from(answer.prefill) is None
            assert not answer.reasons


@given(num_prefills=st.integers(1, 4), num_decodes=st.integers(1, 4), rounds=st.integers(1, 5))
def test_while_nothing_changes_turns_are_even(num_prefills, num_decodes, rounds):
    prefills = [worker(f"p{i}", Role.PREFILL) for i in range(num_prefills)]
    decodes = [worker(f"d{i}", Role.DECODE) for i in range(num_decodes)]
    policy, fleet = RoundRobin(), Fleet.of([*prefills, *decodes])
    placements = [placed(policy, fleet) for _ in range(num_prefills * num_decodes * rounds)]
    by_decode = Counter(p.decode.id for p in placements)
    by_prefill = Counter(p.prefill.id for p in placements if p.prefill)
    assert set(by_decode.values()) == {num_prefills * rounds}
    assert set(by_prefill.values()) == {num_decodes * rounds}


@given(st.lists(st.tuples(fleets, requests), max_size=20))
def test_the_same_questions_get_the_same_answers(questions):
    first, second = RoundRobin(), RoundRobin()
    for fleet, request in questions:
        asked = fleet, request, FleetLoad()
        assert first.place(*asked) == second.place(*asked)


def test_random_choice_follows_from_its_seed_and_takes_every_worker():
    fleet = fleet_of(D0, D1, D2)
    orders = [
        [placed(policy, fleet).decode.id for _ in range(300)]
        for policy in (RandomChoice(), RandomChoice(), RandomChoice(seed=1))
    ]
    assert orders[0] == orders[1] != orders[2]
    assert all(70 < num < 130 for num in Counter(orders[0]).values())


def test_the_least_loaded_worker_is_chosen_and_equals_take_turns():
    policy, fleet, load = LeastLoaded(), fleet_of(D0, D1, D2), FleetLoad()
    load.begin(Placement(None, D1), 10, 0.0)
    chosen = [policy.place(fleet, DEMO, load).decode.id for _ in range(4)]
    assert chosen == ["d0", "d2", "d0", "d2"]
