"""Which processes a fleet on Ray has, with which settings, and where Ray may place them. Pure."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from baton.config.cluster_key import is_loopback
from baton.config.resolve import FromDefault, Resolved, is_path, split_name
from baton.config.sections import Config, RayPlacement, RaySection, RayWorkersTable, Role
from baton.errors import UNDECODABLE, ConfigError, ProtocolError
from baton.launch.fleet import Count, MemberRole
from baton.launch.folder import FLEET_NAME
from baton.launch.plan import flatten_table, worker_positions
from baton.planner.assignment import Needs, show_amounts
from baton.planner.fleet_plan import split_path

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

NOT_FORWARDED: Final = ("up.", "ray.", "fleet.")
OWN_KEYS: Final = frozenset({
    "gateway.prefill",
    "gateway.decode",
    "gateway.workers",
    "gateway.members",
    "worker.name",
    "worker.role",
    "worker.host",
    "worker.port",
    "worker.handoff_host",
    "worker.handoff_port",
})
"""Keys that each process's supervisor decides on its host."""
NAMES: Final[Mapping[MemberRole, str]] = {
    "gateway": "gateway",
    "prefill": "prefill",
    "decode": "decode",
    "both": "worker",
}
"""Of a role's processes, before their number: `decode-0`."""


class ProcessGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Processes of one role, which are alike.

    `settings` are theirs beside the fleet's; `selector`: the labels that a host must have; `gpus`,
    `cpus` and `memory_bytes`: of each process. `within`: a label that has one value for all of
    them. `assignments`: of processes by name, the path of the host to start on, as long as it is
    there and has room.
    """

    role: MemberRole
    num_processes: Count
    settings: dict[str, object] = {}
    selector: dict[str, str] = {}
    gpus: float = 0.0
    cpus: float = 0.0
    memory_bytes: int = 0
    placement: RayPlacement | None = None
    within: str | None = None
    assignments: dict[str, str] = {}

    @property
    def is_reserved_together(self) -> bool:
        """Whether Ray reserves places for all of them at once, in a placement group."""
        return self.placement is not None or self.within is not None

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the processes that the fleet starts with."""
        return tuple(f"{NAMES[self.role]}-{number}" for number in range(self.num_processes))


class RayPlan(msgspec.Struct, frozen=True, kw_only=True):
    """A fleet, as each of its supervisors keeps it. No secrets: Ray stores it on its head.

    `settings` are all that differ from the defaults. `has_key_file`: the cluster key is in a file
    on every host (`cluster.key_file`); otherwise supervisors get it by a call.
    """

    fleet: str
    version: str
    settings: dict[str, object]
    groups: tuple[ProcessGroup, ...]
    gateway_drain_s: float
    worker_drain_s: float
    has_key_file: bool = False
    insecure: bool = False

    def group_of(self, role: MemberRole) -> ProcessGroup | None:
        """The processes of a role, if the fleet has any."""
        return next((group for group in self.groups if group.role == role), None)

    def drain_s(self, role: MemberRole) -> float:
        """How long a process of a role may take to finish what it has."""
        return self.gateway_drain_s if role == "gateway" else self.worker_drain_s


_decoder: Final = msgspec.json.Decoder(RayPlan)


def read_plan(text: bytes) -> RayPlan:
    """Decode what a supervisor keeps.

    Raises:
        ProtocolError: it is no plan, or one of another version of Baton.
    """
    try:
        return _decoder.decode(text)
    except UNDECODABLE as exc:
        raise ProtocolError(f"no plan of a fleet: {exc}") from exc


def role_of(name: str) -> MemberRole:
    """The role of a process by its name.

    Raises:
        ProtocolError: no process of a fleet has this name.
    """
    for role, beginning in NAMES.items():
        if re.fullmatch(rf"{beginning}-\d+", name):
            return role
    raise ProtocolError(f"{name!r} is no name of a process")


def number_of(name: str) -> int:
    """The number in a process's name: those that started later have higher ones."""
    return int(name.rpartition("-")[2])


def plan_fleet(
    resolved: Resolved, fleet: str, version: str, policy: str, *, has_key_file: bool
) -> RayPlan:
    """Decide on processes and their settings. `policy` is the one by which gateways place requests.

    Raises:
        ConfigError: there would be no worker, or a setting cannot work on several hosts.
    """
    config, settings = resolved.to_config(), _forwarded(resolved)
    _check(config, fleet, settings)
    counts: dict[MemberRole, int] = {}
    overrides: dict[MemberRole, dict[str, object]] = {}
    for _, role, group in worker_positions(config):
        counts[role] = counts.get(role, 0) + 1
        engine = dict(flatten_table(f"engine.{group.engine}", group.overrides))
        overrides[role] = {"worker.engine": group.engine, **engine}
    if unknown := set(config.ray.workers) - set(counts):
        raise ConfigError(
            f"ray.workers has {', '.join(sorted(unknown))}, but this fleet has workers of the "
            f"roles {', '.join(sorted(counts))}"
        )
    gateways = ProcessGroup(
        role="gateway",
        num_processes=config.ray.gateways,
        settings={"router.policy": policy},
        selector=read_labels(config.ray.gateway_labels),
        cpus=config.ray.least_cpus,
    )
    workers = [
        _worker_group(role, count, overrides[role], config.ray) for role, count in counts.items()
    ]
    plan = RayPlan(
        fleet=fleet,
        version=version,
        settings=settings,
        groups=(gateways, *workers),
        gateway_drain_s=config.gateway.drain_timeout_s,
        worker_drain_s=config.worker.drain_timeout_s,
        has_key_file=has_key_file,
        insecure=config.ray.insecure,
    )
    return with_assignments(plan, config.fleet.assignments)


def _worker_group(
    role: MemberRole, count: int, settings: dict[str, object], section: RaySection
) -> ProcessGroup:
    table = section.workers.get(role, RayWorkersTable())
    return ProcessGroup(
        role=role,
        num_processes=count,
        settings=settings,
        selector=read_labels(table.labels),
        gpus=table.gpus,
        cpus=table.cpus or section.least_cpus,
        memory_bytes=table.memory_bytes,
        placement=table.placement,
        within=table.within,
    )


def list_needs(config: Config) -> tuple[Needs, ...]:
    """What the fleet's workers need of their hosts, by role, prefill first.

    Raises:
        ConfigError: there would be no worker, or a role's hosts are chosen by a placement group.
    """
    names: dict[Role, list[str]] = {}
    for name, role, _ in worker_positions(config):
        names.setdefault(role, []).append(name)
    tables = {role: config.ray.workers.get(role, RayWorkersTable()) for role in names}
    for role, table in tables.items():
        if table.placement is not None or table.within is not None:
            raise _reserved_together(role)
    return tuple(
        Needs(role, tuple(names[role]), t.gpus, t.cpus, t.memory_bytes, read_labels(t.labels))
        for role, t in tables.items()
    )


def _reserved_together(role: MemberRole) -> ConfigError:
    return ConfigError(
        f"ray.workers.{role} has placement or within, by which Ray chooses hosts for all of its "
        "workers together: leave them out (fleet.spread bounds how many workers of a role one "
        "host, rack or zone has), or assign no hosts"
    )


def with_assignments(plan: RayPlan, assignments: Mapping[str, str]) -> RayPlan:
    """The same fleet with workers on these hosts: paths by the workers' names.

    Raises:
        ConfigError: no worker has such a name, a path is none, or a role's hosts are chosen by a
            placement group.
    """
    if not assignments:
        return plan
    known = {name for group in plan.groups if group.role != "gateway" for name in group.names}
    if unknown := assignments.keys() - known:
        raise ConfigError(
            f"fleet.assignments names {', '.join(sorted(unknown))}, and this fleet has "
            f"{', '.join(sorted(known))}: run baton plan again"
        )
    for path in assignments.values():
        split_path(path)
    for group in plan.groups:
        if group.is_reserved_together and not assignments.keys().isdisjoint(group.names):
            raise _reserved_together(group.role)
    groups = tuple(
        msgspec.structs.replace(
            group, assignments={n: assignments[n] for n in group.names if n in assignments}
        )
        for group in plan.groups
    )
    return msgspec.structs.replace(plan, groups=groups)


def read_labels(texts: Sequence[str]) -> dict[str, str]:
    """Ray's label selector from texts such as `rack=r1`, `rack=in(r1,r2)`, `tier=!spot`.

    Raises:
        ConfigError: a text is not `label=value`, or a label is there twice.
    """
    selector: dict[str, str] = {}
    for text in texts:
        label, separator, value = text.partition("=")
        if not (label and separator and value):
            raise ConfigError(
                f"{text!r} selects no hosts; write label=value, label=!value, label=in(a,b) or "
                "label=!in(a,b)"
            )
        if label in selector:
            raise ConfigError(f"the label {label!r} is given twice; write {label}=in(a,b)")
        selector[label] = value
    return selector


def show_labels(labels: Mapping[str, str]) -> str:
    """The inverse, for people."""
    return ", ".join(f"{label}={value}" for label, value in sorted(labels.items())) or "none"


def _check(config: Config, fleet: str, settings: Mapping[str, object]) -> None:
    if not FLEET_NAME.fullmatch(fleet):
        raise ConfigError(
            f"--fleet {fleet!r}: a name has small letters, digits and -, at most 63 of them"
        )
    if "peer" in config.store.tiers and "urls" not in config.store.options.get("peer", {}):
        raise ConfigError(
            "the store's tier peer needs store.options.peer.urls on Ray: workers may move to other "
            "hosts; name a daemon there (baton store serve)"
        )
    gateway = config.gateway
    on_loopback = "gateway.host" in settings and is_loopback(gateway.host)
    if not (on_loopback or gateway.client_keys_file or gateway.insecure):
        raise ConfigError(
            "gateways on Ray listen on their hosts' addresses, so everybody who reaches one could "
            "use it: give --client-keys FILE (baton key client add; the same path on every host), "
            "or --insecure"
        )


def _forwarded(resolved: Resolved) -> dict[str, object]:
    """What differs from the defaults: other hosts have neither this file nor this environment."""
    return {
        name: value
        for name, value in given_settings(resolved).items()
        if name not in OWN_KEYS and not name.startswith(NOT_FORWARDED)
    }


def given_settings(resolved: Resolved) -> dict[str, object]:
    """What was set by file, environment and flags. Paths are absolute."""
    found: dict[str, object] = {
        name: value.value
        for name, value in resolved.values.items()
        if not isinstance(value.origin, FromDefault) and value.value is not None
    }
    for name, value in found.items():
        if is_path(name):
            found[name] = str(Path(str(value)).absolute())
    return found


def settings_file(settings: Mapping[str, object]) -> str:
    """A TOML file with these settings."""
    lines = []
    for name, value in settings.items():
        key = ".".join(map(_as_key, split_name(name)))
        lines.append(f"{key} = {_as_toml(msgspec.to_builtins(value))}\n")
    return "".join(lines)


def _as_key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else msgspec.json.encode(name).decode()


def _as_toml(value: object) -> str:
    """JSON's scalars are TOML's; tables have = for its colon."""
    if isinstance(value, dict):
        pairs = (f"{_as_key(key)} = {_as_toml(each)}" for key, each in value.items())
        return f"{{{', '.join(pairs)}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_as_toml, value))}]"
    return msgspec.json.encode(value).decode()


class RayHostFacts(msgspec.Struct, frozen=True):
    """A host of Ray's, as far as it decides what may run there."""

    address: str
    labels: dict[str, str]
    gpus: float
    cpus: float = 0.0
    memory_bytes: int = 0


def explain_unplaced(
    plan: RayPlan, names: Sequence[str], hosts: Sequence[RayHostFacts], timeout_s: float
) -> str:
    """Why Ray probably found no host for some processes: what they need, and what there is."""
    needs = []
    for name in names:
        group = plan.group_of(role_of(name))
        if group is not None:
            amounts = show_amounts(group.gpus, group.cpus, group.memory_bytes)
            needed = f", {amounts}" if amounts else ""
            together = f", {group.placement}" if group.placement else ""
            together += f", all within one {group.within}" if group.within else ""
            needs.append(f"  {name}: labels {show_labels(group.selector)}{needed}{together}")
    found = [
        f"  {host.address}: labels {show_labels(_own_labels(host.labels))}, "
        f"{show_amounts(host.gpus, host.cpus, host.memory_bytes) or 'no GPUs'}"
        for host in hosts
    ]
    return "\n".join([
        f"Ray found no host within {timeout_s:g} s for",
        *needs,
        "its hosts are",
        *found,
        "change ray.workers or ray.gateway_labels, add hosts with these labels, or raise",
        "ray.timeout_s (--timeout): a host that Ray's autoscaler starts takes minutes",
    ])


def _own_labels(labels: Mapping[str, str]) -> dict[str, str]:
    """Without the id that Ray gives each host."""
    return {label: value for label, value in labels.items() if label != "ray.io/node-id"}
