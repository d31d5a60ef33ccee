"""What a gateway's supervisor knows of the fleet's workers. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from baton.protocol.members import Member, MembersFile
from baton.protocol.worker_http import Role

if TYPE_CHECKING:
    from collections.abc import Iterable

    from baton.launch.fleet import FleetMember


class KnownWorkers:
    """Workers by name, from what their supervisors answered. Owned by one thread.

    A worker whose supervisor does not answer stays as it was: the gateway's own probes find out
    whether it still serves. It goes when Ray no longer has its supervisor, when its supervisor
    reports that it has no address, or when the supervisor, started elsewhere, reports another one.
    """

    def __init__(self) -> None:
        self._workers: dict[str, Member] = {}

    def retain(self, names: Iterable[str]) -> None:
        """Forget those that are not among these."""
        kept = frozenset(names)
        self._workers = {name: each for name, each in self._workers.items() if name in kept}

    def apply(self, member: FleetMember) -> None:
        """Take what a supervisor reports of its worker."""
        if member.role == "gateway":
            return
        if member.url is None or member.state in {"ended", "failed"}:
            self._workers.pop(member.name, None)
            return
        self._workers[member.name] = Member(
            member.url, Role(member.role), draining=member.state == "draining"
        )

    def to_file(self) -> MembersFile:
        """What the gateway reads: sorted by name, and each address once."""
        by_url = {self._workers[name].url: self._workers[name] for name in sorted(self._workers)}
        return MembersFile(version=1, workers=tuple(by_url.values()))
