"""From settings to a plan of a fleet: for `baton plan`, and for `baton up --on ray`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from baton.config.environment import read_environment
from baton.errors import ConfigError
from baton.launch.fleet import DEFAULT_FLEET
from baton.launch.plan import worker_positions
from baton.launch.ray.connection import CONNECT_TIMEOUT_S, check_ray, connected, find_address
from baton.launch.ray.hosts import list_assignable
from baton.launch.ray.plan import given_settings, list_needs, settings_file
from baton.ops.gateway_pages import Gateway
from baton.planner.fleet_plan import FleetPlan, describe_fleet, plan_assignments
from baton.planner.measured_rates import read_rates
from baton.planner.traffic import ExpectedKV, LinkRate, choose_rates, expect_kv

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from baton.config.resolve import Resolved
    from baton.config.sections import Config, HostTable
    from baton.router.topology import Distance

PLANNED_KEYS: Final = ("fleet.assignments.", "fleet.near")


def list_ray_hosts(config: Config) -> list[HostTable]:
    """The hosts of a Ray cluster to which workers can be assigned.

    Raises:
        ConfigError: this Ray cannot be used, or its hosts have no names.
        FleetError: Ray cannot be reached.
    """
    environment = read_environment()
    check_ray(environment, insecure=config.ray.insecure)
    address = find_address(config.ray.address, environment)
    with connected(address, DEFAULT_FLEET, min(CONNECT_TIMEOUT_S, config.ray.timeout_s)):
        from baton.launch.ray.start import list_hosts  # noqa: PLC0415 - imports Ray

        return list_assignable(list_hosts())


def make_plan(
    config: Config,
    hosts: Sequence[HostTable],
    *,
    kv_model: str | None = None,
    gateway: str | None = None,
) -> FleetPlan:
    """Assign the fleet's workers to hosts.

    `gateway`: the URL of one whose workers have measured their links.

    Raises:
        ConfigError: no assignment is possible, or what it follows from is not known.
        PageError: the gateway does not answer.
    """
    measured = {} if gateway is None else read_rates(Gateway.at(gateway, "--gateway"))
    rates = choose_rates(config.fleet.links, measured)
    kv = expect_kv(config.fleet, kv_model or config.worker.model)
    assignments = plan_assignments(hosts, list_needs(config), rates, config.fleet)
    return _describe(config, assignments, rates, kv)


def find_plan(config: Config, hosts: Sequence[HostTable]) -> FleetPlan:
    """The plan of a fleet that is about to start: as it was written, or for these hosts.

    A model whose KV is not understood is no reason not to start it.

    Raises:
        ConfigError: what is written is of another fleet; no assignment is possible.
    """
    rates = choose_rates(config.fleet.links, {})
    assignments = config.fleet.assignments or plan_assignments(
        hosts, list_needs(config), rates, config.fleet
    )
    try:
        kv = expect_kv(config.fleet, config.worker.model)
    except ConfigError:
        kv = None
    return _describe(config, assignments, rates, kv)


def _describe(
    config: Config,
    assignments: Mapping[str, str],
    rates: Mapping[Distance, LinkRate],
    kv: ExpectedKV | None,
) -> FleetPlan:
    workers = [(name, role) for name, role, _ in worker_positions(config)]
    return describe_fleet(workers, assignments, rates, kv=kv, spread=config.fleet.spread)


def planned_settings(resolved: Resolved, plan: FleetPlan) -> str:
    """A configuration file: what was set by file, environment and flags, and the plan."""
    settings = {
        name: value
        for name, value in given_settings(resolved).items()
        if not name.startswith(PLANNED_KEYS)
    }
    settings |= {f"fleet.assignments.{name}": path for name, path in plan.assignments.items()}
    return settings_file(settings)
