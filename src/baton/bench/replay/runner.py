"""One simulation for each policy, with the same requests."""

from __future__ import annotations

import msgspec

from baton.bench.replay.plan import Clients, PolicyChoice, ReplayPlan
from baton.bench.replay.sessions import make_sessions
from baton.errors import ConfigError
from baton.router.placement import POLICIES, find_first_share
from baton.sim.router.costs import SimulatedCosts
from baton.sim.router.outcomes import Summary, summarize
from baton.sim.router.simulation import Simulation


class PolicyReplay(msgspec.Struct, frozen=True):
    """What clients would have seen under one policy."""

    policy: str
    options: dict[str, object]
    summary: Summary


class ReplayReport(msgspec.Struct, frozen=True):
    """What `--json` prints. Times are virtual. A good request is within `ttft_s` and `tpot_s`."""

    workload: str
    description: str
    warnings: tuple[str, ...]
    workers: dict[str, str]
    costs: SimulatedCosts
    num_gateways: int
    ttft_s: float
    tpot_s: float
    itl_s: float | None
    seed: int
    policies: tuple[PolicyReplay, ...]


def run_replay(plan: ReplayPlan) -> ReplayReport:
    """Replay the plan's load under each of its policies.

    Raises:
        ConfigError: a policy's options are wrong, or there are no requests.
        NoRoomError: a request does not fit in the simulated workers.
    """
    workload = plan.workload
    return ReplayReport(
        workload=workload.name,
        description=workload.description,
        warnings=workload.warnings,
        workers={str(view.id): view.role.value for view in plan.workers},
        costs=plan.costs,
        num_gateways=plan.num_gateways,
        ttft_s=plan.ttft_s,
        tpot_s=plan.tpot_s,
        itl_s=plan.itl_s,
        seed=plan.seed,
        policies=tuple(_run(plan, choice) for choice in plan.policies),
    )


def _run(plan: ReplayPlan, choice: PolicyChoice) -> PolicyReplay:
    build = POLICIES.build(choice.name, choice.options)
    policies = [build(plan.mode) for _ in range(plan.num_gateways)]
    num = plan.num_gateways
    shares = [find_first_share(choice.name, index, num) for index in range(num)]
    simulation = Simulation(
        policies, plan.workers, plan.costs, plan.seed, first_shares=shares, itl_s=plan.itl_s
    )
    sessions = make_sessions(plan)
    if isinstance(plan.arrivals, Clients):
        simulation.add_clients(sessions, plan.arrivals.num)
    else:
        simulation.replay(sessions)
    simulation.run()
    if not simulation.outcomes:
        raise ConfigError("there are no requests to replay")
    found = summarize(simulation.outcomes, plan.ttft_s, plan.tpot_s, plan.itl_s)
    return PolicyReplay(choice.name, dict(choice.options), found)
