import os

import pytest

from baton.bench.architectures.plan import choose_configurations
from baton.bench.load.records import parse_slo
from baton.cli.bench_architectures import ServerFlags, with_limits


@pytest.fixture
def four_cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})


def cores_of(flags):
    return {
        arm.name: [
            worker.settings["worker.cpu_affinity"] for worker in flags.plan_launch(arm).workers
        ]
        for arm in choose_configurations(flags.workers)
    }


def test_every_worker_of_every_arm_has_an_equal_share_of_the_machine(four_cores):
    assert cores_of(ServerFlags(workers=2)) == {
        "single": [(0, 1)],  # not the whole machine
        "replicated": [(0, 1), (2, 3)],
        "1P1D": [(0, 1), (2, 3)],
    }
    shares = cores_of(ServerFlags(workers=4))
    assert shares["single"] == [(0,)]
    assert shares["2P2D"] == shares["replicated"] == [(0,), (1,), (2,), (3,)]


def test_engines_get_as_many_threads_as_cores(four_cores):
    for arm in choose_configurations(2):
        for worker in ServerFlags(workers=2).plan_launch(arm).workers:
            assert worker.settings["engine.num_threads"] == 2


def test_roles_and_a_port_that_nobody_holds(four_cores):
    flags = ServerFlags(workers=3)
    roles = {
        arm.name: [worker.role for worker in flags.plan_launch(arm).workers]
        for arm in choose_configurations(3)
    }
    assert roles == {
        "single": ["both"],
        "replicated": ["both"] * 3,
        "1P2D": ["prefill", "decode", "decode"],
        "2P1D": ["prefill", "prefill", "decode"],
    }
    assert flags.plan_launch(choose_configurations(3)[0]).config.gateway.port == 0


def test_the_arms_of_an_objective_have_it_whatever_is_configured():
    flags = ServerFlags(
        workers=2,
        assignments=["router.options.cost.objective=goodput", "router.options.cost.ttft_s=3.0"],
    )
    arms = choose_configurations(2, ["adaptive", "adaptive-throughput", "adaptive-goodput"])
    options = {arm.name: flags.plan_launch(arm).config.router.options["cost"] for arm in arms}
    assert {name: each["objective"] for name, each in options.items()} == {
        "adaptive": "goodput",
        "adaptive-throughput": "throughput",
        "adaptive-goodput": "goodput",
    }
    assert all(float(each["ttft_s"]) == 3.0 for each in options.values())
    assert all(arm.is_compared and arm.policy == "cost" for arm in arms)


def test_the_given_slo_is_the_limit_of_the_adaptive_arms():
    given = ServerFlags(workers=2, assignments=["router.options.cost.tpot_s=0.03"])
    arm = choose_configurations(2, ["adaptive-goodput"])[0]
    options = with_limits(given, parse_slo(["ttft:400", "tpot:12"])).plan_launch(arm)
    cost = options.config.router.options["cost"]
    assert (float(cost["ttft_s"]), float(cost["tpot_s"])) == (0.4, 0.03)
    assert with_limits(given, None) is given
