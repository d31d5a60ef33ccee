"""`baton up`: from settings to a running launch and what it prints."""

from __future__ import annotations

import asyncio
import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from baton.auth.certificates import IdentityRole
from baton.auth.issuing import Order, issue_derived
from baton.cli.engine_options import check_engine, engine_defaults, engine_options
from baton.cli.plugin_options import check_worker_options
from baton.clock import MachineClock
from baton.config.cluster_key import (
    KEY_VARIABLE,
    ClusterKeyText,
    ephemeral_cluster_key,
    find_cluster_key,
)
from baton.config.environment import read_environment
from baton.config.logs import configure_logging
from baton.errors import ConfigError
from baton.gateway.options import check_processes
from baton.launch.control import Control
from baton.launch.fleet import DEFAULT_FLEET
from baton.launch.folder import FleetFolder, claim, fleet_folder, remove_monitor
from baton.launch.logs import LogFolder
from baton.launch.operations import FleetOperations
from baton.launch.plan import (
    LOOPBACK,
    LaunchPlan,
    Pinning,
    count_peer_ports,
    plan_launch,
    share_cores,
    worker_groups,
)
from baton.launch.ports import find_free_ports
from baton.launch.progress import LoggedDisplay, PlainDisplay, open_display
from baton.launch.supervisor import LaunchContext, Service, Supervisor
from baton.net.credentials import parse_keys
from baton.protocol.gateway_http import DASHBOARD_PATH
from baton.protocol.worker_http import Role
from baton.router.placement import POLICIES, choose_policy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from baton.config.resolve import Resolved
    from baton.config.sections import Config

TRY_THIS = "Write me a story about a house by the sea, and about those who lived in it."
"""Longer than a block: shorter prompts are computed by the decode worker, without a handoff."""

USE_KEY: Final = """
    -H 'authorization: Bearer YOUR_API_KEY' \\"""
CTRL_C: Final = """\
Ctrl-C drains and stops everything; a second Ctrl-C kills.
"""


def launch(
    resolved: Resolved, pinning: Pinning, fleet: str = DEFAULT_FLEET, *, in_background: bool = False
) -> int:
    """Run a launch to its end: its exit code.

    `in_background`: once it serves, it has no part in the terminal any more.

    Raises:
        ConfigError: the settings ask for something that cannot be started, or a fleet of this name
            runs.
        ChildFailedError: a process failed.
    """
    config = resolved.to_config()
    configure_logging(config.log)
    folder = fleet_folder(fleet, read_environment())
    plan = _plan(resolved, sorted(os.sched_getaffinity(0)), pinning)
    with claim(folder):
        return asyncio.run(_launch(plan, folder, in_background=in_background))


def plan_pinned(resolved: Resolved, num_shares: int) -> LaunchPlan:
    """A launch whose workers have one share each of so many equal shares of the machine.

    Raises:
        ConfigError: the settings ask for something that cannot be started.
    """
    config = resolved.to_config()
    shares = share_cores(sorted(os.sched_getaffinity(0)), num_shares)
    num_workers = config.up.prefill + config.up.decode
    cores = [core for share in shares[:num_workers] for core in share]
    return _plan(resolved, cores, "own_cores")


def _plan(resolved: Resolved, cores: Sequence[int], pinning: Pinning) -> LaunchPlan:
    """The processes to start. What one of them would refuse is refused here, before any starts."""
    config = resolved.to_config()
    model = config.worker.model
    if model is not None and not Path(model).is_dir():
        raise ConfigError(f"--model {model}: there is no such folder")
    check_settings(config)
    engine_keys = {
        group.engine: frozenset(engine_defaults(group.engine)) for group in worker_groups(config)
    }
    plan = plan_launch(
        resolved,
        cores=cores,
        engine_keys=engine_keys,
        pinning=pinning,
        peer_ports=find_free_ports(LOOPBACK, count_peer_ports(config)),
    )
    policy = choose_policy(config.router.policy, [Role(each.role) for each in plan.workers])
    POLICIES.build(policy, config.router.options.get(policy, {}))
    return plan


def find_launch_key(config: Config) -> ClusterKeyText:
    """The cluster key of a launch: the configured one, else one of its own, or this user's.

    Raises:
        ConfigError: the file is unreadable or readable by others, or a key is needed and absent.
    """
    hosts = (config.gateway.host, config.worker.host, config.worker.handoff_host)
    # What is in a store is keyed: with a key of its own the next run would believe none of it.
    find_key = find_cluster_key if config.store.tiers else ephemeral_cluster_key
    return find_key(config.cluster, read_environment(), hosts)


def server_environment(key: ClusterKeyText) -> dict[str, str]:
    """What children inherit.

    `cluster.key_file` is theirs, too: they read it themselves, and follow its changes. Any other
    key they get by environment, never by command line: other users can read those.
    """
    environment = {**read_environment(), "PYTHONUNBUFFERED": "1"}
    if key.origin == "configured" and key.path is not None:
        return environment
    return {**environment, KEY_VARIABLE: key.text}


def issue_monitor(config: Config, key_text: str, folder: FleetFolder) -> None:
    """Let this user's programs read the workers' metrics, with a key that is kept nowhere, too."""
    if config.security.identity is None and config.security.tls != "off":
        remove_monitor(folder)
        order = Order(IdentityRole.MONITOR, folder.fleet)
        issue_derived(order, parse_keys(key_text), folder.monitor)


async def _launch(plan: LaunchPlan, folder: FleetFolder, *, in_background: bool) -> int:
    clock = MachineClock()
    display = LoggedDisplay(
        PlainDisplay(clock) if in_background else open_display(clock),
        LogFolder(folder.logs),
        clock,
        shows_children=not in_background,
    )
    key = find_launch_key(plan.config)
    issue_monitor(plan.config, key.text, folder)
    context = LaunchContext(server_environment(key), clock, display, members=folder.members)
    supervisor = Supervisor(plan, context)
    operations = FleetOperations(folder.fleet, supervisor)

    def on_ready(service: Service) -> None:
        end = _how_to_control(folder.fleet) if in_background else CTRL_C
        display.announce(how_to_use(service, plan) + end)
        if in_background:
            display.leave_terminal()

    async with Control(supervisor, operations, display.print_line).serving(folder):
        return await supervisor.run(on_ready)


def how_to_use(service: Service, plan: LaunchPlan) -> str:
    """What to do with a launch that is ready: where it is, a request to try."""
    url, workers = service.url, ", ".join(worker.name for worker in plan.workers)
    dashboards = " ".join(f"{each}{DASHBOARD_PATH}" for each in service.management_urls)
    request = {
        "model": service.model,
        "messages": [{"role": "user", "content": TRY_THIS}],
        "stream": True,
        "max_tokens": 64,
    }
    key = "" if plan.config.gateway.client_keys_file is None else USE_KEY
    return f"""
Baton answers at {url} (model: {service.model}; workers: {workers})
Dashboard: {dashboards}

Try it:
  curl -N {url}/v1/chat/completions -H 'content-type: application/json' \\{key}
    -d {shlex.quote(msgspec.json.encode(request).decode())}

OpenAI clients use {url}/v1 as their base URL; more is in README.md.
"""


def _how_to_control(fleet: str) -> str:
    named = "" if fleet == DEFAULT_FLEET else f" --fleet {fleet}"
    return f"""
It runs in the background:
  baton status{named}
  baton logs gateway --follow{named}
  baton down{named}
"""


def check_settings(config: Config, *, is_remote: bool = False) -> None:
    """Refuse settings that are wrong on any host. `is_remote`: see `check_worker_options`.

    Raises:
        ConfigError: one of them.
    """
    check_processes(config.gateway.processes, config.gateway.management_port)
    for group in worker_groups(config):
        options = engine_options(group.engine, config.engine)
        check_engine(group.engine, {**options, **group.overrides})
    check_worker_options(config, is_launcher=True, is_remote=is_remote)
    POLICIES.check_tables(config.router.options)
