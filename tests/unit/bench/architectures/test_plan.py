import pytest

from baton.bench.architectures.plan import (
    choose_configurations,
    plan_trials,
    prompt_seed,
    read_levels,
)
from baton.errors import ConfigError
from tests.unit.bench.architectures.cells import make_plan


def test_every_split_of_the_workers_is_an_arm_and_uses_them_all():
    arms = choose_configurations(4)
    assert [arm.name for arm in arms] == ["single", "replicated", "1P3D", "2P2D", "3P1D"]
    assert [arm.num_workers for arm in arms] == [1, 4, 4, 4, 4]
    assert [arm.is_disaggregated for arm in arms] == [False, False, True, True, True]


def test_arms_are_chosen_by_name_in_any_case_and_a_wrong_name_says_which_there_are():
    assert [arm.name for arm in choose_configurations(2, ["1p1d", "replicated"])] == [
        "replicated",
        "1P1D",
    ]
    with pytest.raises(ConfigError, match="single, replicated, 1P1D"):
        choose_configurations(2, ["2P1D"])


def test_peers_are_arms_only_where_they_are_asked_for():
    assert not any(arm.peer for arm in choose_configurations(2))
    names = [arm.name for arm in choose_configurations(3, peers=("nixl", "vllm-router"))]
    assert names[:4] == ["single", "replicated", "1P2D", "2P1D"]
    assert names[4:] == ["peer:nixl-1P2D", "peer:nixl-2P1D", "peer:vllm-router"]
    (nixl,) = choose_configurations(2, ["Peer:NIXL-1P1D"])
    assert (nixl.peer, nixl.num_prefill, nixl.num_decode) == ("nixl", 1, 1)
    (router,) = choose_configurations(2, ["peer:vllm-router"])
    assert (router.peer, router.num_both, router.is_disaggregated) == ("vllm-router", 2, False)
    assert [arm.name for arm in choose_configurations(2, ["1P1D"], ("vllm-router",))] == [
        "1P1D", "peer:vllm-router",
    ]  # fmt: skip
    assert ":" not in nixl.folder


def test_a_traces_own_arrivals_are_a_load_beside_others():
    levels = read_levels("2", "recorded, 0.5")
    assert [level.key for level in levels] == ["c2", "r0.5", "recorded"]
    assert [level.words for level in levels] == ["2 at once", "0.5 requests/s", "recorded arrivals"]
    assert [level.key for level in read_levels(None, "recorded")] == ["recorded"]


@pytest.mark.parametrize("number", [0, 1, 65])
def test_one_worker_cannot_be_compared(number):
    with pytest.raises(ConfigError, match="2 to 64"):
        choose_configurations(number)


def test_every_repetition_has_every_arm_and_load_once_and_the_order_changes():
    plan = make_plan(repetitions=20)
    turns = plan_trials(plan)
    orders = set()
    for repetition in range(1, 21):
        some = [turn for turn in turns if turn.repetition == repetition]
        assert {turn.configuration for turn in some} == set(plan.configurations)
        assert len(some) == len(plan.configurations)
        assert len({turn.levels for turn in some}) == 1  # alike for all arms of a repetition
        assert set(some[0].levels) == set(plan.levels)
        orders.add(tuple(turn.configuration.name for turn in some))
    assert len(orders) > 3
    assert [turn.repetition for turn in turns] == sorted(turn.repetition for turn in turns)
    assert plan_trials(plan) == turns
    assert plan_trials(make_plan(repetitions=20, seed="other")) != turns


def test_prompts_are_the_same_in_every_arm_and_new_in_every_cell():
    plan = make_plan()
    seeds = {prompt_seed(plan, r, level) for r in range(5) for level in plan.levels}
    assert len(seeds) == 5 * len(plan.levels)


def test_loads_are_sorted_and_counted_once():
    keys = [level.key for level in read_levels("8,1,2,2", "1.5,0.5")]
    assert keys == ["c1", "c2", "c8", "r0.5", "r1.5"]


@pytest.mark.parametrize(
    ("concurrency", "rate"),
    [("0", None), ("a", None), ("1,,2", None), (None, "-1"), (None, "inf"), (None, "x"),
     (None, None), ("5000", None), (None, "nan")],
)  # fmt: skip
def test_loads_that_make_no_sense_are_refused(concurrency, rate):
    with pytest.raises(ConfigError):
        read_levels(concurrency, rate)


def test_what_is_under_way_at_the_end_of_a_load_may_finish():
    plan = make_plan()
    load = plan.effort.plan_load(plan.levels[2])
    assert load.num_warm_up == 4
    assert plan.effort.plan_load(read_levels("64", None)[0]).num_warm_up == 8
    assert load.limits.duration_s == 10.0
    assert load.limits.drain_s == load.limits.request_timeout_s == 60.0
