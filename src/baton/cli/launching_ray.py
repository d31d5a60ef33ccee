"""`baton up --on ray`: from settings to a fleet that serves, and what it prints."""

from __future__ import annotations

import asyncio
import io
import shlex
from typing import TYPE_CHECKING

import msgspec

from baton import __version__
from baton.cli.launching import TRY_THIS, check_settings, issue_monitor
from baton.cli.planning import find_plan
from baton.clock import MachineClock
from baton.config.cluster_key import ephemeral_cluster_key, find_cluster_key
from baton.config.environment import read_environment
from baton.config.logs import configure_logging
from baton.errors import ConfigError
from baton.launch.folder import ray_folder
from baton.launch.plan import worker_positions
from baton.launch.progress import Display, open_display
from baton.launch.ray.connection import CONNECT_TIMEOUT_S, check_ray, connected, find_address
from baton.launch.ray.hosts import list_assignable
from baton.launch.ray.plan import RayPlan, list_needs, plan_fleet, with_assignments
from baton.planner.fleet_plan import split_path
from baton.planner.fleet_printing import print_plan
from baton.protocol.worker_http import Role
from baton.router.placement import POLICIES, choose_policy

if TYPE_CHECKING:
    from baton.config.resolve import Resolved
    from baton.config.sections import Config
    from baton.launch.fleet import FleetMember


def launch_on_ray(resolved: Resolved, fleet: str) -> int:
    """Start a fleet on Ray, wait until it serves, print how to use it, and leave it running.

    Raises:
        ConfigError: the settings, or this Ray, cannot be used.
        FleetError: Ray cannot be reached, places no process in time, or a process cannot run.
    """
    config, environment = resolved.to_config(), read_environment()
    configure_logging(config.log)
    check_settings(config, is_remote=True)
    # What is in a store is keyed: with a key of its own the next fleet would believe none of it.
    find_key = find_cluster_key if config.store.tiers else ephemeral_cluster_key
    key = find_key(config.cluster, environment, ())
    has_key_file = key.origin == "configured" and key.path is not None
    policy = choose_policy(
        config.router.policy, [Role(role) for _, role, _ in worker_positions(config)]
    )
    POLICIES.build(policy, config.router.options.get(policy, {}))
    plan = plan_fleet(resolved, fleet, __version__, policy, has_key_file=has_key_file)
    if config.fleet.near:
        _check_near(config)
    check_ray(environment, insecure=config.ray.insecure)
    clock = MachineClock()
    display, started = open_display(clock), clock.now()
    connect_s = min(CONNECT_TIMEOUT_S, config.ray.timeout_s)
    with connected(find_address(config.ray.address, environment), fleet, connect_s):
        if config.fleet.near or config.fleet.assignments:
            plan = _assign(config, plan, display)
        members = asyncio.run(
            _start(plan, "" if has_key_file else key.text, config.ray.timeout_s, display)
        )
    if not has_key_file:  # else who has the file needs nothing else
        try:
            issue_monitor(config, key.text, ray_folder(fleet, environment))
        except ConfigError as exc:
            display.print_line(f"this user's programs cannot read the workers' metrics: {exc}")
    for line in list_elsewhere(plan, members):
        display.print_line(line)
    display.print_line(f"ready after {clock.now() - started:.1f} s")
    display.announce(how_to_use_fleet(plan.fleet, members))
    return 0


def _check_near(config: Config) -> None:
    if config.fleet.assignments:
        raise ConfigError(
            "fleet.near (--near) assigns workers to hosts, and fleet.assignments has done so: "
            "leave out one of them"
        )
    list_needs(config)  # refuses what cannot be assigned before anything is connected


def _assign(config: Config, plan: RayPlan, display: Display) -> RayPlan:
    """The fleet with its workers on hosts, which is printed."""
    from baton.launch.ray.start import list_hosts  # noqa: PLC0415 - imports Ray

    found = find_plan(config, list_assignable(list_hosts()) if config.fleet.near else ())
    text = io.StringIO()
    print_plan(found, text)
    display.announce(text.getvalue())
    return with_assignments(plan, found.assignments)


def list_elsewhere(plan: RayPlan, members: list[FleetMember]) -> list[str]:
    """A line for each worker that Ray started on another host than its own."""
    paths = {name: path for group in plan.groups for name, path in group.assignments.items()}
    return [
        f"{each.name} is on {each.labels.get('host', each.host)}, not on {paths[each.name]}, which "
        "is not there or has no room: it is as near to it as there was room"
        for each in members
        if each.name in paths and each.labels.get("host") != split_path(paths[each.name])[2]
    ]


async def _start(plan: RayPlan, key: str, timeout_s: float, display: Display) -> list[FleetMember]:
    from baton.launch.ray.actors import FleetActors  # noqa: PLC0415 - imports Ray
    from baton.launch.ray.start import start_fleet  # noqa: PLC0415 - imports Ray

    names = [name for group in plan.groups for name in group.names]
    display.waiting_for(names)
    try:
        return await start_fleet(
            FleetActors(plan.fleet),
            plan,
            key,
            timeout_s=timeout_s,
            on_waiting=display.waiting_for,
        )
    finally:
        display.waiting_for(())


def how_to_use_fleet(fleet: str, members: list[FleetMember]) -> str:
    """What to do with a fleet that serves: where it is, a request to try, how to control it."""
    gateways = [member for member in members if member.role == "gateway"]
    workers = [f"{m.name} on {m.host}" for m in members if m.role != "gateway"]
    url, others = gateways[0].url or "", [member.url or "" for member in gateways[1:]]
    also = f" (also {', '.join(others)})" if others else ""
    request = {"prompt": TRY_THIS, "stream": True, "max_tokens": 64}
    options = f"--on ray --fleet {shlex.quote(fleet)}"
    return f"""
The fleet {fleet} answers at {url}{also}
Its workers: {", ".join(workers)}

Try it, with one of the models of {url}/v1/models as MODEL:
  curl -N {url}/v1/completions -H 'content-type: application/json' \\
    -d {shlex.quote(msgspec.json.encode({"model": "MODEL", **request}).decode())}

It goes on without this command:
  baton status {options}                 what runs, and where
  baton scale --decode 4 {options}       more workers, or fewer
  baton upgrade {options}                new code, one process after the other
  baton down {options}                   drain and end all
"""
