"""Workers that share a device: answers are batched at few of them, steps are learned of one.

The simulated devices have one processor each, which workers that are busy at once share.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.auth.ticket import WorkerRef
from baton.ids import Epoch, WorkerId
from baton.protocol.worker_http import Role
from baton.router.cost import CostOptions, CostPolicy
from baton.router.devices import DeviceSums, SharedDevice
from baton.router.fleet import WorkerView
from baton.router.simple import RoundRobin
from baton.router.topology import Places
from baton.sim.router.costs import SimulatedCosts
from baton.sim.router.sessions import Session, TokenRun, Turn
from baton.sim.router.simulation import Simulation

COSTS = SimulatedCosts(
    step_s=0.006, block_size=512, kv_tokens=1 << 20, workers_per_device=2, handoff_token_s=0.0
)
LOADS = {
    # tokens in, out, at once
    "one": (512, 128, 1),
    "balanced": (512, 128, 4),
    "balanced, more": (512, 128, 16),
    "long prompts": (2048, 32, 4),
    "long prompts, more": (2048, 32, 16),
    "long answers": (128, 512, 16),
}
IN_CHAOS = {"balanced", "long prompts, more"}
"""`make test` has the others: of balanced loads the larger one, of long prompts the smaller one."""


def view(name, role=Role.BOTH, topology=""):
    ref = WorkerRef(WorkerId(name), Epoch("0" * 32), "127.0.0.1:1")
    usable = frozenset({"tcp"})
    return WorkerView(ref, role, "demo", "f", usable, available=True, topology=topology)


def simulate(policy, views, load):
    """Requests a second, after a beginning in which costs are learned."""
    num_tokens, num_answer_tokens, num_clients = load
    simulation = Simulation([policy], views, COSTS)
    sessions = (
        Session((Turn((TokenRun(str(number), num_tokens),), num_answer_tokens),))
        for number in range(1 << 30)
    )
    simulation.add_clients(sessions, num_clients)
    simulation.run(60.0)
    ended = [each for each in simulation.outcomes if each.ended_at > 20.0]
    return len(ended) / 40.0, simulation


@pytest.mark.parametrize(
    "load",
    [
        pytest.param(load, id=name, marks=pytest.mark.every if name in IN_CHAOS else ())
        for name, load in LOADS.items()
    ],
)
def test_it_serves_as_much_as_the_better_of_replicas_and_the_best_split(load):
    fixed = [simulate(RoundRobin(), [view(f"w{n}") for n in range(4)], load)[0]]
    for num_prefill in (1, 2, 3):
        roles = [Role.PREFILL] * num_prefill + [Role.DECODE] * (4 - num_prefill)
        views = [view(f"{role}{n}", role) for n, role in enumerate(roles)]
        fixed.append(simulate(RoundRobin(), views, load)[0])
    policy = CostPolicy(CostOptions(objective="throughput"))
    served, simulation = simulate(policy, [view(f"w{n}") for n in range(4)], load)
    assert served >= 0.98 * max(fixed), (served, fixed)
    line = simulation.load.costs("demo").step
    # What a step takes by itself is learned, whatever else is on its device.
    assert line.predict(load[2] / 2) == pytest.approx(0.006 + 0.0004 * load[2] / 2, rel=0.35)


def test_where_it_is_not_known_that_devices_are_shared_less_is_served(monkeypatch):
    """What the tests above are worth."""
    policy, views = CostPolicy(CostOptions(objective="throughput")), [*map(view, "abcd")]
    known, _ = simulate(policy, views, LOADS["balanced"])
    monkeypatch.setattr(Places, "has_device", property(lambda self: np.zeros(1 << 12, bool)))
    policy = CostPolicy(CostOptions(objective="throughput"))
    unknown, _ = simulate(policy, views, LOADS["balanced"])
    assert unknown < 0.8 * known


@given(st.lists(st.tuples(st.integers(0, 5), st.floats(0, 9)), min_size=1, max_size=12))
def test_sums_over_devices(workers):
    places = Places()
    paths = ["", "//host", "//host/a", "//host/b", "//other/a", "z/r/other/a"]
    numbers = np.array([places.number(paths[at]) for at, _ in workers], dtype=np.intp)
    values = np.array([value for _, value in workers])
    sums = DeviceSums.of(numbers, places.has_device)
    expected = [
        sum(v for other, v in workers if other == at) if at > 1 else value for at, value in workers
    ]
    known = [at for at, _ in workers if at > 1]
    assert (sums is None) == (len(known) == len(set(known)))
    if sums is not None:
        assert sums.sum(values) == pytest.approx(expected)


@given(st.lists(st.tuples(st.sampled_from([-1, 1]), st.floats(0, 3)), max_size=20))
def test_busy_seconds_are_those_of_each_worker(changes):
    device, num, expected, now = SharedDevice(), 0, 0.0, 0.0
    for change, wait_s in changes:
        if num + change >= 0:
            device.count(change, now)
            num += change
        now += wait_s
        expected += num * wait_s
        assert device.busy_seconds(now) == pytest.approx(expected)
        assert device.num_busy == num
