"""Ray's hosts: where they are by their labels, and how a process is bound to one. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from baton.config.sections import HostTable
from baton.errors import ConfigError
from baton.planner.fleet_plan import split_path

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from baton.launch.ray.plan import RayHostFacts

ZONE_LABELS: Final = ("zone", "ray.io/availability-zone")


def path_of(labels: Mapping[str, str]) -> str:
    """`zone/rack/host` of a host's labels; what they do not name stays empty."""
    zone = next((labels[name] for name in ZONE_LABELS if name in labels), "")
    return "/".join((zone, labels.get("rack", ""), labels.get("host", ""))).rstrip("/")


def list_assignable(hosts: Sequence[RayHostFacts]) -> list[HostTable]:
    """The hosts that workers can be assigned to: those with the label `host`.

    Raises:
        ConfigError: there are none.
    """
    found = [
        HostTable(
            name=host.labels["host"],
            zone=next((host.labels[name] for name in ZONE_LABELS if name in host.labels), ""),
            rack=host.labels.get("rack", ""),
            gpus=host.gpus,
            cpus=host.cpus,
            memory_bytes=host.memory_bytes,
            labels=host.labels,
        )
        for host in hosts
        if host.labels.get("host")
    ]
    if not found:
        raise ConfigError(
            f"workers are assigned to hosts by the label `host`, and none of Ray's {len(hosts)} "
            "hosts has it: ray start --labels host=$(hostname),rack=RACK,zone=ZONE"
        )
    return found


def list_selectors(selector: Mapping[str, str], path: str | None) -> list[dict[str, str]]:
    """The labels of a process's host, the best ones first: it starts by the first that are there.

    Of a path these are its host, then its rack, then its zone, then any host that has the labels
    of `selector`, which all must have.
    """
    if path is None:
        return [dict(selector)]
    zone, rack, host = split_path(path)
    wanted: list[dict[str, str]] = [{"host": host}]
    if rack:
        wanted[0]["rack"] = rack
        wanted.append({"rack": rack})
    if zone:
        wanted += [{label: zone} for label in ZONE_LABELS]
    return [*({**selector, **each} for each in wanted), dict(selector)]
