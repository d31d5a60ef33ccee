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
    """What clients would have seen under one policy: those whose requests ended."""

    policy: str
    options: dict[str, object]
    summary: Summary


class ReplayReport(msgspec.Struct, frozen=True):
    """What `--json` prints. Times are virtual. A good request is within `ttft_s` and `tpot_s`.

    `is_partial`: interrupted in the last of the policies, or before the next one.
    """

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
    is_partial: bool = False


def run_replay(plan: ReplayPlan) -> ReplayReport:
    """Replay the plan's load under each of its policies, or as far as it gets until Ctrl-C.

    Raises:
        ConfigError: a policy's options are wrong, or there are no requests.
        NoRoomError: a request does not fit in the simulated workers.
        KeyboardInterrupt: before the first request has ended.
    """
    workload, policies = plan.workload, list[PolicyReplay]()
    is_partial = False
    for choice in plan.policies:
        simulation = _prepare(plan, choice)
        try:
            simulation.run()
        except KeyboardInterrupt:
            is_partial = True
            if not (simulation.outcomes or policies):
                raise
        if simulation.outcomes:
            found = summarize(simulation.outcomes, plan.ttft_s, plan.tpot_s, plan.itl_s)
            policies.append(PolicyReplay(choice.name, dict(choice.options), found))
        if is_partial:
            break
    if not policies:
        raise ConfigError("there are no requests to replay")
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
        policies=tuple(policies),
        is_partial=is_partial,
    )


def _prepare(plan: ReplayPlan, choice: PolicyChoice) -> Simulation:
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
    return simulation
