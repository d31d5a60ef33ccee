"""Which host each worker is to start on, so that KV crosses as few slow links as possible. Pure.

Prefill workers send the KV of all prompts to decode workers, and placement prefers those that are
near. So of the KV that is computed in a host, rack or zone, as much stays there as its decode
workers take:

    stays(v) = the lesser of v's share of the prefill workers, and its share of the decode workers

What does not stay goes over the links of the next level. With `cost[…]`, the seconds for a byte at
each distance, a byte of KV takes on the average

    cost[cross_zone] - sum over zones  v of stays(v) * (cost[cross_zone] - cost[same_zone])
                     - sum over racks  v of stays(v) * (cost[same_zone]  - cost[same_rack])
                     - sum over hosts  v of stays(v) * (cost[same_rack]  - cost[same_host])

Each term depends on two counts alone. So tables of what each subtree can save, by these counts, are
merged from hosts to racks to zones, and the best assignment is found exactly, not by search.
Workers of one role are alike; their needs and the bound by `spread` only exclude counts.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

import numpy as np

from baton.errors import ConfigError
from baton.router.topology import Distance

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from baton.config.sections import HostTable, Role, Spread

MAX_STEPS: Final = 3_000_000_000
"""Sums of two numbers, of which a core does some 1e9 a second."""
MAX_ENTRIES: Final = 10_000_000
"""Of the table of all hosts: of more workers it would take too many steps in any case."""
EVENNESS: Final = 1e-7
"""What an even division among hosts is worth, as a share of what the best links save: it decides
between assignments that are equally near."""
ROUNDING: Final = 1e-9

Counts: TypeAlias = tuple[int, int]
"""Prefill and decode workers; of a fleet whose workers do both parts, these and none."""


@dataclass(frozen=True, slots=True)
class Needs:
    """The workers of one role, and what each of them needs of its host.

    `selector`: the labels that a host must have, as Ray writes them (`value`, `!value`, `in(a,b)`,
    `!in(a,b)`). A worker that needs neither GPUs, CPUs nor memory is counted as one CPU.
    """

    role: Role
    names: tuple[str, ...]
    gpus: float = 0.0
    cpus: float = 0.0
    memory_bytes: int = 0
    selector: Mapping[str, str] = field(default_factory=dict)

    @property
    def amounts(self) -> tuple[float, float, float]:
        """GPUs, CPUs, bytes of memory: what is counted."""
        if not (self.gpus or self.cpus or self.memory_bytes):
            return 0.0, 1.0, 0.0
        return self.gpus, self.cpus, float(self.memory_bytes)

    def allow(self, host: HostTable) -> bool:
        """Whether a host has the labels."""
        labels = host.labels | {"host": host.name}
        labels |= {k: v for k, v in (("rack", host.rack), ("zone", host.zone)) if v}
        return all(_matches(wanted, labels.get(name)) for name, wanted in self.selector.items())


def _matches(wanted: str, value: str | None) -> bool:
    is_negated = wanted.startswith("!")
    wanted = wanted.removeprefix("!")
    if wanted.startswith("in(") and wanted.endswith(")"):
        values = [each.strip() for each in wanted[3:-1].split(",")]
    else:
        values = [wanted]
    return (value in values) is not is_negated


class Location(NamedTuple):
    """A host's zone, rack and name, each unique among all: what is at the same one is near.

    Where hosts name no rack, each counts as a rack of its own. Those that name no zone are taken to
    be in one, apart from zones with names.
    """

    zone: tuple[str, ...]
    rack: tuple[str, ...]
    host: tuple[str, ...]

    @classmethod
    def of(cls, zone: str, rack: str, host: str) -> Location:
        """From names that are unique within the level above them."""
        in_rack = (zone, rack) if rack else (zone, "", host)
        return cls((zone,), in_rack, (*in_rack, host))

    def distance(self, other: Location) -> Distance:
        """To another host, or to this one."""
        if self.host == other.host:
            return Distance.SAME_HOST
        if self.rack == other.rack:
            return Distance.SAME_RACK
        return Distance.SAME_ZONE if self.zone == other.zone else Distance.CROSS_ZONE


LEVELS: Final = (
    (Distance.SAME_HOST, Location._fields.index("host")),
    (Distance.SAME_RACK, Location._fields.index("rack")),
    (Distance.SAME_ZONE, Location._fields.index("zone")),
)
"""From near to far: what two hosts at this distance have in common."""


class Traffic(NamedTuple):
    """Over links of one distance: a share of the KV, and what one prefill worker sends at most."""

    share: float
    most: float


def divide_traffic(locations: Sequence[tuple[Location, Counts]]) -> dict[Distance, Traffic]:
    """What goes over links of each distance, when the nearest are preferred.

    Of hosts and their workers. Empty where there are not workers of both roles.
    """
    totals = [sum(counts[at] for _, counts in locations) for at in (0, 1)]
    if not all(totals):
        return {}
    sends, takes = ([counts[at] / totals[at] for _, counts in locations] for at in (0, 1))
    found = {}
    for distance, level in (*LEVELS, (Distance.CROSS_ZONE, None)):
        there: dict[tuple[str, ...], list[int]] = {}
        for host, (location, _) in enumerate(locations):
            there.setdefault(() if level is None else location[level], []).append(host)
        share = most = 0.0
        for hosts in there.values():
            to_send, to_take = (sum(left[host] for host in hosts) for left in (sends, takes))
            moved = min(to_send, to_take)
            if moved <= ROUNDING:
                continue
            share += moved
            for host in hosts:
                sent = sends[host] * moved / to_send
                most = max(most, sent / max(1, locations[host][1][0]))
                sends[host] -= sent
                takes[host] -= takes[host] * moved / to_take
        found[distance] = Traffic(share, most)
    return found


class NoAssignmentError(ConfigError):
    """No assignment satisfies what workers need, or finding one would take too long."""


def assign_workers(
    hosts: Sequence[HostTable],
    needs: Sequence[Needs],
    byte_s: Mapping[Distance, float],
    spread: Spread = "none",
) -> dict[str, HostTable]:
    """A host for each worker, by its name: of all assignments one with the least cost of KV.

    `needs` are of prefill and decode workers, or of those that do both parts. `byte_s` does not
    decrease with the distance. Among equals, hosts get even numbers of workers.

    Raises:
        NoAssignmentError: see there; what workers need and hosts have is in the message.
    """
    search = _Search(needs, byte_s, spread)
    table, wanted = search.solve(hosts), search.totals
    reached = np.argwhere(table.best > -inf)
    most: Counts = max(
        ((int(i), int(j)) for i, j in reached),
        key=lambda each: (sum(each), min(each)),
        default=(0, 0),
    )
    if most != wanted:
        raise NoAssignmentError(_explain(hosts, needs, spread, most))
    names = [iter(each.names) for each in needs]
    return {
        next(own): host
        for host, counts in table.divide(wanted)
        for own, num in zip(names, counts, strict=False)
        for _ in range(num)
    }


@dataclass(slots=True)
class _Table:
    """A subtree: what it can save at best, by its workers `[num of first, num of second]`.

    -inf: it cannot have these. `parts`: each merged subtree, and how many of the workers up to it
    it has itself, by their sum.
    """

    best: NDArray[np.float64]
    host: HostTable | None = None
    parts: list[tuple[_Table, NDArray[np.int16]]] = field(default_factory=list)

    def divide(self, counts: Counts) -> Iterator[tuple[HostTable, Counts]]:
        """The hosts, and how many workers each has when the subtree has `counts`."""
        if self.host is not None:
            yield self.host, counts
        divided = []
        for part, taken in reversed(self.parts):
            own = int(taken[counts][0]), int(taken[counts][1])
            counts = counts[0] - own[0], counts[1] - own[1]
            divided.append((part, own))
        for part, own in reversed(divided):
            yield from part.divide(own)


class _Search:
    """One fleet's. `byte_s` and `spread` as of `assign_workers`."""

    def __init__(
        self, needs: Sequence[Needs], byte_s: Mapping[Distance, float], spread: Spread
    ) -> None:
        self._needs = (*needs, Needs("decode", ()))[:2]
        self._spread = spread
        self.totals = len(self._needs[0].names), len(self._needs[1].names)
        farther = (Distance.SAME_RACK, Distance.SAME_ZONE, Distance.CROSS_ZONE)
        self._saved = {
            distance: byte_s[next_one] - byte_s[distance]
            for (distance, _), next_one in zip(LEVELS, farther, strict=True)
        }
        self._evenness = EVENNESS * (max(self._saved.values()) or 1.0)
        self._num_steps = 0

    def solve(self, hosts: Sequence[HostTable]) -> _Table:
        """The table of all hosts together."""
        if (self.totals[0] + 1) * (self.totals[1] + 1) > MAX_ENTRIES:
            raise self._refuse()
        zones: dict[tuple[str, ...], dict[tuple[str, ...], list[_Table]]] = {}
        for host in hosts:
            location = Location.of(host.zone, host.rack, host.name)
            racks = zones.setdefault(location.zone, {})
            racks.setdefault(location.rack, []).append(self._host(host))
        return self._merge_all(
            self._finish(
                self._merge_all(
                    self._finish(self._merge_all(tables), Distance.SAME_RACK)
                    for tables in racks.values()
                ),
                Distance.SAME_ZONE,
            )
            for racks in zones.values()
        )

    def _host(self, host: HostTable) -> _Table:
        free = np.array([host.gpus, host.cpus, host.memory_bytes], dtype=np.float64)
        free *= 1 + ROUNDING
        first, second = (
            np.multiply.outer(np.arange(of + 1 if each.allow(host) else 1), each.amounts)
            for of, each in zip(self.totals, self._needs, strict=True)
        )
        first, second = (alone[(alone <= free).all(axis=1)] for alone in (first, second))
        fits = (first[:, None, :] + second[None, :, :] <= free).all(axis=2)
        rows, columns = fits.shape
        num = np.add.outer(np.arange(rows), np.arange(columns))
        evenly = -self._evenness * (num / sum(self.totals)) ** 2
        return self._finish(_Table(np.where(fits, evenly, -inf), host), Distance.SAME_HOST)

    def _finish(self, table: _Table, distance: Distance) -> _Table:
        """With what stays within the subtree, and without what `spread` excludes."""
        rows, columns = table.best.shape
        shares = [
            np.arange(num) / max(of, 1)
            for num, of in zip((rows, columns), self.totals, strict=True)
        ]
        table.best += self._saved[distance] * np.minimum.outer(*shares)
        if str(distance) == f"same_{self._spread}":
            most_first, most_second = (-(-of // 2) for of in self.totals)
            table.best[most_first + 1 :] = -inf
            table.best[:, most_second + 1 :] = -inf
        return table

    def _merge_all(self, tables: Iterable[_Table]) -> _Table:
        merged = _Table(np.zeros((1, 1)))
        for table in tables:
            merged.best, taken = self._merge(merged.best, table.best)
            merged.parts.append((table, taken))
        return merged

    def _merge(
        self, one: NDArray[np.float64], other: NDArray[np.float64]
    ) -> tuple[NDArray[np.float64], NDArray[np.int16]]:
        """The best sums, and how many workers are then in `other`, by all workers."""
        rows, columns = (
            min(of, a + b - 2) + 1
            for of, a, b in zip(self.totals, one.shape, other.shape, strict=True)
        )
        best = np.full((rows, columns), -inf)
        taken = np.zeros((rows, columns, 2), dtype=np.int16)
        possible = np.argwhere(other > -inf)
        self._count(one.size * len(possible))
        for i, j in possible:
            part = np.s_[i : min(rows, i + one.shape[0]), j : min(columns, j + one.shape[1])]
            height, width = best[part].shape
            sums = one[:height, :width] + other[i, j]
            is_better = sums > best[part]
            best[part][is_better] = sums[is_better]
            taken[part][is_better] = i, j
        return best, taken

    def _count(self, num_steps: int) -> None:
        self._num_steps += num_steps
        if self._num_steps > MAX_STEPS:
            raise self._refuse()

    def _refuse(self) -> NoAssignmentError:
        return NoAssignmentError(
            f"a fleet of {' + '.join(str(each) for each in self.totals if each)} workers on so "
            "many hosts is too large to assign exactly: plan each zone as a fleet of its own, "
            "or let Ray place workers by labels (ray.workers.ROLE.labels, within)"
        )


def _explain(
    hosts: Sequence[HostTable], needs: Sequence[Needs], spread: Spread, most: Counts
) -> str:
    """Why there is none: what is needed, what there is, and what would help."""
    lines = ["the hosts have no room for all workers; together they take, for instance,"]
    lines += [
        f"  {num} of {len(each.names)} {each.role} workers: "
        f"{show_amounts(*each.amounts)} each{_show_selector(each.selector)}"
        for each, num in zip(needs, most, strict=False)
    ]
    if spread != "none":
        lines.append(f"with at most half of each role, rounded up, on one {spread}")
    lines.append("the hosts are")
    lines += [
        f"  {host.zone}/{host.rack}/{host.name}: "
        f"{show_amounts(host.gpus, host.cpus, host.memory_bytes) or 'nothing'}"
        for host in hosts
    ]
    instead = "" if spread == "none" else f", or change fleet.spread (it is {spread!r})"
    lines.append(
        f"start fewer workers, lower what each needs (ray.workers.ROLE), or add hosts{instead}"
    )
    return "\n".join(lines)


def show_amounts(gpus: float, cpus: float, memory_bytes: float) -> str:
    """For people: what is needed, or what there is. Empty if that is nothing."""
    parts = [f"{gpus:g} GPUs"] if gpus else []
    parts += [f"{cpus:g} CPUs"] if cpus else []
    parts += [f"{memory_bytes / 2**30:.4g} GiB"] if memory_bytes else []
    return ", ".join(parts)


def _show_selector(selector: Mapping[str, str]) -> str:
    shown = ", ".join(f"{label}={value}" for label, value in sorted(selector.items()))
    return f", labels {shown}" if shown else ""
