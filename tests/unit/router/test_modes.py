from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.auth.ticket import HandoffMode, WorkerRef
from baton.ids import Epoch, WorkerId
from baton.protocol.worker_http import Role, WorkerLoad
from baton.router.fleet import Fleet, WorkerView
from baton.router.load import FleetLoad
from baton.router.modes import ModeSetting, choose_mode
from baton.router.placement import Placement, PlacementRequest
from baton.router.simple import RoundRobin

ALL: frozenset[HandoffMode] = frozenset(get_args(HandoffMode))
ROOMY = WorkerLoad(num_waiting=0, num_blocks=100, num_free_blocks=90, block_size=16)
FULL = WorkerLoad(num_waiting=0, num_blocks=100, num_free_blocks=5, block_size=16)
QUEUED = WorkerLoad(num_waiting=3, num_blocks=100, num_free_blocks=90, block_size=16)
LONG = PlacementRequest("demo", num_prompt_tokens=1000)
BOTH: frozenset[HandoffMode] = frozenset({"push", "pull"})


def worker(
    name: str,
    load: WorkerLoad | None = ROOMY,
    modes: frozenset[HandoffMode] = BOTH,
    host: str = "10.0.0.1",
) -> WorkerView:
    role = Role.PREFILL if name.startswith("p") else Role.DECODE
    ref = WorkerRef(WorkerId(name), Epoch("0" * 32), f"{host}:1")
    return WorkerView(ref, role, "demo", "f", frozenset({"tcp"}), True, modes=modes, load=load)


def auto(prefill: WorkerView, decode: WorkerView, request: PlacementRequest = LONG):
    return choose_mode(prefill, decode, request, "auto")


def test_push_unless_decode_is_short_of_room() -> None:
    assert auto(worker("p"), worker("d")).mode == "push"
    assert auto(worker("p"), worker("d", None)).mode == "push"


@pytest.mark.parametrize(("load", "says"), [(FULL, "5 of 100 blocks free"), (QUEUED, "3 requests")])
def test_pull_where_decode_has_no_room(load: WorkerLoad, says: str) -> None:
    choice = auto(worker("p"), worker("d", load))
    assert (choice.mode, choice.is_degraded) == ("pull", False)
    assert says in choice.reasons[0]


def test_a_short_prompt_is_pushed_whatever_the_load() -> None:
    short = replace(LONG, num_prompt_tokens=40)
    choice = auto(worker("p"), worker("d", FULL), short)
    assert (choice.mode, choice.reasons) == ("push", ("a short prompt, of about 40 tokens",))


def test_nothing_waits_at_a_prefill_worker_that_is_short_itself() -> None:
    choice = auto(worker("p", FULL), worker("d", FULL))
    assert choice.mode == "push"
    assert len(choice.reasons) == 2
    assert "in the way" in choice.reasons[1]
    pooling = BOTH | {"pool"}
    assert auto(worker("p", FULL, pooling), worker("d", FULL, pooling)).mode == "pool"


def test_on_one_host_nothing_need_be_copied() -> None:
    prefill, decode = worker("p", modes=ALL), worker("d", FULL, ALL)
    assert auto(prefill, decode).mode == "reference"
    assert auto(prefill, worker("d", FULL, ALL, host="10.0.0.2")).mode == "pull"


def test_workers_that_know_only_push_are_never_asked_for_more() -> None:
    old: frozenset[HandoffMode] = frozenset({"push"})
    for prefill, decode in ((old, BOTH), (BOTH, old)):
        choice = auto(worker("p", modes=prefill), worker("d", FULL, decode))
        assert (choice.mode, choice.is_degraded) == ("push", False)


def test_the_operator_has_the_last_word_where_the_workers_can() -> None:
    for mode in get_args(HandoffMode):
        choice = choose_mode(worker("p", modes=ALL), worker("d", modes=ALL), LONG, mode)
        assert (choice.mode, choice.reasons) == (mode, (f"the operator chose {mode}",))
    choice = choose_mode(worker("p"), worker("d"), LONG, "pool")
    assert (choice.mode, choice.is_degraded) == ("push", True)
    assert choice.reasons == ("the operator chose pool", "p does not know the mode pool")


def test_a_mode_that_failed_the_request_is_followed_by_the_next() -> None:
    pulled = replace(LONG, failed_modes=frozenset({"pull"}))
    choice = choose_mode(worker("p"), worker("d"), pulled, "pull")
    assert (choice.mode, choice.is_degraded) == ("push", True)
    assert choice.reasons[-1] == "pull has just failed this request, or is not for it"
    nothing = choose_mode(worker("p"), worker("d"), replace(LONG, failed_modes=ALL), "auto")
    assert nothing.mode is None


def test_placement_says_the_mode_and_why() -> None:
    fleet = Fleet.of((worker("p"), worker("d", FULL)))
    placement = RoundRobin().place(fleet, LONG, FleetLoad())
    assert isinstance(placement, Placement)
    assert (placement.mode, placement.reasons) == ("pull", ())
    assert placement.why
    everything_failed = RoundRobin().place(fleet, replace(LONG, failed_modes=ALL), FleetLoad())
    assert isinstance(everything_failed, Placement)
    assert everything_failed.mode == "colocated"
    assert everything_failed.reasons


def test_colocated_by_the_operators_word_is_no_failure() -> None:
    placement = RoundRobin("colocated").place(
        Fleet.of((worker("p"), worker("d"))), LONG, FleetLoad()
    )
    assert isinstance(placement, Placement)
    assert (placement.mode, placement.reasons) == ("colocated", ())
    assert placement.why == ("the operator chose colocated",)


LOADS = st.none() | st.builds(
    WorkerLoad,
    num_waiting=st.integers(0, 2),
    num_blocks=st.just(100),
    num_free_blocks=st.integers(0, 100),
    block_size=st.just(16),
)
MODES = st.frozensets(st.sampled_from(sorted(ALL))).map(lambda some: some | {"push"})


@given(
    loads=st.tuples(LOADS, LOADS),
    modes=st.tuples(MODES, MODES),
    num_tokens=st.integers(0, 5000),
    failed=st.frozensets(st.sampled_from(sorted(ALL))),
    setting=st.sampled_from(["auto", *sorted(ALL)]),
)
def test_only_what_both_know_and_has_not_failed_is_chosen(
    loads: tuple[WorkerLoad | None, WorkerLoad | None],
    modes: tuple[frozenset[HandoffMode], frozenset[HandoffMode]],
    num_tokens: int,
    failed: frozenset[HandoffMode],
    setting: ModeSetting,
) -> None:
    prefill, decode = (worker(n, load, m) for n, load, m in zip("pd", loads, modes, strict=True))
    request = PlacementRequest("demo", num_prompt_tokens=num_tokens, failed_modes=failed)
    choice = choose_mode(prefill, decode, request, setting)
    usable = (prefill.modes & decode.modes) - failed
    assert choice.reasons
    if choice.mode is None:
        assert not usable
    else:
        assert choice.mode in usable
    if setting in usable:
        assert choice.mode == setting
