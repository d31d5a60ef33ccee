"""Starts supervisors, and waits until their processes serve."""

from __future__ import annotations

import asyncio
from math import inf
from typing import TYPE_CHECKING, Final

import msgspec
import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from baton.errors import ConfigError
from baton.launch.errors import FleetError, UnplacedError
from baton.launch.ray.actors import FleetActors, NoAnswerError
from baton.launch.ray.connection import describe, namespace_of
from baton.launch.ray.hosts import list_selectors
from baton.launch.ray.members_file import read_member
from baton.launch.ray.plan import ProcessGroup, RayHostFacts, RayPlan, explain_unplaced
from baton.launch.ray.process import LogLines
from baton.launch.ray.supervisor import Supervisor

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from baton.launch.fleet import FleetMember

HEAD_TIMEOUT_S: Final = 10.0
POLL_INTERVAL_S: Final = 0.25
MAX_CONCURRENT_CALLS: Final = 16
"""Of one supervisor: each gateway's asks, and one that stops its process takes a place."""
MAX_PENDING_CALLS: Final = 256
"""Of one caller to a supervisor that has no host: those above it fail at once."""
NUM_SHOWN_LINES: Final = 20
HOST_LABEL: Final = "ray.io/node-id"
"""A label that Ray gives each host, with a value of its own."""
NAME_TAKEN: Final = ("already taken", "already exists in the namespace")
"""In Ray's message of an actor whose name another one has: by its client, and by its head."""
BUNDLE_CPUS: Final = 0.001
"""A bundle must have something; supervisors take no cores from what else runs on Ray."""


class NameTakenError(FleetError):
    """Ray has a process of this name in this fleet already."""


async def start_fleet(
    supervisors: FleetActors,
    plan: RayPlan,
    key: str,
    *,
    timeout_s: float,
    on_waiting: Callable[[Sequence[str]], None],
) -> list[FleetMember]:
    """Start everything: all processes, ready, gateways first. On failure nothing is left.

    `timeout_s` is for Ray to find a host for each process; loading a model takes what it takes.

    Raises:
        ConfigError: the fleet runs already.
        FleetError: Ray does not place a process in time, or one cannot run.
    """
    if running := await supervisors.list_names(HEAD_TIMEOUT_S):
        raise ConfigError(_runs_already(plan.fleet, running))
    names = [name for group in plan.groups for name in group.names]
    # Whoever creates the first supervisor has the fleet: of two that start it at once, the other
    # one must not remove what it has not created.
    try:
        create_supervisor(plan, plan.groups[0], names[0])
    except NameTakenError as exc:
        raise ConfigError(_runs_already(plan.fleet, names[:1])) from exc
    try:
        for group in plan.groups:
            create_group(plan, group, except_for=names[0])
        await wait_until_placed(supervisors, plan, names, key=key, timeout_s=timeout_s)
        return await wait_until_ready(
            supervisors, names, timeout_s=timeout_s, on_waiting=on_waiting
        )
    except BaseException:
        await remove_all(supervisors, plan, names)
        raise


def _runs_already(fleet: str, running: Collection[str]) -> str:
    return (
        f"the fleet {fleet!r} runs already, with {', '.join(sorted(running))}: end it with "
        f"`baton down --on ray --fleet {fleet}`, or choose another name with --fleet"
    )


def create_group(plan: RayPlan, group: ProcessGroup, *, except_for: str) -> None:
    """Have Ray start the supervisors that a fleet begins with in one group, but for one.

    Raises:
        ConfigError: Ray refuses the group's labels.
    """
    bundles = None
    if group.is_reserved_together:
        bundles = _reserve(plan, group)
    for index, name in enumerate(group.names):
        if name != except_for:
            create_supervisor(plan, group, name, bundles=bundles, index=index)


def _reserve(plan: RayPlan, group: ProcessGroup) -> PlacementGroup:
    needed = {"GPU": group.gpus, "CPU": group.cpus, "memory": group.memory_bytes}
    bundle = {name: amount for name, amount in needed.items() if amount} or {"CPU": BUNDLE_CPUS}
    strategies = {HOST_LABEL: (group.placement or "pack").upper()}
    if group.within is not None:
        strategies[group.within] = "STRICT_PACK"
    try:
        return placement_group(
            [bundle] * group.num_processes,
            topology_strategy=strategies,
            name=_placement_name(plan, group),
            lifetime="detached",
            bundle_label_selector=[group.selector] * group.num_processes,
        )
    except ValueError as exc:
        raise ConfigError(f"Ray refuses ray.workers.{group.role}: {describe(exc)}") from exc


def create_supervisor(
    plan: RayPlan,
    group: ProcessGroup,
    name: str,
    *,
    bundles: PlacementGroup | None = None,
    index: int = 0,
    near: str | None = None,
) -> None:
    """Have Ray start one supervisor, which outlives this process; returns at once.

    `near`: the path of the host on which it is to be, if not the one that it is assigned to.

    Raises:
        NameTakenError: Ray has a process of this name in this fleet.
        ConfigError: Ray refuses the group's labels.
    """
    in_bundle = None if bundles is None else PlacementGroupSchedulingStrategy(bundles, index)
    path = near or group.assignments.get(name)
    selector, *others = list_selectors(group.selector, path)
    try:
        ray.remote(Supervisor).options(
            name=name,
            namespace=namespace_of(plan.fleet),
            lifetime="detached",
            max_restarts=-1,
            max_concurrency=MAX_CONCURRENT_CALLS,
            max_pending_calls=MAX_PENDING_CALLS,
            num_cpus=group.cpus,
            num_gpus=group.gpus,
            memory=group.memory_bytes or None,
            label_selector=None if in_bundle else selector or None,
            fallback_strategy=[{"label_selector": each} for each in others] or None,
            scheduling_strategy=in_bundle or "SPREAD",
        ).remote(name, msgspec.json.encode(plan))
    except ValueError as exc:
        if any(text in str(exc) for text in NAME_TAKEN):
            raise NameTakenError(
                f"another command changes the fleet {plan.fleet!r}, and has started {name} "
                "meanwhile: try again when it has ended"
            ) from exc
        raise ConfigError(f"Ray refuses the options of {name}: {describe(exc)}") from exc


async def wait_until_placed(
    supervisors: FleetActors, plan: RayPlan, names: Sequence[str], *, key: str, timeout_s: float
) -> None:
    """Until each supervisor has a host, and the cluster key.

    Raises:
        UnplacedError: some have none in time.
        FleetError: one cannot run where it is.
    """
    calls = (supervisors.call(name, "give_key", key, timeout_s=timeout_s) for name in names)
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    for outcome in outcomes:
        if isinstance(outcome, BaseException) and not isinstance(outcome, NoAnswerError):
            raise outcome
    if unplaced := [
        name
        for name, outcome in zip(names, outcomes, strict=True)
        if isinstance(outcome, NoAnswerError)
    ]:
        hosts = await asyncio.to_thread(list_hosts)
        raise UnplacedError(explain_unplaced(plan, unplaced, hosts, timeout_s))


async def wait_until_ready(
    supervisors: FleetActors,
    names: Sequence[str],
    *,
    timeout_s: float,
    on_waiting: Callable[[Sequence[str]], None],
    ready_timeout_s: float = inf,
) -> list[FleetMember]:
    """Until each process serves.

    Raises:
        FleetError: one has ended too often, is not ready after `ready_timeout_s`, or its supervisor
            does not answer for `timeout_s`.
    """
    loop = asyncio.get_running_loop()
    give_up_at = loop.time() + ready_timeout_s
    while True:
        calls = (supervisors.call(name, "status", timeout_s=timeout_s) for name in names)
        members = [read_member(answer) for answer in await asyncio.gather(*calls)]
        for member in members:
            if member.state in {"failed", "ended"}:
                reason = member.reason or "failed"
                raise FleetError(await _explain_failure(supervisors, member, reason))
        waiting = [member for member in members if member.state != "ready"]
        on_waiting([f"{m.name} ({m.reason})" if m.reason else m.name for m in waiting])
        if not waiting:
            return members
        if loop.time() >= give_up_at:
            reason = f"was not ready after {ready_timeout_s:g} s"
            raise FleetError(await _explain_failure(supervisors, waiting[0], reason))
        await asyncio.sleep(POLL_INTERVAL_S)


async def _explain_failure(supervisors: FleetActors, member: FleetMember, reason: str) -> str:
    try:
        answer = await supervisors.call(
            member.name, "lines", -NUM_SHOWN_LINES, timeout_s=HEAD_TIMEOUT_S
        )
        lines = msgspec.json.decode(answer if isinstance(answer, bytes) else b"", type=LogLines)
        quoted = "\n".join(f"    {line}" for line in lines.lines)
    except (FleetError, msgspec.MsgspecError) as exc:
        quoted = f"    ({exc})"
    return (
        f"{member.name} on {member.host} {reason}. Its last lines:\n"
        f"{quoted or '    (it wrote nothing)'}"
    )


async def remove_all(supervisors: FleetActors, plan: RayPlan, names: Sequence[str]) -> None:
    """End these supervisors, and give back what was reserved for the fleet.

    Raises:
        FleetError: Ray's head does not answer in time.
    """
    for name in names:
        await supervisors.remove(name, HEAD_TIMEOUT_S)
    for group in plan.groups:
        if group.is_reserved_together:
            await asyncio.to_thread(_remove_placement, _placement_name(plan, group))


def _placement_name(plan: RayPlan, group: ProcessGroup) -> str:
    return f"{namespace_of(plan.fleet)}-{group.role}"


def _remove_placement(name: str) -> None:
    try:
        remove_placement_group(ray.util.get_placement_group(name))
    except ValueError:  # there is none of this name
        return


def list_hosts() -> list[RayHostFacts]:
    """The hosts that Ray has now."""
    return [
        RayHostFacts(
            address=node["NodeManagerAddress"],
            labels=dict(node.get("Labels") or {}),
            gpus=float(node["Resources"].get("GPU", 0)),
            cpus=float(node["Resources"].get("CPU", 0)),
            memory_bytes=int(node["Resources"].get("memory", 0)),
        )
        for node in ray.nodes()
        if node["Alive"]
    ]
