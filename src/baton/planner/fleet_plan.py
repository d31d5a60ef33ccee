"""A fleet's workers on its hosts, and the KV that is then expected between them. Pure."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

import msgspec
from msgspec.structs import replace

from baton.config.sections import FleetSection, HostTable, Role
from baton.errors import ConfigError
from baton.planner.assignment import (
    Counts,
    Location,
    Needs,
    Traffic,
    assign_workers,
    divide_traffic,
)
from baton.planner.traffic import DISTANCES, ExpectedKV, LinkRate, RateSource

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from baton.router.topology import Distance

SCHEMA: Final = "baton-plan/1"
PATH: Final = re.compile(r"(?:[^/]*/[^/]*/)?[^/]+")


class PlannedWorker(msgspec.Struct, frozen=True):
    """A worker, the path of its host, and its nearest workers of the other role.

    `distance` None: there are none, or its host is left to the launcher.
    """

    name: str
    role: Role
    host: str | None
    distance: str | None = None
    nearest: tuple[str, ...] = ()


class PlannedTraffic(msgspec.Struct, frozen=True):
    """KV over links of one distance. `busy`: the share of time in which the busiest of them is.

    That is the link of one prefill worker. None: not known how much KV that is.
    """

    distance: str
    share: float
    gb_per_s: float
    source: RateSource
    bytes_per_s: float | None = None
    busy: float | None = None


class FleetPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What `baton plan --json` prints. `traffic` is empty where no KV is handed over.

    `kv` None: the model's KV is not known.
    """

    schema: str = SCHEMA
    spread: str
    kv: ExpectedKV | None
    workers: tuple[PlannedWorker, ...]
    traffic: tuple[PlannedTraffic, ...]

    @property
    def assignments(self) -> dict[str, str]:
        """`zone/rack/host` by worker, as `fleet.assignments` has it."""
        return {each.name: each.host for each in self.workers if each.host is not None}


def plan_assignments(
    hosts: Sequence[HostTable],
    needs: Sequence[Needs],
    rates: Mapping[Distance, LinkRate],
    fleet: FleetSection,
) -> dict[str, str]:
    """The path of the host that each worker is to start on, by the worker's name.

    A link that is faster than one of a nearer distance counts as the nearer one.

    Raises:
        ConfigError: two hosts have one name, a name cannot be in a path, or no assignment is
            possible (`NoAssignmentError`).
    """
    paths = [host_path(host.zone, host.rack, host.name) for host in hosts]
    if doubled := {path for path in paths if paths.count(path) > 1}:
        raise ConfigError(f"several hosts are called {min(doubled)}: give each its own name")
    byte_s, slowest_s = {}, 0.0
    for distance in DISTANCES:
        slowest_s = max(slowest_s, 1e-9 / rates[distance].gb_per_s)
        byte_s[distance] = slowest_s
    assigned = assign_workers(hosts, needs, byte_s, fleet.spread)
    return {name: host_path(host.zone, host.rack, host.name) for name, host in assigned.items()}


def host_path(zone: str, rack: str, host: str) -> str:
    """`zone/rack/host`, as `fleet.assignments` has it.

    Raises:
        ConfigError: one of the names has a slash.
    """
    if "/" in zone + rack + host:
        raise ConfigError(f"the host {host!r} of rack {rack!r} and zone {zone!r}: / is in a name")
    return f"{zone}/{rack}/{host}"


def split_path(path: str) -> tuple[str, str, str]:
    """Zone, rack and host of a path; `h1` alone is a host of which no more is known.

    Raises:
        ConfigError: it is none.
    """
    if not PATH.fullmatch(path):
        raise ConfigError(
            f"fleet.assignments: {path!r} is no host: write zone/rack/host, or //host"
        )
    zone, rack, host = path.split("/") if "/" in path else ("", "", path)
    return zone, rack, host


def describe_fleet(
    workers: Sequence[tuple[str, Role]],
    assignments: Mapping[str, str],
    rates: Mapping[Distance, LinkRate],
    *,
    kv: ExpectedKV | None,
    spread: str,
) -> FleetPlan:
    """Workers where they are assigned to, the KV between them, and who is near whom.

    Raises:
        ConfigError: an assignment is of no worker, or no path.
    """
    if unknown := assignments.keys() - {name for name, _ in workers}:
        raise ConfigError(
            f"fleet.assignments names {', '.join(sorted(unknown))}, and this fleet has "
            f"{', '.join(name for name, _ in workers)}: run baton plan again"
        )
    at = {name: Location.of(*split_path(path)) for name, path in assignments.items()}
    paths = {name: host_path(*split_path(path)) for name, path in assignments.items()}
    planned = []
    for name, role in workers:
        others = [other for other, its in workers if its != role and other in at]
        distance, nearest = _find_nearest(name, others, at)
        planned.append(PlannedWorker(name, role, paths.get(name), distance, nearest))
    counts: dict[Location, Counts] = {}
    for name, role in workers:
        if name in at:
            prefill, decode = counts.get(at[name], (0, 0))
            counts[at[name]] = prefill + (role == "prefill"), decode + (role == "decode")
    traffic = [
        _describe_traffic(distance, goes, rates[distance], kv)
        for distance, goes in divide_traffic(list(counts.items())).items()
    ]
    return FleetPlan(spread=spread, kv=kv, workers=tuple(planned), traffic=tuple(traffic))


def _find_nearest(
    name: str, others: Sequence[str], at: Mapping[str, Location]
) -> tuple[str | None, tuple[str, ...]]:
    """How far away the nearest of `others` are, and which."""
    if name not in at or not others:
        return None, ()
    distances = {other: at[name].distance(at[other]) for other in others}
    least = min(distances.values())
    return str(least), tuple(other for other in others if distances[other] is least)


def _describe_traffic(
    distance: Distance, goes: Traffic, rate: LinkRate, kv: ExpectedKV | None
) -> PlannedTraffic:
    described = PlannedTraffic(str(distance), goes.share, rate.gb_per_s, rate.source)
    if kv is None:
        return described
    moved, most = goes.share * kv.bytes_per_s, goes.most * kv.bytes_per_s
    return replace(described, bytes_per_s=moved, busy=most / (rate.gb_per_s * 1e9))
