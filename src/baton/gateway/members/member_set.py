"""Which workers all sources together list. Pure.

A worker is known by the origin of its URL. It is listed while at least one source lists it. Where
sources disagree on its role, the one that comes first in the configuration decides. It gets nothing
new once any source that lists it states that it drains.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from baton.protocol.worker_http import Role

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from yarl import URL

    from baton.gateway.options import WorkerAddress

CONFIGURED: Final = "configuration"
"""The source of `gateway.prefill`, `gateway.decode` and `gateway.workers`: it comes first."""
ROLES: Final = tuple(Role)


@dataclass(frozen=True, slots=True)
class Listing:
    """A worker as its sources list it, the first of which decides on the role.

    `drained_by`: the sources that state that it drains. `topology`: of the first that knows it.
    """

    role: Role
    sources: tuple[str, ...]
    drained_by: tuple[str, ...] = ()
    topology: str = ""

    @property
    def why_withdrawn(self) -> str | None:
        """Why it gets nothing new; None: it does."""
        return f"drained by {', '.join(self.drained_by)}" if self.drained_by else None


@dataclass(frozen=True, slots=True)
class RoleConflict:
    """Two sources, or one source, list a worker with two roles: the first role is used."""

    url: URL
    used: tuple[str, Role]
    ignored: tuple[str, Role]

    def __str__(self) -> str:
        (used_by, used), (other, role) = self.used, self.ignored
        return (
            f"{self.url} is a {used} worker by {used_by}, and a {role} worker by {other}: it is "
            f"used as a {used} worker; list it with one role"
        )


class MemberSet:
    """Owner: one thread. `sources` are in their order in the configuration."""

    def __init__(self, sources: Sequence[str]) -> None:
        self._lists: dict[str, dict[URL, list[WorkerAddress]]] = {name: {} for name in sources}
        self._conflicts: frozenset[RoleConflict] = frozenset()
        self.listings: Mapping[URL, Listing] = {}

    def update(self, source: str, addresses: Iterable[WorkerAddress]) -> list[RoleConflict]:
        """A source lists these workers now, and no others; the conflicts that are new.

        `listings` is another mapping afterwards.
        """
        listed: dict[URL, list[WorkerAddress]] = {}
        for address in sorted(addresses, key=lambda each: (ROLES.index(each.role), each.url)):
            listed.setdefault(address.origin, []).append(address)
        self._lists[source] = listed
        entries: dict[URL, list[tuple[str, WorkerAddress]]] = {}
        for name, found in self._lists.items():
            for url, alike in found.items():
                entries.setdefault(url, []).extend((name, address) for address in alike)
        self.listings = {url: _list(named) for url, named in entries.items()}
        before, self._conflicts = self._conflicts, frozenset(_find_conflicts(entries))
        return sorted(self._conflicts - before, key=str)

    def num_listed(self, source: str) -> int:
        """How many workers a source lists."""
        return len(self._lists[source])


def _list(named: Sequence[tuple[str, WorkerAddress]]) -> Listing:
    sources = dict.fromkeys(name for name, _ in named)
    drained_by = dict.fromkeys(name for name, address in named if address.draining)
    topology = next((each.topology for _, each in named if each.topology), "")
    return Listing(named[0][1].role, tuple(sources), tuple(drained_by), topology)


def _find_conflicts(
    entries: Mapping[URL, Sequence[tuple[str, WorkerAddress]]],
) -> Iterable[RoleConflict]:
    for url, named in entries.items():
        used = named[0][0], named[0][1].role
        for name, address in named[1:]:
            if address.role is not used[1]:
                yield RoleConflict(url, used, (name, address.role))
